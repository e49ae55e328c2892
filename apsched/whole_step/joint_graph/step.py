"""Kept parameters where forward and backward are one graph: the choice for both apart is made in
that graph, and compared there with none kept and with all kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from apsched.config import Caps
from apsched.pipeline.load import LoadedGraph, with_apart
from apsched.pipeline.result import Result
from apsched.pipeline.solve_graph import (
    Search,
    SolveRequest,
    resolve_caps,
    solve_graph,
    under_plan,
)
from apsched.progress import Progress
from apsched.quantities import MemoryCap, show_us
from apsched.schedule.schedule import Schedule
from apsched.solver.bounds.step_time import TimeBound
from apsched.solver.bounds.whole_step import graph_bound
from apsched.solver.interleave.least_memory import exceeds_memory_cap
from apsched.solver.requested import solve_requested
from apsched.units import ticks_to_us
from apsched.whole_step.bounds import grouped
from apsched.whole_step.choices import ALL, NONE, Choice
from apsched.whole_step.improve import NEVER, ticks_of
from apsched.whole_step.joint_graph.bound import JointGraphs
from apsched.whole_step.keep_request import KeepRequest
from apsched.whole_step.pair import (
    Step,
    beside_each_other,
    pair_of,
    parameters_of,
    priced_as,
    with_kept,
)
from apsched.whole_step.search import StepAnswer, check_bound, solve_step

AS_APART = "as apart"
"""Name of the choice that is best for forward and backward apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointChoice:
    """One graph of forward and backward under one choice."""

    kept: Choice
    kept_bytes: int
    graph: LoadedGraph
    bound_ticks: int
    """No schedule of this graph is faster."""
    result: Result | None
    """``None`` where it is not solved, since the bound is no lower than the step time of another
    choice.
    """

    @property
    def fits(self) -> bool:
        """Whether a schedule within the caps is known."""
        return self.result is not None and self.result.best is not None

    @property
    def step_ticks(self) -> int:
        """The step time; 0 where no schedule is known."""
        best = self.result.best if self.result is not None else None
        return 0 if best is None else best.step_time_ticks

    @property
    def peak_bytes(self) -> int:
        """The peak of the schedule; 0 where none is known."""
        best = self.result.best if self.result is not None else None
        return 0 if best is None else best.peak_memory_bytes

    @property
    def least_bytes(self) -> int:
        """The least memory for which a schedule is known; of a choice that was solved."""
        (result,) = self.results
        return result.answer.floor_memory_bytes

    @property
    def graphs(self) -> tuple[LoadedGraph, ...]:
        """The graph, as other steps have theirs."""
        return (self.graph,)

    @property
    def results(self) -> tuple[Result, ...]:
        """The answer for the graph; of a choice that was solved."""
        assert self.result is not None
        return (self.result,)


@dataclass(frozen=True, slots=True, kw_only=True)
class JointAnswer:
    """The kept parameters of one graph of forward and backward, and its schedule."""

    best: JointChoice
    bound: TimeBound
    """With ``auto`` no choice and no schedule within the caps is faster, as long as no choice
    prices a node lower than each choice that was made does. Else the bound of the stated choice.
    """
    names: tuple[str, ...]
    """Parameters that both directions gather: kept or gathered again."""
    compared: dict[str, JointChoice]
    """The choices that were made in the graph, by name; empty where the choice is stated."""
    apart: StepAnswer | None = None
    """The answer for forward and backward apart; ``None`` where the choice is stated."""

    @property
    def result(self) -> Result:
        """The answer for the graph."""
        (result,) = self.best.results
        return result

    @property
    def gap(self) -> float:
        """(step time - bound) / step time; 0 where no schedule fits."""
        ticks = self.best.step_ticks
        return (ticks - self.bound.ticks) / ticks if self.best.fits and ticks else 0.0

    @property
    def cap_bytes(self) -> int | None:
        """The memory cap of the graph."""
        return self.result.caps.memory_cap_bytes


