"""Policies: what is launched when, before a forward pass (``apsched.solver.place``) makes a program of it."""

from dataclasses import dataclass

import numpy as np

from apsched.config import Caps
from apsched.solver.compact import ALL_GATHER, Compact, Ints
from apsched.solver.compiled import compiled
from apsched.solver.partition import Partition

UNLIMITED = np.int64(2**62)
_NEAR = 64
"""Spine nodes within which a launch moves to a stall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How early gathers start and where their copy-outs stand."""

    lead: float
    """Extra lead of a gather in units of its own transfer time; infinite: as early as memory allows."""
    copy_out_early: bool
    """Copy out right after the wait (short life of the buffer) or just before each member's use (short life of the copy)."""
    prefetch: bool = True
    """False: every gather starts at its need."""
    one_ahead: bool = False
    """A gather starts when the one before it is needed (prefetch of one bucket, as FSDP2 does)."""
    in_stalls: bool = False
    """Launch, and copy out, while the compute stream stands still for an on-path collective anyway."""
    wait_reductions_at_once: bool = False
    """Wait for a reduction right after its launch: least memory, no overlap."""


def want_gaps(compact: Compact, partition: Partition, policy: Policy, caps: Caps) -> Ints:
    """Return for each bucket the first gap where its launch is wanted (only gathers are launched ahead of need)."""
    num_spine = len(compact.spine_ticks)
    if not policy.prefetch:
        return partition.need_gap.copy()
    if policy.one_ahead:
        want = _one_ahead(compact, partition)
    elif np.isinf(policy.lead):
        want = np.zeros(len(partition.buckets), dtype=np.int64)
    else:
        want = _want_gaps(
            _reached(compact),
            partition.need_gap,
            partition.transfer_ticks,
            compact.stream[partition.member_list[partition.member_begin[:-1]]],
            queue(compact, partition),
            compact.num_streams,
            policy.lead,
        )
    if policy.in_stalls:
        want = _at_stall_before(compact, want)
    if caps.max_prefetch is not None:
        want = np.where(partition.need_gap < num_spine, np.maximum(want, partition.need_gap - caps.max_prefetch), want)
    return np.minimum(want, partition.need_gap)


def launch_gaps(compact: Compact, partition: Partition, policy: Policy) -> Ints:
    """Return for each bucket that is no gather the gap where it is launched: when it is ready, or at the next stall."""
    if not policy.in_stalls:
        return partition.ready_gap.copy()
    stalls = _stalls(compact)
    later = np.searchsorted(stalls, partition.ready_gap)
    at = np.append(stalls, UNLIMITED)[later]
    near = (at - partition.ready_gap <= _NEAR) & (at < partition.need_gap)
    moved: Ints = np.where(near & (partition.need_gap >= len(compact.spine_ticks)), at, partition.ready_gap)
    return moved


def _stalls(compact: Compact) -> Ints:
    """Return the gaps where the compute stream waits for an on-path collective."""
    return np.unique(compact.need_gap[compact.on_path])


def _at_stall_before(compact: Compact, want: Ints) -> Ints:
    stalls = _stalls(compact)
    at = np.append(stalls, -UNLIMITED)[np.searchsorted(stalls, want, side="right") - 1]
    return np.where(want - at <= _NEAR, at, want)


def _reached(compact: Compact) -> Ints:
    """Return when each gap is reached if only on-path collectives are waited for, one after the other."""
    steps = np.concatenate(([0], compact.spine_ticks))
    exposed = np.nonzero(compact.on_path)[0]
    np.add.at(steps, compact.need_gap[exposed], compact.transfer_ticks[exposed])
    return np.cumsum(steps)


def _one_ahead(compact: Compact, partition: Partition) -> Ints:
    """Return for each gather the need of the one before it on its stream."""
    want = np.zeros(len(partition.buckets), dtype=np.int64)
    latest = np.zeros(compact.num_streams, dtype=np.int64)
    for b in queue(compact, partition):
        stream = compact.stream[partition.member_list[partition.member_begin[b]]]
        want[b] = latest[stream]
        latest[stream] = partition.need_gap[b]
    return want


@compiled
def _want_gaps(reached: Ints, need_gap: Ints, transfer_ticks: Ints, stream: Ints, order: Ints, num_streams: int, lead: float) -> Ints:
    """Latest launches that still end before the need, one after the other on each stream, then ``lead`` transfers earlier."""
    want = np.zeros(len(need_gap), np.int64)
    latest = np.full(num_streams, UNLIMITED)
    for i in range(len(order) - 1, -1, -1):
        b = order[i]
        begin = min(reached[need_gap[b]], latest[stream[b]]) - transfer_ticks[b]
        latest[stream[b]] = begin
        at = begin - lead * transfer_ticks[b]
        want[b] = 0 if at <= 0 else np.searchsorted(reached, at, side="right") - 1
    return want


def queue(compact: Compact, partition: Partition) -> Ints:
    """Return the gather buckets in order of need: the order in which they are launched."""
    first = partition.member_list[partition.member_begin[:-1]]
    moving = (compact.kind[first] == ALL_GATHER) & ~compact.on_path[first]
    gathers = np.nonzero(moving)[0]
    order: Ints = gathers[np.lexsort((gathers, partition.need_gap[gathers]))]
    return order
