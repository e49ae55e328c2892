"""Kept parameters in one graph of forward and backward, against every choice in that graph."""

import io
from dataclasses import replace
from itertools import chain, combinations

import pytest

from apsched.capture.captured import Capture
from apsched.capture.one_graph import with_joint_graph
from apsched.config import Caps, SolveOptions
from apsched.errors import InputError
from apsched.kinds import CollectiveKind
from apsched.pipeline.load import LoadedGraph, with_apart
from apsched.pipeline.solve_graph import SolveRequest
from apsched.problem.plan.rules import Plan, Rule
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.report.answer.joint_graph import joint_json, joint_lines, print_joint
from apsched.report.answer.more_memory import more_memory_json, more_memory_lines
from apsched.schedule.verify import verify
from apsched.solver.bounds.whole_step import graph_bound
from apsched.units import ticks_to_us
from apsched.whole_step.choices import Choice
from apsched.whole_step.improve import ticks_of
from apsched.whole_step.joint_graph.names import names_apart
from apsched.whole_step.joint_graph.step import (
    AS_APART,
    JointAnswer,
    JointStep,
    solve_joint,
    solve_stated,
    with_kept_in_joint,
)
from apsched.whole_step.keep_request import AUTO, KeepRequest
from apsched.whole_step.one_more import with_more_memory
from tests.helpers.graphs.sharded_layers import FlatPrices, captured_layers, loaded_layers

SLOW, FAST = FlatPrices(bytes_per_us=150.0), FlatPrices(bytes_per_us=4000.0)
LATE = FlatPrices(bytes_per_us=2000.0, latency_us=40.0)
NAMES = ("weights.0", "weights.1", "weights.2")
FLOOR = MemoryCap(size_bytes=0, above_floor=True)


@pytest.fixture(scope="module")
def layers() -> Capture:
    return with_joint_graph(captured_layers((32, 64, 128, 64)))


KNOWN: dict[tuple[object, ...], tuple[object, ...]] = {}
"""Joint graphs and answers that a test of this file asked for, behind what they were made of: the
ids in a key are those of objects that live here.
"""


def joint_of(capture: Capture, prices: FlatPrices) -> LoadedGraph:
    """Return the joint graph at these prices, made once: tests only read it."""
    key = (id(capture), id(prices))
    if key not in KNOWN:
        *apart, joint = loaded_layers(capture, prices)
        KNOWN[key] = (capture, prices, with_apart(joint, apart))
    return KNOWN[key][-1]


def posed(
    joint: LoadedGraph,
    cap: MemoryCap | None = None,
    plan: Plan | None = None,
    *,
    second_group: bool = False,
    budget: float = 0.0,
) -> tuple[LoadedGraph, SolveRequest]:
    request = SolveRequest(
        caps=Caps(),
        memory_cap=cap or MemoryCap(),
        options=SolveOptions(time_slack=0.0, budget=budget),
        plan=plan or Plan(),
        second_group=second_group,
    )
    problem, without = request.posed(joint.problem)
    return replace(joint, problem=problem, without_bitwise=without), request


def solved(
    joint: LoadedGraph,
    keep: KeepRequest,
    cap: MemoryCap | None = None,
    plan: Plan | None = None,
    *,
    second_group: bool = False,
    budget: float = 0.0,
) -> JointAnswer:
    """Return the answer, solved once: several tests compare the same ones."""
    key = (id(joint), keep, cap or MemoryCap(), plan or Plan(), second_group, budget)
    if key not in KNOWN:
        graph, request = posed(joint, cap, plan, second_group=second_group, budget=budget)
        progress = Progress(quiet=True)
        KNOWN[key] = (
            joint,
            solve_stated(graph, request, keep, progress)
            if keep.mode != AUTO
            else solve_joint(JointStep.of(graph, request, progress)),
        )
    return KNOWN[key][-1]


def stated(*names: str) -> KeepRequest:
    return KeepRequest(mode="names", entries=names) if names else KeepRequest()


