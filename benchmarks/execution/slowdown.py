"""By how much compute and collectives slow each other down, measured with the steps of a job."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import cycle, islice, product
from math import ceil
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from apsched.problem.contention import Contention

_LARGEST_TERM = 100
_SMALL_ELEMENTS, _LARGE_ELEMENTS = 2**17, 2**20
"""512 KiB and 4 MiB, as the buckets of a small model are."""
_POOL_ELEMENTS = 2**23
"""Messages take turns on 32 MiB: those of a job are in no cache."""
_STEPS_LONG = 1.75
"""Time that messages take alone, in that of the steps that they run beside: some are left when
these end, since they are slower by less.
"""
_FEWEST = 5
"""Messages that go by while steps run, at least; as many run alone."""

Messages = tuple[int, bool]
"""Elements of each; whether gathers, or else reductions."""


@dataclass(frozen=True, slots=True)
class Beside:
    """One step beside one queue of messages, in microseconds, means over process ranks."""

    step_us: float
    message_us: float
    message_alone_us: float


class Slowdown:
    """Runs steps without collectives beside messages that no node waits for. Every process rank
    calls the same, and gets the same.
    """

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step
        step_us = _agreed(fmean(_us(step) for _ in range(3)))
        self._counts: dict[Messages, tuple[int, int]] = {}
        """Number of messages, and number of steps beside them."""
        for messages in product((_SMALL_ELEMENTS, _LARGE_ELEMENTS), (True, False)):
            message_us = _agreed(_queue(messages, _FEWEST)[0])
            steps = ceil(_FEWEST * message_us / step_us)
            self._counts[messages] = ceil(_STEPS_LONG * steps * step_us / message_us) + 1, steps

    def sample(self) -> dict[Messages, Beside]:
        """Run a step beside messages of each size and kind, and some of these alone."""
        found = {}
        for messages, (count, steps) in self._counts.items():
            alone_us, _ = _queue(messages, _FEWEST)
            message_us, steps_us = _queue(messages, count, partial(self._run, steps))
            found[messages] = Beside(
                _agreed(steps_us) / steps, _agreed(message_us), _agreed(alone_us)
            )
        return found

    def _run(self, steps: int) -> None:
        for _ in range(steps):
            self._step()


def contention_of(
    samples: Sequence[Mapping[Messages, Beside]], compute_us: float, latency_us: float
) -> Contention:
    """Return the mutual slowdown of streams. ``samples`` are those of a step whose compute takes
    ``compute_us`` as captured, and of messages with a latency of ``latency_us``.

    The slowdown of compute is the ratio of these times. With t(s) the time of a message of s bytes,
    and the latency l,

        t_beside(s) = h l + g (t_alone(s) - l)

    Two other measurements would be wrong. Operators of a step one by one, each with arguments of
    its own, differ from those in a step: there an operator reads values that the one before it has
    just written, from the cache, where no message is in its way. Messages that find their stream
    idle, right after a barrier, take 4 ms more beside compute; messages of schedules, by their
    traces, take 1 to 2 ms more.
    """

    def taken(elements: int, figure: Callable[[Beside], float]) -> float:
        return fmean(
            _typical([figure(sample[elements, gather]) for sample in samples])
            for gather in (True, False)
        )

    step_us, small_us, small_alone_us, large_us, large_alone_us = (
        fmean(
            taken(elements, lambda of: of.step_us)
            for elements in (_SMALL_ELEMENTS, _LARGE_ELEMENTS)
        ),
        *(taken(_SMALL_ELEMENTS, figure) for figure in _OF_MESSAGES),
        *(taken(_LARGE_ELEMENTS, figure) for figure in _OF_MESSAGES),
    )
    g = max(1.0, (large_us - small_us) / (large_alone_us - small_alone_us))
    h = max(1.0, (small_us - g * (small_alone_us - latency_us)) / latency_us)
    f = max(1.0, step_us / compute_us)
    return Contention(
        compute_slowdown=_ratio(f), transfer_slowdown=_ratio(g), latency_slowdown=_ratio(h)
    )


_OF_MESSAGES: tuple[Callable[[Beside], float], ...] = (
    lambda of: of.message_us,
    lambda of: of.message_alone_us,
)


def _queue(
    messages: Messages, count: int, work: Callable[[], object] | None = None
) -> tuple[float, float]:
    """Return the time of a message behind another in a queue, and of ``work`` that begins with the
    queue.

    With work those messages count that end before it. The first counts never: it begins with both
    process ranks in step.
    """
    elements, gather = messages
    pool = [torch.zeros(elements) for _ in range(_POOL_ELEMENTS // elements)]
    shard = torch.zeros(elements // dist.get_world_size())
    dist.barrier()
    ends: list[int] = []
    sent = [_launched(whole, shard, gather=gather) for whole in islice(cycle(pool), count)]
    futures = [one.get_future().then(lambda _: ends.append(time.perf_counter_ns())) for one in sent]
    work_us = 0.0 if work is None else _us(work)
    work_end = time.perf_counter_ns()
    for future in futures:
        future.wait()
    counted = count if work is None else max(2, sum(end <= work_end for end in ends))
    return (ends[counted - 1] - ends[0]) / 1e3 / (counted - 1), work_us


def _launched(whole: torch.Tensor, shard: torch.Tensor, *, gather: bool) -> Any:
    """Start a gather, or an all-reduce, which gloo runs for a reduce-scatter."""
    of_shards = whole[: shard.numel() * dist.get_world_size()]
    return (
        dist.all_gather_into_tensor(of_shards, shard, async_op=True)
        if gather
        else dist.all_reduce(whole, async_op=True)
    )


def _agreed(mine: float) -> float:
    """Return the mean over process ranks."""
    mean = torch.tensor([mine], dtype=torch.float64)
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def _typical(times: Sequence[float]) -> float:
    """Return the mean of the middle half."""
    quarter = len(times) // 4
    return fmean(sorted(times)[quarter : len(times) - quarter])


def _ratio(factor: float) -> tuple[int, int]:
    return Fraction(factor).limit_denominator(_LARGEST_TERM).as_integer_ratio()


def _us(call: Callable[[], object]) -> float:
    begin = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begin) / 1e3
