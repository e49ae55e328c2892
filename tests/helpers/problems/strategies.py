"""Random problems: built straight as integers, no torch.

``random_problem(rng)``, ``layered_problem(rng)`` and ``random_caps(rng, problem)`` take any
``random.Random``; the hypothesis strategies hand the first and the last one that hypothesis
controls, so that a failure shrinks.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from hypothesis import strategies as st

from apsched.config import Caps
from apsched.costs.price_curve import PriceCurve
from apsched.kinds import KernelCut
from apsched.problem.problem import Key, Problem
from apsched.schedule.schedule import as_captured
from apsched.schedule.simulate import simulate
from tests.helpers.problems.by_hand import ByHand, line
from tests.helpers.problems.draft import Draft, Tensor


@st.composite
def a_problem(draw, max_collectives: int = 4, max_compute: int = 5) -> Problem:
    """A problem with 1 to ``max_collectives`` collectives and 2 to ``max_compute`` compute nodes
    that keep their order.
    """
    return random_problem(
        draw(st.randoms(use_true_random=False)),
        max_collectives=max_collectives,
        max_compute=max_compute,
    )


@st.composite
def a_problem_with_forms(draw, max_collectives: int = 4, max_compute: int = 5) -> Problem:
    """A problem in which some buckets may be coalesced."""
    rng = draw(st.randoms(use_true_random=False))
    return with_coalesced_price(
        random_problem(rng, max_collectives=max_collectives, max_compute=max_compute), rng
    )


@st.composite
def a_problem_with_caps(
    draw, max_collectives: int = 4, max_compute: int = 5
) -> tuple[Problem, Caps]:
    """A problem and caps, of which some bind, some do not and some cannot hold."""
    rng = draw(st.randoms(use_true_random=False))
    problem = random_problem(rng, max_collectives=max_collectives, max_compute=max_compute)
    return problem, random_caps(rng, problem)


def with_coalesced_price(problem: Problem, rng: random.Random) -> Problem:
    """Return ``problem`` with prices for coalesced launches, of most gathers and reduce-scatters;
    launches and copies may cost more.

    Where both do, a bucket that needs no copies beats all others.
    """

    def price(key: Key) -> int | None:
        most = max(key.launch_ticks, key.price(0), 1)
        return (
            rng.choice((0, 1, rng.randint(0, most), 2 * most))
            if key.kind in ("all_gather", "reduce_scatter")
            else None
        )

    most = max(key.price(0) for key in problem.keys)
    launch, latency, factor = (
        rng.choice((0, rng.randint(0, 2 * most))),
        rng.randint(0, 2 * most),
        rng.choice((1, 3, 10)),
    )
    keys = tuple(
        replace(
            key,
            coalesced_member_ticks=price(key) if rng.random() < 0.9 else None,
            launch_ticks=key.launch_ticks + launch,
        )
        for key in problem.keys
    )
    old, starts = problem.copy_price, {c.start for c in problem.collectives}
    return replace(
        problem,
        keys=keys,
        duration_ticks=tuple(
            ticks + launch * (node in starts) for node, ticks in enumerate(problem.duration_ticks)
        ),
        copy_price=PriceCurve(
            size_bytes=old.size_bytes,
            price_ticks=tuple(latency + factor * ticks for ticks in old.price_ticks),
        ),
    )


def problem_for_coalescing(
    rng: random.Random, *, most_gathers: int = 3, most_reductions: int = 2
) -> Problem:
    """Return gathers and reductions of one group whose launches and copies cost much, and members
    of coalesced launches little.
    """
    launch, copy = rng.randint(0, 60), line(rng.randint(0, 60), rng.randint(0, 30))
    prices = {
        kind: line(rng.randint(1, 50), rng.randint(0, 20))
        for kind in ("all_gather", "reduce_scatter")
    }
    hand = ByHand(prices=prices, copy_price=copy, bucket_launch_ticks=launch)
    num_compute = rng.randint(1, 3)
    shards = [
        hand.input(f"s{i}", 512 * rng.randint(1, 4), kept=True)
        for i in range(rng.randint(1, most_gathers))
    ]
    cast = [
        hand.compute(f"cast{i}", rng.randint(1, 20), s, size=512) if rng.random() < 0.3 else -1
        for i, s in enumerate(shards)
    ]
    sizes = [512 * rng.randint(1, 4) for _ in shards]
    gathers = []
    for i, (shard, size) in enumerate(zip(shards, sizes, strict=True)):
        extra = (
            {}
            if cast[i] < 0
            else {"prologue": (cast[i],), "cast": (cast[i],), "cast_bytes": 2 * size}
        )
        gathers.append(
            hand.start(
                "all_gather",
                f"g{i}",
                shard if cast[i] < 0 else cast[i],
                size,
                2 * size,
                launch_ticks=launch,
                **extra,
            )
        )
    needs = [
        sorted(rng.sample(range(len(shards)), rng.randint(0, len(shards))))
        for _ in range(num_compute)
    ]
    longest, needs[0] = rng.choice((60, 400)), needs[0] if rng.random() < 0.5 else []
    waits = [hand.wait(f"w{i}", start) for i, start in enumerate(gathers)]
    left, reductions = rng.randint(0, most_reductions), []
    before: list[int] = []
    for k in range(num_compute):
        before = [
            hand.compute(
                f"c{k}",
                rng.randint(0, longest),
                *before,
                *(waits[i] for i in needs[k]),
                size=512 * rng.randint(1, 8),
            )
        ]
        if left and rng.random() < 0.7:
            left -= 1
            reductions.append(
                hand.start("reduce_scatter", f"r{k}", before[0], 512, 256, launch_ticks=launch)
            )
    outputs = [hand.wait(f"x{i}", start) for i, start in enumerate(reductions)]
    problem = hand.output(*before, *outputs, *waits)
    member = rng.choice((0, 0, 1, rng.randint(0, 40)))
    return replace(
        problem, keys=tuple(replace(key, coalesced_member_ticks=member) for key in problem.keys)
    )


def random_caps(rng: random.Random, problem: Problem) -> Caps:
    """Return caps around what the order as captured needs; each is ``None`` about half the time."""
    peak = simulate(problem, as_captured(problem.num_nodes)).peak_memory_bytes
    largest = max(c.size_bytes for c in problem.collectives)
    most = max(c.output_bytes for c in problem.collectives)

    def perhaps(low: int, high: int) -> int | None:
        return rng.randint(low, max(low, high)) if rng.random() < 0.4 else None

    return Caps(
        memory_cap_bytes=rng.randint(peak * 2 // 3, peak * 3 // 2) if rng.random() < 0.6 else None,
        bucket_cap_bytes=perhaps(0, 3 * largest),
        max_topo_span=perhaps(0, problem.num_nodes),
        max_prefetch=perhaps(0, len(problem.compute_order)),
        in_flight_cap_bytes=perhaps(most, 3 * most),
    )


def random_problem(
    rng: random.Random, *, max_collectives: int = 4, max_compute: int = 5, **sizes
) -> Problem:
    """Return a problem of FSDP (gathers and reductions), HSDP (reduce-scatter, then all-reduce),
    DDP and on-path collectives.

    ``sizes`` are ``units``, ``grain``, ``chained``, ``added``, ``copied``, ``parts`` and ``sized``
    of :class:`draft.Draft`.
    """
    draft = Draft(rng, rng, **sizes)
    num_compute = rng.randint(2, max_compute)
    budget = rng.randint(1, max_collectives)
    at: dict[
        int, list[Callable[[], None]]
    ] = {}  # compute order position -> what happens right before it
    after: dict[int, list[Callable[[], None]]] = {}  # and right after it
    shards = []
    while budget > 0:
        what = rng.choice(("gather", "gather", "gather", "reduce", "reduce", "chain", "on_path"))
        if what == "gather":
            draft.module = f"layers.{rng.randrange(2)}.w{len(shards)}"
            shards.append(
                rng.choice(shards) if shards and rng.random() < 0.15 else draft.shard()
            )  # gathered a second time
            further = budget >= 2 and rng.random() < 0.1
            budget -= further
            _plan_gather(draft, num_compute, shards[-1], further, at)
        elif what == "on_path":
            i = rng.randrange(num_compute - 1)
            until = rng.randint(i + 1, num_compute - 1)
            if draft.parts and rng.random() < draft.parts:
                _plan_part(draft, i, until, at, after)
            else:
                after.setdefault(i, []).append(lambda i=i, until=until: draft.on_path(i, until))
        else:
            chained = what == "chain" and budget >= 2
            budget -= chained
            i = rng.randrange(num_compute)
            wait_at = min(i + rng.randint(0, 2), num_compute - 1)
            after.setdefault(i, []).append(
                lambda i=i, chained=chained, wait_at=wait_at: draft.start_reduction(
                    i, chained, wait_at
                )
            )
        budget -= 1
    for _ in range(rng.randint(0, 2)):
        draft.given.setdefault(rng.randrange(num_compute), []).append(
            draft.input("activation", kept=False)
        )
    for i in range(num_compute):
        for act in at.get(i, ()):
            act()
        draft.compute_node(i)
        for act in after.get(i, ()):
            act()
        draft.finish_reductions(i, num_compute)
    return draft.finish()


def with_kernels(problem: Problem, seed: int) -> Problem:
    """Return ``problem`` with kernels of a few neighbours, as a compiler makes them."""
    rng, kernels = random.Random(seed), [-1] * problem.num_nodes
    compute_order = list(problem.captured_order)
    while compute_order:
        run = [compute_order.pop(0) for _ in range(min(rng.randint(1, 3), len(compute_order)))]
        if len(run) > 1:
            for node in run:
                kernels[node] = run[0]
    return replace(problem, kernels=tuple(kernels))


def with_cuts(problem: Problem, seed: int) -> Problem:
    """Return ``problem``, whose kernels are those of ``with_kernels``, with a price on every cut of
    them.
    """
    rng, compute_order, kernels = random.Random(seed), problem.captured_order, problem.kernels
    cuts = [
        KernelCut(node=node, nodes=(rng.choice((before, node)),), extra_ticks=(rng.randint(1, 4),))
        for before, node in pairwise(compute_order)
        if kernels[node] >= 0 and kernels[node] == kernels[before]
    ]
    return replace(problem, cuts=tuple(cuts))


def _plan_gather(
    draft: Draft,
    num_compute: int,
    shard: Tensor,
    further: bool,
    at: dict[int, list[Callable[[], None]]],
) -> None:
    rng, module = draft.rng, draft.module
    first = rng.randrange(num_compute)
    start = rng.randint(0, first)
    needs = sorted({first, *(i for i in range(first, num_compute) if rng.random() < 0.2)})
    needs = needs if rng.random() < 0.95 else []  # only outputs need it
    started = []

    def begin() -> None:
        draft.module = module
        started.append(draft.start_gather(shard))

    def end() -> None:
        result = draft.wait_gather(started[0], further=further)
        for i in needs:
            draft.given.setdefault(i, []).append(result)
        if not needs:
            draft.outputs.append(result)

    at.setdefault(start, []).append(begin)
    at.setdefault(rng.randint(start, first), []).append(end)


def _plan_part(
    draft: Draft,
    made_by: int,
    need: int,
    at: dict[int, list[Callable[[], None]]],
    after: dict[int, list[Callable[[], None]]],
) -> None:
    rng, made, started = draft.rng, [], []

    def copy() -> None:
        made.append(draft.copy_part())

    def begin() -> None:
        started.append(draft.start_gather_of(made[0]))

    def end() -> None:
        draft.given.setdefault(need, []).append(draft.wait_gather(started[0]))

    after.setdefault(made_by, []).append(copy)
    at.setdefault(rng.randint(made_by + 1, need), []).append(begin)
    at.setdefault(need, []).append(end)


def layered_problem(
    rng: random.Random, *, num_layers: int, backward: bool | None = None
) -> Problem:
    """Return a model of equal layers between a head and a tail: what repeats is alike to the tick
    and to the byte.

    A layer is one to three gathers, one to four compute nodes, perhaps on-path collectives, and in
    backward a reduction a gather.
    """
    draft = Draft(rng, random.Random(rng.random()))
    backward = rng.random() < 0.5 if backward is None else backward
    template = rng.random()
    seeds = [rng.random(), *[template] * num_layers, rng.random()]
    shards = []
    for seed in seeds:  # parameters come first, as in a captured graph
        draft.rng = random.Random(seed)
        shards.append([draft.shard() for _ in range(_layer_plan(seed).num_gathers)])
    for layer, (seed, mine) in enumerate(zip(seeds, shards, strict=True)):
        draft.module, draft.rng = f"layers.{layer}", random.Random(seed)
        _layer(draft, _layer_plan(seed), mine, backward)
    return draft.finish()


@dataclass(frozen=True, slots=True)
class _Plan:
    num_gathers: int
    num_compute: int
    num_on_path: int


def _layer_plan(seed: float) -> _Plan:
    rng = random.Random(seed)
    return _Plan(rng.randint(1, 3), rng.randint(1, 4), rng.choice((0, 0, 1)))


def _layer(draft: Draft, plan: _Plan, shards: list[Tensor], backward: bool) -> None:
    first = len(draft.compute_order)
    for j, shard in enumerate(shards):
        result = draft.wait_gather(draft.start_gather(shard))
        draft.given.setdefault(first + min(j, plan.num_compute - 1), []).append(result)
    for i in range(first, first + plan.num_compute):
        draft.compute_node(i)
        if plan.num_on_path and i == first:
            draft.on_path(i, i + 1)
        if backward and i - first < len(shards):
            draft.start_reduction(i, chained=False, wait_at=i)
        draft.finish_reductions(i)
