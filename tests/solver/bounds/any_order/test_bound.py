"""Bounds that hold where compute may move: never above the best of all orders, and tight where the
machine is simple.
"""

import random
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import problem_arrays
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.any_order import last_reduction
from apsched.solver.bounds.any_order.bound import InAnyOrder, _rows, loose_program
from apsched.solver.bounds.any_order.chain import between, chain_bound, levels, longest_way
from apsched.solver.bounds.any_order.compute_chain import compute_chain_bound
from apsched.solver.bounds.any_order.heads import Ticks, earliest
from apsched.solver.bounds.any_order.jobs import ends_of
from apsched.solver.bounds.any_order.last_reduction import Tail, tail_bound
from apsched.solver.bounds.any_order.one_machine import critical_jobs, one_machine
from apsched.solver.bounds.best import any_order_bound
from apsched.solver.bounds.linear_program import costs_of
from tests.helpers.loosened import loosened
from tests.helpers.oracle import best_schedule, orders_within
from tests.helpers.problems.by_hand import ByHand, line
from tests.helpers.problems.strategies import random_caps, random_problem


def bound_of(problem: Problem, caps: Caps) -> tuple[int, str]:
    small = problem_arrays(problem)
    bound = any_order_bound(
        Instance(problem=problem, arrays=small, caps=caps),
        Orders(Instance(problem=problem, arrays=small)),
    )
    return bound.ticks, bound.source


def chain_bound_of(problem: Problem, caps: Caps) -> int:
    instance, loose = loosened(problem, caps)
    ends = ends_of(loose, caps.max_compute_move)
    return chain_bound(instance, loose, ends, longest_way(loose)).ticks


def compute_chain_bound_of(problem: Problem, caps: Caps) -> int:
    instance, loose = loosened(problem, caps)
    return compute_chain_bound(instance, loose, longest_way(loose)).ticks


def tail_of(problem: Problem, caps: Caps) -> Tail:
    small = problem_arrays(problem)
    costs = costs_of(Instance(problem=problem, arrays=small, caps=caps))
    loose = loose_program(
        Instance(problem=problem, arrays=small),
        Orders(Instance(problem=problem, arrays=small)),
        costs,
    )
    most = caps.max_compute_move
    ends, way = ends_of(loose, most), longest_way(loose)
    return tail_bound(small, loose, ends, costs, most, way)


def tail_bound_of(problem: Problem, caps: Caps) -> int:
    return tail_of(problem, caps).bound.ticks


def best_in_any_order(problem: Problem, caps: Caps) -> int | None:
    """Return the least step time over all orders of the compute."""
    found = []
    for order in orders_within(problem, caps.max_compute_move):
        best = best_schedule(replace(problem, reordered=order), caps)
        if best is not None:
            found.append(best.step_time_ticks)
    return min(found, default=None)


@pytest.mark.parametrize("chunk", range(6))
def test_no_bound_is_above_the_optimum_over_all_orders(chunk: int) -> None:
    """300 problems against exhaustive search over orders, buckets and places; some meet the
    optimum, and in some order matters.
    """
    met = moved = 0
    for seed in range(chunk * 50, (chunk + 1) * 50):
        rng = random.Random(seed)
        problem = random_problem(
            rng,
            max_collectives=rng.randint(2, 4),
            max_compute=5,
            chained=rng.choice((0.2, 0.5, 0.8)),
        )
        caps = replace(
            random_caps(rng, problem),
            memory_cap_bytes=None,
            max_prefetch=None,
            max_compute_move=rng.choice((None, None, 1, 2)),
        )
        best = best_in_any_order(problem, caps)
        if best is None:
            continue
        bound, source = bound_of(problem, caps)
        assert bound <= best, (seed, source)
        assert chain_bound_of(problem, caps) <= best, seed
        assert compute_chain_bound_of(problem, caps) <= best, seed
        assert tail_bound_of(problem, caps) <= best, seed
        met += bound == best
        captured = best_schedule(problem, caps)
        moved += captured is not None and best < captured.step_time_ticks
    assert met >= 10
    assert moved >= 3


def jobs(rng: random.Random, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tuple(
        np.array([rng.randint(0, most) for _ in range(count)], dtype=np.int64)
        for most in (20, 20, 9)
    )  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(60))
