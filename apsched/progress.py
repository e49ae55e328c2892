"""Progress of a command, on stderr: a live line on a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import Progress as RichProgress
from rich.progress import ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.text import Text

from apsched.quantities import show_gap, show_us

_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BEFORE_LONG = 1.0
"""Seconds since the last line after which a part that may take minutes has a line of its own."""
_SECONDS_OF_PACE = 0.5
"""Time for which the budget must have been used before the pace of this machine is known."""
_RUNNING: "ContextVar[Progress | None]" = ContextVar("running", default=None)


def working_on(part: str, *, is_long: bool = False) -> None:
    """Show the ``part`` of the running stage that begins: a module, a pass; nothing where no stage
    runs. A part that ``is_long`` may take minutes, in which no other begins.
    """
    if (progress := _RUNNING.get()) is not None:
        progress.part(part, is_long=is_long)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BudgetTime:
    """A moment of a search, and the share of its budget that was used then."""

    began: float
    """Time of the first such report, on the clock of ``time.perf_counter``."""
    began_share: float
    now: float
    share: float

    def show(self, now: float) -> str:
        """Return the seconds of the budget that are used and left, at the pace so far."""
        used = now - self.began
        pace = (self.now - self.began) / (self.share - self.began_share)
        left = pace * (1 - self.share) - (now - self.now)
        return f"budget {used:.0f} s used, at most {max(0.0, left):.0f} s left"


class _TimeColumn(ProgressColumn):
    """The time that a stage takes, and the time that the budget leaves it."""

    max_refresh = 0.5

    def __init__(self, progress: "Progress") -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: Task) -> Text:
        """Return the text of the column."""
        budget = self._progress.budget_text()
        return Text(f"{task.elapsed or 0.0:.0f} s" if budget == "" else budget)


class Progress:
    """Reports stages and the solver's incumbent, bound and gap; one object a command. ``seconds``
    has the time of each stage.
    """

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._live: RichProgress | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._within = ""
        self._began = time.perf_counter()
        self._last_line = 0.0
        self._last_news = ""
        self._budget_began: tuple[float, float] | None = None
        self._budget: _BudgetTime | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, float]]:
        """Run the body as the stage ``name``; the dictionary has its ``seconds`` afterwards."""
        took: dict[str, float] = {"seconds": 0.0}
        self._begin(name)
        before = _RUNNING.set(self)
        try:
            yield took
        finally:
            _RUNNING.reset(before)
            took["seconds"] = time.perf_counter() - self._began
            self._end(sys.exc_info()[0] is None)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Put ``name`` before the stages of the body, which try something that was not stated; so
        its warnings are left out.
        """
        before, self._within = self._within, f"{self._within}{name}: "
        try:
            yield
        finally:
            self._within = before

    def note(self, text: str) -> None:
        """Tell the user why something takes longer than usual."""
        if not self._quiet:
            self._line(text)

    def warning(self, text: str) -> None:
        """Warn the user with ``text``."""
        if not self._quiet and not self._within:
            self._line(f"warning: {text}")

    def part(self, part: str, *, is_long: bool = False) -> None:
        """Show the part of the stage that begins, as :func:`working_on` does."""
        wait = min(_SECONDS_BETWEEN_LINES, _SECONDS_BEFORE_LONG if is_long else math.inf)
        if self._live is not None and self._task is not None:
            self._live.update(self._task, description=f"{self._stage}: {part}")
        elif not self._quiet and time.perf_counter() - self._last_line >= wait:
            self._line(f"{self._stage} {time.perf_counter() - self._began:6.1f} s  {part}")

    def solver(
        self, stage: str, incumbent_us: float, bound_us: float, share_of_budget: float = math.nan
    ) -> None:
        """Report the solver's stage, its best step time, its bound, and the share of the budget
        that is used (nan: unknown). It may be called often.
        """
        self._use_budget(share_of_budget)
        news = f"bound {show_us(bound_us)}; {stage}"
        if math.isfinite(incumbent_us):
            gap = (incumbent_us - bound_us) / incumbent_us if incumbent_us > 0 else 0.0
            news = (
                f"incumbent {show_us(incumbent_us)}, gap {show_gap(gap)},"
                f" bound {show_us(bound_us)}; {stage}"
            )
        if self._live is not None and self._task is not None:
            self._live.update(self._task, description=f"{self._stage}: {news}")
        elif (
            not self._quiet
            and (news != self._last_news or self._budget is not None)
            and time.perf_counter() - self._last_line >= _SECONDS_BETWEEN_LINES
        ):
            budget = self.budget_text()
            shown = f"{news}; {budget}" if budget else news
            self._line(f"{self._stage} {time.perf_counter() - self._began:6.1f} s  {shown}")
        self._last_news = news

    def budget_text(self) -> str:
        """Return the seconds of the solver's budget that are used and left; empty while the pace of
        this machine is unknown.
        """
        return "" if self._budget is None else self._budget.show(time.perf_counter())

    def _use_budget(self, share: float) -> None:
        """Keep the time at which ``share`` of the budget is used."""
        now = time.perf_counter()
        if math.isnan(share) or (self._budget is not None and share < self._budget.share):
            self._budget = self._budget_began = None  # another search begins
        elif self._budget_began is None:
            self._budget_began = now, share
        elif now - self._budget_began[0] >= _SECONDS_OF_PACE and share > self._budget_began[1]:
            began, began_share = self._budget_began
            self._budget = _BudgetTime(began=began, began_share=began_share, now=now, share=share)

    def _begin(self, name: str) -> None:
        name = f"{self._within}{name}"
        self._stage, self._began, self._last_news = name, time.perf_counter(), ""
        self._budget = self._budget_began = None
        if self._quiet:
            return
        if not self._stream.isatty():
            self._line(f"{name} ...")
            return
        columns = (SpinnerColumn(), _TimeColumn(self), TextColumn("{task.description}"))
        self._live = RichProgress(*columns, console=Console(file=self._stream), transient=True)
        self._task = self._live.add_task(name, total=None)
        self._live.start()

    def _end(self, done: bool) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = self._task = None
        if not self._quiet and done:
            news = f"  {self._last_news}" if self._last_news else ""
            self._line(f"{self._stage} {time.perf_counter() - self._began:6.1f} s{news}")

    def _line(self, text: str) -> None:
        self._last_line = time.perf_counter()
        print(text, file=self._stream, flush=True)
