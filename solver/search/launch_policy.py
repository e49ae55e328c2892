"""Policies: launch times of buckets, which a forward pass
(``apsched.solver.search.construct_pass``) makes a program of.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from apsched.config import Caps
from apsched.solver.arrays.bucket_prices import (
    NEED_SLOT,
    TRANSFER_TICKS,
    num_at_most,
)
from apsched.solver.arrays.jit import compiled
from apsched.solver.arrays.problem_arrays import Bools, Ints, ProblemArrays

UNLIMITED = np.int64(2**62)
_NEAR = 256
"""Compute nodes within which a launch moves to a stall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Start times of gathers, and places of their copy-outs."""

    lead: float
    """Extra lead of a gather in units of its own transfer time; infinite: as early as memory
    allows.
    """
    copy_out_early: bool
    """Copy out right after the wait (short life of the buffer) or just before each member's use
    (short life of the copy).
    """
    prefetch: bool = True
    """False: every gather starts at its need."""
    one_ahead: bool = False
    """A gather starts when the one before it is needed (prefetch of one bucket, as FSDP2 does)."""
    in_stalls: bool = False
    """Launch, and copy out, while the compute stream stalls for an on-path collective
    anyway.
    """
    wait_reductions_at_once: bool = False
    """Wait for a reduction right after its launch: least memory, no overlap."""
    most_ahead: int | None = None
    """Compute nodes that a launch may be ahead of its need, where the cap on prefetch allows more;
    None: as many as the cap allows.
    """
    coalesced: bytes = b""
    """For each collective 1 where a bucket that it is the first of is coalesced, if it may be;
    empty for none.
    """

    def coalesced_of(self, num_collectives: int) -> Bools:
        """Return ``coalesced`` as an array."""
        return np.frombuffer(self.coalesced or bytes(num_collectives), dtype=np.bool_).copy()


class Rules(NamedTuple):
    """A policy and caps, for compiled code."""

    lead: float
    early: bool
    prefetch: bool
    one_ahead: bool
    in_stalls: bool
    at_once: bool
    memory_cap: int
    """In addition to tensors that the caller keeps."""
    in_flight_cap: int
    max_prefetch: int
    bucket_cap: int
    span_cap: int
    coalesced: Bools


class BaseTimes(NamedTuple):
    """Times at which the compute order reaches its slots, without the influence of buckets."""

    reached: Ints
    """(m+1,) when each slot is reached if only on-path collectives are waited for, one after the
    other.
    """
    stalls: Ints
    """Gaps where the compute stream waits for an on-path collective, ascending."""


def rules(arrays: ProblemArrays, policy: Policy, caps: Caps, memory_cap_bytes: int | None) -> Rules:
    """Return ``policy`` under ``caps``, steered by ``memory_cap_bytes``."""
    return Rules(
        lead=float(policy.lead),
        early=policy.copy_out_early,
        prefetch=policy.prefetch,
        one_ahead=policy.one_ahead,
        in_stalls=policy.in_stalls,
        at_once=policy.wait_reductions_at_once,
        memory_cap=int(UNLIMITED)
        if memory_cap_bytes is None
        else max(memory_cap_bytes - arrays.kept_bytes, 0),
        in_flight_cap=_or_unlimited(caps.in_flight_cap_bytes),
        max_prefetch=min(_or_unlimited(caps.max_prefetch), _or_unlimited(policy.most_ahead)),
        bucket_cap=_or_unlimited(caps.bucket_cap_bytes),
        span_cap=_or_unlimited(caps.max_topo_span),
        coalesced=policy.coalesced_of(len(arrays.kind)),
    )


def _or_unlimited(limit: int | None) -> int:
    return int(UNLIMITED) if limit is None else min(limit, int(UNLIMITED))


def base_times(arrays: ProblemArrays) -> BaseTimes:
    """Return the times at which the compute order reaches its slots."""
    steps = np.concatenate(([0], arrays.compute_ticks))
    exposed = np.nonzero(arrays.on_path)[0]
    np.add.at(steps, arrays.need_slot[exposed], arrays.transfer_ticks[exposed])
    return BaseTimes(reached=np.cumsum(steps), stalls=np.unique(arrays.need_slot[exposed]))


@compiled
def want_slots(
    clock: BaseTimes, rules: Rules, figures: Ints, stream: Ints, queue: Ints, num_streams: int
) -> Ints:
    """Return for each bucket the first slot where its launch is wanted (only gathers are launched
    ahead of need).
    """
    num_buckets, num_compute = len(figures), len(clock.reached) - 1
    want = np.zeros(num_buckets, np.int64)
    if not rules.prefetch:
        return figures[:, NEED_SLOT].copy()
    if rules.one_ahead:
        # the need of the one before it on its stream
        before = np.zeros(num_streams, np.int64)
        for b in queue:
            want[b] = before[stream[b]]
            before[stream[b]] = figures[b, NEED_SLOT]
    elif not np.isinf(rules.lead):
        # latest launches that still end before the need, one after the other on each stream, then
        # ``lead`` transfers earlier
        latest = np.full(num_streams, UNLIMITED)
        for i in range(len(queue) - 1, -1, -1):
            b = queue[i]
            begin = (
                min(clock.reached[figures[b, NEED_SLOT]], latest[stream[b]])
                - figures[b, TRANSFER_TICKS]
            )
            latest[stream[b]] = begin
            at = begin - rules.lead * figures[b, TRANSFER_TICKS]
            want[b] = 0 if at <= 0 else num_at_most(clock.reached, at) - 1
    for b in range(num_buckets):
        need = figures[b, NEED_SLOT]
        if rules.in_stalls:
            before_it = num_at_most(clock.stalls, want[b]) - 1
            if before_it >= 0 and want[b] - clock.stalls[before_it] <= _NEAR:
                want[b] = clock.stalls[before_it]
        if need < num_compute:
            want[b] = max(want[b], need - rules.max_prefetch)
        want[b] = min(want[b], need)
    return want


@compiled
def launch_slot(
    stalls: Ints, in_stalls: bool, max_prefetch: int, ready: int, need: int, num_compute: int
) -> int:
    """Return the slot where a bucket that is no gather is launched: when it is ready and may be, or
    at the next of the ``stalls``.

    It takes numbers and one array: numba counts a reference to each array of a record in each call.
    """
    if need < num_compute:
        return int(max(ready, need - max_prefetch))
    if not in_stalls:
        return int(ready)
    at = num_at_most(stalls, ready - 1)
    if at < len(stalls) and stalls[at] - ready <= _NEAR and stalls[at] < need:
        return int(stalls[at])
    return int(ready)
