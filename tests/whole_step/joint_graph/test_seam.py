"""One graph of forward and backward against both apart, with the same parameters kept: the answers
differ by no more than the boundary between forward and backward allows.

Let T be step times, F and B the graphs apart, J one graph of both, all with compute in its captured
order. A node may have another price in J, since kernels are fused otherwise. D(x, y) is the sum,
over all nodes, of that by which a node is dearer in x than in y.

    T(J) <= T(F) + T(B) + D(J, FB)              J starts from both schedules in a row
    T(F) + T(B) <= f + b                        the schedule of J, cut in two, at the prices apart
    f + b <= T(J) + seam + D(FB, J)

Let e be the time at which the last item of forward ends in J. Forward alone, in the same order,
takes at most e. Let W be the work of the items of backward that begin before e. Backward alone
first runs these, where one of them always runs, and then the others as in J: it takes at most
T(J) - e + W. It also takes at most T(J) less the time at which its first item begins. So

    seam = min(W, e - first)

A launch with members of both counts for both. Alone, a member may need the cast that the launch
has in its copy: seam counts it, too. Where nothing of backward begins before e, seam is 0.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import pytest

from apsched.capture.one_graph import with_joint_graph
from apsched.config import Caps, SolveOptions
from apsched.kinds import CollectiveKind, NodeKind
from apsched.pipeline.cost_choice import CostChoice
from apsched.pipeline.load import LoadedGraph, loaded, with_apart
from apsched.pipeline.result import Result
from apsched.pipeline.solve_graph import SolveRequest, under_plan
from apsched.pipeline.sources import SourceRequest
from apsched.problem.problem import Problem
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.schedule.in_a_row import Part, in_a_row
from apsched.schedule.schedule import Bucket, Schedule, Step, StepKind
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.whole_step.joint_graph.names import kept_in_joint, names_apart
from apsched.whole_step.joint_graph.step import JointChoice, JointStep
from apsched.whole_step.pair import SolvedChoice, kept_tensors, storages_behind
from apsched.whole_step.solve import best_choice
from tests.helpers.graphs.sharded_layers import FlatPrices, captured_layers, loaded_layers

QUIET = Progress(quiet=True)
FORWARD, BACKWARD = "forward", "backward"
INPUT = NodeKind.INPUT


@dataclass(kw_only=True)
class BothWays:
    """One choice, solved as one graph and as two."""

    step: JointStep
    joint: JointChoice
    apart: SolvedChoice

    @cached_property
    def prices(self) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]:
        """Ticks of each node in one graph, and in both apart."""
        graph, names = self.joint.graph, names_apart(self.joint.graph)
        problem = graph.problem
        one = {
            names[name]: ticks
            for name, ticks in zip(problem.node_names, problem.duration_ticks, strict=True)
        }
        two = {
            (direction, name): ticks
            for direction, half in zip((FORWARD, BACKWARD), self.apart.graphs, strict=True)
            for name, ticks in zip(
                half.problem.node_names, half.problem.duration_ticks, strict=True
            )
        }
        assert sum(one.values()) == sum(problem.duration_ticks)
        return one, two

    @property
    def dearer(self) -> tuple[int, int]:
        """D(J, FB) and D(FB, J)."""
        one, two = self.prices
        both = one.keys() & two.keys()
        dearer = sum(max(one[node] - two[node], 0) for node in both)
        cheaper = sum(max(two[node] - one[node], 0) for node in both)
        assert dearer - cheaper == sum(one.values()) - sum(two.values()), "a node has no partner"
        return dearer, cheaper

    @property
    def seam(self) -> int:
        """Seam of the schedule of one graph, in ticks."""
        return seam_of(self.joint.results[0], self.joint.graph)


def seam_of(result: Result, graph: LoadedGraph) -> int:
    """Return the seam of a solved ``graph`` of forward and backward, in ticks."""
    problem, schedule, timeline = result.problem, result.schedule, result.timeline
    assert schedule is not None
    assert timeline is not None
    names = names_apart(graph)
    of_node = [names[name][0] for name in problem.node_names]
    of_collective = [of_node[one.start] for one in problem.collectives]
    items: list[tuple[set[str], int, int, int]] = []  # directions, begin, end, work
    for step, begin, end in zip(
        schedule.steps, timeline.begin_ticks, timeline.end_ticks, strict=True
    ):
        stalls = step.kind is StepKind.WAIT
        if step.kind is StepKind.NODE:
            own = {of_node[step.index]}
            stalls = any(step.index == one.wait for one in problem.collectives)
        elif step.kind is StepKind.COPY_OUT:
            own = {of_collective[step.index]}
        else:
            own = {of_collective[c] for c in schedule.buckets[step.index].members}
        items.append((own, begin, end, 0 if stalls else end - begin))
    for sent in timeline.transfers:
        own = {of_collective[c] for c in sent.members}
        casts = {node for c in sent.members for node in problem.collectives[c].cast}
        more = sum(problem.duration_ticks[node] for node in casts) if len(own) == 2 else 0
        items.append(
            (own, sent.begin_ticks, sent.end_ticks, sent.end_ticks - sent.begin_ticks + more)
        )
    end_of_forward = max(end for own, _, end, _ in items if FORWARD in own)
    early = [item for item in items if BACKWARD in item[0] and item[1] < end_of_forward and item[3]]
    first = min((begin for _, begin, _, _ in early), default=end_of_forward)
    return min(sum(work for *_, work in early), end_of_forward - first)


def cut_in_two(graph: LoadedGraph, schedule: Schedule) -> list[Schedule]:
    """Return the parts of ``schedule``, of a ``graph`` of forward and backward, that are forward
    and backward.
    """
    return [_part(graph.problem, half, schedule) for half in graph.apart]


def _part(whole: Problem, half: LoadedGraph, schedule: Schedule) -> Schedule:
    problem = half.problem
    node_at = {place: node for node, place in enumerate(half.places) if place >= 0}
    at_start = {one.start: c for c, one in enumerate(problem.collectives)}
    own = {
        c: at_start[node_at[one.start]]
        for c, one in enumerate(whole.collectives)
        if one.start in node_at
    }
    members = [tuple(own[c] for c in bucket.members if c in own) for bucket in schedule.buckets]
    number: dict[int, int] = {}
    for b, among in enumerate(members):
        if len(among) > 1:
            number[b] = len(number)
    alone = {c for among in members if len(among) == 1 for c in among}
    steps = [Step(StepKind.NODE, k) for k, kind in enumerate(problem.kinds) if kind is INPUT]
    for step in schedule.steps:
        if step.kind is StepKind.NODE:
            node = node_at.get(step.index)
            if node is not None and problem.kinds[node] is not INPUT:
                steps.append(Step(step.kind, node))
        elif step.kind is StepKind.COPY_OUT:
            if step.index in own and own[step.index] not in alone:
                steps.append(Step(step.kind, own[step.index]))
        elif step.index in number:
            steps.append(Step(step.kind, number[step.index]))
        elif members[step.index]:
            one = problem.collectives[members[step.index][0]]
            casts = () if schedule.buckets[step.index].coalesced else one.cast
            nodes = {StepKind.START: (*sorted(casts), one.start), StepKind.WAIT: (one.wait,)}
            steps += [Step(StepKind.NODE, node) for node in nodes.get(step.kind, ())]
    steps.append(Step(StepKind.NODE, problem.num_nodes - 1))
    buckets = (Bucket(members[b], coalesced=schedule.buckets[b].coalesced) for b in number)
    return Schedule(buckets=tuple(buckets), steps=tuple(steps))


def step_of(graph: LoadedGraph) -> JointStep:
    request = SolveRequest(
        caps=Caps(max_compute_move=0),
        memory_cap=MemoryCap(),
        options=SolveOptions(time_slack=0.0, budget=0.0),
    )
    (posed,) = under_plan([graph], request)
    return JointStep.of(posed, request, QUIET)


def of_layers(prices: FlatPrices) -> JointStep:
    *apart, joint = loaded_layers(with_joint_graph(captured_layers((32, 64, 128, 64))), prices)
    return step_of(with_apart(joint, apart))


def both_ways(step: JointStep, keep: str) -> BothWays:
    """Return the choice ``keep`` solved both ways; of ``auto`` the one that is made in ``step``."""
    kept = {"none": step.always, "all": step.apart.most}.get(keep)
    kept = best_choice(step).best.kept if kept is None else kept
    joint = step.solve(kept)
    return BothWays(step=step, joint=joint, apart=step.apart.solved[kept])


def tight_cap(step: JointStep, keep: str) -> MemoryCap:
    """Return a memory cap between the least memory of the choice ``keep`` and the peak of the
    fastest schedule; of ``auto`` it may hold some of the parameters only.
    """
    least = step.solve(step.apart.most if keep == "all" else step.always)
    fastest = step.solve(step.always if keep == "none" else step.apart.most)
    return MemoryCap(size_bytes=(least.least_bytes + fastest.peak_bytes) // 2)


def check(step: JointStep, keep: str, *, capped: bool) -> None:
    """Check that both ways give the same answer, within the seam and the prices of nodes, and keep
    the same.
    """
    both = both_ways(step.with_cap(tight_cap(step, keep)) if capped else step, keep)
    assert both.joint.fits
    assert both.apart.fits
    joint, apart = both.joint.step_ticks, both.apart.step_ticks
    dearer, cheaper = both.dearer
    in_a_row_fits = keeps_cap_in_a_row(both)
    assert in_a_row_fits or capped
    if in_a_row_fits:
        assert joint <= apart + dearer
    cut, cut_fits = cut_ticks(both)
    assert cut_fits or capped
    if cut_fits:
        assert apart <= cut
    assert cut <= joint + both.seam + cheaper
    check_same_kept(both)


def cut_ticks(both: BothWays) -> tuple[int, bool]:
    """Return the time of the schedule of one graph, cut in two, and whether that keeps the caps."""
    schedule = both.joint.results[0].schedule
    assert schedule is not None
    ticks, keeps_caps = 0, True
    parts = cut_in_two(both.joint.graph, schedule)
    for part, result in zip(parts, both.apart.results, strict=True):
        broken = verify(result.problem, part, result.caps)
        assert all(why.startswith("memory") for why in broken), broken
        keeps_caps &= not broken
        ticks += simulate(result.problem, part).step_time_ticks
    return ticks, keeps_caps


def keeps_cap_in_a_row(both: BothWays) -> bool:
    """Return whether the schedules apart, one behind the other, keep the caps of one graph."""
    graph = both.joint.graph
    parts = [
        Part(problem=half.problem, schedule=result.schedule, places=half.places)
        for half, result in zip(graph.apart, both.apart.results, strict=True)
        if result.schedule is not None
    ]
    row = in_a_row(graph.problem, parts)
    return row is not None and not verify(graph.problem, row, both.step.caps_of(both.joint.kept))


def check_same_kept(both: BothWays) -> None:
    """Check that both ways keep tensors of the same parameters, with the same bytes."""
    kept, step = both.joint.kept, both.step
    assert both.apart.kept == kept
    assert both.joint.kept_bytes == both.apart.kept_bytes
    of_joint = kept_in_joint(step.graph, both.joint.graph)
    of_apart = kept_tensors(step.apart.graphs, both.apart.graphs)
    assert bytes_of(both.joint.graph, of_joint) == both.joint.kept_bytes
    assert bytes_of(both.apart.graphs[0], of_apart) == both.joint.kept_bytes
    names = {p.name for p in step.apart.parameters}
    num_joint = gathers(names, both.joint.graph)
    forward, backward = (gathers(names, graph) for graph in both.apart.graphs)
    assert num_joint == forward + backward
    assert {name for name in names if num_joint[name] == forward[name]} == kept
    assert names - backward.keys() == kept


def bytes_of(graph: LoadedGraph, tensors: dict[str, tuple[str, ...]]) -> int:
    storages = storages_behind(graph, tensors[graph.problem.name])
    return sum(graph.problem.storages[s].size_bytes for s in storages)


def gathers(names: set[str], graph: LoadedGraph) -> Counter[str]:
    """Return the number of gathers of each of the parameters ``names``."""
    problem = graph.problem
    kinds = ((problem.keys[one.key].kind, one.module) for one in problem.collectives)
    return Counter(m for kind, m in kinds if kind == CollectiveKind.ALL_GATHER and m in names)


@pytest.fixture(scope="module")
def steps() -> dict[str, JointStep]:
    return {
        "slow": of_layers(FlatPrices(bytes_per_us=150.0)),
        "fast": of_layers(FlatPrices(bytes_per_us=4000.0)),
        "late": of_layers(FlatPrices(bytes_per_us=2000.0, latency_us=40.0)),
    }


@pytest.fixture(scope="module", params=["fsdp=4", "fsdp=4,tp=2"])
def model(request: pytest.FixtureRequest) -> Iterator[JointStep]:
    source = SourceRequest(source="llama3-debug", mesh=request.param, seq_len=64, num_layers=1)
    with loaded(source, CostChoice(cluster="h100-tcpx"), "joint", QUIET) as found:
        yield step_of(found.graphs[0])


KEEP = pytest.mark.parametrize("keep", ["none", "all", "auto"])
CAPPED = pytest.mark.parametrize("capped", [False, True], ids=["free", "capped"])


@KEEP
@CAPPED
@pytest.mark.parametrize("prices", ["slow", "fast", "late"])
def test_both_ways_give_the_same_answer(
    steps: dict[str, JointStep], prices: str, capped: bool, keep: str
) -> None:
    check(steps[prices], keep, capped=capped)


@pytest.mark.slow
@KEEP
@CAPPED
def test_both_ways_give_the_same_answer_of_models(
    model: JointStep, capped: bool, keep: str
) -> None:
    """With FSDP alone, and with tensor parallelism, whose collectives stay where they are."""
    check(model, keep, capped=capped)


def test_only_gathers_of_backward_cross(steps: dict[str, JointStep]) -> None:
    """With all kept nothing does, and both ways agree to the tick at prices that no fusion changes;
    with none kept the difference is more than prices explain.
    """
    for step in steps.values():
        most = both_ways(step, "all")
        assert most.dearer == (0, 0)
        assert most.seam == 0
        assert most.joint.step_ticks == most.apart.step_ticks
    none = both_ways(steps["late"], "none")
    assert none.joint.step_ticks < none.apart.step_ticks
    assert none.seam > 0


@pytest.mark.slow
def test_with_all_kept_a_model_differs_by_compute_alone(model: JointStep) -> None:
    most = both_ways(model, "all")
    dearer, cheaper = most.dearer
    assert most.seam == 0
    assert -cheaper <= most.joint.step_ticks - most.apart.step_ticks <= dearer


def test_with_all_kept_one_graph_gathers_as_often_as_forward(steps: dict[str, JointStep]) -> None:
    """The kept tensor is a node that forward and backward both use."""
    step = steps["slow"]
    names = {p.name for p in step.apart.parameters}
    most = step.under(step.apart.most)
    assert gathers(names, most) == gathers(names, step.apart.graphs[0]) == Counter(names)
    assert most.captured is not None
    directions = {name: direction for name, (direction, _) in names_apart(most).items()}
    (kept,) = kept_in_joint(step.graph, most).values()
    nodes = [node for node in most.captured.module.graph.nodes if node.name in kept]
    assert len(nodes) == len(names)
    for node in nodes:
        assert {directions[user.name] for user in node.users} == {FORWARD, BACKWARD}
