"""How far a study is, and how long it will take, on stderr: one line that changes on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Sequence
from typing import TextIO

from apsched.study.chain import MOST_SOLVES
from apsched.study.run import Live
from apsched.study.work import ALONG

_SECONDS_BETWEEN_LINES = 5.0
_ALONG_TO_SOLVE = 0.15
"""What an answer from other caps takes beside a solve, as long as none has been seen."""


class Board:
    """Tells about the chains of one run."""

    def __init__(self, lives: Sequence[Live], slots: int, stream: TextIO | None = None) -> None:
        self._lives, self._slots = lives, slots
        self._stream = stream or sys.stderr
        self._kept = {id(live): frozenset(live.known) for live in lives}
        self._last = 0.0
        self._began = time.monotonic()

    def told(self) -> None:
        """Say where things stand, unless that was said a moment ago."""
        now = time.monotonic()
        done, total = self.counts()
        if not self._stream.isatty() and now - self._last < _SECONDS_BETWEEN_LINES and done < total:
            return
        self._last = now
        left = self.seconds_left()
        text = f"study: {done} of {total} points, {now - self._began:.0f} s" + (f", about {_show(left)} left" if done < total else "")
        end = "\r" if self._stream.isatty() and done < total else "\n"
        print(f"{text:<60}" if end == "\r" else text, file=self._stream, end=end, flush=True)

    def counts(self) -> tuple[int, int]:
        """Return how many points there are, and how many there will be at most."""
        done = sum(len(live.known) for live in self._lives)
        return done, sum(len(live.chain.names(live.known)) or live.chain.expected() for live in self._lives)

    def seconds_left(self) -> float:
        """Return an estimate: the mean time of a solve and of an answer from other caps, times how many of each are left."""
        new = [live.known[name] for live in self._lives for name in live.known if name not in self._kept[id(live)]]
        of_all = new or [outcome for live in self._lives for outcome in live.known.values()]
        solves = [outcome.seconds for outcome in of_all if outcome.how != ALONG]
        others = [outcome.seconds for outcome in of_all if outcome.how == ALONG]
        solve = sum(solves) / len(solves) if solves else 0.0
        other = sum(others) / len(others) if others else _ALONG_TO_SOLVE * solve
        longest = total = 0.0
        for live in self._lives:
            missing = (len(live.chain.names(live.known)) or live.chain.expected()) - len(live.known)
            most = live.chain.expected() if live.chain.full else MOST_SOLVES
            left_to_solve = min(missing, max(most - sum(outcome.how != ALONG for outcome in live.known.values()), 0))
            seconds = left_to_solve * solve + (missing - left_to_solve) * other
            total += seconds
            longest = max(longest, seconds / self._slots if live.chain.full else seconds)
        return max(total / self._slots, longest)


def _show(seconds: float) -> str:
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
