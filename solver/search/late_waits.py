"""Waits as late as the peak allows, so that the schedule tolerates wrong costs.

Search waits for a reduction where the clock of the model says that it is done. If transfers take
longer than the model says, or compute less, the compute stream stalls there, though nothing needs
the result yet. The later the wait, the less it risks; but until then the bytes that it frees are
held. So, on a program that is otherwise decided, each wait that nothing needs yet gets a margin

    begin(wait) - end(transfer)  >=  share * T(transfer)

with share = 1/2, 1, 2, 4, then as late as can be.

The waits with the least margin move first, and all of them get one share before any gets the next,
as far as live bytes stay below the peak that the program has anyway. Epilogues and copy-outs move
along with their wait. Step time, peak and launches do not get worse: the moves for one share are
evaluated exactly, and dropped if they cost anything.
"""

from dataclasses import dataclass, replace

import numpy as np

from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import Bools, Ints, ProblemArrays
from apsched.solver.program.evaluate import evaluate, trace
from apsched.solver.program.program import (
    COPY_IN,
    COPY_OUT,
    LAUNCH,
    NODE,
    START,
    WAIT,
    Program,
    Trace,
)
from apsched.solver.search.launch_policy import UNLIMITED

_SHARES = (0.5, 1.0, 2.0, 4.0, np.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    """Waits, each with the copy-outs right behind it; (U,) arrays."""

    first: Ints
    """Operation of the wait."""
    past: Ints
    """Operation after the unit."""
    limit: Ints
    """Last slot where it can stand."""
    held_bytes: Ints
    """Bytes that the unit frees, and that are held until then."""
    flying_bytes: Ints
    works: Bools
    """It has work on the compute stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Course:
    """A program, operation by operation."""

    slot: Ints
    """(operations,) the slot in which it stands; of a compute node its own."""
    operation_at: Ints
    """(m+1,) operation before which a unit stands that moves to a slot: behind the launches there,
    so that none is late for it.
    """
    slot_ticks: Ints
    """(m+1,) time at which the compute stream reaches it."""
    live_bytes: Ints
    """(operations,) most bytes alive from each operation to the next."""
    flying_bytes: Ints
    """(operations,) bytes in flight at each operation."""
    end_ticks: Ints
    """(B,) end of each transfer."""


def late_waits(instance: Instance, program: Program) -> Program:
    """Return ``program`` with its waits as late as its peak, its step time and ``caps`` allow."""
    arrays = instance.arrays
    if not program.partition.buckets:
        return program
    limits = evaluate(arrays, program)
    in_flight_cap = (
        limits.peak_in_flight_bytes
        if instance.caps.in_flight_cap_bytes is not None
        else int(UNLIMITED)
    )
    best = program
    for share in _SHARES:
        for with_work in (True, False):
            moved = _moved(
                arrays,
                best,
                share,
                limits.peak_memory_bytes - arrays.kept_bytes,
                in_flight_cap,
                with_work=with_work,
            )
            if moved is best:
                break
            found = evaluate(arrays, moved)
            if (
                found.step_time_ticks <= limits.step_time_ticks
                and found.peak_memory_bytes <= limits.peak_memory_bytes
                and found.peak_in_flight_bytes <= in_flight_cap
            ):
                best = moved
                break
    return best


def _moved(
    arrays: ProblemArrays,
    program: Program,
    share: float,
    peak_bytes: int,
    in_flight_cap: int,
    *,
    with_work: bool,
) -> Program:
    """Return ``program`` with every margin raised to ``share`` of the transfer, or as near to it as
    memory allows.
    """
    stands = trace(arrays, program)
    course = _course(arrays, program, stands)
    units = _units(arrays, program, stands, course)
    bucket = program.argument[units.first]
    end, transfer = (
        course.end_ticks[bucket],
        np.maximum(program.partition.transfer_ticks[bucket], 1),
    )
    margin = (stands.begin_ticks[units.first] - end) / transfer
    live, flying = course.live_bytes.copy(), course.flying_bytes.copy()
    to = {}
    for u in np.argsort(margin, kind="stable").tolist():
        past, slot = int(units.past[u]), int(course.slot[units.first[u]])
        if margin[u] >= share or units.limit[u] <= slot or (units.works[u] and not with_work):
            continue
        limit = int(units.limit[u])
        if np.isfinite(share):
            wanted = int(np.searchsorted(course.slot_ticks, end[u] + share * transfer[u]))
            limit = min(limit, max(wanted, slot))
        stop = int(course.operation_at[limit])
        too_much = (live[past:stop] + units.held_bytes[u] > peak_bytes) | (
            flying[past:stop] + units.flying_bytes[u] > in_flight_cap
        )
        if too_much.any():
            limit = (
                int(
                    np.searchsorted(
                        course.operation_at, past + int(np.argmax(too_much)), side="right"
                    )
                )
                - 1
            )
        if limit <= slot:
            continue
        to[u] = int(course.operation_at[limit])
        live[past : to[u]] += units.held_bytes[u]
        flying[past : to[u]] += units.flying_bytes[u]
    return _rebuilt(program, units, to, end) if to else program


def _rebuilt(program: Program, units: _Units, to: dict[int, int], end_ticks: Ints) -> Program:
    """Return ``program`` with units standing before other operations; those before the same one in
    the order in which they end.
    """
    size = len(program.operation)
    before, place, order = (
        np.arange(size),
        np.ones(size, dtype=np.int64),
        np.zeros(size, dtype=np.int64),
    )
    for u, operation_at in to.items():
        of_unit = slice(int(units.first[u]), int(units.past[u]))
        before[of_unit], place[of_unit], order[of_unit] = operation_at, 0, end_ticks[u]
    at = np.lexsort((np.arange(size), order, place, before))
    return replace(program, operation=program.operation[at], argument=program.argument[at])


def _course(arrays: ProblemArrays, program: Program, stands: Trace) -> _Course:
    operation, argument = program.operation, program.argument
    size, num_compute = len(operation), len(arrays.compute_ticks)
    is_compute = operation == NODE
    slot = np.cumsum(is_compute) - is_compute
    operation_at = np.concatenate(([0], np.nonzero(is_compute)[0] + 1))
    launches = np.nonzero(np.isin(operation, (LAUNCH, COPY_IN, START)))[0]
    np.maximum.at(operation_at, slot[launches], launches + 1)
    positions = np.append(stands.first_position, len(stands.live_bytes) - 1)
    assert len(operation_at) == num_compute + 1
    flying = np.zeros(size, dtype=np.int64)
    bytes_of = _flying_bytes(arrays, program)
    for kinds, sign in (((LAUNCH, START), 1), ((WAIT,), -1)):
        these = np.isin(operation, kinds)
        flying[these] += sign * bytes_of[argument[these]]
    return _Course(
        slot=slot,
        operation_at=operation_at,
        slot_ticks=np.maximum.accumulate(np.append(stands.begin_ticks, UNLIMITED)[operation_at]),
        live_bytes=np.maximum.reduceat(stands.live_bytes, positions)[:-1],
        flying_bytes=np.cumsum(flying),
        end_ticks=stands.transfer_end_ticks,
    )


def _flying_bytes(arrays: ProblemArrays, program: Program) -> Ints:
    """Return the bytes of each bucket that count against the cap on bytes in flight."""
    flying = np.zeros(len(program.partition.buckets), dtype=np.int64)
    np.add.at(flying, program.partition.bucket_of, arrays.output_bytes)
    return flying


def _units(arrays: ProblemArrays, program: Program, stands: Trace, course: _Course) -> _Units:
    operation, argument, p = program.operation, program.argument, program.partition
    size = len(operation)
    first = np.nonzero(operation == WAIT)[0]
    past = first + 1
    owner = np.where(
        operation == COPY_OUT, p.bucket_of[np.where(operation == COPY_OUT, argument, 0)], -1
    )
    for u, b in enumerate(argument[first].tolist()):
        while past[u] < size and owner[past[u]] == b:
            past[u] += 1
    limits = _limits(arrays, program, course)
    for b, slot in zip(
        owner[outside := _outside(owner, first, past)].tolist(),
        course.slot[outside].tolist(),
        strict=True,
    ):
        limits[b] = min(limits[b], slot - 1)  # members that are copied out somewhere behind
    freed = np.zeros(len(stands.live_bytes) + 1, dtype=np.int64)
    own = stands.storage_in_buffer == -1
    np.add.at(freed, stands.storage_last[own] + 1, arrays.storage_bytes[own])
    for side, buffer in enumerate((p.out_buffer_bytes, p.in_buffer_bytes)):
        lives = stands.buffer_lives[:, side, 1] >= 0
        np.add.at(freed, stands.buffer_lives[lives, side, 1] + 1, buffer[lives])
    freed = np.cumsum(freed)
    positions = np.append(stands.first_position, len(stands.live_bytes) - 1)
    ticks = np.append(stands.begin_ticks, 0)
    return _Units(
        first=first,
        past=past,
        limit=limits[argument[first]],
        held_bytes=freed[positions[past]] - freed[positions[first]],
        flying_bytes=_flying_bytes(arrays, program)[argument[first]],
        works=(past < size)
        & (ticks[past] > np.maximum(ticks[first], course.end_ticks[argument[first]])),
    )


def _outside(owner: Ints, first: Ints, past: Ints) -> Ints:
    """Return the copy-outs that are in no unit."""
    inside = np.zeros(len(owner) + 1, dtype=np.int64)
    np.add.at(inside, first, 1)
    np.add.at(inside, past, -1)
    outside: Ints = np.nonzero((owner >= 0) & (np.cumsum(inside)[:-1] == 0))[0]
    return outside


def _limits(arrays: ProblemArrays, program: Program, course: _Course) -> Ints:
    """Return for each bucket the last slot where its wait may stand: need, plan, and launches that
    depend on it.
    """
    p = program.partition
    limits = np.full(len(p.buckets), len(arrays.compute_ticks), dtype=np.int64)
    np.minimum.at(limits, p.bucket_of, np.minimum(arrays.need_slot, arrays.wait_last))
    for i in np.nonzero(np.isin(program.operation, (LAUNCH, COPY_IN)))[0].tolist():
        for c in p.buckets[program.argument[i]]:
            for d in arrays.awaited_by(c):
                limits[p.bucket_of[d]] = min(limits[p.bucket_of[d]], course.slot[i] - 1)
    return limits