def test_one_machine_is_the_longest_set_of_jobs(seed: int) -> None:
    """Least head, all ticks, least tail: over all sets; and the set that is named reaches it."""
    rng = random.Random(seed)
    count = rng.randint(1, 7)
    head, tail, ticks = jobs(rng, count)
    sets = [list(s) for size in range(1, count + 1) for s in combinations(range(count), size)]
    longest = max(int(head[s].min() + ticks[s].sum() + tail[s].min()) for s in sets)
    assert one_machine(head, tail, ticks) == longest
    value, least_head, least_tail = critical_jobs(head, tail, ticks)
    assert value == longest
    mine = (head >= least_head) & (tail >= least_tail)
    assert least_head + int(ticks[mine].sum()) + least_tail == longest


def two_branches(num_layers: int) -> Problem:
    """On-path collectives in a chain; between two of them two branches that both must run; three
    weight gradients a layer.
    """
    b = ByHand(prices={"all_reduce": line(50), "reduce_scatter": line(10)})
    x = b.input("x", 512)
    outputs = []
    for i in range(num_layers):
        grads = [b.compute(f"g{i}.{j}", 15, x, size=512) for j in range(3)]
        left, right = b.compute(f"l{i}", 30, x, size=512), b.compute(f"r{i}", 40, x, size=512)
        y = b.compute(f"m{i}", 5, left, right, size=512)
        x = b.wait(f"w{i}", b.start("all_reduce", f"ar{i}", y, 512, 512, group="tp", on_path=True))
        outputs += [
            b.wait(f"v{i}.{j}", b.start("reduce_scatter", f"rs{i}.{j}", g, 512, 512))
            for j, g in enumerate(grads)
        ]
    return b.output(x, *outputs)


def test_all_compute_between_chained_collectives_counts() -> None:
    """Both branches, though each alone is on no longest way; gradients fill the stalls, and the
    reduction of the last sticks out by 5.
    """
    caps = Caps(max_compute_move=None)
    assert bound_of(two_branches(3), caps) == (
        3 * (30 + 40 + 5 + 50) + 5,
        "compute between collectives on the path",
    )
    assert (
        best_in_any_order(two_branches(1), caps)
        == bound_of(two_branches(1), caps)[0]
        == 30 + 40 + 5 + 3 * 15 + 10
    )


def test_a_cap_on_moves_keeps_what_is_far_behind_there() -> None:
    """Gradients that may not move far run before the next layer: the bound knows it, and grows as
    the cap falls.
    """
    problem = two_branches(8)
    bounds = [bound_of(problem, Caps(max_compute_move=w))[0] for w in (None, 8, 4, 2, 1)]
    assert bounds == sorted(bounds)
    assert bounds[0] == 8 * 125 + 5
    assert (
        bounds[-1] > bounds[0] + 7 * 45
    )  # those of all layers but the last run before the chain goes on


def test_twice_the_cap_on_moves_is_how_far_two_nodes_may_pass_each_other() -> None:
    """Two places each: the last of four passes the first, and by one place each it does not."""
    b = ByHand(prices={"reduce_scatter": line(200)})
    x = b.input("x", 512)
    others = [b.compute(f"f{i}", ticks, x, size=512) for i, ticks in enumerate((100, 1, 1))]
    grad = b.compute("g", 1, x, size=512)
    problem = b.output(*others, b.wait("w", b.start("reduce_scatter", "rs", grad, 512, 512)))
    assert [best_in_any_order(problem, Caps(max_compute_move=w)) for w in (1, 2)] == [302, 202]
    assert [bound_of(problem, Caps(max_compute_move=w))[0] for w in (1, 2)] == [301, 201]


def test_transfers_that_cannot_begin_sooner_are_the_bound_of_their_stream() -> None:
    """Reductions behind the first compute, one after the other, and what must follow the last of
    them.
    """
    b = ByHand(prices={"reduce_scatter": line(100)})
    x = b.input("x", 512)
    first = b.compute("first", 7, x, size=512)
    grads = [b.compute(f"g{i}", 1, first, size=512) for i in range(4)]
    starts = [
        b.start("reduce_scatter", f"rs{i}", g, 512, 512, bucketable=False)
        for i, g in enumerate(grads)
    ]
    last = b.compute("norm", 3, *(b.wait(f"w{i}", s) for i, s in enumerate(starts)), size=512)
    problem = b.output(last)
    assert bound_of(problem, Caps(max_compute_move=None)) == (7 + 1 + 400 + 3, "stream of group dp")
    assert best_in_any_order(problem, Caps(max_compute_move=None)) == 411


