"""Move compute: orders by the rule of ``apsched.solver.reorder.fill_stalls``, each judged exactly,
then buckets for the best of them.

The rule is a heuristic with two parameters, and its result depends on the program that it reads; so
several values are tried, each repeatedly on its own result, until nothing changes. An order is
scored by laying out the same buckets around it, under a few policies. All of it is repeated with
the buckets that search finds for the best order.
"""

from dataclasses import dataclass, replace

import numpy as np

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.partition import Partition, Pricer
from apsched.solver.arrays.problem_arrays import ALL_GATHER, Ints
from apsched.solver.arrays.reordered import Orders
from apsched.solver.program.evaluate import trace
from apsched.solver.program.program import NODE
from apsched.solver.reorder.fill_stalls import FillLimits, Pass, Units, refill
from apsched.solver.search.decoder import Decoder
from apsched.solver.search.front import Candidate
from apsched.solver.search.local_search import FIRST_POLICIES

_OVERRUNS = (1.0, 0.2)
_SHARES_PUT_OFF = (0.25, 0.5, 1.0, 0.0)
"""Share of the cap on moves by which patient compute is put off."""
_REPEATS = 4
"""How often the rule goes over its own result."""
_STEERING_ROUNDS = 3
_UNLIMITED = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Buckets under a policy around compute in some order."""

    blocks: Ints
    candidate: Candidate


class ComputeMover:
    """Looks for better orders of the compute of one problem."""

    def __init__(self, instance: Instance) -> None:
        self.problem = instance.problem
        self.orders = Orders(instance)
        self._pricer = Pricer(instance)

    @property
    def captured(self) -> Ints:
        """The blocks as captured."""
        return np.arange(len(self.orders.precedence.block_ticks))

    def compute_order(self, blocks: Ints) -> Ints:
        """Return the compute nodes of ``blocks`` in their order."""
        first = self.orders.precedence.first
        sizes = np.diff(first)[blocks]
        ends = np.cumsum(sizes)
        nodes: Ints = np.repeat(first[blocks] - (ends - sizes), sizes) + np.arange(
            int(ends[-1]) if len(ends) else 0
        )
        return nodes

    def blocks_of(self, problem: Problem) -> Ints:
        """Return the blocks in the order of ``problem``, which ``moved`` made."""
        place = {node: k for k, node in enumerate(self.problem.captured_order)}
        return self.orders.blocks_of(
            np.array([place[node] for node in problem.compute_order], dtype=np.int64)
        )

    def moved(self, blocks: Ints) -> Instance:
        """Return the instance with its compute in the order of ``blocks``."""
        return self.orders.in_order(self.compute_order(blocks))

    def is_near(self, blocks: Ints, caps: Caps) -> bool:
        """Whether no node is further from where it was captured than the cap allows."""
        compute_order = self.compute_order(blocks)
        return (
            caps.max_compute_move is None
            or int(np.abs(compute_order - np.arange(len(compute_order))).max(initial=0))
            <= caps.max_compute_move
        )

    def improve(self, start: Moved, caps: Caps, stop_at_ticks: int) -> Moved:
        """Return the best order found for the buckets of ``start``, which is that of ``start`` if
        no other is better.
        """
        best = start
        most = (
            len(self.orders.arrays.compute_ticks)
            if caps.max_compute_move is None
            else caps.max_compute_move
        )
        for share in _SHARES_PUT_OFF:
            for max_overrun in _OVERRUNS:
                if best.candidate.figures.step_time_ticks <= stop_at_ticks:
                    return best
                current, limits = start, FillLimits(int(share * most), max_overrun)
                for _ in range(_REPEATS):
                    refilled = self._refilled(current, caps, most, limits)
                    if refilled is None or np.array_equal(refilled.blocks, current.blocks):
                        break
                    current = refilled
                    best = min(best, current, key=lambda m: m.candidate.value)
        return best

    def _refilled(
        self, moved_from: Moved, caps: Caps, max_move: int, limits: FillLimits
    ) -> Moved | None:
        """Return the result of the rule for ``moved_from``; None if it does not fit."""
        program, units = self._pass(moved_from, caps)
        room = (
            _UNLIMITED
            if caps.memory_cap_bytes is None
            else caps.memory_cap_bytes - self.orders.arrays.kept_bytes
        )
        for _ in range(_STEERING_ROUNDS):
            blocks = refill(self.orders.precedence, units, program, room, max_move, limits)
            found, excess = self.judged(blocks, moved_from.candidate, caps)
            if found is not None:
                return found
            room -= excess
        return None

    def judged(self, blocks: Ints, like: Candidate, caps: Caps) -> tuple[Moved | None, int]:
        """Return the best of a few policies for the buckets of ``like`` around ``blocks``, and by
        how many bytes none of them fits.
        """
        decoder = Decoder(Pricer(self.moved(blocks), self._pricer), caps)
        best: Candidate | None = None
        excess = _UNLIMITED
        others = [replace(p, coalesced=like.policy.coalesced) for p in FIRST_POLICIES]
        for policy in dict.fromkeys(
            (like.policy, *others, *(replace(p, in_stalls=True) for p in others))
        ):
            figures = decoder.figures(like.labels, policy, caps.memory_cap_bytes)
            if figures is None or (
                caps.in_flight_cap_bytes is not None
                and figures.peak_in_flight_bytes > caps.in_flight_cap_bytes
            ):
                continue
            if (
                caps.memory_cap_bytes is not None
                and figures.peak_memory_bytes > caps.memory_cap_bytes
            ):
                excess = min(excess, figures.peak_memory_bytes - caps.memory_cap_bytes)
                continue
            candidate = Candidate(like.labels, policy, caps.memory_cap_bytes, figures)
            if best is None or candidate.value < best.value:
                best = candidate
        return (Moved(blocks=blocks, candidate=best) if best is not None else None), excess

    def _pass(self, moved_from: Moved, caps: Caps) -> tuple[Pass, Units]:
        pricer = Pricer(self.moved(moved_from.blocks), self._pricer)
        program = Decoder(pricer, caps).program(
            moved_from.candidate.labels,
            moved_from.candidate.policy,
            moved_from.candidate.steer_bytes,
        )
        stands = trace(pricer.arrays, program)
        p, compute_order = self.orders.precedence, self.compute_order(moved_from.blocks)
        block = p.block_of[compute_order]
        is_compute = program.operation == NODE
        argument, kept = program.argument.copy(), np.ones(len(program.operation), dtype=np.bool_)
        kept[is_compute] = (p.first[block] == compute_order)[argument[is_compute]]
        argument[is_compute] = block[argument[is_compute]]
        live = np.maximum.reduceat(stands.live_bytes, stands.first_position)
        return Pass(moved_from.blocks, program.operation[kept], argument[kept], live[kept]), _units(
            pricer, program.partition
        )


def _units(pricer: Pricer, partition: Partition) -> Units:
    t, num_buckets = pricer.tables, len(partition.buckets)
    flat = partition.flat[partition.bucket_of]
    first = partition.member_list[partition.member_begin[:-1]]
    gathers = t.kind == ALL_GATHER
    copied = flat & gathers

    def total(ticks: Ints) -> Ints:
        sums = np.zeros(num_buckets, dtype=np.int64)
        np.add.at(sums, partition.bucket_of, ticks)
        return sums

    return Units(
        partition.bucket_of,
        partition.member_begin,
        partition.member_list,
        partition.launch_ticks
        + partition.copy_in_ticks
        + total(np.where(flat, t.prologue_ticks - t.cast_ticks, t.prologue_ticks)),
        total(np.where(copied, 0, t.epilogue_ticks)),
        np.where(copied, t.copy_out_ticks + t.epilogue_ticks, 0),
        partition.transfer_ticks,
        t.stream[first],
        (gathers & ~t.on_path)[first],
        t.after_begin,
        t.after_list,
        int(t.stream.max()) + 1 if len(t.stream) else 0,
    )
