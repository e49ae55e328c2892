"""Inputs of the parts of the solver, their findings, and the answer made of these."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from apsched.config import SolveOptions
from apsched.schedule.result import Scored, SolvedBy, SolveResult, TradeOff
from apsched.schedule.schedule import Schedule
from apsched.schedule.score import score
from apsched.schedule.verify import verify
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import Ints
from apsched.solver.arrays.relaxed import without_places
from apsched.solver.bounds.memory_and_launches import later_bounds
from apsched.solver.bounds.step_time import TimeBound
from apsched.solver.infeasible.explain import explain
from apsched.solver.program.program import Program
from apsched.solver.reorder.split_kernels import Fitting
from apsched.solver.search.decoder import BudgetUse
from apsched.units import ticks_to_us

Progress = Callable[[str, float, float, float], None]
"""Called with the stage, the best step time and the bound in microseconds, and the share of the
planned work that is done; nan for a value that is not known yet.
"""


@dataclass(slots=True, kw_only=True)
class Report:
    """Passes the stage, the best step time and the use of the budget to ``progress``."""

    progress: Progress | None
    bound: TimeBound
    use: BudgetUse = field(default_factory=BudgetUse)
    _stage: str = ""
    _best_us: float = float("nan")

    def __post_init__(self) -> None:
        self.use.shown = self._show

    def __call__(self, stage: str, best_ticks: int | None) -> None:
        """Report the stage, and the best step time in ticks (None: no schedule yet)."""
        self._stage = stage
        self._best_us = float("nan") if best_ticks is None else ticks_to_us(best_ticks)
        self._show()

    def _show(self) -> None:
        if self.progress is not None:
            bound_us = ticks_to_us(self.bound.ticks)
            self.progress(self._stage, self._best_us, bound_us, self.use.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Facts that are known before any search."""

    whole: Fitting
    """The requested problem, with all kernels whole."""
    fitting: Fitting
    """The searched problem: ``whole``, or that with some kernels cut."""
    options: SolveOptions
    bound: TimeBound
    """The bound of ``whole``."""
    made: tuple[Scored, ...]
    """The baselines."""
    report: Report

    @property
    def is_cut(self) -> bool:
        """Whether some kernel is cut."""
        return self.fitting is not self.whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A schedule to start from."""

    program: Program
    order: Ints | None = None
    """Its compute nodes as captured, in their order; None where that is as captured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The best schedule of one part of the solver."""

    schedule: Schedule | None
    bound: TimeBound
    solved_by: str
    hint: Hint | None = None
    """The schedule as the whole formulation has it."""
    fastest_ticks: int = 0
    """The least step time found, also while later objectives used the slack; 0: that of
    ``schedule``.
    """
    peak_bound_bytes: int = 0
    """Bound of the whole formulation, for schedules within the slack of ``fastest_ticks``; 0 for
    none.
    """
    launches_bound: int = 0
    """Bound of the whole formulation, for schedules within that slack and the peak found; 0 for
    none.
    """
    deterministic_work: float = 0.0
    search_ticks: int = 0
    """Step time of the search, from which CP-SAT started; 0 for none."""
    trade_offs: tuple[TradeOff, ...] = ()
    """Memory against step time, the least memory first."""

    @property
    def value(self) -> tuple[bool, int]:
        """The lower the better."""
        return self.schedule is None, self.fastest_ticks


def slack_limit(time_ticks: int, options: SolveOptions, made: tuple[Scored, ...]) -> int:
    """Return the step time that lower memory and fewer launches may cost: never so much that a
    baseline that fits is faster.
    """
    fastest = min((b.step_time_ticks for b in made if b.fits), default=None)
    limit = int(time_ticks * (1 + options.time_slack))
    return limit if fastest is None else max(time_ticks, min(limit, fastest))


def within_slack(found: SolveResult, options: SolveOptions, ticks: int) -> SolveResult:
    """Return ``found`` where a schedule with a step time of ``ticks`` is known, too: with the least
    step time, and the limit of the slack over that.
    """
    fastest = min(ticks, found.fastest_ticks or ticks)
    return replace(
        found,
        fastest_ticks=fastest,
        time_limit_ticks=slack_limit(fastest, options, found.baselines),
    )


def near_enough(bound: TimeBound, options: SolveOptions) -> int:
    """Return the step time at which the search stops: memory and launches may use the rest. It does
    not rise where a memory cap is looser, so that a tighter one never searches longer.
    """
    ticks = bound.ticks if bound.monotone_ticks is None else bound.monotone_ticks
    return int(ticks * (1 + options.time_slack / 2))


def rescored(instance: Instance, best: Scored | None) -> Scored | None:
    """Return the schedule of ``best`` with its figures on the machine of ``instance``."""
    if best is None:
        return None
    return score(instance.problem, "apsched", best.schedule, instance.caps)


def scored_start(instance: Instance, start: Schedule | None) -> Scored | None:
    """Return ``start`` with its figures where it keeps the caps."""
    if start is None or verify(instance.problem, start, instance.caps):
        return None
    return score(instance.problem, "start", start, instance.caps)


def as_given(task: Task, given: Scored) -> Answer:
    """Return the answer that the schedule given is."""
    return Answer(
        schedule=given.schedule,
        bound=task.bound,
        solved_by=SolvedBy.START,
        fastest_ticks=given.step_time_ticks,
    )


def result_of(
    task: Task,
    answer: Answer,
    *,
    given: Scored | None,
    uncontended: Scored | None,
    explained: bool,
) -> SolveResult:
    """Return the best of ``answer``, the baselines, the schedule ``given``, and the answer without
    contention, within the slack of the fastest of all; where nothing fits, the reasons if that is
    to be ``explained``.
    """
    problem, caps = task.whole.instance.problem, task.whole.instance.caps
    if task.is_cut:  # where kernels are whole, compute is faster: only bounds for all orders hold
        answer = replace(answer, bound=task.bound, peak_bound_bytes=0, launches_bound=0)
    scored = None
    if answer.schedule is not None:
        scored = score(problem, "apsched", answer.schedule, caps)
    if uncontended is not None and (
        scored is None or not scored.fits or uncontended.step_time_ticks < answer.fastest_ticks
    ):
        scored = uncontended
        answer = replace(
            answer,
            solved_by=f"{answer.solved_by} without contention",
            fastest_ticks=uncontended.step_time_ticks,
        )
    others = task.made if given is None else (*task.made, given)
    fitting = [s for s in (scored, *others) if s is not None and s.fits]
    if not fitting:
        return _infeasible(task, answer, explained=explained)
    fastest = min(s.step_time_ticks for s in fitting)
    if answer.fastest_ticks and scored is not None and scored.fits:
        fastest = min(fastest, answer.fastest_ticks)
    answer = replace(answer, fastest_ticks=fastest)
    limit = slack_limit(fastest, task.options, others)
    best = least_memory_within(fitting, limit)
    return _found(task, answer, best, limit, is_answer=best is scored)


def _infeasible(task: Task, answer: Answer, *, explained: bool) -> SolveResult:
    return SolveResult.infeasible(
        explain(task.fitting.instance, task.options) if explained else None,
        bound_ticks=answer.bound.ticks,
        bound_source=answer.bound.source,
        baselines=task.made,
        floor_memory_bytes=task.whole.floor.peak_bytes,
        floor_bound_bytes=task.whole.floor.bound_bytes,
        solved_by=answer.solved_by,
        deterministic_work=answer.deterministic_work,
    )


def _found(
    task: Task, answer: Answer, best: Scored, limit_ticks: int, *, is_answer: bool
) -> SolveResult:
    """Return the result; the bounds on memory and launches hold for every order that may be."""
    instance, floor = task.whole.instance, task.whole.floor
    if instance.caps.max_compute_move != 0:
        instance = replace(instance, arrays=without_places(instance.arrays))
    later = later_bounds(
        instance, best, limit_ticks, max(floor.bound_bytes, answer.peak_bound_bytes)
    )
    launches = answer.launches_bound if is_answer else 0  # proven for the peak of the answer
    return SolveResult.found(
        best,
        bound_ticks=answer.bound.ticks,
        bound_source=answer.bound.source,
        baselines=task.made,
        floor_memory_bytes=floor.peak_bytes,
        floor_bound_bytes=floor.bound_bytes,
        fastest_ticks=answer.fastest_ticks,
        time_limit_ticks=later.limit_ticks,
        peak_bound_bytes=later.peak_bytes,
        launches_bound=max(later.launches, launches),
        solved_by=answer.solved_by if is_answer else best.name,
        deterministic_work=answer.deterministic_work,
        search_ticks=answer.search_ticks,
        trade_offs=answer.trade_offs,
    )


def least_memory_within(fitting: Sequence[Scored], limit_ticks: int) -> Scored:
    """Return the schedule with the least memory, of as many with the fewest launches, among
    ``fitting``, within ``limit_ticks`` or as fast as the fastest.
    """
    limit = max(limit_ticks, min(s.step_time_ticks for s in fitting))
    return min(
        (s for s in fitting if s.step_time_ticks <= limit),
        key=lambda s: (s.peak_memory_bytes, s.num_launches, s.step_time_ticks),
    )
