"""The choice found and the bound over all choices, against every choice of small steps."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, product

import pytest

from apsched.capture.captured import Capture
from apsched.config import Caps, SolveOptions
from apsched.errors import SelfCheckError
from apsched.names import is_in_node, name_of
from apsched.pipeline.solve_graph import SolveRequest, under_plan
from apsched.problem.plan.rules import Plan, Rule
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.solver.bounds.whole_step import StepBound, seam_bytes
from apsched.solver.bounds.whole_step_rows import Row, Sizes
from apsched.whole_step import search
from apsched.whole_step.bounds import Prices, bounds_of, prices_of
from apsched.whole_step.choices import (
    Choice,
    Parameter,
    decided_alike,
    named_choices,
    splits,
    units,
)
from apsched.whole_step.pair import Step
from apsched.whole_step.search import search_choices, solve_step
from tests.helpers.graphs.sharded_layers import FlatPrices, captured_layers, loaded_layers

WIDTHS = (32, 64, 128)
SLOW, FAST = FlatPrices(bytes_per_us=150.0), FlatPrices(bytes_per_us=4000.0)
IN_NODE = 90
"""Percent of the time of a gather that is saved where it stays in the node."""
LATE = FlatPrices(bytes_per_us=2000.0, latency_us=40.0)


@pytest.fixture(scope="module")
def layers() -> Capture:
    return captured_layers(WIDTHS)


def step_of(
    capture: Capture,
    prices: FlatPrices,
    cap_bytes: int | None,
    *,
    second_group: bool = False,
    plan: Plan | None = None,
) -> Step:
    request = SolveRequest(
        caps=Caps(),
        memory_cap=MemoryCap(size_bytes=cap_bytes),
        options=SolveOptions(time_slack=0.0, budget=1.0),
        second_group=second_group,
        plan=plan or Plan(),
    )
    graphs = under_plan(loaded_layers(capture, prices), request)
    return Step.of(graphs, request, Progress(quiet=True))


def every_choice(names: Sequence[str]) -> list[Choice]:
    sizes = range(len(names) + 1)
    return [Choice(c) for c in chain.from_iterable(combinations(names, n) for n in sizes)]


def names_of(step: Step) -> list[str]:
    return [p.name for p in step.parameters]


@pytest.mark.parametrize(
    "prices", [SLOW, FAST, LATE], ids=["network binds", "compute binds", "latency binds"]
)
def test_no_choice_is_faster_than_the_bound_or_the_answer(layers, prices) -> None:
    """Under caps from where nothing can be kept to where all can; a looser cap is never slower."""
    step = step_of(layers, prices, None)
    sizes = sorted(p.size_bytes for p in step.parameters)
    floor = max(r.answer.floor_memory_bytes for r in step.solve(Choice()).results)
    assert floor >= max(seam_bytes(*(graph.problem for graph in step.graphs)))
    found = []
    for room in (0, sizes[1], 4 * sum(sizes)):
        step = step_of(layers, prices, floor + room)
        answer = solve_step(step)
        fitting = [s for s in map(step.solve, every_choice(names_of(step))) if s.fits]
        least = min(solved.step_ticks for solved in fitting)
        assert answer.bound.ticks <= least == answer.best.step_ticks
        assert answer.best.peak_bytes <= floor + room
        found.append(least)
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]
    assert answer.gap < 0.15


@pytest.mark.parametrize("prices", [SLOW, LATE], ids=["network binds", "latency binds"])
def test_parameters_of_one_planned_bucket_are_decided_on_alike(prices) -> None:
    """The answer is the fastest of the choices that keep the buckets of the plan whole."""
    layers = captured_layers((*WIDTHS, 64))
    names = names_of(step_of(layers, prices, None))
    rule = Rule(match="|".join(map(re.escape, names[:2])), kind="all_gather", group=True)
    plan = Plan((rule,), chooses_kept=True)
    free = step_of(layers, prices, None, plan=plan)
    whole = [c for c in every_choice(names) if len(c & set(names[:2])) != 1]
    floor = max(r.answer.floor_memory_bytes for r in free.solve(Choice()).results)
    sizes, split = sorted(p.size_bytes for p in free.parameters), 0
    for room in (*sizes, sizes[0] + sizes[1], sizes[0] + sizes[2], 4 * sum(sizes)):
        step = step_of(layers, prices, floor + room, plan=plan)
        answer = solve_step(step)
        assert answer.best.kept in whole
        assert all(choice.kept in whole for choice in answer.baselines.values())
        fitting = [solved for solved in map(step.solve, whole) if solved.fits]
        least = min(solved.step_ticks for solved in fitting)
        assert answer.bound.ticks <= least == answer.best.step_ticks
        others = (step.solve(choice) for choice in every_choice(names))
        split += any(other.fits and other.step_ticks < least for other in others)
    assert split, "a choice that splits the bucket is faster under some cap"


def test_peak_counts_shards_that_backward_does_not_take(layers) -> None:
    step = step_of(layers, SLOW, None)
    solved = step.solve(Choice(names_of(step)))
    backward = solved.results[1]
    assert backward.best is not None
    shards = 32 * 64 + 64 * 128  # a quarter of the elements, of 4 bytes
    assert solved.beside_bytes == shards
    assert solved.peak_bytes >= backward.best.peak_memory_bytes + shards
    tight = step_of(layers, SLOW, backward.best.peak_memory_bytes + shards - 1)
    caps = tight.solve(solved.kept).results[1].caps
    assert caps.memory_cap_bytes == backward.best.peak_memory_bytes - 1


def test_second_groups_have_a_bound_of_their_own(layers) -> None:
    answer = solve_step(step_of(layers, SLOW, None, second_group=True))
    assert answer.bound.ticks <= answer.best.step_ticks


def test_a_bound_above_the_answer_is_an_error(layers, monkeypatch) -> None:
    """It must not be lowered in silence."""

    def too_high(step: Step, prices: Prices) -> list[StepBound]:
        found = bounds_of(step, prices)
        more = (tuple(replace(r, ticks=2 * r.ticks + 1) for r in b.rows) for b in found)
        return [replace(b, rows=rows) for b, rows in zip(found, more, strict=True)]

    step = step_of(layers, SLOW, None)
    assert solve_step(step).best.fits
    monkeypatch.setattr(search, "bounds_of", too_high)
    with pytest.raises(SelfCheckError, match="the whole step lies above the step time"):
        solve_step(step_of(layers, SLOW, None))


def test_the_bound_knows_the_prices_of_every_choice_that_was_solved(layers, monkeypatch) -> None:
    """A choice in between may fuse a node as neither extreme does."""
    step = step_of(layers, FAST, None)
    bound = solve_step(step).bound
    found, lowered = search.search_choices, []

    def with_a_lower_price(step: Step, bounds: Sequence[StepBound]) -> search.StepAnswer:
        answer = found(step, bounds)
        between = step.solve(Choice(names_of(step)[:1]))
        if lowered:  # once
            return answer
        forward, backward = between.graphs
        problem = backward.problem
        ticks = tuple(d // 2 for d in problem.duration_ticks)
        lower = replace(backward, problem=replace(problem, duration_ticks=ticks))
        step.solved[between.kept] = replace(between, graphs=(forward, lower))
        lowered.append(between.kept)
        return answer

    monkeypatch.setattr(search, "search_choices", with_a_lower_price)
    assert solve_step(step_of(layers, FAST, None)).bound.ticks < bound.ticks


@pytest.mark.parametrize("widths", [(512, 32, 64, 256), (32, 64, 128, 512), (32, 64, 512, 32)])
def test_a_choice_that_fits_may_fit(widths: tuple[int, ...]) -> None:
    """Under the least memory that is known for it, whatever is kept; where memory is highest at the
    end of forward, the bound excludes more than memory between both graphs does.
    """
    layers = captured_layers(widths, tokens=256)
    free = step_of(layers, SLOW, None)
    names, excluded = names_of(free), 0
    for choice in every_choice(names):
        items, least = [names.index(name) for name in choice], free.solve(choice).least_bytes
        for less in (0, 4096):
            step = step_of(layers, SLOW, least - less)
            (bound,) = bounds_of(step, prices_of(step))
            assert bound.may_fit(items) or less
            seams = seam_bytes(*(graph.problem for graph in step.graphs))
            between = replace(bound, free_bytes=least - less - max(seams))
            assert step.free_before_backward < between.free_bytes
            if widths[-1] < widths[-2]:
                assert step.free_bytes < step.free_before_backward
            excluded += between.may_fit(items) and not bound.may_fit(items)
    assert excluded or widths[-1] < widths[-2]


@dataclass(frozen=True, kw_only=True)
class Made:
    """A solved choice of a made-up step."""

    kept: Choice
    fits: bool
    step_ticks: int
    peak_bytes: int
    bound_ticks: int
    may_improve: bool = False

    @property
    def is_final(self) -> bool:
        return not self.may_improve

    @property
    def kept_bytes(self) -> int:
        return self.peak_bytes

    least_bytes = kept_bytes


@dataclass(frozen=True, kw_only=True)
class MadeUpStep:
    """Each parameter saves its time where it is kept, and takes its bytes; resharded in its node it
    saves a part of that.
    """

    parameters: tuple[Parameter, ...]
    saves: dict[str, int]
    room: int
    request: SolveRequest = field(default_factory=SolveRequest)
    solved: dict[Choice, Made] = field(default_factory=dict)
    always: Choice = field(default_factory=Choice)
    slower: int = 0
    """By so much the search alone is slower, at most."""

    @property
    def undecided(self) -> tuple[Parameter, ...]:
        return self.parameters

    @property
    def cap_bytes(self) -> tuple[int, int]:
        return self.room, self.room

    @property
    def entry_bytes(self) -> dict[str, int]:
        return {entry: size for p in self.parameters for entry, size in p.entries.items()}

    def solve(self, kept: Choice) -> Made:
        peak = sum(p.entries.get(entry, 0) for p in self.parameters for entry in kept)
        saved = sum(self.saves[entry] for entry in kept if entry in self.saves)
        saved += sum(self.saves[name_of(e)] * IN_NODE // 100 for e in kept if is_in_node(e))
        ticks = 10**6 + sum(self.saves.values()) - saved
        fits = peak <= self.room
        made = Made(kept=kept, fits=fits, step_ticks=ticks, peak_bytes=peak, bound_ticks=ticks)
        if kept not in self.solved or self.solved[kept].may_improve:
            self.solved[kept] = made
        return self.solved[kept]

    def search(self, kept: Choice) -> Made:
        if kept not in self.solved and self.slower:
            made = self.solve(kept)
            slower = random.Random(str(sorted(kept))).randrange(self.slower)
            ticks = made.step_ticks + slower
            self.solved[kept] = replace(made, step_ticks=ticks, may_improve=True)
        return self.solve(kept) if kept not in self.solved else self.solved[kept]

    def bound(self) -> StepBound:
        nothing = (0.0,) * len(self.parameters)
        saves = tuple(float(self.saves[p.name]) for p in self.parameters)
        sizes = Sizes(
            kept=tuple(p.size_bytes for p in self.parameters),
            in_node=tuple(p.node_bytes or p.size_bytes for p in self.parameters),
        )
        row = Row(source="all", ticks=1e6, again=saves, in_node=nothing)
        return StepBound(rows=(row,), sizes=sizes, free_bytes=self.room)


@pytest.mark.parametrize("seed", range(20))
def test_the_search_is_near_the_best_choice_and_solves_few(seed: int) -> None:
    rng = random.Random(seed)
    parameters = tuple(
        parameter(f"layers.{k // 2}.w{k % 2}", rng.randrange(10**5 + 1, 4 * 10**5), 11 - k)
        for k in range(12)
    )
    sizes = {p.name: p.size_bytes for p in parameters}
    saves = {name: size // 2 for name, size in sizes.items()}
    step = MadeUpStep(parameters=parameters, saves=saves, room=rng.randrange(sum(sizes.values())))
    answer = search_choices(step, [step.bound()])  # type: ignore[arg-type]
    few = len(step.solved)
    least = min(s.step_ticks for s in map(step.solve, every_choice(list(sizes))) if s.fits)
    assert answer.best.fits
    assert answer.bound.ticks <= least <= answer.best.step_ticks
    assert all(b.step_ticks >= answer.best.step_ticks for b in answer.baselines.values() if b.fits)
    assert not answer.baselines.keys() & answer.excluded.keys()
    of_people = named_choices(parameters).keys()
    assert {*answer.baselines, *answer.excluded, *answer.too_large} == {*of_people}
    for too_large in answer.too_large.values():
        assert too_large.kept_bytes == sum(sizes[name] for name in too_large.kept)
        assert not step.solve(too_large.kept).fits
    assert few < 25
    for excluded in answer.excluded.values():
        solved = step.solve(excluded.kept)
        assert answer.best.step_ticks <= excluded.bound.ticks <= solved.step_ticks
        assert excluded.kept_bytes == solved.peak_bytes
    saved, could = (10**6 + sum(saves.values()) - t for t in (answer.best.step_ticks, least))
    assert saved >= 0.6 * could
    frontier = [(s.peak_bytes, s.step_ticks) for s in answer.frontier]
    assert frontier == sorted(frontier)
    assert [-ticks for _, ticks in frontier] == sorted(-ticks for _, ticks in frontier)
    fitting = [(s.peak_bytes, s.step_ticks) for s in answer.tried if s.fits]
    assert all(any(p <= peak and t <= ticks for p, t in frontier) for peak, ticks in fitting)


@pytest.mark.parametrize("slower", [1, 4 * 10**4])
@pytest.mark.parametrize("seed", range(10))
def test_cp_sat_solves_what_it_may_make_the_fastest(seed: int, slower: int) -> None:
    """The answer is the fastest of all choices that were looked at, as if each was solved by it; it
    is itself, also where the search alone finds the least step time.
    """
    rng = random.Random(seed)
    parameters = tuple(
        parameter(f"layers.{k // 2}.w{k % 2}", rng.randrange(10**5 + 1, 4 * 10**5), 11 - k)
        for k in range(12)
    )
    step = MadeUpStep(
        parameters=parameters,
        saves={p.name: p.num_elements // 20 for p in parameters},
        room=sum(p.size_bytes for p in parameters) // 2,
        slower=slower,
        request=SolveRequest(options=SolveOptions(time_slack=0.0)),
    )
    answer = search_choices(step, [step.bound()])  # type: ignore[arg-type]
    assert not answer.best.may_improve
    tried = dict(step.solved)
    assert answer.best is tried[answer.best.kept]
    assert all(answer.baselines[name] is tried[b.kept] for name, b in answer.baselines.items())
    left = [solved for solved in tried.values() if solved.may_improve]
    assert all(solved.bound_ticks >= answer.best.step_ticks for solved in left if solved.fits)
    assert left, "not each choice is solved twice"
    assert answer.best.step_ticks == min(step.solve(k).step_ticks for k in tried if tried[k].fits)


@pytest.mark.parametrize(
    ("with_rows", "excluded", "solved"), [(True, {"last_block"}, 2), (False, set(), 4)]
)
def test_where_all_fit_few_choices_are_solved(
    with_rows: bool, excluded: set[str], solved: int
) -> None:
    """Bounds exclude the last block. Where they are loose, it is solved, and one shorter prefix,
    which is slower.
    """
    parameters = tuple(parameter(f"layers.{k // 2}.w{k % 2}", 10**6, 11 - k) for k in range(12))
    step = MadeUpStep(
        parameters=parameters, saves={p.name: 5 * 10**4 for p in parameters}, room=10**9
    )
    bound = step.bound()
    if not with_rows:
        nothing = (0.0,) * 12
        row = Row(source="none", ticks=9e5, again=nothing, in_node=nothing)
        bound = replace(bound, rows=(row,))
    answer = search_choices(step, [bound])  # type: ignore[arg-type]
    assert answer.best.kept == {p.name for p in parameters}
    assert answer.excluded.keys() == excluded
    assert answer.baselines.keys() == {"none", "all", "last_block"} - excluded
    assert len(step.solved) == solved


@pytest.mark.parametrize("room", [0.05, 0.11, 0.2, 0.5, 1.2])
@pytest.mark.parametrize("seed", range(4))
def test_the_search_is_near_the_best_choice_with_nodes(seed: int, room: float) -> None:
    """From where not even all parts fit to where all is kept whole."""
    rng = random.Random(seed)
    sizes = [rng.randrange(10**5 + 1, 4 * 10**5) for _ in range(6)]
    parameters = tuple(
        replace(parameter(f"layers.{k // 2}.w{k % 2}", size, 5 - k), node_bytes=2 * size // 8)
        for k, size in enumerate(sizes)
    )
    step = MadeUpStep(
        parameters=parameters,
        saves={p.name: p.num_elements for p in parameters},
        room=int(room * sum(p.size_bytes for p in parameters)),
    )
    answer = search_choices(step, [step.bound()])  # type: ignore[arg-type]
    few = len(step.solved)
    entries = [("", *p.entries) for p in parameters]
    every = [Choice(filter(None, choice)) for choice in product(*entries)]
    least = min(s.step_ticks for s in map(step.solve, every) if s.fits)
    assert answer.bound.ticks <= least <= answer.best.step_ticks
    assert few < 40 < len(every)
    saved, could = (10**6 + sum(step.saves.values()) - t for t in (answer.best.step_ticks, least))
    assert saved >= 0.75 * could


@pytest.mark.parametrize("room", [0.05, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("seed", range(4))
def test_no_planned_bucket_is_split(seed: int, room: float) -> None:
    """Not even where only some of its parameters can be resharded in their node."""
    rng = random.Random(seed)
    sizes = [rng.randrange(10**5 + 1, 10**6) for _ in range(9)]
    parameters = tuple(
        replace(
            parameter(f"layers.{k // 3}.w{k % 3}", size, 8 - k),
            node_bytes=rng.choice((0, size // 4)),
            together=f"layers.{k // 3}.w0" if k % 3 < 2 else "",
        )
        for k, size in enumerate(sizes)
    )
    step = MadeUpStep(
        parameters=parameters,
        saves={p.name: p.num_elements for p in parameters},
        room=int(room * sum(p.size_bytes for p in parameters)),
    )
    answer = search_choices(step, [step.bound()])  # type: ignore[arg-type]
    alike = decided_alike(parameters)
    assert [len(members) for members in alike] == [2, 1] * 3
    assert len(step.solved) > 1
    assert not any(splits(kept, alike) for kept in step.solved)
    ways = [
        ((), *(tuple(entry[k] for entry in entries) for k in range(min(map(len, entries)))))
        for entries in ([list(p.entries) for p in members] for members in alike)
    ]
    every = [Choice(chain.from_iterable(chosen)) for chosen in product(*ways)]
    least = min(s.step_ticks for s in map(step.solve, every) if s.fits)
    assert answer.bound.ticks <= least <= answer.best.step_ticks
    saved, could = (10**6 + sum(step.saves.values()) - t for t in (answer.best.step_ticks, least))
    assert saved >= 0.5 * could


def parameter(name: str, elements: int, need: int) -> Parameter:
    return Parameter(
        name=name, size_bytes=2 * elements, num_elements=elements, beside_bytes=0, gathers=(need,)
    )


BACKWARD = [
    parameter("output.w", 10**6, 0),
    parameter("norm.w", 100, 1),
    parameter("layers.1.w", 10**6, 2),
    parameter("layers.1.b", 10, 3),
    parameter("layers.0.w", 10**6, 4),
    parameter("layers.0.b", 10, 5),
]


def test_choices_that_people_make() -> None:
    assert {name: sorted(kept) for name, kept in named_choices(BACKWARD).items()} == {
        "none": [],
        "all": sorted(p.name for p in BACKWARD),
        "last_block": ["layers.1.b", "layers.1.w", "norm.w", "output.w"],
        "fsdp2": ["norm.w", "output.w"],
        "threshold": ["layers.0.b", "layers.1.b", "norm.w"],
    }


def test_small_parameters_are_kept_first_and_then_those_that_backward_needs_first() -> None:
    assert [[p.name for (p,) in unit] for unit in units(BACKWARD)] == [
        ["norm.w", "layers.1.b", "layers.0.b"],
        ["output.w"],
        ["layers.1.w"],
        ["layers.0.w"],
    ]


def test_parameters_of_one_planned_bucket_are_one_member_of_a_unit() -> None:
    """A bucket that has a large parameter is not a small one."""
    planned = {"norm.w": "norm.w", "output.w": "norm.w", "layers.1.b": "layers.1.b"}
    planned |= {"layers.0.b": "layers.1.b"}
    parameters = [replace(p, together=planned.get(p.name, "")) for p in BACKWARD]
    assert [[sorted(p.name for p in alike) for alike in unit] for unit in units(parameters)] == [
        [["layers.0.b", "layers.1.b"]],
        [["norm.w", "output.w"]],
        [["layers.1.w"]],
        [["layers.0.w"]],
    ]