@pytest.mark.parametrize("prices", [SLOW, FAST, LATE], ids=["slow", "fast", "late"])
@pytest.mark.parametrize("cap_bytes", [None, 200_000, 150_000, 130_000])
def test_no_choice_that_people_state_is_faster(
    layers: Capture, prices: FlatPrices, cap_bytes: int | None
) -> None:
    """Nor one that the bound excludes; and every schedule keeps the cap."""
    joint, cap = joint_of(layers, prices), MemoryCap(size_bytes=cap_bytes)
    found = solved(joint, KeepRequest(mode=AUTO), cap)
    assert found.compared[AS_APART].kept == found.apart.best.kept
    if found.best.fits:
        best = found.result.best
        assert verify(found.result.problem, best.schedule, found.result.caps) == ()
        assert (best.peak_memory_bytes <= cap_bytes) if cap_bytes else True
    for names in ((), NAMES):
        other = solved(joint, stated(*names), cap)
        assert ticks_of(found.best) <= ticks_of(other.best)
        assert other.best.bound_ticks <= ticks_of(other.best)
    for choice in found.compared.values():
        if choice.result is None:
            other = solved(joint, stated(*sorted(choice.kept)), cap)
            assert choice.bound_ticks <= ticks_of(other.best)
            assert ticks_of(found.best) <= ticks_of(other.best)


def test_a_bound_that_excludes_a_choice_counts_second_groups(layers: Capture) -> None:
    """The bound on one group lies above the step time on two."""
    joint = joint_of(layers, FlatPrices(bytes_per_us=150.0, latency_us=40.0))
    excluded = solved(joint, KeepRequest(mode=AUTO), second_group=True).compared["none"]
    assert excluded.result is None
    none = solved(joint, KeepRequest(), second_group=True, budget=0.1)  # CP-SAT finds it
    assert excluded.bound_ticks <= ticks_of(none.best)
    assert none.best.step_ticks < graph_bound(joint.problem, none.result.caps)


CHOICES = tuple(chain.from_iterable(combinations(NAMES, n) for n in range(len(NAMES) + 1)))


def test_the_choice_is_the_best_of_all_where_the_network_binds(layers: Capture) -> None:
    joint = joint_of(layers, SLOW)
    times = {c: solved(joint, stated(*c)).best.step_ticks for c in CHOICES}
    found = solved(joint, KeepRequest(mode=AUTO))
    assert found.best.kept == set(NAMES)
    assert found.best.step_ticks == min(times.values()) < times[()]
    assert found.compared["none"].result is None, "excluded by its bound"
    assert 0 <= found.gap < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prices", "cap_bytes", "second_group"),
    [
        (SLOW, 150_000, False),
        (SLOW, 230_000, False),
        (SLOW, None, True),
        (LATE, 200_000, False),
        (LATE, 150_000, True),
    ],
)
def test_no_choice_is_faster_than_the_bound(
    layers: Capture, prices: FlatPrices, cap_bytes: int | None, second_group: bool
) -> None:
    joint, cap = joint_of(layers, prices), MemoryCap(size_bytes=cap_bytes)
    found = solved(joint, KeepRequest(mode=AUTO), cap, second_group=second_group)
    for names in CHOICES:
        other = solved(joint, stated(*names), cap, second_group=second_group)
        if other.best.fits:
            assert found.bound.ticks <= other.best.step_ticks, names


def test_the_bound_knows_that_memory_does_not_hold_all(layers: Capture) -> None:
    """Some gathers take place again: the bound rises as the memory falls."""
    joint = joint_of(layers, SLOW)
    caps = [MemoryCap(size_bytes=size) for size in (None, 150_000, 130_000, 110_000)]
    bounds = [solved(joint, KeepRequest(mode=AUTO), cap).bound.ticks for cap in caps]
    assert bounds == sorted(bounds)
    assert bounds[0] < bounds[-1]


def test_names_that_both_have_stay_apart(layers: Capture) -> None:
    """Numbers of such names differ from choice to choice; those apart do not."""
    joint = joint_of(layers, SLOW)
    known = set(names_apart(joint).values())
    for kept in ({"weights.0"}, set(NAMES)):
        made = with_kept_in_joint(joint, frozenset(kept))
        found = names_apart(made)
        assert set(made.problem.node_names) <= found.keys()
        assert set(found.values()) <= known
        assert len(set(found.values())) == len(found)
        for direction, half in zip(("forward", "backward"), made.apart, strict=True):
            own = {name for where, name in found.values() if where == direction}
            assert set() < own <= set(half.problem.node_names)


