"""Parameters resharded in their node, kept, or gathered again: against every choice of small
steps.
"""

from dataclasses import replace
from itertools import product

import pytest

from apsched.config import SolveOptions
from apsched.errors import InputError
from apsched.names import in_node, name_of
from apsched.pipeline.device_memory import COMMUNICATOR_BYTES, BesideGraph
from apsched.pipeline.solve_graph import SolveRequest
from apsched.problem.contention import Contention
from apsched.problem.plan.rules import Plan, Rule
from apsched.problem.problem import with_contention
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.report.answer.whole_step import keep_json, kept_lines
from apsched.schedule.result import BoundSource
from apsched.schedule.verify import verify
from apsched.solver.bounds.whole_step import StepBound, graph_bound
from apsched.whole_step.bounds import bounds_of, prices_of
from apsched.whole_step.choices import Choice, kept_in_node, kept_whole
from apsched.whole_step.keep_request import keep_request
from apsched.whole_step.pair import Step, with_kept
from apsched.whole_step.search import solve_choice, solve_step
from tests.helpers.graphs.sharded_layers import (
    RANKS,
    PricesInNodes,
    captured_layers,
    loaded_layers,
)

WIDTHS = (32, 64, 128)
NAMES = ("weights.0", "weights.1")
SLOW = PricesInNodes(bytes_per_us=150.0)
FAST = PricesInNodes(bytes_per_us=4000.0)
CAPTURE = captured_layers(WIDTHS)


def step_of(
    prices: PricesInNodes,
    cap_bytes: int | None,
    *,
    ranks_per_node: int = 2,
    plan: Plan | None = None,
) -> Step:
    request = SolveRequest(
        memory_cap=MemoryCap(size_bytes=cap_bytes),
        options=SolveOptions(time_slack=0.0, budget=1.0),
        plan=plan or Plan(),
    )
    graphs = loaded_layers(CAPTURE, prices, ranks_per_node=ranks_per_node)
    return Step.of(graphs, request, Progress(quiet=True))


def every_choice() -> list[Choice]:
    options = [("", name, in_node(name)) for name in NAMES]
    return [Choice(filter(None, entries)) for entries in product(*options)]


def bound_of(bound: StepBound, choice: Choice) -> int:
    parts = ([NAMES.index(name) for name in some(choice)] for some in (kept_whole, kept_in_node))
    return bound.of_choice(*parts).ticks