def test_steps_of_a_chain_count_all_that_runs_between() -> None:
    """0 -> {1, 2} -> 3 -> 5 with 4 beside: both branches between 0 and 3; 4 follows none of
    them.
    """
    begin, before = np.array([0, 0, 1, 2, 4, 4, 5]), np.array([0, 0, 1, 2, 3])
    ticks = np.array([5, 7, 8, 1, 50, 2])
    chain = np.array([0, 3, 5])
    assert between(begin, before, ticks, ticks, chain).tolist() == [5 + 7 + 8, 1]
    assert between(begin, before, ticks, ticks // 10, chain).tolist() == [
        5 + 8,
        1,
    ]  # off the compute stream the longer branch counts
    level, limit = levels(begin, before, chain)
    assert level.tolist() == [0, 0, 0, 1, -1, 2]
    assert limit.tolist() == [1, 1, 1, 2, 3, 3]  # nothing is over before its own begin


def gathered_layers(num_layers: int) -> Problem:
    """A chain of compute with a gather and a reduction for each node; transfers take longer than
    compute.
    """
    b = ByHand(prices={"all_gather": line(20, 10), "reduce_scatter": line(20, 10)})
    shards = [b.input(f"s{i}", 512, kept=True) for i in range(num_layers)]
    x = b.input("x", 512)
    outputs = []
    for i, shard in enumerate(shards):
        x = b.compute(
            f"c{i}",
            10,
            x,
            b.wait(f"w{i}", b.start("all_gather", f"ag{i}", shard, 512, 1024)),
            size=1024,
        )
        outputs.append(b.wait(f"v{i}", b.start("reduce_scatter", f"rs{i}", x, 1024, 512)))
    return b.output(x, *outputs)


def test_a_chain_counts_the_latency_of_buckets() -> None:
    """One bucket would keep the stream idle, each alone costs latency: more than bytes at the best
    rate, no more than the optimum.
    """
    problem, caps = gathered_layers(3), Caps(max_compute_move=None)
    best = best_in_any_order(problem, caps)
    assert best is not None
    assert 6 * 10 < chain_bound_of(problem, caps) <= best
    assert 6 * 10 < compute_chain_bound_of(problem, caps) <= best
    assert bound_of(gathered_layers(12), caps) == (
        compute_chain_bound_of(gathered_layers(12), caps),
        "buckets weighed along a chain",
    )


def test_compute_left_to_the_end_is_no_way_around_the_tail() -> None:
    """A chain with a long last reduction; gradients beside it could run during that, but their own
    reductions follow it.
    """
    b = ByHand(prices={"reduce_scatter": line(0, 60)})
    x = b.input("x", 512)
    outputs = []
    for i in range(3):
        grad = b.compute(f"g{i}", 20, x, size=512)
        outputs.append(b.wait(f"v{i}", b.start("reduce_scatter", f"rs{i}", grad, 512, 256)))
        x = b.compute(f"c{i}", 30, x, size=2048)
    outputs.append(b.wait("v", b.start("reduce_scatter", "rs", x, 2048, 1024)))
    problem, caps = b.output(*outputs), Caps(max_compute_move=None)
    best = best_in_any_order(problem, caps)
    assert best == 3 * (20 + 30) + 120
    assert bound_of(problem, caps) == (best - 2, "compute + tail of group dp")  # rounding


def test_compute_that_hides_stalls_is_missing_at_the_end() -> None:
    """Two collectives on a chain, of 10 ticks each, and a gradient of 16 ticks that can run beside
    one of them: 10 of its ticks are hidden there. Beside the last reduction all of them are, but
    its own reduction then follows.
    """
    b = ByHand(prices={"all_reduce": line(10), "reduce_scatter": line(0, 40)})
    x = b.input("x", 512)
    grad = b.compute("g", 16, x, size=512)
    outputs = [b.wait("v", b.start("reduce_scatter", "rs g", grad, 512, 256))]
    for i in range(2):
        x = b.compute(f"c{i}", 10, x, size=512)
        start = b.start(
            "all_reduce", f"ar{i}", x, 512, 512, group="tp", on_path=True, bucketable=False
        )
        x = b.wait(f"w{i}", start)
    x = b.compute("c", 10, x, size=512)
    outputs.append(b.wait("v last", b.start("reduce_scatter", "rs", x, 512, 256)))
    problem, caps = b.output(*outputs), Caps(max_compute_move=None)
    best = best_in_any_order(problem, caps)
    assert best == 3 * 10 + 16 + 10 + 20
    assert tail_bound_of(problem, caps) == best - 2  # rounding
    assert bound_of(problem, caps)[0] >= best - 2


