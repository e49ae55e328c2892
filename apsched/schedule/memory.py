"""Bytes alive at each step of a schedule: an exact function of the order (design, section 4).

The solver has the same rule in other forms, which change with it: of programs
(``solver.program.evaluate``), while a partition is placed (``solver.search.construct``), while
compute moves (``solver.arrays.reordered``, ``solver.reorder``), in CP-SAT
(``solver.cpsat.constraints_memory``), in the MILP (``solver.milp.memory``), and in bounds
(``solver.bounds.step_time``, ``memory_and_launches``, ``tighten``, ``any_order.memory``).
"""

from dataclasses import dataclass
from itertools import accumulate

from apsched.kinds import CollectiveKind
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Bucket, Schedule, StepKind
from apsched.units import allocated_bytes


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A storage is alive from its first to its last step, both included."""

    first: int
    last: int
    size_bytes: int
    storage: int = -1
    """Index of the storage; -1 for a buffer of a bucket."""


def live_bytes(problem: Problem, schedule: Schedule) -> tuple[int, ...]:
    """Return the bytes alive at each step of ``schedule``, those that the caller keeps included."""
    delta = [0] * (len(schedule.steps) + 1)
    for life in lifetimes(problem, schedule):
        delta[life.first] += life.size_bytes
        delta[life.last + 1] -= life.size_bytes
    return tuple(live + problem.kept_bytes for live in accumulate(delta[:-1]))


def lifetimes(problem: Problem, schedule: Schedule) -> list[Lifetime]:
    """Return the life of every storage that is not kept, the buffers of buckets included.

    ==============  =============================  =================  ============================
    bucket          its buffers                    inputs of members  outputs of members
    ==============  =============================  =================  ============================
    all-gather      gathered: first COPY_IN to     until COPY_IN      own storage from COPY_OUT
                    last COPY_OUT
    reduce-scatter  concatenated input: COPY_IN    until COPY_IN      inside one output: START to
                    to WAIT                                           the last use of any of them
    all-reduce      one, in place: COPY_IN to the  until COPY_IN      inside that one
                    last use of any output
    ==============  =============================  =================  ============================

    The result of the cast of an input does not exist in such a bucket: the copy-in reads the input
    of the cast. A coalesced bucket has no buffers: inputs and outputs of its members live as those
    of a collective alone, outputs from the START, inputs to the WAIT.
    """
    at = {(step.kind, step.index): k for k, step in enumerate(schedule.steps)}
    node_step = {
        step.index: k for k, step in enumerate(schedule.steps) if step.kind is StepKind.NODE
    }
    bucket_of_output: dict[int, int] = {}
    copied_out_at: dict[int, int] = {}
    released: dict[int, set[int]] = {}
    not_made: set[int] = set()
    for b, bucket in enumerate(schedule.buckets):
        for c in bucket.members:
            member = problem.collectives[c]
            if bucket.coalesced:
                node_step[member.start], node_step[member.wait] = (
                    at[StepKind.START, b],
                    at[StepKind.WAIT, b],
                )
                continue
            node_step[member.start] = at[StepKind.COPY_IN, b]
            released.setdefault(member.input_storage, set()).add(member.wait)
            if member.cast:
                not_made.add(member.input_storage)
                node_step.update(dict.fromkeys(member.cast, node_step[member.start]))
            if _gathers(problem, bucket):
                copied_out_at[member.output_storage] = node_step[member.wait] = at[
                    StepKind.COPY_OUT, c
                ]
            else:
                bucket_of_output[member.output_storage] = b
                node_step[member.wait] = at[StepKind.WAIT, b]
    lives: list[Lifetime] = []
    last_output_use = [at[StepKind.WAIT, b] for b in range(len(schedule.buckets))]
    for s, storage in enumerate(problem.storages):
        if storage.kept or s in not_made:
            continue
        first = copied_out_at.get(s, 0 if storage.birth < 0 else node_step[storage.birth])
        dropped = released.get(s, ())
        last = max((node_step[use] for use in storage.uses if use not in dropped), default=first)
        if (owner := bucket_of_output.get(s)) is not None:
            last_output_use[owner] = max(last_output_use[owner], last)
        else:
            lives.append(Lifetime(first, last, storage.size_bytes, s))
    for b, bucket in enumerate(schedule.buckets):
        if not bucket.coalesced:
            lives += _buffers(problem, bucket, b, at, last_output_use[b])
    return lives


def _buffers(
    problem: Problem,
    bucket: Bucket,
    b: int,
    at: dict[tuple[StepKind, int], int],
    last_output_use: int,
) -> list[Lifetime]:
    members = [problem.collectives[c] for c in bucket.members]
    inputs = allocated_bytes(sum(m.input_bytes for m in members))
    outputs = allocated_bytes(sum(m.output_bytes for m in members))
    copy_in = at[StepKind.COPY_IN, b]
    if _gathers(problem, bucket):
        return [Lifetime(copy_in, max(at[StepKind.COPY_OUT, c] for c in bucket.members), outputs)]
    if problem.keys[members[0].key].kind == CollectiveKind.ALL_REDUCE:
        return [Lifetime(copy_in, last_output_use, outputs)]
    return [
        Lifetime(copy_in, at[StepKind.WAIT, b], inputs),
        Lifetime(at[StepKind.START, b], last_output_use, outputs),
    ]


def _gathers(problem: Problem, bucket: Bucket) -> bool:
    return (
        problem.keys[problem.collectives[bucket.members[0]].key].kind == CollectiveKind.ALL_GATHER
    )
