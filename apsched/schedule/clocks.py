"""The clocks of the machine: when each step and each transfer ends. ``simulate`` drives one of them
through a schedule.

Both have the same face: ``run`` some work on the compute stream, ``launch`` a transfer on a stream,
``wait`` for one, ``finish``.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Protocol


class Clock(Protocol):
    """The time of the compute stream, and of every transfer."""

    now: int
    """When the compute stream gets on."""
    begins: list[int]
    """Of every transfer; complete when finished."""
    ends: list[int]

    def run(self, ticks: int) -> None:
        """Let the compute stream do so much work."""

    def launch(self, stream: int, ticks: int, latency_ticks: int) -> int:
        """Put a transfer on a stream and return its index."""

    def wait(self, transfer: int) -> None:
        """Stall the compute stream until a transfer has ended."""

    def finish(self) -> int:
        """Let all transfers end, and return when the last of everything does."""


class FreeClock:
    """Streams do not slow each other: sums and maxima."""

    def __init__(self, num_streams: int) -> None:
        self.now = 0
        self.begins: list[int] = []
        self.ends: list[int] = []
        self._free = [0] * num_streams

    def run(self, ticks: int) -> None:
        """Work."""
        self.now += ticks

    def launch(self, stream: int, ticks: int, latency_ticks: int) -> int:
        """Begin when launched and the stream is free."""
        begin = max(self.now, self._free[stream])
        self._free[stream] = begin + ticks
        self.begins.append(begin)
        self.ends.append(begin + ticks)
        return len(self.ends) - 1

    def wait(self, transfer: int) -> None:
        """Stall."""
        self.now = max(self.now, self.ends[transfer])

    def finish(self) -> int:
        """Return the end."""
        return max([self.now, *self._free])


@dataclass(slots=True)
class _Flow:
    """A transfer and its remaining work."""

    index: int
    latency: Fraction
    moving: Fraction


class SharedClock:
    """Streams share links, compute and transfers slow each other down: see
    :mod:`apsched.problem.contention`. Exact, in fractions of a tick.
    """

    def __init__(
        self,
        links_of_stream: Sequence[Sequence[int]],
        compute_slowdown: Fraction,
        transfer_slowdown: Fraction = Fraction(1),
        latency_slowdown: Fraction = Fraction(1),
    ) -> None:
        self.now = 0
        self.begins: list[int] = []
        self.ends: list[int] = []
        self._links = links_of_stream
        self._compute_slowdown = compute_slowdown
        self._transfer_slowdown = transfer_slowdown
        self._latency_slowdown = latency_slowdown
        self._queues: list[deque[_Flow]] = [deque() for _ in links_of_stream]

    def run(self, ticks: int) -> None:
        """Work, more slowly while something is transferred."""
        left = Fraction(ticks)
        while left > 0:
            speed = 1 / self._compute_slowdown if any(self._queues) else Fraction(1)
            until = self.now + ceil(left / speed)
            speeds = self._speeds(computing=True)
            change = self._next_change(speeds)
            if change is not None:
                until = min(until, change)
            left -= speed * (until - self.now)
            self._go_to(until, speeds)

    def launch(self, stream: int, ticks: int, latency_ticks: int) -> int:
        """Join the queue of the stream."""
        index = len(self.ends)
        self.begins.append(self.now)
        self.ends.append(-1)
        self._queues[stream].append(
            _Flow(index, Fraction(latency_ticks), Fraction(ticks - latency_ticks))
        )
        return index

    def wait(self, transfer: int) -> None:
        """Stall."""
        while self.ends[transfer] < 0:
            speeds = self._speeds(computing=False)
            change = self._next_change(speeds)
            assert change is not None
            self._go_to(change, speeds)

    def finish(self) -> int:
        """Return the end; the compute stream is where it was."""
        now = self.now
        while (change := self._next_change(speeds := self._speeds(computing=False))) is not None:
            self._go_to(change, speeds)
        end, self.now = self.now, now
        return end

    def _speeds(self, *, computing: bool) -> list[Fraction]:
        """Return the speed of the head of each stream: during latency, then the share that its
        fullest link leaves; compute slows both.
        """
        alone = 1 / self._transfer_slowdown if computing else Fraction(1)
        in_latency = 1 / self._latency_slowdown if computing else Fraction(1)
        on_link: dict[int, int] = {}
        for stream, queue in enumerate(self._queues):
            if queue and not queue[0].latency:
                for link in self._links[stream]:
                    on_link[link] = on_link.get(link, 0) + 1
        return [
            alone / max((on_link.get(link, 1) for link in self._links[stream]), default=1)
            if queue and not queue[0].latency
            else in_latency
            for stream, queue in enumerate(self._queues)
        ]

    def _next_change(self, speeds: Sequence[Fraction]) -> int | None:
        """Return the next tick at which a head moves bytes or ends; ``None`` where nothing is
        transferred.
        """
        heads = [
            (queue[0], speed) for queue, speed in zip(self._queues, speeds, strict=True) if queue
        ]
        return min(
            (self.now + ceil((flow.latency or flow.moving) / speed) for flow, speed in heads),
            default=None,
        )

    def _go_to(self, until: int, speeds: Sequence[Fraction]) -> None:
        """Advance time to the next change, at most, and end finished work."""
        passed = until - self.now
        self.now = until
        for queue, speed in zip(self._queues, speeds, strict=True):
            if not queue:
                continue
            head = queue[0]
            if head.latency:
                head.latency = max(head.latency - speed * passed, Fraction(0))
            else:
                head.moving -= speed * passed
            if not head.latency and head.moving <= 0:
                self.ends[head.index] = until
                queue.popleft()
                if queue:
                    self.begins[queue[0].index] = until