def gradients_beside_a_chain(rng: random.Random, *, stalls: bool = False) -> Problem:
    """Two gradients beside a chain, with reductions on one or two streams, and one behind its end;
    with ``stalls`` the chain has two collectives.
    """
    price = line(rng.randint(0, 9), rng.randint(5, 40))
    b = ByHand(
        prices={"reduce_scatter": price, "all_reduce": line(rng.randint(5, 60))},
        copy_price=line(rng.randint(0, 1), rng.randint(0, 2)),
        bucket_launch_ticks=2,
    )
    x = b.input("x", 512)
    outputs = []

    def reduced(name: str, node: int, size: int) -> None:
        group = rng.choice(("dp", "dp", "ep"))
        free = rng.random() < 0.7
        start = b.start(
            "reduce_scatter",
            name,
            node,
            size,
            size // 2,
            group=group,
            launch_ticks=rng.randint(0, 9),
            bucketable=free,
        )
        outputs.append(b.wait(f"{name} done", start))

    for i in range(2):
        size = rng.choice((512, 1024, 3072))
        reduced(f"rs{i}", b.compute(f"g{i}", rng.randint(1, 60), x, size=size), size)
        x = b.compute(f"c{i}", rng.randint(1, 60), x, size=4096)
        if stalls:
            start = b.start(
                "all_reduce", f"ar{i}", x, 4096, 4096, group="tp", on_path=True, bucketable=False
            )
            x = b.wait(f"ar{i} done", start)
    if stalls:
        x = b.compute("c", rng.randint(1, 20), x, size=4096)
    reduced("rs", x, 4096)
    return b.output(*outputs)


@pytest.mark.parametrize("max_move", [None, 1])
def test_no_tail_is_above_the_optimum(max_move: int | None) -> None:
    """25 problems in which a reduction sticks out; in some the bound is the optimum, but for
    rounding.
    """
    close = 0
    for seed in range(25):
        problem, caps = (
            gradients_beside_a_chain(random.Random(seed)),
            Caps(max_compute_move=max_move),
        )
        best = best_in_any_order(problem, caps)
        assert best is not None
        assert tail_bound_of(problem, caps) <= best, seed
        close += tail_bound_of(problem, caps) >= best - 2
    assert close >= 2


def test_the_largest_value_between_two_places() -> None:
    for size in range(20):
        values = np.random.default_rng(size).integers(1, 99, size)
        begin, end = np.indices((size + 1, size + 1)).reshape(2, -1)
        expected = [max(values[a:b], default=0) for a, b in zip(begin, end, strict=True)]
        assert last_reduction._largest_between(values, begin, end).tolist() == expected


