"""The end of the step: reductions that end after the last compute node, and orders of the compute
that leave less of them there.

The last reduction R of a step runs when there is nothing left to compute. A weight gradient that is
put off behind the compute that R needs runs beside R, but its own reduction then follows R on the
same stream. Blocks that only one bucket needs may be put off: with C ticks of compute and T of
transfer they shorten the exposed end by C - T at most, so the last ones with C > T are put off, as
many as needed. Behind R the blocks with the longest transfers run first (Johnson's rule for two
machines: where C > T descending T is best), so the last transfer is the shortest. Where R itself
has blocks that nothing else needs, those also may run as soon as the blocks that they need have
run.

Every order is laid out and judged again, with the same buckets; after that the buckets at the end
are searched again. S. M. Johnson, Optimal two- and three-stage production schedules with setup
times included, Naval Research Logistics 1 (1954) 61-68.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from apsched.config import Caps
from apsched.solver.arrays.problem_arrays import ALL_GATHER, Bools, Ints, ProblemArrays
from apsched.solver.arrays.reordered import Precedence
from apsched.solver.program.evaluate import evaluate, trace
from apsched.solver.program.program import LAUNCH, WAIT, Program
from apsched.solver.reorder.reorder import ComputeMover, Moved
from apsched.solver.search.local_search import Search

_SHARES = (0.25, 0.5, 0.75, 1.0, 1.5)
"""Share of the exposed end that the deferred blocks should hide."""
MOST_ROUNDS = 8
"""How often the end is looked at, each time as the round before left it."""
_NEAR = 10
"""Buckets are searched again if they are launched in the last so many lengths of the tail."""
NO_OWNER, SEVERAL = -1, -2
"""In place of an owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The end of a program."""

    last: int
    """Bucket whose transfer ends last."""
    ticks: int
    """From the end of all compute to the end of that transfer."""


def tail_of(arrays: ProblemArrays, program: Program) -> Tail | None:
    """Return the reductions that end after the last compute node; None where there are none."""
    partition, where = program.partition, trace(arrays, program)
    if not len(partition.buckets):
        return None
    last = int(np.argmax(where.transfer_end_ticks))
    members = partition.buckets[last]
    if arrays.kind[members[0]] == ALL_GATHER or arrays.on_path[list(members)].any():
        return None
    behind = int(np.nonzero(program.operation != WAIT)[0][-1]) + 1
    step_time = evaluate(arrays, program).step_time_ticks
    begins = where.begin_ticks
    return Tail(
        last=last, ticks=step_time - (int(begins[behind]) if behind < len(begins) else step_time)
    )


def with_shorter_tail(
    mover: ComputeMover, search: Search, worth_ticks: int, evaluations: int, stop_at_ticks: int
) -> Search:
    """Return a search around an order whose end is shorter by more than ``worth_ticks`` in all, or
    ``search`` where none is found.

    As long as ``worth_ticks`` and more are exposed at the end; buckets are searched again only at
    the end, with ``evaluations`` at most.
    """
    best = search
    for _ in range(MOST_ROUNDS):
        assert best.best is not None
        program = best.program()
        tail = tail_of(best.instance.arrays, program)
        if tail is None or tail.ticks <= worth_ticks or best.step_time_ticks <= stop_at_ticks:
            break
        captured_blocks = mover.blocks_of(best.instance.problem)
        orders = list(
            orders_of_the_end(mover, search.instance.caps, captured_blocks, program, tail)
        )
        found = [
            moved
            for order in orders
            if (moved := mover.judged(order, best.best, search.instance.caps)[0]) is not None
        ]
        if not found:
            break
        around = _searched_at_the_end(
            mover,
            best,
            min(found, key=lambda m: m.candidate.value),
            tail,
            evaluations,
            stop_at_ticks,
        )
        if around.step_time_ticks >= best.step_time_ticks:
            break
        best = around
    return best if best.step_time_ticks + worth_ticks < search.step_time_ticks else search


def _searched_at_the_end(
    mover: ComputeMover,
    search: Search,
    found: Moved,
    tail: Tail,
    evaluations: int,
    stop_at_ticks: int,
) -> Search:
    """Return the search around ``found``, with the buckets launched near the end searched again."""
    around = search.around(mover.moved(found.blocks), evaluations)
    around.consider(found.candidate)
    program = around.program()
    near = around.step_time_ticks - _NEAR * tail.ticks
    where = trace(around.instance.arrays, program)
    launches = program.operation == LAUNCH
    late = np.zeros(len(program.partition.buckets), dtype=np.bool_)
    late[program.argument[launches & (where.begin_ticks >= near)]] = True
    around.descend_among(late[program.partition.bucket_of], stop_at_ticks)
    return around


def orders_of_the_end(
    mover: ComputeMover, caps: Caps, order: Ints, program: Program, tail: Tail
) -> Iterator[Ints]:
    """Yield orders of the blocks in which other compute runs beside the last reduction, and that
    reduction sooner; none twice.

    No block is put off past more nodes than the cap on moves allows; of a bucket perhaps only the
    last ones are.
    """
    p = mover.orders.precedence
    bucket_of, transfer = program.partition.bucket_of, program.partition.transfer_ticks
    most = int(p.first[-1]) if caps.max_compute_move is None else caps.max_compute_move
    owner = owners(p, bucket_of)
    owner[_passed(p, order, owner != SEVERAL) > most] = SEVERAL
    needed = ancestors(p, np.nonzero(bucket_of == tail.last)[0])
    work = np.bincount(
        owner[owner >= 0], weights=p.block_ticks[owner >= 0], minlength=len(transfer)
    ).astype(np.int64)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    last_place = np.full(len(transfer), -1, dtype=np.int64)
    np.maximum.at(last_place, owner[owner >= 0], place[owner >= 0])
    gains = work - transfer
    worth = [
        b
        for b in np.argsort(-last_place, kind="stable").tolist()
        if last_place[b] >= 0 and gains[b] > 0 and b != tail.last
    ]
    makes_up = np.cumsum(gains[worth])
    tried: set[bytes] = set()
    for share in _SHARES:
        max_delay = worth[: int(np.searchsorted(makes_up, share * tail.ticks)) + 1]
        behind = np.isin(owner, max_delay) | (
            (owner == NO_OWNER) & (place >= place[needed].max(initial=0))
        )
        _add_following(p, behind)  # what nothing needs
        behind &= _passed(p, order, behind) <= most
        other, late = order[~behind[order]], order[behind[order]]
        longest_first = sorted(
            late.tolist(),
            key=lambda block: -int(transfer[owner[block]]) if owner[block] >= 0 else 1,
        )
        for front in (other, _soon(p, other, owner == tail.last)):
            made = (
                np.concatenate((front, np.array(back, dtype=np.int64)))
                for back in (longest_first, late)
            )
            near = next((blocks for blocks in made if mover.is_near(blocks, caps)), None)
            if near is not None and near.tobytes() not in tried:
                tried.add(near.tobytes())
                yield near


def _passed(p: Precedence, order: Ints, behind: Bools) -> Ints:
    """Return for each block how many nodes it passes where the blocks ``behind`` run after all
    others.
    """
    staying = np.where(behind[order], 0, np.diff(p.first)[order])
    passed = np.empty(len(order), dtype=np.int64)
    passed[order] = staying.sum() - np.cumsum(staying)
    return passed


def _add_following(p: Precedence, blocks: Bools) -> None:
    """Add to ``blocks`` all that come behind one of them."""
    for block in range(len(blocks)):
        if blocks[block]:
            blocks[p.behind_list[p.behind_begin[block] : p.behind_begin[block + 1]]] = True


def _soon(p: Precedence, order: Ints, urgent: Bools) -> Ints:
    """Return ``order`` with each of the ``urgent`` blocks right after the blocks that it needs."""
    left = p.before_begin[1:] - p.before_begin[:-1]
    result: list[int] = []

    def run(block: int) -> None:
        result.append(block)
        for after in p.behind_list[p.behind_begin[block] : p.behind_begin[block + 1]].tolist():
            left[after] -= 1
            if urgent[after] and not left[after]:
                run(after)

    ready = [block for block in order.tolist() if urgent[block] and not left[block]]
    for block in (*ready, *(block for block in order.tolist() if not urgent[block])):
        run(block)
    return np.array(result, dtype=np.int64)


def owners(p: Precedence, bucket_of: Ints) -> Ints:
    """Return for each block the only bucket that it is needed for; NO_OWNER where none needs it,
    SEVERAL where more than one does.
    """
    owner = np.full(len(p.block_ticks), NO_OWNER, dtype=np.int64)
    for block in range(len(owner) - 1, -1, -1):
        after = owner[p.behind_list[p.behind_begin[block] : p.behind_begin[block + 1]]]
        buckets = bucket_of[p.feeds_list[p.feeds_begin[block] : p.feeds_begin[block + 1]]]
        served = set(after.tolist()) | set(buckets.tolist())
        served.discard(NO_OWNER)
        if served:
            owner[block] = served.pop() if len(served) == 1 else SEVERAL
    return owner


def ancestors(p: Precedence, collectives: Ints) -> Bools:
    """Return which blocks come before the launch of any of ``collectives``."""
    needed = np.zeros(len(p.block_ticks), dtype=np.bool_)
    for c in collectives.tolist():
        needed[p.block_of[p.ready_list[p.ready_begin[c] : p.ready_begin[c + 1]]]] = True
    for block in range(len(needed) - 1, -1, -1):
        if needed[block]:
            needed[p.before_list[p.before_begin[block] : p.before_begin[block + 1]]] = True
    return needed