@dataclass(frozen=True, kw_only=True)
class JointStep:
    """One graph of forward and backward, with every parameter gathered again, and both apart."""

    graph: LoadedGraph
    apart: Step
    request: SolveRequest
    """That of the graph, under every choice."""
    floor_caps: Caps | None = None
    """Caps of every choice, where the memory cap is one above a floor: that of the graph with only
    those parameters kept that a rule keeps.
    """
    more_bytes: int = 0
    """The memory caps are looser by so much."""
    search: Search | None = None
    """Stands in for the solver of the graph."""
    made: dict[Choice, LoadedGraph] = field(default_factory=dict)
    """Graphs that were made already, here or elsewhere, under the plan."""
    solved: dict[Choice, JointChoice] = field(default_factory=dict)
    """Choices that were solved already."""
    before: Mapping[Choice, JointChoice] = field(default_factory=dict)
    """Choices that were solved under another memory cap: no answer for one of them is slower, as
    long as that schedule keeps the caps.
    """

    @classmethod
    def of(cls, graph: LoadedGraph, request: SolveRequest, progress: Progress) -> "JointStep":
        """Return the step that ``graph``, one of forward and backward under the plan, is."""
        halves = under_plan(graph.apart, request)
        step = cls(graph=graph, apart=Step.of(halves, request, progress), request=request)
        return step.with_floor()

    def with_cap(self, memory_cap: MemoryCap | None) -> "JointStep":
        """Return this step under another memory cap, with the graphs that are made already; a floor
        is that of the graph with only those parameters kept that a rule keeps.
        """
        later = self._later(self.apart.with_cap(memory_cap))
        request = replace(self.request, memory_cap=memory_cap)
        return replace(later, request=request, floor_caps=None, more_bytes=0).with_floor()

    def _later(self, apart: Step) -> "JointStep":
        """Return this step with ``apart``, both apart under other caps."""
        return replace(self, apart=apart, solved={}, before={**self.before, **self.solved})

    @property
    def entry_bytes(self) -> dict[str, int]:
        """Entry of a choice -> bytes passed from forward to backward."""
        return self.apart.entry_bytes

    @property
    def entries(self) -> tuple[str, ...]:
        """All entries that a choice may have."""
        return self.apart.entries

    def with_floor(self) -> "JointStep":
        """Return this step with the same caps for every choice, if the memory cap is one above a
        floor.
        """
        memory_cap = self.request.memory_cap
        if memory_cap is None or not memory_cap.above_floor:
            return self
        least = self.under(self.always)
        return replace(self, floor_caps=resolve_caps(least, self.request, self.apart.progress))

    def with_more(self, size_bytes: int) -> "JointStep":
        """Return this step with memory caps that are looser by ``size_bytes``."""
        step = self._later(self.apart.with_more(size_bytes))
        return replace(step, more_bytes=self.more_bytes + size_bytes)

    @property
    def always(self) -> Choice:
        """Parameters that a rule of the plan keeps."""
        return self.apart.always

    def under(self, kept: Choice) -> LoadedGraph:
        """Return the graph with the parameters ``kept``, under the plan."""
        if kept not in self.made:
            self.made[kept] = _made(self.graph, kept, self.request)
        return self.made[kept]

    def caps_of(self, kept: Choice) -> Caps:
        """Return the caps of the graph with the parameters ``kept``."""
        caps = self.floor_caps
        if caps is None:
            caps = resolve_caps(self.under(kept), self.request, self.apart.progress)
        cap_bytes = caps.memory_cap_bytes
        if cap_bytes is None:
            return caps
        return replace(caps, memory_cap_bytes=cap_bytes + self.more_bytes)

    def may_fit(self, kept: Choice) -> bool:
        """Return whether no lower bound of the memory with ``kept`` exceeds the cap."""
        return not exceeds_memory_cap(self.under(kept).problem, self.caps_of(kept))

    def solve(self, kept: Choice) -> JointChoice:
        """Return the graph solved with the parameters ``kept``; each choice once. The search starts
        from the schedules of both apart.
        """
        if kept not in self.solved:
            self.apart.solve(kept)
            self.solved[kept] = self._solved(kept)
        return self.solved[kept]

    def solve_if_faster(self, kept: Choice) -> JointChoice:
        """Return the choice ``kept``, solved unless its bound is no lower than the step time of a
        choice that was solved.
        """
        fastest = min(map(ticks_of, self.solved.values()), default=NEVER)
        if kept not in self.solved and fastest != NEVER:
            problem, caps = self.under(kept).problem, self.caps_of(kept)
            ways = {False, self.request.second_group}
            bound_ticks = min(graph_bound(grouped(problem, way), caps) for way in ways)
            if bound_ticks >= fastest:
                return self._choice(kept, bound_ticks, None)
        if kept not in self.solved:
            self.solved[kept] = self._solved(kept)
        return self.solved[kept]

    def _solved(self, kept: Choice) -> JointChoice:
        progress, apart = self.apart.progress, self._schedules_apart(kept)
        progress.note(f"one graph of both with {len(kept)} parameters kept")
        graph, caps = self.under(kept), self.caps_of(kept)
        result = solve_graph(
            graph, self.request, progress, caps=caps, apart=apart, search=self.search
        )
        start = self._faster_before(kept, result)
        if start is not None:
            search = partial(solve_requested, start=start)
            result = solve_graph(graph, self.request, progress, caps=caps, search=search)
        return self._choice(kept, result.answer.bound_ticks, result)

    def _faster_before(self, kept: Choice, found: Result) -> Schedule | None:
        """Return the schedule with the choice ``kept`` under another memory cap, if it keeps the
        cap of ``found`` and is faster.
        """
        before, cap_bytes = self.before.get(kept), found.caps.memory_cap_bytes
        if before is None or not before.fits:
            return None
        keeps_cap = cap_bytes is None or before.peak_bytes <= cap_bytes
        least = NEVER if found.best is None else found.best.step_time_ticks
        (result,) = before.results
        return result.schedule if keeps_cap and before.step_ticks < least else None

    def _choice(self, kept: Choice, bound_ticks: int, result: Result | None) -> JointChoice:
        return JointChoice(
            kept=kept,
            kept_bytes=sum(self.entry_bytes[name] for name in kept),
            graph=self.under(kept),
            bound_ticks=bound_ticks,
            result=result,
        )

    def _schedules_apart(self, kept: Choice) -> tuple[Schedule, ...]:
        """Return the schedules of forward and of backward alone with the choice ``kept``, if they
        were solved and use no second process group.
        """
        solved = self.apart.solved.get(kept)
        if solved is None or self.request.second_group:
            return ()
        found = [result.best for result in solved.results]
        schedules = tuple(best.schedule for best in found if best is not None)
        return schedules if len(schedules) == len(found) else ()

    def bound(self) -> TimeBound:
        """Return the bound over all choices."""
        least, most = self.always, self.apart.most
        loosest = self.caps_of(least)
        caps_bytes = [self.caps_of(kept).memory_cap_bytes for kept in {least, most}]
        known = [cap for cap in caps_bytes if cap is not None]
        cap_bytes = max(known) if len(known) == len(caps_bytes) else None
        graphs = JointGraphs(
            least=self.under(least), most=self.under(most), between=tuple(self.made.values())
        )
        return graphs.bound(
            self.apart.undecided,
            replace(loosest, memory_cap_bytes=cap_bytes),
            second_group=self.request.second_group,
        )


