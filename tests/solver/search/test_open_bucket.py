"""Partitions with one bucket open at a time: the front of a line has what brute force has, and
every partition keeps the caps.
"""

import random
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from apsched.config import Caps
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.partition import Pricer
from apsched.solver.search.launch_policy import base_times
from apsched.solver.search.local_search import FIRST_POLICIES, Search
from apsched.solver.search.open_bucket.front import front
from apsched.solver.search.open_bucket.line import Line, lines
from apsched.solver.search.open_bucket.partitions import open_bucket_partitions
from apsched.solver.search.open_bucket.stretches import stretches
from tests.helpers.problems.strategies import layered_problem, random_problem


def priced(seed: int, num_layers: int = 2) -> Pricer:
    rng = random.Random(seed)
    if seed % 3:
        return Pricer(Instance.of(layered_problem(rng, num_layers=num_layers)))
    problem = random_problem(rng, max_collectives=8, max_compute=8)
    return Pricer(Instance.of(problem))


def all_stretches(n: int, num_sizes: int) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """Yield every way to cut ``n`` members into stretches, each with one of ``num_sizes``."""
    if n == 0:
        yield ()
    for first in range(n):
        for before in all_stretches(first, num_sizes):
            for size in range(num_sizes):
                yield (*before, (first, n, size))


def walked(
    pricer: Pricer, line: Line, stretches: tuple[tuple[int, int, int], ...], sizes: list[int]
) -> tuple[int, int] | None:
    """Return the time of the stream and the clock after a line, transfer by transfer; None where a
    head may not ride, or a bucket cannot be.
    """
    a, t, caps = pricer.arrays, pricer.tables, Caps()
    stream, clock = int(t.launch_ticks[line.members[0]]), line.first_ticks
    for first, past, size in stretches:
        members = line.members[first:past].tolist()
        riders = tuple(c for c in members if a.size_bytes[c] <= sizes[size])
        if members[0] not in riders or not pricer.allowed(riders, caps):
            return None
        launch, transfer, copy_in = pricer.figures(tuple(sorted(riders)))[:3]
        flat = len(riders) > 1
        for i, c in zip(range(first, past), members, strict=True):
            if c == members[0]:
                casts = sum(int(t.cast_ticks[r]) for r in riders) if flat else 0
                prologues = sum(int(t.prologue_ticks[r]) for r in riders) - casts
                work = launch + copy_in + prologues
                stream += transfer
            elif c not in riders:
                work = int(t.launch_ticks[c] + t.prologue_ticks[c])
                stream += int(t.transfer_ticks[c])
            if line.gathers:
                clock += work if c == members[0] or c not in riders else 0
                clock = max(clock, stream) if c == members[0] or c not in riders else clock
                if c == members[0] and flat:
                    clock += sum(int(t.copy_out_ticks[r]) for r in riders)
                clock += int(t.epilogue_ticks[c])
            elif c == members[0] or c not in riders:
                clock = max(clock, stream) + work
            clock += int(line.gap_ticks[i])
    return stream, clock


def not_beaten(times: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the pairs of which no other is at most as late in both, ascending."""
    ascending = sorted(times)
    return [
        (stream, clock)
        for i, (stream, clock) in enumerate(ascending)
        if all(clock < other for _, other in ascending[:i])
    ]


@pytest.mark.parametrize("seed", range(60))
def test_the_front_is_that_of_all_partitions(seed: int) -> None:
    pricer = priced(seed)
    for line in lines(pricer, base_times(pricer.arrays).reached):
        n = len(line.members)
        sizes = np.unique(pricer.tables.size_bytes[line.members])
        if n > 5 or len(sizes) > 3:
            continue
        lengths = np.arange(1, n + 1)
        found = stretches(pricer, line, Caps(), lengths, sizes)
        launch = int(pricer.tables.launch_ticks[line.members[0]])
        end = front(found, line.first_ticks, launch, 500)[-1]
        ends = list(zip(end.stream_ticks.tolist(), end.clock_ticks.tolist(), strict=True))
        judged = {
            times
            for stretches in all_stretches(n, len(sizes))
            if (times := walked(pricer, line, stretches, sizes.tolist())) is not None
        }
        assert ends == not_beaten(judged)


def test_some_lines_are_judged_by_brute_force() -> None:
    """The test above has something to look at, in both directions."""
    judged = {
        line.gathers
        for seed in range(60)
        for line in lines(priced(seed), base_times(priced(seed).arrays).reached)
        if 2 <= len(line.members) <= 5
    }
    assert judged == {True, False}


def test_a_line_keeps_to_one_key_and_direction_in_its_order() -> None:
    for seed in range(12):
        arrays = priced(seed).arrays
        for line in lines(priced(seed), base_times(arrays).reached):
            assert len(set(arrays.key[line.members])) == 1
            slots = (arrays.need_slot if line.gathers else -arrays.late_ready_slot)[line.members]
            assert all(a <= b for a, b in pairwise(slots.tolist()))
            mask = arrays.gathers if line.gathers else arrays.reductions
            assert mask[line.members].all()
            assert (line.gap_ticks >= 0).all()


@pytest.mark.parametrize(
    "caps", [Caps(), Caps(bucket_cap_bytes=3_000), Caps(max_topo_span=6)], ids=str
)
def test_every_partition_keeps_the_caps(caps: Caps) -> None:
    several = 0
    for seed in range(12):
        pricer = priced(seed, num_layers=4)
        for labels in open_bucket_partitions(pricer, caps):
            for label in set(labels.tolist()):
                members = tuple(np.nonzero(labels == label)[0].tolist())
                assert members[0] == label
                assert pricer.allowed(members, caps)
                several += len(members) > 1
    assert several


def test_a_partition_is_kept_where_it_is_better_than_the_portfolio() -> None:
    """Search is at least as good as each partition that it starts from."""
    for seed in (1, 2):
        problem = layered_problem(random.Random(seed), num_layers=6)
        search = Search(
            instance=Instance.of(problem), report=lambda *_: None, max_evaluations=1_000,
            floor_bytes=0,
        )  # fmt: skip
        search.portfolio()
        search.descend_from_many(0)
        best = search.step_time_ticks
        for labels in open_bucket_partitions(search.pricer, Caps()):
            for policy in FIRST_POLICIES:
                candidate = search.evaluate(labels, policy, None)
                assert candidate is None or candidate.figures.step_time_ticks >= best
