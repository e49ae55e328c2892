"""Several micro-batches in a row: the choice found and its bound, against every choice of small
steps.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from unittest.mock import Mock

import pytest
import torch

from apsched.config import Caps, SolveOptions
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.errors import InputError, SelfCheckError
from apsched.fx.accumulate import reductions
from apsched.fx.collectives import is_collective
from apsched.fx.graph_copies import copied
from apsched.fx.keep import outputs_of
from apsched.names import NEXT, SUM, SUM_SHARDS, in_node, marked
from apsched.pipeline.load import LoadedGraph
from apsched.pipeline.solve_graph import SolveRequest
from apsched.problem.problem import Problem
from apsched.problem.second_group import second_groups
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.schedule.verify import verify
from apsched.solver.bounds.accumulation import (
    HELD,
    KEPT,
    KINDS,
    SHARDS,
    SUMMED,
    AccumulationBound,
)
from apsched.solver.bounds.step_time import TimeBound
from apsched.units import TICKS_PER_US
from apsched.whole_step.accumulation.search import (
    AccumulationAnswer,
    _Search,
    solve_accumulation,
    solve_baselines,
)
from apsched.whole_step.accumulation.step import Accumulation, held_in
from apsched.whole_step.choices import Choice
from apsched.whole_step.keep_request import keep_request
from apsched.whole_step.pair import Step
from apsched.whole_step.search import solve_choice
from tests.helpers.graphs.accumulations import (
    CAPTURE,
    HSDP,
    SLOW,
    accumulation_of,
    answer_of,
    floor_bytes,
)
from tests.helpers.graphs.sharded_layers import (
    FlatPrices,
    PricesInNodes,
    SlowReplicas,
    captured_layers,
    loaded_layers,
)

NAMES = ("weights.0", "weights.1")
WHOLE_BYTES = {"weights.0": 4 * 32 * 64, "weights.1": 4 * 64 * 128}
FAST = FlatPrices(bytes_per_us=4000.0)
LATE = FlatPrices(bytes_per_us=2000.0, latency_us=40.0)
LATER = FlatPrices(bytes_per_us=150.0, latency_us=8.0)
"""A second group hides so much latency that the step is faster than the bound on one group."""


def every_choice(accumulation: Accumulation, *, nodes: bool = False) -> list[Choice]:
    options = []
    for name in accumulation.sums:
        keeps = ["", name, *([in_node(name)] if nodes else [])]
        sums = ["", marked(name, SUM)]
        sums += [marked(name, SUM_SHARDS)] if name in accumulation.shard_sums else []
        both = product(keeps, ("", marked(name, NEXT)), sums)
        options.append([tuple(filter(None, entries)) for entries in both])
    return [Choice(e for entries in chosen for e in entries) for chosen in product(*options)]


@pytest.mark.parametrize(
    ("num_micro_batches", "prices", "room_bytes", "capture"),
    [
        (3, SLOW, sum(WHOLE_BYTES.values()), CAPTURE),
        (2, LATE, WHOLE_BYTES["weights.1"], CAPTURE),
        (2, FAST, 2**20, CAPTURE),
        (2, SlowReplicas(bytes_per_us=150.0), 2**12, HSDP),
    ],
    ids=["network binds", "latency binds", "compute binds", "replicas"],
)
def test_no_choice_is_faster_than_the_bound_or_the_answer(
    num_micro_batches, prices, room_bytes, capture
) -> None:
    made = partial(accumulation_of, num_micro_batches, prices, capture=capture)
    cap_bytes = floor_bytes(made()) + room_bytes
    accumulation = made(cap_bytes)
    answer = answer_of(accumulation)
    solved = [accumulation.solve(choice) for choice in every_choice(accumulation)]
    least = min(one.step_ticks for one in solved if one.fits)
    best = answer.best
    assert answer.bound.ticks <= least == best.step_ticks
    assert best.peak_bytes <= cap_bytes
    for result in (result for one in solved if one.fits for result in one.results):
        assert not list(verify(result.problem, result.best.schedule, result.caps))
    of_shards = {name for name in accumulation.shard_sums if marked(name, SUM_SHARDS) in best.kept}
    assert of_shards == (set(NAMES[:1]) if capture is HSDP else set()), "whole sums do not fit"


def test_shards_that_are_added_take_less_memory_and_fewer_reductions_in_the_bound(
    monkeypatch,
) -> None:
    capture = captured_layers((64,) * 5, replicas=2)
    made = partial(accumulation_of, 3, SlowReplicas(bytes_per_us=150.0), capture=capture)
    accumulation = made(floor_bytes(made()) + 2**12)
    seen: list[AccumulationBound] = []
    of = AccumulationBound.of

    def kept_bound(*args: object, **options: object) -> AccumulationBound:
        seen.append(of(*args, **options))
        return seen[-1]

    monkeypatch.setattr(AccumulationBound, "of", kept_bound)
    answer = answer_of(accumulation)
    assert {marked(name, SUM_SHARDS) for name in accumulation.sums} <= answer.best.kept
    bound, every = seen[-1], frozenset(range(len(accumulation.sums)))
    chosen = dict.fromkeys(KINDS, frozenset()) | {SHARDS: every}
    solved = accumulation.solve(Choice(marked(name, SUM_SHARDS) for name in accumulation.sums))
    assert bound.of_choice(chosen) <= solved.step_ticks
    taken = max(
        sum(unit.least_bytes[SHARDS] for unit in bound.units),
        sum(unit.reduced_bytes for unit in bound.units),
    )
    just_fits = replace(bound, free_bytes=(taken, taken))
    assert just_fits.may_fit(chosen)
    assert just_fits.over_choices().ticks <= bound.of_choice(chosen)
    assert not replace(bound, free_bytes=(taken, 0)).may_fit(chosen)


def test_the_bound_counts_the_time_to_add_gradients() -> None:
    """A microsecond for each of two gradients, in the second and the third of four micro-batches;
    in the last one the reductions take longer.
    """
    search = _Search(accumulation_of(4, FAST))
    bound = search._bound
    once = dict.fromkeys(KINDS, frozenset[int]())
    once |= {kind: frozenset(range(2)) for kind in (KEPT, HELD, SUMMED)}
    solved = search._solved(once)
    without = replace(bound, adding_ticks=dict.fromkeys(bound.adding_ticks, (0, 0)))
    adding = bound.of_choice(once) - without.of_choice(once)
    assert adding == pytest.approx(2 * 2 * TICKS_PER_US, abs=1)
    assert bound.of_choice(once) <= solved.step_ticks


def test_the_bound_holds_where_one_kernel_casts_and_adds_a_gradient() -> None:
    capture = captured_layers((64, 128, 256), tokens=8, cast=torch.bfloat16)
    accumulation = accumulation_of(3, ClusterCostModel(load_cluster("h100")), capture=capture)
    search, kernels = _Search(accumulation), set()
    known = [(units, search._solved(units)) for units in search._every()]
    _, bound = search._made_bound()
    for units, solved in known:
        assert bound.of_choice(units) <= solved.step_ticks
        for pair in solved.pairs:
            problem = pair.graphs[1].problem
            ticks = dict(zip(problem.node_names, problem.duration_ticks, strict=True))
            for one in (one for ones in accumulation.sums.values() for one in ones):
                kernels.add((one.sum_name in ticks, sum(ticks[n] for n in one.chain) > 0))
    assert kernels == {(False, True), (True, False)}, "the cast is free where it is added at once"
    assert bound.over_choices().ticks <= min(solved.step_ticks for _, solved in known)


@pytest.mark.parametrize(("bytes_per_us", "room_bytes"), [(150.0, 20_000), (20_000.0, 90_000)])
def test_no_other_way_to_add_the_gradients_of_hsdp_is_faster(bytes_per_us, room_bytes) -> None:
    """More units than are tried one by one. In the second case whole sums of one gradient pay, in
    place of sums of its shards.
    """
    prices = SlowReplicas(bytes_per_us=bytes_per_us)
    capture = captured_layers((64, 128, 64, 128), replicas=2)
    made = partial(accumulation_of, 3, prices, capture=capture)
    accumulation = made(floor_bytes(made()) + room_bytes)
    best = answer_of(accumulation).best
    others = {entry for entry in best.kept if not entry.endswith((SUM, SUM_SHARDS))}
    for marks in product(("", SUM, SUM_SHARDS), repeat=len(accumulation.sums)):
        sums = {marked(name, m) for name, m in zip(accumulation.sums, marks, strict=True) if m}
        solved = accumulation.search(Choice(others | sums))
        assert not solved.fits or solved.step_ticks >= best.step_ticks


def test_all_marks_on_nodes_of_two() -> None:
    """Two of four ranks a node: the gathers of backward stay in the node, forward gathers once."""
    accumulation = accumulation_of(3, PricesInNodes(bytes_per_us=150.0), ranks_per_node=2)
    name = NAMES[1]
    choice = Choice([in_node(name), marked(name, NEXT), marked(name, SUM)])
    solved = accumulation.solve(choice)
    first, middle, last = (pair.results for pair in solved.pairs)

    def served(results) -> list[list[tuple[str, int]]]:
        return [
            [(r.problem.keys[c.key].kind, r.problem.keys[c.key].group_size) for c in collectives]
            for r in results
            if (collectives := [c for c in r.problem.collectives if c.module == name])
        ]

    assert served(first) == [[("all_gather", 4)], [("all_gather", 2)]]
    assert served(middle) == [[("all_gather", 2)]]
    assert served(last) == [[("all_gather", 2), ("reduce_scatter", 4)]]
    assert [pair.count for pair in solved.pairs] == [1, 1, 1]
    assert middle[0] is last[0], "forward of the last micro-batch is that of the others"


def test_memory_of_other_micro_batches_by_hand() -> None:
    accumulation = accumulation_of(3)
    sums, reduced = 4 * 64 * 128, 4 * 32 * 64 // 4
    solved = accumulation.solve(Choice([marked(NAMES[1], SUM)]))
    assert [pair.beside_bytes for pair in solved.pairs] == [
        (0, 0),
        (sums + reduced, reduced),
        (sums + reduced, reduced),
    ]
    given = [
        sum(s.size_bytes for s in pair.results[1].problem.storages if s.birth < 0)
        for pair in solved.pairs
    ]
    assert [size - given[0] for size in given] == [0, sums, sums], "backward takes the sums"
    alone = accumulation.solve(Choice())
    every = sum(WHOLE_BYTES.values()) // 4
    assert [(pair.count, pair.beside_bytes) for pair in alone.pairs] == [(3, (every, every))]
    assert alone.step_ticks == 3 * accumulation.step.solve(Choice()).step_ticks


def test_without_a_memory_cap_a_graph_is_solved_once_whatever_else_is_alive() -> None:
    accumulation = accumulation_of(3)
    first, second = (accumulation.solve(Choice([marked(name, SUM)])) for name in NAMES)
    assert first.pairs[1].beside_bytes != second.pairs[1].beside_bytes
    assert first.pairs[1].results[0] is second.pairs[1].results[0]


def test_memory_of_shards_of_other_micro_batches_by_hand() -> None:
    solved = accumulation_of(3, capture=HSDP).solve(Choice([marked(NAMES[0], SUM_SHARDS)]))
    shards = 4 * 64 * 128 // 4
    assert [pair.beside_bytes for pair in solved.pairs] == [(0, 0), (shards, 0), (shards, 0)]
    kinds = [
        [r.problem.keys[c.key].kind for c in r.problem.collectives]
        for r in (pair.results[1] for pair in solved.pairs)
    ]
    assert kinds == [["all_gather", "reduce_scatter"]] * 2 + [
        ["all_gather", "reduce_scatter", "all_reduce"]
    ]


def test_a_held_parameter_lives_through_all_of_backward_and_in_the_next_forward() -> None:
    accumulation = accumulation_of(2)
    kept = accumulation.solve(Choice([NAMES[0], marked(NAMES[0], NEXT)]))
    (first, _), (forward, _) = (pair.results for pair in kept.pairs)
    backward = kept.pairs[0].results[1].problem
    held = [
        s
        for s in backward.storages
        if s.size_bytes == WHOLE_BYTES[NAMES[0]] and s.birth < 0 and not s.kept
    ]
    assert [s.uses[-1] for s in held] == [backward.num_nodes - 1]
    assert len(first.problem.collectives) == len(forward.problem.collectives) + 1


def test_never_slower_than_a_choice_of_people_that_fits() -> None:
    """Six layers, more units than are tried one by one."""
    widths = (32, 64, 64, 32, 64, 64, 32)
    request = SolveRequest(
        caps=Caps(max_compute_move=0),
        memory_cap=MemoryCap(size_bytes=None),
        options=SolveOptions(time_slack=0.0, budget=0.0),
    )
    graphs = loaded_layers(captured_layers(widths), SLOW)
    free = Accumulation.of(Step.of(graphs, request, Progress(quiet=True)), 4)
    most = answer_of(free)
    assert most.best is most.baselines["once"]
    assert set(most.baselines) == {"none", "once"}, "the bound excludes the others"
    check_excluded(free, most)
    floor = floor_bytes(free)
    for room in (30_000, 90_000):
        capped = replace(request, memory_cap=MemoryCap(size_bytes=floor + room))
        accumulation = Accumulation.of(Step.of(graphs, capped, Progress(quiet=True)), 4)
        answer = answer_of(accumulation)
        check_excluded(accumulation, answer)
        fitting = [b.step_ticks for b in solve_baselines(accumulation).values() if b.fits]
        assert "last_block" in {*answer.baselines, *answer.excluded}
        assert answer.bound.ticks <= answer.best.step_ticks <= min(fitting)
        assert most.best.step_ticks <= answer.best.step_ticks
        assert answer.best.peak_bytes <= floor + room
        more = (accumulation.solve(answer.best.kept | {entry}) for entry in accumulation.entries)
        assert all(one.step_ticks >= answer.best.step_ticks for one in more if one.fits)


def check_excluded(accumulation: Accumulation, answer: AccumulationAnswer) -> None:
    """Check that the baselines that were not solved are no faster than their bounds say, and that
    the answer is not slower than any of these bounds.
    """
    every = solve_baselines(accumulation)
    assert {*answer.baselines, *answer.excluded} == set(every)
    for name, excluded in answer.excluded.items():
        assert every[name].kept == excluded.kept
        assert answer.best.step_ticks <= excluded.bound_ticks
        assert not every[name].fits or excluded.bound_ticks <= every[name].step_ticks


def test_a_unit_that_exceeds_the_memory_by_itself_gives_way_to_the_others() -> None:
    """Of five units the first one and the large one exceed the memory, which no bound knows."""
    search = object.__new__(_Search)
    sizes, solves = [3, 5, 5, 1, 1], []
    search._units = [
        Mock(order={HELD: u}, least_bytes={HELD: size}) for u, size in enumerate(sizes)
    ]
    search._names = [{HELD: (str(u),)} for u in range(len(sizes))]
    search._bound = Mock(may_fit=lambda units: True, of_choice=lambda units: 0)
    search._step, search._known = Mock(always=Choice()), {}

    def solve(choice: Choice) -> Mock:
        solves.append(choice)
        fits = not choice & {"0", "1", "2"}
        return search._of.solved.setdefault(choice, Mock(fits=fits, step_ticks=9 - len(choice)))

    search._of = Mock(solved={}, search=solve)
    search._solved({kind: frozenset() for kind in KINDS})
    while search._filled():
        pass
    assert min((s.step_ticks, c) for c, s in search._of.solved.items() if s.fits)[1] == {"3", "4"}
    assert len({*solves}) <= 12


def test_a_bound_above_the_step_time_is_an_error(monkeypatch) -> None:
    accumulation = accumulation_of(2)
    above = TimeBound(ticks=10**12, source="wrong")
    monkeypatch.setattr(AccumulationBound, "over_choices", lambda _: above)
    with pytest.raises(SelfCheckError, match="without --accumulate"):
        answer_of(accumulation)


def test_stated_entries() -> None:
    accumulation = accumulation_of(2)

    def chosen(*entries: str) -> Choice:
        request = keep_request(entries)
        return solve_accumulation(accumulation, request).best.kept

    assert chosen(r"weights\..*", "weights.0 @next") == {*NAMES, "weights.0 @next"}
    every = solve_accumulation(accumulation, keep_request("all")).best.kept
    assert every == {*NAMES, *(marked(n, mark) for n in NAMES for mark in (NEXT, SUM))}
    with pytest.raises(InputError, match=r"forward gathers, in a step of several micro-batches"):
        chosen("other @next")
    with pytest.raises(InputError, match=r"a gradient that backward reduces"):
        chosen("other @sum")
    with pytest.raises(InputError, match=r"\(accumulate\), \(there are none\)"):
        solve_choice(accumulation.step, keep_request(["weights.0 @sum"]))


def test_gathers_on_second_groups_are_not_faster_than_the_bound() -> None:
    """With gathers on a stream of their own, the bound of one stream does not hold."""
    request = SolveRequest(
        caps=Caps(max_compute_move=0),
        memory_cap=MemoryCap(size_bytes=None),
        options=SolveOptions(time_slack=0.0, budget=0.0),
        second_group=True,
    )
    nothing_shared = [
        replace(graph, problem=without_modules(graph.problem))
        for graph in loaded_layers(captured_layers((64,) * 6), LATER)
    ]
    unnamed = [
        replace(g, captured=replace(g.captured, kept_inputs=frozenset())) for g in nothing_shared
    ]
    accumulation = Accumulation.of(Step.of(unnamed, request, Progress(quiet=True)), 2)
    answer = answer_of(accumulation)
    assert second_groups(answer.best.results[1].problem)
    assert answer.bound.ticks <= answer.best.step_ticks


def test_nothing_to_share() -> None:
    """Without gathers and reductions of parameters each micro-batch runs by itself."""
    capture = captured_layers((32, 64, 128))
    graphs = [
        replace(graph, captured=replace(graph.captured, kept_inputs=frozenset()))
        for graph in loaded_layers(capture, SLOW)
    ]
    none = [replace(graph, problem=without_modules(graph.problem)) for graph in graphs]
    request = SolveRequest(memory_cap=MemoryCap(size_bytes=None), options=SolveOptions(budget=0.0))
    accumulation = Accumulation.of(Step.of(none, request, Progress(quiet=True)), 2)
    assert accumulation.entries == ()
    answer = answer_of(accumulation)
    assert [pair.count for pair in answer.best.pairs] == [2]
    assert answer.bound.ticks <= answer.best.step_ticks
    people = {"none", "kept", "no_sync", "no_sync_kept", "once"}
    assert {*answer.baselines, *answer.excluded} == people


def without_modules(problem: Problem) -> Problem:
    """Return ``problem`` without the names of parameters on its collectives."""
    return replace(problem, collectives=tuple(replace(c, module="") for c in problem.collectives))


def loaded(**options: object) -> tuple[LoadedGraph, ...]:
    return loaded_layers(captured_layers((32, 64, 128), **options), SLOW)


def step_of(graphs: Sequence[LoadedGraph]) -> Step:
    request = SolveRequest(memory_cap=MemoryCap(size_bytes=None), options=SolveOptions(budget=0.0))
    return Step.of(graphs, request, Progress(quiet=True))


def test_gradients_that_cannot_be_added_before_their_reduction_take_memory() -> None:
    """A penalty on the shard: the gradient is a sum of a reduced and a local one."""
    accumulation = Accumulation.of(step_of(loaded(penalty=True)), 2)
    every = sum(WHOLE_BYTES.values()) // 4
    assert accumulation.sums == {}
    assert accumulation.other_gradient_bytes == every
    (pair,) = accumulation.solve(Choice()).pairs
    assert pair.beside_bytes == (every, every)
    assert Accumulation.of(step_of(loaded()), 2).other_gradient_bytes == 0


def test_a_part_of_a_node_does_not_stay_gathered_beside_the_whole() -> None:
    graphs = loaded_layers(
        captured_layers((32, 64, 128), cast=torch.bfloat16), SLOW, ranks_per_node=2
    )
    step = step_of(graphs)
    under = step.under(Choice([in_node(NAMES[0])]))
    (value,) = held_in(under)[NAMES[0]]
    assert value.size_bytes == WHOLE_BYTES[NAMES[0]] // 2
    assert value.backward is not None
    assert value.backward.endswith("_whole")


def test_a_reduced_gradient_that_has_another_reader_is_left_out() -> None:
    captured = loaded()[1].captured
    assert captured is not None
    module = copied(captured.module)
    every = {n.name for n in module.graph.nodes if is_collective(n)}
    assert len(reductions(module, every)) == 2
    output = module.graph.output_node()
    gradient = next(value for value in outputs_of(module.graph) if value is not None)
    with module.graph.inserting_before(output):
        norm = module.graph.call_function(torch.ops.aten.sum.default, (gradient,))
    norm.meta = {"val": torch.ops.aten.sum.default(gradient.meta["val"])}
    output.args = ((*outputs_of(module.graph), norm),)
    assert len(reductions(module, every)) == 1
