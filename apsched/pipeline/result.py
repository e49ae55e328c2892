"""The result for one graph: the schedule, its certificate, and the outcome of its check."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from apsched.config import Caps
from apsched.pipeline.assumptions import Assumptions
from apsched.pipeline.device_memory import MemoryAccount
from apsched.problem.problem import Problem
from apsched.schedule.analysis.critical_path import CriticalPath, critical_path
from apsched.schedule.analysis.metrics import Metrics, metrics_of
from apsched.schedule.analysis.usage import Chosen, chosen
from apsched.schedule.result import Score, Scored, SolveResult, Status
from apsched.schedule.schedule import Schedule
from apsched.schedule.simulate import Timeline, simulate
from apsched.units import ticks_to_us
from apsched.what_if.robustness import Robustness

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class BitwisePrice:
    """The price of bitwise mode: the same problem, caps and plan solved without it."""

    step_time_us: float
    """The fastest found without bitwise mode."""
    cost_us: float
    """The step time that the fastest schedule found in bitwise mode adds."""

    @property
    def share(self) -> float:
        """The cost as a share of the step time without bitwise mode."""
        return self.cost_us / self.step_time_us if self.step_time_us else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """The displays of a result: the layer of reports (:mod:`apsched.report.answer.shown`) gives
    these functions to :class:`Result`, which does not know that layer.
    """

    three_lines: Callable[["Result"], tuple[str, str, str]]
    """Step time and bound, memory and launches, and the best baseline that fits."""
    summary_text: Callable[["Result"], str]
    """The summary of a graph and its details."""
    as_html: Callable[["Result"], str]
    """The three lines and the timeline."""
    frame_of: Callable[["Result", str], "DataFrame"]
    """A table of the schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A graph and its answer. ``best`` is ``None`` if no schedule keeps the caps."""

    views: ClassVar[Views]
    """Set by :mod:`apsched.report.answer.shown`; surfaces that return results import it."""

    cluster: str
    """Name of the cluster whose costs were used; empty for a cost model of the user's own."""
    problem: Problem
    caps: Caps
    answer: SolveResult
    timeline: Timeline | None
    """Of the best schedule."""
    chosen: Chosen | None
    """Bucket size, span, prefetch and in-flight bytes of the best schedule."""
    path: CriticalPath | None
    """The shares of the critical path of the best schedule."""
    metrics: Metrics | None = None
    """Metrics of the collectives of the best schedule."""
    round_trip_exact: bool | None = None
    """The rewritten graph, exported and simulated again, has the figures claimed; ``None`` where
    nothing was rewritten.
    """
    cost_shares: Mapping[str, float] = field(default_factory=dict)
    """Source of costs (``formula``, ``table``, ``profile``, ``measured``) -> share of the time of
    all nodes and transfers as captured.
    """
    assumptions: Assumptions | None = None
    """Assumed sizes that depend on data; ``None`` if there are none."""
    account: MemoryAccount | None = None
    """The account of the device's memory; ``None`` if no device is known."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time of the stages that ran."""
    others: tuple[Score, ...] = ()
    """Baselines that are no schedule of this problem: graphs that torch's own schedulers made."""
    notes: tuple[str, ...] = ()
    """Notes for the user about this graph's comparison."""

    bitwise: BitwisePrice | None = None
    """The price of bitwise mode; ``None`` without that mode, or if it changes nothing or has no
    schedule.
    """

    robustness: Robustness | None = None
    """Step times of the best schedule and others over sampled costs; ``None`` without scenarios."""

    def __repr__(self) -> str:
        """Three lines: step time and bound, memory, the best baseline."""
        return "\n".join(self.views.three_lines(self))

    def _repr_html_(self) -> str:
        """The three lines and the timeline, for notebooks."""
        return self.views.as_html(self)

    def summary(self) -> str:
        """Return the output of ``apsched solve`` about this graph."""
        return self.views.summary_text(self)

    def to_frame(self, what: str = "schedule") -> "DataFrame":
        """Return one row for each step of the ``"schedule"`` (with its memory), or for each of its
        ``"launches"``, as a pandas DataFrame (extra ``apsched[pandas]``); the columns name their
        units. ``InputError`` where there is no schedule, no pandas or no such table.
        """
        return self.views.frame_of(self, what)

    @property
    def beaten_by(self) -> tuple[Score, ...]:
        """Baselines that fit and are faster than the schedule found; there should be none."""
        best = self.answer.best
        known = (*self.answer.baselines, *self.others)
        return tuple(
            score
            for score in known
            if best is not None and score.fits and score.step_time_ticks < best.step_time_ticks
        )

    @property
    def best(self) -> Scored | None:
        """The schedule found, with its figures."""
        return self.answer.best

    @property
    def schedule(self) -> Schedule | None:
        """The schedule found."""
        return self.answer.best.schedule if self.answer.best else None

    @property
    def status(self) -> Status:
        """``"optimal"`` (the step time is the bound), ``"feasible"``, or ``"infeasible"``: no
        schedule keeps the caps, or none was found.
        """
        return self.answer.status

    @property
    def peak_memory_bytes(self) -> int | None:
        """Peak of the memory of the graph with the best schedule, in bytes; ``None`` where there is
        none.
        """
        return self.answer.best.peak_memory_bytes if self.answer.best else None

    @property
    def step_time_us(self) -> float | None:
        """Step time of the best schedule."""
        return ticks_to_us(self.answer.best.step_time_ticks) if self.answer.best else None

    @property
    def bound_us(self) -> float:
        """No schedule within the caps is faster."""
        return ticks_to_us(self.answer.bound_ticks)

    @property
    def gap(self) -> float:
        """(step time - bound) / step time."""
        return self.answer.gap


def result_of(
    problem: Problem, caps: Caps, answer: SolveResult, *, cluster: str, seconds: Mapping[str, float]
) -> Result:
    """Return ``answer`` with the timeline and the choices of its best schedule."""
    timeline = simulate(problem, answer.best.schedule) if answer.best else None
    path = (
        critical_path(problem, answer.best.schedule, timeline, caps)
        if answer.best and timeline
        else None
    )
    return Result(
        cluster=cluster,
        problem=problem,
        caps=caps,
        answer=answer,
        timeline=timeline,
        chosen=chosen(problem, answer.best.schedule, timeline)
        if answer.best and timeline
        else None,
        path=path,
        metrics=metrics_of(problem, answer.best.schedule, timeline, caps)
        if answer.best and timeline
        else None,
        seconds=dict(seconds),
    )