def test_more_memory_gains_what_a_looser_cap_does(layers: Capture) -> None:
    graph, request = posed(joint_of(layers, SLOW), FLOOR)
    step = JointStep.of(graph, request, Progress(quiet=True))
    now = solve_joint(step)
    found = with_more_memory(step, now, 100_000)
    cap = MemoryCap(size_bytes=now.cap_bytes + 100_000)
    looser = solved(joint_of(layers, SLOW), KeepRequest(mode=AUTO), cap)
    assert found.more.cap_bytes == cap.size_bytes
    assert found.more.best.step_ticks <= looser.best.step_ticks < now.best.step_ticks
    assert found.also_kept == looser.best.kept - now.best.kept != Choice()
    assert found.proven_ticks <= found.gain_ticks <= found.possible_ticks
    line, change = more_memory_lines(found)
    assert line.startswith("one more 97.66 KiB (memory cap ")
    assert "more kept (" in change
    says = more_memory_json(found)
    assert says["gain_us"] == ticks_to_us(now.best.step_ticks - found.more.best.step_ticks)
    assert says["also_kept"] == sorted(found.also_kept)


def test_under_the_floor_every_choice_has_the_same_cap(layers: Capture) -> None:
    """That of the graph which gathers all again."""
    joint = joint_of(layers, FAST)
    found = solved(joint, KeepRequest(mode=AUTO), FLOOR)
    none = solved(joint, KeepRequest(), FLOOR)
    assert found.result.caps == none.result.caps
    assert found.best.step_ticks <= none.best.step_ticks
    alone = solved(joint, stated(*NAMES), FLOOR)
    assert alone.result.caps.memory_cap_bytes > none.result.caps.memory_cap_bytes, "its own floor"
    assert alone.best.fits


@pytest.mark.parametrize(("keep", "kept"), [(True, {"weights.1"}), (False, set())])
def test_rules_of_a_plan_hold(layers: Capture, keep: bool, kept: set[str]) -> None:
    plan = Plan(rules=(Rule(match="weights.1", keep=keep),), chooses_kept=True)
    for prices in (SLOW, FAST):
        found = solved(joint_of(layers, prices), KeepRequest(mode=AUTO), plan=plan)
        for choice in found.compared.values():
            assert choice.kept & {"weights.1"} == kept


def test_a_kept_parameter_is_gathered_once_and_priced_as_before(layers: Capture) -> None:
    joint = joint_of(layers, SLOW)
    assert with_kept_in_joint(joint, frozenset()) is joint
    made = with_kept_in_joint(joint, frozenset({"weights.1"}))
    assert gathers(joint) == {**dict.fromkeys(NAMES, 2)}
    assert gathers(made) == {**dict.fromkeys(NAMES, 2), "weights.1": 1}
    assert made.problem.keys == joint.problem.keys
    assert [half.problem.name for half in made.apart] == ["forward", "backward"]
    with pytest.raises(InputError, match=r"found none that 'weights\.7' fits"):
        solved(joint, stated("weights.7"))


def test_the_answer_is_shown_for_people_and_for_programs(layers: Capture) -> None:
    joint = joint_of(layers, SLOW)
    found, one = solved(joint, KeepRequest(mode=AUTO)), solved(joint, stated("weights.1"))
    entry = joint_json(found)["keep_joint"]
    assert entry["kept"] == list(NAMES)
    assert entry["compared"]["none"]["step_time_us"] is None
    assert not entry["compared"]["none"]["is_solved"]
    assert joint_json(found)["keep_apart"]["kept"] == list(NAMES)
    assert set(joint_json(one)) == {"keep_joint"}
    shown = io.StringIO()
    print_joint(found, shown)
    of_both = shown.getvalue().partition("one graph of both:")[2].splitlines()
    rows = {line.split("  ")[0]: line for line in of_both if line}
    assert set(rows) >= {"as apart", "none", "apsched"}
    assert ">= " in rows["none"]
    assert "not solved" in rows["none"]
    assert rows["apsched"].split()[1:] == rows["as apart"].split()[2:]
    step, *lines = joint_lines(one)
    assert step.startswith("step: ")
    assert " bound with this choice " in step
    assert tuple(lines) == (
        f"  kept from forward to backward: 1 of 3 parameters, {size(one)}; 2 gathered again",
    )


def size(answer: JointAnswer) -> str:
    return f"{answer.best.kept_bytes / 2**10:.2f} KiB"


def gathers(graph: LoadedGraph) -> dict[str, int]:
    found: dict[str, int] = {}
    for collective in graph.problem.collectives:
        if graph.problem.keys[collective.key].kind == CollectiveKind.ALL_GATHER:
            found[collective.module] = found.get(collective.module, 0) + 1
    return found
