"""One step of a job on a CPU, taken apart: the host is the compute stream, gloo's threads are the
groups' streams.

Every moment between the first and the last node of a graph has one owner: an operator owns the time
from the end of the one before it to its own end (python and views on the way included), a start
owns the time until its transfer begins or the host continues, a transfer owns the time until the
host continues after its wait, if the host stalled for it. So the costs of one step, put back into
the machine

    t_k = max(t_{k-1}, end of the transfers waited for) + d_k

give the time of that step.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from apsched.calibrate.profile.match import Matched, Pair
from apsched.calibrate.profile.trace import HostOp, Trace, Work
from apsched.kinds import NodeKind


@dataclass(slots=True)
class StepTimes:
    """Times of the nodes of one step, by place in the list of pairs."""

    compute_us: dict[int, float] = field(default_factory=dict)
    """Of compute and start nodes."""
    transfer_us: dict[int, float] = field(default_factory=dict)
    """Of start nodes."""
    graph_us: dict[int, float] = field(default_factory=dict)
    """Of each graph, from the begin of its first node to the end of its last."""


@dataclass(slots=True)
class _Launched:
    place: int
    begin_us: float
    """When its transfer could begin."""
    work: Work | None
    alone: bool
    """Its wait follows at once."""


def host_times(trace: Trace, matched: Matched, transfers: Mapping[int, Work]) -> StepTimes:
    """Return the times of one step; ``transfers`` are those that the operators of start nodes
    caused.
    """
    times = StepTimes()
    other = _Lost([trace.ops[index] for index in matched.unmatched])
    first_us = now_us = 0.0
    graph = -1
    free_us: dict[str, float] = {}
    launched: dict[int, _Launched] = {}
    for k, pair in enumerate(matched.pairs):
        op, record = trace.ops[pair.op], pair.place.record
        if pair.place.graph != graph:
            graph, first_us, now_us, free_us, launched = (
                pair.place.graph,
                op.begin_us,
                op.begin_us,
                {},
                {},
            )
        if record.kind is NodeKind.WAIT:
            start = next(
                (
                    c
                    for c in launched.values()
                    if matched.pairs[c.place].place.record.collective.wait == record.rank  # type: ignore[union-attr]
                ),
                None,
            )
            if start is not None:
                now_us = _wait(times, matched.pairs[start.place], start, op, now_us, free_us)
        else:
            end_us = op.end_us
            if record.kind is NodeKind.START:
                work, alone = transfers.get(pair.op), _wait_follows(matched.pairs, k)
                if work is not None and alone:
                    end_us = min(op.end_us, max(work.begin_us, op.begin_us))
                begin_us = (
                    end_us if work is None else min(max(work.begin_us, op.begin_us), op.end_us)
                )
                launched[k] = _Launched(k, begin_us, work, alone)
            times.compute_us[k] = max(end_us - now_us - other.between(now_us, op.begin_us), 0.0)
            now_us = max(end_us, now_us)
        times.graph_us[graph] = (
            max(now_us, *free_us.values()) - first_us if free_us else now_us - first_us
        )
    return times


def _wait(
    times: StepTimes,
    pair: Pair,
    start: _Launched,
    op: HostOp,
    now_us: float,
    free_us: dict[str, float],
) -> float:
    """Record the time of the transfer of ``start``, and return the time at which the host
    continues.
    """
    collective = pair.place.record.collective
    assert collective is not None
    begin_us = max(start.begin_us, free_us.get(collective.group, 0.0))
    done_us = op.begin_us if start.work is None else start.work.end_us
    stood_still = start.work is None or done_us > op.begin_us
    end_us = max(op.end_us if stood_still else done_us, begin_us)
    times.transfer_us[start.place] = end_us - begin_us
    free_us[collective.group] = end_us
    return max(end_us, now_us) if stood_still or start.alone else now_us


def _wait_follows(pairs: Sequence[Pair], k: int) -> bool:
    collective = pairs[k].place.record.collective
    assert collective is not None
    return (
        k + 1 < len(pairs)
        and pairs[k + 1].place.graph == pairs[k].place.graph
        and pairs[k + 1].place.record.rank == collective.wait
    )


class _Lost:
    """Time on the host that belongs to no node."""

    def __init__(self, ops: Sequence[HostOp]) -> None:
        self._begins = [op.begin_us for op in ops]
        self._durations = [op.end_us - op.begin_us for op in ops]

    def between(self, begin_us: float, end_us: float) -> float:
        """Return how much of it begins in a span."""
        return sum(
            self._durations[
                bisect_left(self._begins, begin_us) : bisect_right(self._begins, end_us)
            ]
        )
