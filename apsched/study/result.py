"""The answers of a study in Python: points, a text, a data frame."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apsched.report.answer.frames import frame
from apsched.study.report.across import Line
from apsched.study.report.exports import flat
from apsched.study.report.steps import StepPoint, steps_of
from apsched.study.report.text import print_study
from apsched.study.rows import Point

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """All answers to the questions of a study."""

    lines: tuple[Line, ...]
    """A frontier for each combination of options and each graph: points by ascending caps."""
    slowdown: float
    path: Path | None
    """Directory of the study; ``None`` where nothing is kept."""

    @property
    def points(self) -> tuple[Point, ...]:
        """The points of all lines."""
        return tuple(point for line in self.lines for point in line.points)

    @property
    def steps(self) -> tuple[StepPoint, ...]:
        """Forward and backward as one step, where parameters are kept."""
        return steps_of(self.lines)

    def rows(self) -> list[Mapping[str, Any]]:
        """Return a row for each point: the columns of ``apsched study export``."""
        return list(flat(self.points))

    def to_frame(self) -> "DataFrame":
        """Return :meth:`rows` as a data frame; ``InputError`` without pandas."""
        return frame(self.rows())

    def summary(self) -> str:
        """Return the output of the command."""
        text = io.StringIO()
        print_study(self.lines, self.slowdown, text)
        return text.getvalue()

    def __repr__(self) -> str:
        fitting = [p.step_time_us for p in self.points if p.step_time_us is not None]
        steps = "no schedule fits"
        if fitting:
            steps = f"{min(fitting) / 1000:,.3f} to {max(fitting) / 1000:,.3f} ms"
        return (
            f"StudyResult: {len(self.points)} points on {len(self.lines)} frontiers\n"
            f"  step times: {steps}; {len(self.points) - len(fitting)} points without a schedule\n"
            f"  {'nothing is kept' if self.path is None else f'kept in {self.path}'}"
        )