@pytest.mark.parametrize("max_move", [None, 2])
def test_no_tail_with_stalls_is_above_the_optimum(
    max_move: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 problems; in some the weight of the stalls makes the bound tighter."""
    tighter = close = 0
    for seed in range(20):
        problem = gradients_beside_a_chain(random.Random(seed), stalls=True)
        caps = Caps(max_compute_move=max_move)
        best = best_in_any_order(problem, caps)
        assert best is not None
        bound = tail_bound_of(problem, caps)
        assert bound <= best, seed
        close += bound >= best - 2
        with monkeypatch.context() as without:
            without.setattr(last_reduction, "_STALL_WEIGHTS", np.zeros(1))
            tighter += tail_bound_of(problem, caps) < bound
    assert tighter >= 5
    assert close >= 2


def test_more_work_before_the_last_reduction_adds_to_its_bound() -> None:
    """A node before it takes longer: the bound rises by as much."""
    before = too_much = 0
    for seed in range(15):
        rng = random.Random(100 + seed)
        problem, caps = gradients_beside_a_chain(rng), Caps(max_compute_move=rng.choice([None, 2]))
        tail = tail_of(problem, caps)
        assert tail.share == 1
        k, more = rng.randrange(len(problem.compute_order)), rng.randrange(1, 40)
        longer = best_in_any_order(with_more_ticks(problem, k, more), caps)
        assert longer is not None
        if tail.run[k]:
            before += 1
            assert tail.bound.ticks + more <= longer, seed
        too_much += tail.bound.ticks + more > longer
    assert before >= 5
    assert too_much >= 1


def test_more_work_that_may_be_beside_a_stall_adds_nothing() -> None:
    """The node ``free`` runs beside the all-reduce, for 5 ticks or 25."""
    b = ByHand(prices={"reduce_scatter": line(10), "all_reduce": line(100)})
    x = b.input("x", 512)
    first = b.compute("first", 10, x, size=512)
    start = b.start("all_reduce", "ar", first, 512, 512, group="tp", on_path=True)
    free = b.compute("free", 5, x, size=512)
    last = b.compute("last", 10, b.wait("ar done", start), free, size=512)
    problem = b.output(b.wait("rs done", b.start("reduce_scatter", "rs", last, 512, 256)))
    caps = Caps(max_compute_move=None)
    tail = tail_of(problem, caps)
    best = best_in_any_order(problem, caps)
    assert best == best_in_any_order(with_more_ticks(problem, 1, 20), caps)
    assert tail.bound.ticks >= best - 2
    assert tail.run[1]
    assert tail.share == 0


def with_more_ticks(problem: Problem, k: int, more: int) -> Problem:
    """Return ``problem`` with a compute node that takes ``more`` ticks longer."""
    ticks = list(problem.duration_ticks)
    ticks[problem.compute_order[k]] += more
    return replace(problem, duration_ticks=tuple(ticks))


def test_without_collectives_it_is_the_compute() -> None:
    b = ByHand()
    x = b.input("x", 512)
    problem = b.output(b.compute("a", 7, x), b.compute("b", 8, x))
    assert bound_of(problem, Caps(max_compute_move=None)) == (15, "compute")


def test_what_is_captured_twice_the_cap_on_moves_before_an_item_has_ended() -> None:
    """(V1) of ten nodes that follow nothing, of 10 ticks each: the eighth may pass the six before
    it, and the first one has run.
    """
    none, num_nodes = np.zeros(10, np.int64), 10
    ticks = Ticks(first=none, span=none + 10, work=none + 10, load=none, stream=none)
    begin = earliest(
        np.zeros(num_nodes + 1, np.int64),
        np.zeros(0, np.int64),
        np.arange(num_nodes),
        ticks,
        1,
        np.zeros(num_nodes, np.bool_),
        3,
    )
    assert begin.tolist() == [0] * 7 + [10, 20, 30]


def test_a_row_of_a_stream_has_its_own_transfers_alone() -> None:
    """(V6) two gathers of 30 ticks and two reductions of 7 on a group of their own: in a row of one
    stream the others cost nothing, alone or in a bucket (a tick less each: prices are rounded).
    """
    hand = ByHand(prices={"all_gather": line(0, 30), "reduce_scatter": line(0, 7)})
    shards = [hand.input(f"s{i}", 512, kept=True) for i in range(2)]
    gathers = [hand.start("all_gather", f"ag{i}", s, 512, 1024) for i, s in enumerate(shards)]
    waits, outputs = [hand.wait(f"w{i}", start) for i, start in enumerate(gathers)], []
    for i, wait in enumerate(waits):
        gradient = hand.compute(f"g{i}", 10, wait, size=1024)
        start = hand.start("reduce_scatter", f"rs{i}", gradient, 1024, 512, group="grads")
        outputs.append(hand.wait(f"x{i}", start))
    instance = Instance.of(hand.output(*outputs))
    orders, costs = Orders(instance), costs_of(instance)
    loose = loose_program(instance, orders, costs)
    ends, way = ends_of(loose, None), longest_way(loose)
    at = InAnyOrder(instance=instance, loose=loose, ends=ends, costs=costs, way=way)
    of_gathers, of_reductions = _rows(at)[2:4], _rows(at)[4:6]
    for (critical, whole), transfers, least in (
        (of_gathers, [30, 30, 0, 0], [29, 29, 0, 0]),
        (of_reductions, [0, 0, 7, 7], [0, 0, 6, 6]),
    ):
        for row in (critical, whole):
            assert row.alone.tolist() == transfers
            assert [round(ticks) for ticks in row.shared] == least
