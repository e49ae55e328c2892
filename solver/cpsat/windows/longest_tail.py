"""What follows in a program: the longest way from a point of it to the end of the step."""

from apsched.solver.arrays.partition import Members
from apsched.solver.arrays.problem_arrays import ALL_GATHER, Compact, Ints
from apsched.solver.program.evaluate import COPY_OUT, SPINE, WAIT, Program


def tails(compact: Compact, program: Program, past: int) -> tuple[int, dict[int, int], dict[int, int]]:
    """Return the longest way from the end of operation ``past - 1`` to the end of the step, in ticks.

    From the compute stream; from each stream's last transfer so far; and from the end of each transfer that is waited for later.
    """
    p = program.partition
    along, stream, end = 0, dict.fromkeys(range(compact.num_streams), 0), {}
    for i in range(len(program.operation) - 1, past - 1, -1):
        operation, a = int(program.operation[i]), int(program.argument[i])
        if operation == SPINE:
            along += int(compact.spine_ticks[a])
        elif operation == COPY_OUT:
            along += int(compact.copy_out_ticks[a]) + epilogue_ticks(compact, (a,))
        elif operation == WAIT:
            members = p.buckets[a]
            if not (p.flat[a] and compact.kind[members[0]] == ALL_GATHER):
                along += epilogue_ticks(compact, members)
            end[a] = along
        else:
            s = int(compact.stream[p.buckets[a][0]])
            stream[s] = int(p.transfer_ticks[a]) + max(end.pop(a, 0), stream[s])
            work = prologue_ticks(compact, p.buckets[a], flat=bool(p.flat[a]))
            along = max(along, stream[s]) + int(p.launch_ticks[a] + p.copy_in_ticks[a]) + work
    return along, stream, end


def prologue_ticks(compact: Compact, members: Members, *, flat: bool) -> int:
    """Return the work of the prologues of a bucket, which has no casts where it is flat."""
    work = _float_ticks(compact, compact.prologue_begin, compact.prologue_list, members)
    if flat:
        work -= sum(int(compact.float_ticks[compact.cast_float[c]]) for c in members if compact.cast_float[c] >= 0)
    return work


def epilogue_ticks(compact: Compact, members: Members) -> int:
    """Return the work of the epilogues of ``members``."""
    return _float_ticks(compact, compact.epilogue_begin, compact.epilogue_list, members)


def _float_ticks(compact: Compact, begin: Ints, floats: Ints, members: Members) -> int:
    return sum(int(compact.float_ticks[floats[begin[c] : begin[c + 1]]].sum()) for c in members)
