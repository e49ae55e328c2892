"""The longest way from a point of a program to the end of the step."""

from apsched.solver.arrays.partition import Members
from apsched.solver.arrays.problem_arrays import ALL_GATHER, Ints, ProblemArrays
from apsched.solver.program.program import COPY_OUT, NODE, WAIT, Program


def tails(
    arrays: ProblemArrays, program: Program, past: int
) -> tuple[int, dict[int, int], dict[int, int]]:
    """Return the longest way from the end of operation ``past - 1`` to the end of the step, in
    ticks.

    From the compute stream; from each stream's last transfer so far; and from the end of each
    transfer that is waited for later.
    """
    p = program.partition
    along, stream, end = 0, dict.fromkeys(range(arrays.num_streams), 0), {}
    for i in range(len(program.operation) - 1, past - 1, -1):
        operation, a = int(program.operation[i]), int(program.argument[i])
        if operation == NODE:
            along += int(arrays.compute_ticks[a])
        elif operation == COPY_OUT:
            along += int(arrays.copy_out_ticks[a]) + epilogue_ticks(arrays, (a,))
        elif operation == WAIT:
            members = p.buckets[a]
            if not (p.flat[a] and arrays.kind[members[0]] == ALL_GATHER):
                along += epilogue_ticks(arrays, members)
            end[a] = along
        else:
            s = int(arrays.stream[p.buckets[a][0]])
            stream[s] = int(p.transfer_ticks[a]) + max(end.pop(a, 0), stream[s])
            work = prologue_ticks(arrays, p.buckets[a], flat=bool(p.flat[a]))
            along = max(along, stream[s]) + int(p.launch_ticks[a] + p.copy_in_ticks[a]) + work
    return along, stream, end


def prologue_ticks(arrays: ProblemArrays, members: Members, *, flat: bool) -> int:
    """Return the work of the prologues of a bucket, which has no casts where it is flat."""
    work = _attached_ticks(arrays, arrays.prologue_begin, arrays.prologue_list, members)
    if flat:
        work -= sum(
            int(arrays.attached_ticks[arrays.cast_attached[c]])
            for c in members
            if arrays.cast_attached[c] >= 0
        )
    return work


def epilogue_ticks(arrays: ProblemArrays, members: Members) -> int:
    """Return the work of the epilogues of ``members``."""
    return _attached_ticks(arrays, arrays.epilogue_begin, arrays.epilogue_list, members)


def _attached_ticks(arrays: ProblemArrays, begin: Ints, attached: Ints, members: Members) -> int:
    return sum(int(arrays.attached_ticks[attached[begin[c] : begin[c + 1]]].sum()) for c in members)