def with_kept_in_joint(graph: LoadedGraph, kept: Choice) -> LoadedGraph:
    """Return ``graph``, one of forward and backward, with the parameters ``kept`` gathered once."""
    if not kept:
        return graph
    from apsched.capture.one_graph import joined  # torch, which graph files do without

    apart = with_kept(pair_of(graph.apart), kept)
    forward, backward = (half.captured for half in apart)
    assert forward is not None
    assert backward is not None
    (joint,) = beside_each_other(priced_as(graph, joined(forward, backward)))
    return with_apart(joint, apart)


def solve_stated(
    graph: LoadedGraph, request: SolveRequest, keep: KeepRequest, progress: Progress
) -> JointAnswer:
    """Return ``graph``, one of forward and backward under the plan, solved with the parameters that
    ``keep`` states.
    """
    parameters = parameters_of(pair_of(graph.apart))
    entry_bytes = {entry: size for p in parameters for entry, size in p.entries.items()}
    chosen = keep.chosen(tuple(entry_bytes))
    made = _made(graph, chosen, request)
    result = solve_graph(made, request, progress)
    best = JointChoice(
        kept=chosen,
        kept_bytes=sum(entry_bytes[entry] for entry in chosen),
        graph=made,
        bound_ticks=result.answer.bound_ticks,
        result=result,
    )
    bound = TimeBound(ticks=best.bound_ticks, source=result.answer.bound_source)
    names = tuple(p.name for p in parameters)
    return JointAnswer(best=best, bound=bound, names=names, compared={})


