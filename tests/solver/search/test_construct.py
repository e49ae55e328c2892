"""Layouts of buckets worked out by hand: what is launched ahead, as far as memory and the cap on
prefetch have room.
"""

import random

import numpy as np
import pytest

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.partition import Pricer
from apsched.solver.program.evaluate import evaluate
from apsched.solver.program.program import LAUNCH, NODE, Figures, Program
from apsched.solver.search.construct import construct
from apsched.solver.search.construct_pass import BLOCK, _add, _last_above
from apsched.solver.search.launch_policy import Policy
from tests.helpers.problems.by_hand import ByHand, line

KIB = 1024
EARLY = Policy(lead=np.inf, copy_out_early=True)


def gathers(*needed_by: int, nodes: int = 4) -> Problem:
    """A chain of compute nodes of 100 ticks and 512 bytes; one gather of 64 KiB and 100 ticks for
    each that needs one.
    """
    hand = ByHand(prices={"all_gather": line(100)})
    shards = {k: hand.input(f"s{k}", 512, kept=True) for k in needed_by}
    at = hand.input("x", 512)
    for k in range(nodes):
        taken = [at]
        if k in shards:
            start = hand.start("all_gather", f"ag{k}", shards[k], 512, 64 * KIB)
            taken.append(hand.wait(f"w{k}", start))
        at = hand.compute(f"c{k}", 100, *taken, size=512)
    return hand.output(at)


def laid_out(problem: Problem, caps: Caps) -> tuple[list[int], Figures]:
    """Return before which compute node each gather is launched, and the figures."""
    instance = Instance.of(problem, caps)
    pricer = Pricer(instance)
    program = construct(
        pricer, pricer.partition([(c,) for c in range(len(problem.collectives))]), EARLY, caps
    )
    return launched_before(program), evaluate(instance.arrays, program)


def launched_before(program: Program) -> list[int]:
    """Return the compute nodes before the launch of each bucket."""
    nodes = np.cumsum(program.operation == NODE)
    launches = np.nonzero(program.operation == LAUNCH)[0]
    order = np.argsort(program.argument[launches])
    return nodes[launches[order]].tolist()


def peak(problem: Problem, gathered: int) -> int:
    """Return a cap with room for so many gathers at once, input and result, beside the nodes' own
    results.
    """
    kept = sum(s.size_bytes for s in problem.storages if s.kept)
    return kept + gathered * (64 * KIB + 512) + 2 * 512


def test_without_a_cap_all_are_launched_at_once() -> None:
    launched, figures = laid_out(gathers(1, 2, 3), Caps())
    assert launched == [0, 0, 0]
    assert figures.step_time_ticks == 400


def test_what_is_ahead_counts_as_memory_until_it_is_needed() -> None:
    """There is room for two results: the second is launched beside the first, the third behind the
    node that needs the first.
    """
    problem = gathers(1, 2, 3)
    caps = Caps(memory_cap_bytes=peak(problem, 2))
    launched, figures = laid_out(problem, caps)
    assert launched == [0, 0, 2]
    assert figures.step_time_ticks == 400
    assert figures.peak_memory_bytes <= peak(problem, 2)


def test_a_result_is_freed_behind_its_last_use() -> None:
    """With room for one result the next gather starts behind the node that used the first, and is
    hidden behind the node between the two.
    """
    problem = gathers(0, 2)
    launched, figures = laid_out(problem, Caps(memory_cap_bytes=peak(problem, 1)))
    assert launched == [0, 1]
    assert figures.step_time_ticks == 100 + 400
    assert figures.peak_memory_bytes <= peak(problem, 1)


@pytest.mark.parametrize(("cap", "launched"), [(0, 3), (1, 2), (2, 1), (3, 0)])
def test_the_cap_on_prefetch_holds_for_the_last_node_too(cap: int, launched: int) -> None:
    problem = gathers(3)
    assert laid_out(problem, Caps(max_prefetch=cap))[0] == [launched]


@pytest.mark.parametrize("seed", range(20))
def test_bytes_by_blocks_are_bytes_node_by_node(seed: int) -> None:
    """Sums over ranges, and the last node above a limit, equal those of a plain array."""
    rng = random.Random(seed)
    size = rng.choice((1, BLOCK - 1, BLOCK, 5 * BLOCK // 2, 4 * BLOCK))
    plain = np.array([rng.randint(0, 50) for _ in range(size)], dtype=np.int64)
    used, num_blocks = plain.copy(), size // BLOCK + 1
    added, most = np.zeros(num_blocks, np.int64), np.zeros(num_blocks, np.int64)
    for k in range(size):
        most[k // BLOCK] = max(most[k // BLOCK], used[k])
    for _ in range(12):
        first, past = sorted(rng.randint(0, size) for _ in range(2))
        more = rng.randint(0, 20)
        _add(used, added, most, first, past, more)
        plain[first:past] += more
        first, past = sorted(rng.randint(0, size) for _ in range(2))
        limit = int(rng.choice((plain.max() - 1, plain.max(), int(np.median(plain)))))
        above = [k for k in range(first, past) if plain[k] > limit]
        assert _last_above(used, added, most, first, past, limit) == max(above, default=-1)


def test_at_the_end_launches_come_before_waits_for_others() -> None:
    """A reduction of 200 ticks, launched at 100, does not hold up an all-reduce of 20 ticks on
    another stream, ready at 110, and the reduction that follows it.
    """
    hand = ByHand(prices={"reduce_scatter": line(100, 100), "all_reduce": line(20)})
    x = hand.compute("c0", 100, hand.input("x", 512), size=KIB)
    first = hand.start("reduce_scatter", "rs0", x, KIB, 512)
    y = hand.compute("c1", 10, x, size=512)
    summed = hand.wait("w1", hand.start("all_reduce", "ar", y, 512, 512, group="tp"))
    second = hand.start("reduce_scatter", "rs1", summed, 512, 256)
    problem = hand.output(hand.wait("w0", first), hand.wait("w2", second))
    launched, figures = laid_out(problem, Caps())
    assert launched == [1, 2, 2]
    assert figures.step_time_ticks == 100 + 200 + 150