@pytest.mark.parametrize("prices", [SLOW, FAST], ids=["network binds", "compute binds"])
def test_no_choice_is_faster_than_the_bound_or_the_answer(prices) -> None:
    step = step_of(prices, None)
    floor = max(r.answer.floor_memory_bytes for r in step.solve(Choice()).results)
    sizes = [p.node_bytes for p in step.parameters]
    assert sizes == [4 * 32 * 64 // 2, 4 * 64 * 128 // 2]
    found = []
    for room in (0, sizes[1], 2 * sizes[1], 8 * sum(sizes)):
        step = step_of(prices, floor + room)
        answer = solve_step(step)
        fitting = [s for s in map(step.solve, every_choice()) if s.fits]
        least = min(solved.step_ticks for solved in fitting)
        assert answer.bound.ticks <= least == answer.best.step_ticks
        for bound in bounds_of(step, prices_of(step)):
            for solved in fitting:
                assert bound_of(bound, solved.kept) <= solved.step_ticks
        assert answer.best.peak_bytes <= floor + room
        assert all(
            not list(verify(r.problem, r.best.schedule, r.caps)) for s in fitting for r in s.results
        )
        found.append((least, answer.best.kept))
    assert [ticks for ticks, _ in found] == sorted((ticks for ticks, _ in found), reverse=True)
    if prices is SLOW:
        chosen = [kept for _, kept in found]
        assert any(in_node(NAMES[1]) in kept for kept in chosen), "between again and kept"
        assert set(map(name_of, chosen[-1])) == set(NAMES)


def test_the_bound_counts_what_resharding_costs() -> None:
    """The copies of parts in forward, and in backward the gathers in the node: their stream, their
    launches, also before the reduction that ends last. Where all can be kept, none is resharded.
    """
    free = step_of(FAST, None)
    (loose,) = bounds_of(free, prices_of(free))
    assert not any(map(sum, (row.in_node for row in loose.rows)))
    assert list(free.made) == [Choice(NAMES)]
    step = step_of(FAST, free.solve(Choice()).least_bytes + 2**14)
    (bound,) = bounds_of(step, prices_of(step))
    plain, with_parts = bound.rows[: len(bound.rows) // 2], bound.rows[len(bound.rows) // 2 :]
    copies = [w - p for w, p in zip(with_parts[0].in_node, plain[0].in_node, strict=True)]
    forward = step.under(Choice(map(in_node, NAMES)))[0].problem
    again = set(step.graphs[0].problem.node_names)
    ticks = zip(forward.node_names, forward.duration_ticks, strict=True)
    assert sum(copies) == sum(t for name, t in ticks if name not in again) > 0
    costs = {row.source: row.in_node for row in plain}
    (stream,) = (costs.pop(name) for name in list(costs) if name.endswith("+node"))
    (tail,) = (costs[name] for name in costs if name.startswith("compute + tail"))
    assert min(stream) > 0
    assert costs[BoundSource.COMPUTE][0] > 0
    assert tail == (0, costs[BoundSource.COMPUTE][1]), "weight 0 is for the gradient of x alone"
    assert min(costs[BoundSource.WEIGHED]) > 0


def test_other_choices_hold_fewer_parts_in_forward() -> None:
    """So the memory cap does not count in the bound on forward with all parts."""
    step = step_of(FAST, 100_000)
    (bound,) = bounds_of(step, prices_of(step))
    half = len(bound.rows) // 2
    captured, resharded = (row.of_choice([], [0, 1]) for row in (bound.rows[0], bound.rows[half]))
    forward, with_parts = (
        pair[0].problem for pair in (step.graphs, step.under(Choice(map(in_node, NAMES))))
    )
    free = replace(step.caps[0], memory_cap_bytes=None)
    assert graph_bound(with_parts, free) < graph_bound(with_parts, step.caps[0])
    assert resharded - captured == graph_bound(with_parts, free) - graph_bound(
        forward, step.caps[0]
    )


def test_within_one_node_there_is_no_third_choice() -> None:
    step = step_of(SLOW, None, ranks_per_node=RANKS)
    assert [p.node_bytes for p in step.parameters] == [0, 0]
    answer = solve_step(step)
    assert not any("@node" in entry for solved in answer.tried for entry in solved.kept)
    assert "in_node" not in answer.baselines


def test_a_rule_of_a_plan_decides_against_the_node() -> None:
    plan = Plan((Rule(match=r"weights\.1", keep=False),), chooses_kept=True)
    answer = solve_step(step_of(SLOW, None, plan=plan))
    assert not any(NAMES[1] in entry for solved in answer.tried for entry in solved.kept)


def test_a_stated_choice_is_solved_and_shown(tmp_path) -> None:
    file = tmp_path / "kept.txt"
    file.write_text("weights.*   @node  # both\nweights.0\n")
    answer = solve_choice(step_of(SLOW, None), keep_request(file))
    assert answer.best.kept == {"weights.0", "weights.1 @node"}
    assert (
        "1 of 2 parameters; 1 resharded in their node, 24.00 KiB; 0 gathered again"
        in (kept_lines(answer)[1])
    )
    peaks = [r.best.peak_memory_bytes for r in answer.best.results]
    tight = peaks[0] < peaks[1] + answer.best.beside_bytes
    assert f"({'backward' if tight else 'forward'}) with all parameters" in kept_lines(answer)[0]
    says = keep_json(answer)
    assert (says["num_kept"], says["num_in_node"]) == (1, 1)
    assert says["kept"] == ["weights.0", "weights.1 @node"]
    assert says["kept_bytes"] == 4 * 32 * 64 + 4 * 64 * 128 // 2
    with pytest.raises(InputError, match=r"ranks on each, \(there are none\).*drop that"):
        solve_choice(step_of(SLOW, None, ranks_per_node=RANKS), keep_request(file))


def test_a_further_communicator_takes_memory_of_the_device() -> None:
    """Where the cap is the memory of the device."""
    step = step_of(SLOW, None)
    graphs = tuple(replace(graph, beside=_beside()) for graph in step.graphs)
    step = Step.of(graphs, replace(step.request, memory_cap=None), Progress(quiet=True))
    caps = [
        {r.caps.memory_cap_bytes + s.beside_bytes * (r is s.results[1]) for r in s.results}
        for s in map(step.solve, (Choice(NAMES), Choice(map(in_node, NAMES))))
    ]
    assert [len(both) for both in caps] == [1, 1]
    assert caps[0].pop() - caps[1].pop() == COMMUNICATOR_BYTES


def _beside() -> BesideGraph:
    """Return the memory beside a graph that uses one communicator, on a device with room for
    three.
    """
    return BesideGraph(
        device_bytes=3 * COMMUNICATOR_BYTES + 2**20,
        context_bytes=0,
        num_communicators=1,
        communicator_bytes=COMMUNICATOR_BYTES,
        parameter_bytes=0,
        bf16_parameter_bytes=0,
        other_parameter_bytes=0,
    )


def test_transfers_in_the_node_share_its_links_alone() -> None:
    group = next(iter(CAPTURE.group_ranks))
    links = Contention(links=("links of the node", "NIC"), links_of_group=((group, (0, 1)),))
    graphs = [
        replace(graph, problem=with_contention(graph.problem, links))
        for graph in loaded_layers(CAPTURE, SLOW, ranks_per_node=2)
    ]
    _, backward = with_kept((graphs[0], graphs[1]), Choice([in_node(NAMES[0])]))
    found = backward.problem.contention
    assert found is not None
    assert dict(found.links_of_group) == {group: (0, 1), f"{group}+node": (0,)}
    _, backward = with_kept((graphs[0], graphs[1]), Choice(NAMES))
    assert backward.problem.contention == links, "where nothing is resharded, nothing changes"
    assert f"{group}+node" not in backward.dag.graph["group_ranks"]