def solve_joint(step: JointStep) -> JointAnswer:
    """Return the fastest choice found: the best one for forward and backward apart, compared with
    none kept and with all kept, and with those that ``step`` has solved already. The answer is
    never slower than with none kept, nor than with all kept if that fits.
    """
    apart = solve_step(step.apart)
    best, compared = compare(step, choices_to_compare(step.apart, apart.best.kept))
    bound = step.bound()
    check_bound(bound.ticks, best.step_ticks if best.fits else None)
    return JointAnswer(
        best=best,
        bound=bound,
        names=tuple(p.name for p in step.apart.parameters),
        compared=compared,
        apart=apart,
    )


def compare(
    step: JointStep, choices: Mapping[str, Choice]
) -> tuple[JointChoice, dict[str, JointChoice]]:
    """Return the fastest of ``choices`` (:func:`choices_to_compare`) and of those that ``step`` has
    solved already; and ``choices`` in the graph, without all kept if that cannot fit.
    """
    compared = {
        name: step.solve_if_faster(kept)
        for name, kept in choices.items()
        if name != ALL or step.may_fit(kept)
    }
    best = min(step.solved.values(), key=lambda choice: (ticks_of(choice), choice.peak_bytes))
    if not best.fits:
        best = compared[NONE] if NONE in compared else compared[AS_APART]
    return best, compared


def step_times(choices: Mapping[str, Choice], compared: Mapping[str, JointChoice]) -> str:
    """Return the step times of ``choices`` as ``compared`` in one line."""
    texts = []
    for name, kept in choices.items():
        found = compared.get(name)
        if found is None or (found.result is not None and not found.fits):
            shown = "does not fit"
        elif found.result is None:
            shown = f"at least {show_us(ticks_to_us(found.bound_ticks))}"
        else:
            shown = show_us(ticks_to_us(found.step_ticks))
        texts.append(f"{name} ({len(kept)} kept) {shown}")
    return ", ".join(texts)


def choices_to_compare(step: Step, apart: Choice) -> dict[str, Choice]:
    """Return ``apart``, the best choice for forward and backward apart, and those of none and of
    all, by name; equal ones once.
    """
    others = {NONE: step.always, ALL: step.most}
    return {AS_APART: apart} | {name: kept for name, kept in others.items() if kept != apart}


def _made(graph: LoadedGraph, kept: Choice, request: SolveRequest) -> LoadedGraph:
    """Return ``graph`` with ``kept``, under the plan of ``request``."""
    made = with_kept_in_joint(graph, kept)
    if made is graph:
        return graph
    problem, without = request.posed(made.problem)
    return replace(made, problem=problem, without_bitwise=without)
