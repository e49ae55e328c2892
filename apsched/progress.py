"""Tells what is being worked on, on stderr: a live line on a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

from rich.console import Console
from rich.progress import Progress as RichProgress
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from apsched.quantities import show_us

_SECONDS_BETWEEN_LINES = 5.0
_RUNNING: "ContextVar[Progress | None]" = ContextVar("running", default=None)


def working_on(part: str) -> None:
    """Show the ``part`` of the running stage that begins: a module, a pass; nothing where no stage
    runs.
    """
    if (progress := _RUNNING.get()) is not None:
        progress.part(part)


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
        self._began = time.perf_counter()
        self._last_line = 0.0
        self._last_news = ""

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

    def note(self, text: str) -> None:
        """Tell the user why something takes longer than usual."""
        if not self._quiet:
            self._line(text)

    def warning(self, text: str) -> None:
        """Tell the user what may not be as meant."""
        if not self._quiet:
            self._line(f"warning: {text}")

    def part(self, part: str) -> None:
        """Show the part of the stage that begins, as :func:`working_on` does."""
        if self._live is not None and self._task is not None:
            self._live.update(self._task, description=f"{self._stage}: {part}")
        elif not self._quiet and time.perf_counter() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._line(f"{self._stage} {time.perf_counter() - self._began:6.1f} s  {part}")

    def solver(self, stage: str, incumbent_us: float, bound_us: float) -> None:
        """Report where the solver stands; called as often as it likes."""
        news = f"{stage}: bound {show_us(bound_us)}"
        if math.isfinite(incumbent_us):
            gap = (incumbent_us - bound_us) / incumbent_us if incumbent_us > 0 else 0.0
            news = (
                f"{stage}: incumbent {show_us(incumbent_us)}, bound {show_us(bound_us)}, gap"
                f" {100 * gap:.3f} %"
            )
        if self._live is not None and self._task is not None:
            self._live.update(self._task, description=f"{self._stage}: {news}")
        elif (
            not self._quiet
            and news != self._last_news
            and time.perf_counter() - self._last_line >= _SECONDS_BETWEEN_LINES
        ):
            self._line(f"{self._stage} {time.perf_counter() - self._began:6.1f} s  {news}")
        self._last_news = news

    def _begin(self, name: str) -> None:
        self._stage, self._began, self._last_news = name, time.perf_counter(), ""
        if self._quiet:
            return
        if not self._stream.isatty():
            self._line(f"{name} ...")
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
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
