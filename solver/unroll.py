"""A modulo schedule written out for all layers of a graph; what it does not decide, head and tail, is just in time."""

import numpy as np

from apsched.solver.evaluate import COPY_OUT, LAUNCH, SPINE, WAIT, Program
from apsched.solver.loop_body import GATHER, REDUCTION, pinned_gaps, roles
from apsched.solver.modulo import ModuloSchedule
from apsched.solver.partition import Members, Pricer

_PINNED_LAUNCH, _REDUCTION_WAIT, _REDUCTION_LAUNCH, _GATHER_LAUNCH, _NEED, _PINNED_WAIT, _COMPUTE = range(7)
"""What stands at one site, in order."""

_At = tuple[int, int]
"""Gap, and stage: 0 early, 1 main (see ``apsched.solver.loop_body``), more behind the last compute."""
_Instance = tuple[Members, int, int]
"""Members, index of the bucket in the schedule (-1 for what it does not decide), layer of its anchor."""


def layered_buckets(schedule: ModuloSchedule, num_collectives: int) -> list[Members]:
    """Return the buckets of all layers; at the ends of the stretch, what is there of them; everything else alone."""
    return [members for members, _, _ in _instances(schedule, num_collectives)]


def unroll(schedule: ModuloSchedule, pricer: Pricer) -> Program:
    """Return the program in which every layer runs as ``schedule`` says, moved no further than what the graph allows at its ends."""
    instances = _instances(schedule, len(pricer.compact.kind))
    writer = _Writer(schedule, pricer)
    for b, instance in enumerate(instances):
        writer.add(b, *instance)
    writer.placed += [((k, 1, _COMPUTE, 0, 0), SPINE, k) for k in range(len(pricer.compact.spine_ticks))]
    order = np.array([(operation, argument) for _, operation, argument in sorted(writer.placed)], dtype=np.int64).reshape(-1, 2)
    partition = pricer.partition([members for members, _, _ in instances])
    return Program(partition=partition, operation=np.ascontiguousarray(order[:, 0]), argument=np.ascontiguousarray(order[:, 1]))


def _instances(schedule: ModuloSchedule, num_collectives: int) -> list[_Instance]:
    body = schedule.body
    found: list[_Instance] = []
    decided = set()
    for i, bucket in enumerate(schedule.buckets):
        for layer in range(-1, body.period.count + 1):
            inside = [(s, layer + shift) for s, shift in bucket.column.members if 0 <= layer + shift < body.period.count]
            if inside:
                members = tuple(sorted(body.collective(s, at) for s, at in inside))
                decided |= set(members)
                found.append((members, i, layer))
    return sorted([*found, *(((c,), -1, 0) for c in range(num_collectives) if c not in decided)])


class _Writer:
    def __init__(self, schedule: ModuloSchedule, pricer: Pricer) -> None:
        self.schedule, self.compact, self.depth = schedule, pricer.compact, pricer.tables.depth
        self.roles = roles(self.compact)
        self.launches, self.waits = pinned_gaps(self.compact)
        self.placed: list[tuple[tuple[int, int, int, int, int], int, int]] = []
        """((gap, stage, what, turn, step of the turn), operation, argument)"""

    def add(self, b: int, members: Members, bucket: int, layer: int) -> None:
        """Place the launch, the wait and the copy-outs of bucket ``b``."""
        if self.roles[members[0]] == GATHER:
            self._add_gather(b, members, bucket, layer)
            return
        at, turn = self._when_ready(members), self._turn(members)
        if self.roles[members[0]] == REDUCTION:
            last = (len(self.compact.spine_ticks), 1)
            wait = last if bucket < 0 else min(self._site(self.schedule.buckets[bucket].wait_site, layer), last)
            self._put(at, _REDUCTION_LAUNCH, turn, 0, LAUNCH, b)
            self._put(max(wait, (at[0], 1), at), _REDUCTION_WAIT if at[1] == 0 else _PINNED_WAIT, at[0], turn, WAIT, b)
        else:
            self._put(at, _PINNED_LAUNCH, turn, 0, LAUNCH, b)
            self._put(max((int(self.waits[members[0]]), 1), at), _PINNED_WAIT, turn, 0, WAIT, b)

    def _add_gather(self, b: int, members: Members, bucket: int, layer: int) -> None:
        need_of = self.compact.need_gap
        ready, need = max(int(self.compact.ready_gap[c]) for c in members), min(int(need_of[c]) for c in members)
        turn = self._turn(members)
        at = (need, 1) if bucket < 0 else self._site(self.schedule.buckets[bucket].launch_site, layer)
        self._put(min(max(at, (ready, 0)), (need, 1)), _GATHER_LAUNCH, need, turn, LAUNCH, b)
        self._put((need, 1), _NEED, turn, 0, WAIT, b)
        if len(members) > 1:
            early = self.schedule.buckets[bucket].column.copies_early
            for j, c in enumerate(sorted(members, key=lambda c: (int(need_of[c]), c))):
                if early:
                    self._put((need, 1), _NEED, turn, j + 1, COPY_OUT, c)
                else:
                    self._put((int(need_of[c]), 1), _NEED, self._turn((c,)), 1, COPY_OUT, c)

    def _when_ready(self, members: Members) -> _At:
        """Return where what cannot be launched ahead is launched; behind the last compute nothing but the stage keeps chains in order."""
        k, gap = self.compact, max(int(self.launches[c]) for c in members)
        before = {d for c in members for d in k.after_list[k.after_begin[c] : k.after_begin[c + 1]].tolist()}
        late = any(self.waits[d] >= gap for d in before)
        return gap, 1 + int(self.depth[members[0]]) if late else 0

    def _turn(self, members: Members) -> int:
        """Return whose turn, among those at one place, a bucket takes: the slot that is needed first, or ready last."""
        k, slots = self.compact, self.schedule.body.period.slot_of_collective
        if self.roles[members[0]] == GATHER:
            first = min(members, key=lambda c: (int(k.need_gap[c]), slots[c]))
        else:
            first = max(members, key=lambda c: (int(k.ready_gap[c]), slots[c]))
        return slots[first] if slots[first] >= 0 else len(slots) + first

    def _put(self, at: _At, what: int, turn: int, step: int, operation: int, argument: int) -> None:
        self.placed.append(((*at, what, turn, step), operation, argument))

    def _site(self, site: int, layer: int) -> _At:
        """Return where a site is that is counted from ``layer``."""
        body = self.schedule.body
        repeat, place = divmod(site, body.num_sites)
        gap = body.period.first_spine + (layer + repeat) * body.period.length + body.sites[place].gap
        return max(gap, 0), 0 if body.sites[place].early else 1
