"""A window of a program as a small problem of its own, and the way back.

The fixed operations of the window are its compute order. What lies before and behind enters as a
:class:`Boundary`, exactly: step time is a (max, +) function of what crosses a window's ends. Memory
of everything that the window does not decide is a baseline; where units could stand that stand
elsewhere now, it is an upper limit, so that a window may miss a schedule but never breaks the cap.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from apsched.config import Caps
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.partition import Members, Pricer
from apsched.solver.arrays.problem_arrays import Ints, ProblemArrays
from apsched.solver.cpsat.variables import Boundary
from apsched.solver.cpsat.windows.longest_tail import epilogue_ticks, prologue_ticks, tails
from apsched.solver.cpsat.windows.subproblem_arrays import (
    GAPS,
    PER_COLLECTIVE,
    attached_of,
    begins,
    float_arrays,
)
from apsched.solver.program.evaluate import evaluate, trace
from apsched.solver.program.program import COPY_OUT, LAUNCH, NODE, WAIT, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Operations [first, past) of a program, and the collectives that are free in it."""

    first: int
    past: int
    free: tuple[int, ...]


class WindowView:
    """The small problem of a window, and the way back."""

    def __init__(self, pricer: Pricer, caps: Caps, program: Program, window: Window) -> None:
        problem, arrays = pricer.problem, pricer.arrays
        self.pricer, self.whole, self.program, self.window = pricer, arrays, program, window
        self.where = trace(arrays, program)
        self.origin = int(self.where.begin_ticks[window.first])
        self.free_buckets = {int(program.partition.bucket_of[c]) for c in window.free}
        self._cut_segments()
        self.pinned = self._pinned()
        self.arrays = self._small_compact()
        self.problem = replace(
            problem,
            collectives=tuple(
                problem.collectives[c] for c in (*window.free, *(m[0] for _, m, _ in self.pinned))
            ),
        )
        self.boundary, self.horizon_ticks = self._boundary()
        self.instance = Instance(problem=self.problem, arrays=self.arrays, caps=self._caps(caps))

    # -- the compute order of the window: runs of operations that keep their order

    def _cut_segments(self) -> None:
        """Cut the fixed operations into segments, at every slot where a free unit stands or may
        want to.
        """
        program, window, whole = self.program, self.window, self.whole
        wanted = {int(getattr(whole, slot)[c]) for c in window.free for slot in GAPS}
        self.segments: list[list[int]] = [[]]
        self.slot_of_operation: dict[int, int] = {}
        cut = False
        for i in range(window.first, window.past):
            operation, argument = int(program.operation[i]), int(program.argument[i])
            free = operation != NODE and self._bucket(operation, argument) in self.free_buckets
            launch = operation == LAUNCH
            if free or launch:
                cut = True
                self.slot_of_operation[i] = (
                    len(self.segments) if self.segments[-1] else len(self.segments) - 1
                )
                continue
            if (
                cut or operation == WAIT or (operation == NODE and argument in wanted)
            ) and self.segments[-1]:
                self.segments.append([])
            cut = False
            self.segments[-1].append(i)
        if not self.segments[-1]:
            self.segments.pop()
        self.segment_starts = [segment[0] for segment in self.segments]

    def _bucket(self, operation: int, argument: int) -> int:
        return (
            int(self.program.partition.bucket_of[argument]) if operation == COPY_OUT else argument
        )

    def _pinned(self) -> list[tuple[int, Members, int]]:
        """Return (operation, members, slot) of launches in the window whose waits stand behind
        it.
        """
        result = []
        for i in range(self.window.first, self.window.past):
            operation, argument = int(self.program.operation[i]), int(self.program.argument[i])
            if operation == LAUNCH and argument not in self.free_buckets:
                result.append(
                    (i, self.program.partition.buckets[argument], self.slot_of_operation[i])
                )
        return result

    # -- the small problem

    def _small_compact(self) -> ProblemArrays:
        whole, free, pinned = self.whole, self.window.free, self.pinned
        compute_op = {
            int(self.program.argument[i]): i
            for i in range(len(self.program.operation))
            if self.program.operation[i] == NODE
        }
        rows = np.array([*free, *(m[0] for _, m, _ in pinned)], dtype=np.int64)
        num_free, num_segments = len(free), len(self.segments)
        partition = self.program.partition
        launch, transfer = whole.launch_ticks[rows].copy(), whole.transfer_ticks[rows].copy()
        bucketable = whole.bucketable[rows].copy()
        ready, need = (
            np.zeros(len(rows), dtype=np.int64),
            np.full(len(rows), num_segments, dtype=np.int64),
        )
        launch_last, wait_first, wait_last = need.copy(), ready.copy(), need.copy()
        for j, c in enumerate(free):
            ready[j] = self._first_slot_after(compute_op.get(int(whole.ready_slot[c]) - 1, -1))
            need[j] = self._last_slot_before(
                compute_op.get(int(whole.need_slot[c]), self.window.past)
            )
            launch_last[j] = self._last_slot_before(
                compute_op.get(int(whole.launch_last[c]), self.window.past)
            )
            wait_first[j] = self._first_slot_after(compute_op.get(int(whole.wait_first[c]) - 1, -1))
            wait_last[j] = self._last_slot_before(
                compute_op.get(int(whole.wait_last[c]), self.window.past)
            )
        for j, (i, _, slot) in enumerate(pinned, start=num_free):
            b = int(self.program.argument[i])
            launch[j], transfer[j], bucketable[j] = (
                self._launch_work(i),
                partition.transfer_ticks[b],
                False,
            )
            ready[j] = slot
        after: list[list[int]] = []
        place = {c: j for j, c in enumerate(free)}
        for j, c in enumerate(free):
            awaited = whole.awaited_by(c)
            after.append([place[int(d)] for d in awaited if int(d) in place])
            for d in awaited:
                if int(d) not in place:
                    ready[j] = max(
                        ready[j], self._first_slot_after(self._last_operation_of(int(d)))
                    )
        after += [[] for _ in pinned]
        self._need_before_dependents(place, need)
        base_slot, base_compute = self._baseline()
        return replace(
            whole,
            **float_arrays(whole, free, len(rows)),
            **self._storages_of(free, compute_op),
            compute_ticks=np.array(
                [sum(self._work(i) for i in segment) for segment in self.segments], dtype=np.int64
            ),
            base_slot_bytes=base_slot,
            base_compute_bytes=base_compute,
            **{name: getattr(whole, name)[rows] for name in PER_COLLECTIVE},
            launch_ticks=launch,
            transfer_ticks=transfer,
            bucketable=bucketable,
            ready_slot=ready,
            need_slot=need,
            launch_last=launch_last,
            wait_first=wait_first,
            wait_last=wait_last,
            after_begin=begins(after),
            after_list=np.array([d for ds in after for d in ds], dtype=np.int64),
            shares=None,  # a window proposes, the clock of the whole program judges
        )

    def _first_slot_after(self, i: int) -> int:
        """Return the first slot behind operation ``i``; 0 where that is before the window."""
        if i < self.window.first:
            return 0
        return bisect_right(self.segment_starts, i) if i < self.window.past else len(self.segments)

    def _last_slot_before(self, i: int) -> int:
        """Return the last slot before operation ``i``; the end where that is behind the window."""
        if i >= self.window.past:
            return len(self.segments)
        return max(bisect_right(self.segment_starts, i) - 1, 0)

    def _last_operation_of(self, c: int) -> int:
        b = int(self.program.partition.bucket_of[c])
        found = -1
        for i in range(self.window.first, self.window.past):
            if (
                self.program.operation[i] != NODE
                and self._bucket(int(self.program.operation[i]), int(self.program.argument[i])) == b
            ):
                found = i
        return found

    def _need_before_dependents(self, place: dict[int, int], need: Ints) -> None:
        """A fixed launch in the window that waits for a free collective keeps it before itself."""
        whole = self.whole
        for _, members, slot in self.pinned:
            for c in members:
                for d in whole.awaited_by(c):
                    if int(d) in place:
                        need[place[int(d)]] = min(need[place[int(d)]], max(slot - 1, 0))

    def _work(self, i: int) -> int:
        """Return the work of a fixed operation on the compute stream, without stalls."""
        whole, operation, argument = (
            self.whole,
            int(self.program.operation[i]),
            int(self.program.argument[i]),
        )
        if operation == NODE:
            return int(whole.compute_ticks[argument])
        if operation == COPY_OUT:
            return int(whole.copy_out_ticks[argument]) + epilogue_ticks(whole, (argument,))
        members = self.program.partition.buckets[argument]
        copied = self.program.partition.flat[argument] and whole.kind[members[0]] == 0
        return 0 if copied else epilogue_ticks(whole, members)

    def _launch_work(self, i: int) -> int:
        whole, b = self.whole, int(self.program.argument[i])
        work = int(self.program.partition.launch_ticks[b] + self.program.partition.copy_in_ticks[b])
        return work + prologue_ticks(
            whole, self.program.partition.buckets[b], flat=bool(self.program.partition.flat[b])
        )

    # -- memory

    def _positions(self, i: int) -> tuple[int, int]:
        """Return the first position of operation ``i`` and the first behind it."""
        first = self.where.first_position
        return int(first[i]), (
            int(first[i + 1]) if i + 1 < len(first) else len(self.where.live_bytes) - 1
        )

    def _baseline(self) -> tuple[Ints, Ints]:
        """Return the bytes of everything that the window does not decide, in its slots and at its
        segments.
        """
        live = self.where.live_bytes - self._free_bytes()
        at = np.array(
            [
                max(int(live[slice(*self._positions(i))].max()) for i in segment)
                for segment in self.segments
            ]
            + [0],
            dtype=np.int64,
        )
        slot = np.zeros(len(self.segments) + 1, dtype=np.int64)
        for i, g in self.slot_of_operation.items():
            first, past = self._positions(i)
            slot[g] = max(slot[g], int(live[first:past].max()))
        for g in range(len(slot)):
            if not slot[
                g
                # nothing stands there now: what is alive on both sides is at most the smaller of
                # them
            ]:
                beside = [int(at[k]) for k in (g - 1, g) if 0 <= k < len(self.segments)]
                slot[g] = max(beside, default=0)
        return slot, at

    def _free_bytes(self) -> Ints:
        delta = np.zeros(len(self.where.live_bytes) + 1, dtype=np.int64)
        for s in self._free_storages():
            if self.where.storage_in_buffer[s] == -1:
                delta[self.where.storage_first[s]] += self.whole.storage_bytes[s]
                delta[self.where.storage_last[s] + 1] -= self.whole.storage_bytes[s]
        partition = self.program.partition
        for b in self.free_buckets:
            for which, size in enumerate(
                (partition.out_buffer_bytes[b], partition.in_buffer_bytes[b])
            ):
                first, last = self.where.buffer_lives[b, which]
                if first >= 0:
                    delta[first] += size
                    delta[last + 1] -= size
        return np.cumsum(delta[:-1])

    def _free_storages(self) -> list[int]:
        whole = self.whole
        attached = set(attached_of(whole, self.window.free))
        return [
            s
            for s in range(len(whole.storage_bytes))
            if not attached.isdisjoint(whole.touches_of(s).tolist())
        ]

    def _storages_of(self, free: tuple[int, ...], compute_op: dict[int, int]) -> dict[str, Any]:
        """Return the storages that free collectives touch, with lives clipped to the window."""
        whole = self.whole
        index = {f: j for j, f in enumerate(attached_of(whole, free))}
        kept = self._free_storages()
        place = {s: j for j, s in enumerate(kept)}
        birth_compute, birth_attached, last, touches = [], [], [], []
        for s in kept:
            f, k = int(whole.storage_birth_attached[s]), int(whole.storage_birth_compute[s])
            birth_attached.append(index.get(f, -1))
            birth_compute.append(self._segment_of(compute_op[k]) if f < 0 and k >= 0 else -1)
            ends = (
                [compute_op.get(int(whole.storage_last_compute[s]), self.window.past)]
                if whole.storage_last_compute[s] >= 0
                else []
            )
            touching = []
            for g in whole.touches_of(s):
                if int(g) in index:
                    touching.append(index[int(g)])
                else:
                    ends.append(self._operation_at(int(self.where.attached_position[g])))
            inside = [self._segment_of(i) for i in ends if i >= self.window.first]
            last.append(max(inside, default=-1))
            touches.append(touching)
        return {
            "storage_bytes": whole.storage_bytes[kept],
            "storage_birth_compute": np.array(birth_compute, dtype=np.int64),
            "storage_birth_attached": np.array(birth_attached, dtype=np.int64),
            "storage_last_compute": np.array(last, dtype=np.int64),
            "touch_begin": begins(touches),
            "touch_list": np.array([f for fs in touches for f in fs], dtype=np.int64),
            "input_storage": np.array(
                [place.get(int(whole.input_storage[c]), -1) for c in free]
                + [-1] * len(self.pinned),
                dtype=np.int64,
            ),
            "output_storage": np.array(
                [place.get(int(whole.output_storage[c]), -1) for c in free]
                + [-1] * len(self.pinned),
                dtype=np.int64,
            ),
        }

    def _operation_at(self, position: int) -> int:
        return int(np.searchsorted(self.where.first_position, position, side="right")) - 1

    def _segment_of(self, i: int) -> int:
        """Return the segment of operation ``i``; -1 before the window, the number of segments
        behind it.
        """
        if i < self.window.first:
            return -1
        return (
            len(self.segments)
            if i >= self.window.past
            else max(bisect_right(self.segment_starts, i) - 1, 0)
        )

    # -- what the rest of the program says

    def _boundary(self) -> tuple[Boundary, int]:
        program, window, whole = self.program, self.window, self.whole
        partition, ends = program.partition, self.where.transfer_end_ticks
        stream_of = {
            b: int(whole.stream[members[0]]) for b, members in enumerate(partition.buckets)
        }
        stream_free: dict[int, int] = {}
        for i in range(window.first):
            if program.operation[i] == LAUNCH:
                b = int(program.argument[i])
                stream_free[stream_of[b]] = max(int(ends[b]) - self.origin, 0)
        num_free = len(window.free)
        pinned_bucket = {
            int(program.argument[i]): num_free + j for j, (i, _, _) in enumerate(self.pinned)
        }
        release: dict[int, int] = {}
        awaited: dict[int, int] = {}
        for k, segment in enumerate(self.segments):
            for b in (int(program.argument[i]) for i in segment if program.operation[i] == WAIT):
                if b in pinned_bucket:
                    awaited[pinned_bucket[b]] = k
                else:
                    release[k] = max(release.get(k, 0), int(ends[b]) - self.origin)
        after_compute, after_stream, after_end = tails(whole, program, window.past)
        pinned = {num_free + j: slot for j, (_, _, slot) in enumerate(self.pinned)}
        after_transfer = {
            num_free + j: after_end.get(int(program.argument[i]), 0)
            for j, (i, _, _) in enumerate(self.pinned)
        }
        boundary = Boundary(
            stream_free_ticks=stream_free,
            release_ticks={k: max(t, 0) for k, t in release.items()},
            after_compute_ticks=after_compute,
            after_stream_ticks=after_stream,
            after_transfer_ticks=after_transfer,
            pinned=pinned,
            awaited=awaited,
        )
        return boundary, evaluate(whole, program).step_time_ticks - self.origin

    def _caps(self, caps: Caps) -> Caps:
        """Return the caps for the window: bytes in flight of the rest are taken off, prefetch is in
        the ready slots.
        """
        in_flight = caps.in_flight_cap_bytes
        if in_flight is not None:
            in_flight = max(in_flight - self._rest_in_flight(), 0)
        return replace(caps, in_flight_cap_bytes=in_flight, max_prefetch=None)

    def _rest_in_flight(self) -> int:
        whole, program = self.whole, self.program
        flying, most = 0, 0
        for i in range(self.window.past):
            operation, b = int(program.operation[i]), int(program.argument[i])
            if operation in (LAUNCH, WAIT) and b not in self.free_buckets:
                size = sum(int(whole.output_bytes[c]) for c in program.partition.buckets[b])
                flying += -size if operation == WAIT else size
                if i >= self.window.first:
                    most = max(most, flying)
            elif i == self.window.first:
                most = max(most, flying)
        return most

    # -- there and back
