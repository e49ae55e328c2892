"""Programs, and the records of their exact figures: the solver's own form of a schedule.

A program is a list of (operation, argument): NODE k, LAUNCH b, WAIT b, COPY_OUT c; COPY_IN b and
START b are the two halves of a LAUNCH of several members (prologues and copy-in; start).
"""

from dataclasses import dataclass
from typing import NamedTuple

from apsched.schedule.schedule import StepKind
from apsched.solver.arrays.partition import Partition
from apsched.solver.arrays.problem_arrays import Bools, Ints, ProblemArrays

NOT_MADE = -2
NODE, COPY_IN, START, WAIT, COPY_OUT = (int(kind) for kind in StepKind)
LAUNCH = COPY_OUT + 1
"""Operations: the kinds of the steps of a schedule, and LAUNCH."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A partition and the order of its units around the compute order."""

    partition: Partition
    operation: Ints
    argument: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The cost of a program."""

    step_time_ticks: int
    peak_memory_bytes: int
    peak_in_flight_bytes: int
    num_launches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Positions of all operations in a program (position 0: the inputs; the last: the output)."""

    first_position: Ints
    """(operations,) of each operation; it reaches to the position before the next operation's."""
    begin_ticks: Ints
    """(operations,) when the compute stream comes to each operation."""
    transfer_end_ticks: Ints
    """(B,)"""
    live_bytes: Ints
    """(positions,) without the bytes that the caller keeps."""
    attached_position: Ints
    storage_first: Ints
    """(S,) first position at which the storage is alive."""
    storage_last: Ints
    storage_in_buffer: Ints
    """(S,) the bucket whose buffer holds it; -1 where it has its own memory; NOT_MADE where it has
    none.
    """
    buffer_lives: Ints
    """(B, 2, 2) first and last position of the output buffer and of the concatenated input; -1
    where there is none.
    """


class WalkInput(NamedTuple):
    """Fields of :class:`ProblemArrays`, for compiled code."""

    compute_ticks: Ints
    base_slot: Ints
    base_compute: Ints
    kind: Ints
    stream: Ints
    output_bytes: Ints
    copy_out_ticks: Ints
    on_path: Bools
    attached_of_start: Ints
    attached_of_wait: Ints
    collective_of_wait: Ints
    prologue_begin: Ints
    prologue_list: Ints
    cast_attached: Ints
    epilogue_begin: Ints
    epilogue_list: Ints
    attached_ticks: Ints
    storage_bytes: Ints
    birth_compute: Ints
    birth_attached: Ints
    last_compute: Ints
    touch_begin: Ints
    touch_list: Ints
    input_storage: Ints
    output_storage: Ints
    num_streams: int


class Buckets(NamedTuple):
    """Fields of :class:`Partition`, for compiled code."""

    bucket_of: Ints
    member_begin: Ints
    member_list: Ints
    flat: Bools
    launch_ticks: Ints
    transfer_ticks: Ints
    copy_in_ticks: Ints
    in_buffer_bytes: Ints
    out_buffer_bytes: Ints


class Timing(NamedTuple):
    """Times and places of all operations of a program, from its clock."""

    step_time: int
    peak_in_flight: int
    first_position: Ints
    compute_position: Ints
    attached_position: Ints
    bucket_position: Ints
    """(B, 4): copy-in, start, wait, last copy-out."""
    begin_ticks: Ints
    transfer_end: Ints


class MemoryUse(NamedTuple):
    """Lives of storages and buffers, and the bytes alive."""

    peak: int
    live_bytes: Ints
    first: Ints
    last: Ints
    inside: Ints
    buffer_lives: Ints


def fixed(arrays: ProblemArrays) -> WalkInput:
    """Return the fields of ``compact`` for compiled code."""
    c = arrays
    return WalkInput(
        compute_ticks=c.compute_ticks,
        base_slot=c.base_slot_bytes,
        base_compute=c.base_compute_bytes,
        kind=c.kind,
        stream=c.stream,
        output_bytes=c.output_bytes,
        copy_out_ticks=c.copy_out_ticks,
        on_path=c.on_path,
        attached_of_start=c.attached_of_start,
        attached_of_wait=c.attached_of_wait,
        collective_of_wait=c.collective_of_wait,
        prologue_begin=c.prologue_begin,
        prologue_list=c.prologue_list,
        cast_attached=c.cast_attached,
        epilogue_begin=c.epilogue_begin,
        epilogue_list=c.epilogue_list,
        attached_ticks=c.attached_ticks,
        storage_bytes=c.storage_bytes,
        birth_compute=c.storage_birth_compute,
        birth_attached=c.storage_birth_attached,
        last_compute=c.storage_last_compute,
        touch_begin=c.touch_begin,
        touch_list=c.touch_list,
        input_storage=c.input_storage,
        output_storage=c.output_storage,
        num_streams=c.num_streams,
    )
