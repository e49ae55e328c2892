"""The end of the step: gradients that are put off run beside the last reduction; no cap is broken,
nothing gets slower.
"""

import random
from dataclasses import replace

import numpy as np
import pytest

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.analysis.moved_compute import moved_compute
from apsched.schedule.schedule import Bucket
from apsched.schedule.verify import verify
from apsched.solver import solve
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import problem_arrays
from apsched.solver.program.to_schedule import expand
from apsched.solver.reorder.min_memory import is_small
from apsched.solver.reorder.reorder import ComputeMover
from apsched.solver.reorder.shorten_tail import (
    NO_OWNER,
    SEVERAL,
    ancestors,
    orders_of_the_end,
    owners,
    tail_of,
    with_shorter_tail,
)
from apsched.solver.search.local_search import Search
from tests.helpers.problems.by_hand import ByHand, line
from tests.helpers.problems.strategies import layered_problem, random_problem, with_kernels

QUICK = SolveOptions(budget=1, time_slack=0.001)


def with_an_embedding(
    num_layers: int,
    *,
    gradient: int,
    last: int,
    price: int = 10,
    norms: bool = False,
    bucketable: bool = False,
) -> Problem:
    """A chain with a gradient beside each step, and one behind its end: a reduction takes ``price``
    ticks a KiB.

    With ``norms`` a node that nothing needs reads each gradient.
    """
    b = ByHand(prices={"reduce_scatter": line(0, price)})
    x = b.input("x", 512)
    outputs = []
    for i in range(num_layers):
        grad = b.compute(f"g{i}", gradient, x, size=1024)
        outputs.append(
            b.wait(
                f"v{i}", b.start("reduce_scatter", f"rs{i}", grad, 1024, 512, bucketable=bucketable)
            )
        )
        if norms:
            b.compute(f"n{i}", 1, grad, size=512)
        x = b.compute(f"c{i}", 30, x, size=512)
    x = b.compute("embedding", 5, x, size=last * 1024)
    return b.output(
        *outputs,
        b.wait("v", b.start("reduce_scatter", "rs", x, last * 1024, last * 512, bucketable=False)),
    )


def test_gradients_fill_the_end() -> None:
    """Four gradients of 40 ticks hide 120 ticks of the last reduction and their own; the last of
    them sticks out, by 10.
    """
    problem = with_an_embedding(20, gradient=40, last=12)
    assert not is_small(problem)
    compute = 20 * (40 + 30) + 5
    captured, moved = (solve(problem, Caps(max_compute_move=most), QUICK) for most in (0, None))
    assert captured.fastest_ticks == captured.bound_ticks == compute + 120
    assert moved.fastest_ticks == compute + 10
    assert moved.bound_ticks == compute + 10
    assert moved.best is not None
    assert 0 < len(moved_compute(problem, moved.best.schedule)) <= 5


def test_gradients_whose_own_reductions_take_longer_fill_nothing() -> None:
    """What they would hide they would add behind it; the last may change places with the
    embedding's, which waits for it by 5.
    """
    problem = with_an_embedding(20, gradient=40, last=12, price=40)
    captured, moved = (solve(problem, Caps(max_compute_move=most), QUICK) for most in (0, None))
    assert captured.fastest_ticks == 20 * (40 + 30) + 5 + 480 + 5
    assert moved.fastest_ticks == captured.fastest_ticks - 5
    assert moved.bound_ticks == moved.fastest_ticks - 1  # rounding


@pytest.mark.parametrize("most", [1, 2, 4, 6])
def test_no_further_than_the_cap_on_moves(most: int) -> None:
    problem, caps = with_an_embedding(20, gradient=40, last=12), Caps(max_compute_move=most)
    answer = solve(problem, caps, QUICK)
    assert answer.best is not None
    assert verify(problem, answer.best.schedule, caps) == ()
    # the first of n gradients that are put off lets n steps of the chain and the embedding pass
    assert answer.fastest_ticks - (20 * (40 + 30) + 5) == {1: 120, 2: 90, 4: 30, 6: 10}[most]


def test_the_late_gradients_of_a_bucket_go_without_its_early_ones() -> None:
    """The last two gradients share buckets with the first two, which are further from the end than
    compute may move.
    """
    problem, caps = (
        with_an_embedding(20, gradient=40, last=12, bucketable=True),
        Caps(max_compute_move=6),
    )
    small = problem_arrays(problem)
    search = Search(
        instance=Instance(problem=problem, arrays=small, caps=caps),
        report=lambda *_: None,
        max_evaluations=0,
        floor_bytes=0,
    )
    search.try_buckets((Bucket((0, 19)), Bucket((1, 18))))
    compute = 20 * (40 + 30) + 5
    assert search.step_time_ticks == compute + 120
    found = with_shorter_tail(
        ComputeMover(Instance(problem=problem, arrays=small)), search, 0, 0, 0
    )
    assert found.step_time_ticks < compute + 120 - 40
    assert verify(problem, expand(found.instance, found.program()), caps) == ()


def test_the_reduction_that_sticks_out_goes_early() -> None:
    """Captured last, a gradient that needs nothing but the first step runs as soon as that is done,
    and hides its reduction.
    """
    b = ByHand(prices={"reduce_scatter": line(0, 10)})
    x = first = b.compute("first", 5, b.input("x", 512), size=512)
    outputs = []
    for i in range(30):
        x = b.compute(f"c{i}", 30, x, size=512)
        outputs.append(
            b.wait(f"v{i}", b.start("reduce_scatter", f"rs{i}", x, 512, 512, bucketable=False))
        )
    grad = b.compute("g", 20, first, size=12 * 1024)
    outputs.append(
        b.wait("v", b.start("reduce_scatter", "rs", grad, 12 * 1024, 6 * 1024, bucketable=False))
    )
    problem = b.output(*outputs)
    captured, moved = (solve(problem, Caps(max_compute_move=most), QUICK) for most in (0, None))
    assert captured.fastest_ticks == 5 + 30 * 30 + 20 + 120
    assert moved.fastest_ticks == 5 + 30 * 30 + 20 + 5


def test_memory_is_kept() -> None:
    """Where what is put off would not fit, less is; with the peak as captured the step is between
    the two.
    """
    problem = with_an_embedding(20, gradient=40, last=12)
    captured = solve(problem, Caps(), QUICK)
    assert captured.best is not None
    times = []
    for more in (0, 2048, 8192):
        caps = Caps(memory_cap_bytes=captured.best.peak_memory_bytes + more, max_compute_move=None)
        answer = solve(problem, caps, QUICK)
        assert answer.best is not None
        assert verify(problem, answer.best.schedule, caps) == ()
        times.append(answer.fastest_ticks)
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0] <= captured.fastest_ticks


@pytest.mark.parametrize("seed", range(30))
def test_never_slower_and_no_cap_broken(seed: int) -> None:
    """Layered problems with kernels, under caps on memory and moves: what comes out is what it
    says, and no slower.
    """
    rng = random.Random(seed)
    problem = with_kernels(layered_problem(rng, num_layers=4), seed)
    small = problem_arrays(problem)
    caps = Caps(max_compute_move=rng.choice((2, 5, None)))
    search = Search(
        instance=Instance(problem=problem, arrays=small, caps=caps),
        report=lambda *_: None,
        max_evaluations=50,
        floor_bytes=0,
    )
    search.portfolio()
    assert search.best is not None
    caps = replace(caps, memory_cap_bytes=rng.choice((None, search.best.figures.peak_memory_bytes)))
    search.instance = search.instance.within(caps)
    mover = ComputeMover(Instance(problem=problem, arrays=small))
    found = with_shorter_tail(mover, search, 0, 50, 0)
    assert found.step_time_ticks <= search.step_time_ticks
    schedule = expand(found.instance, found.program())
    assert verify(problem, schedule, caps) == ()
    compute_order, block_of = (
        mover.compute_order(mover.blocks_of(found.instance.problem)).tolist(),
        mover.orders.precedence.block_of,
    )
    assert all(
        compute_order.index(k + 1) == compute_order.index(k) + 1
        for k in range(len(compute_order) - 1)
        if block_of[k] == block_of[k + 1]
    )


def test_orders_of_the_end_keep_dependences() -> None:
    """Each block once, and behind all that comes before it, whatever nothing needs included."""
    made = 0
    several = (
        random_problem(random.Random(seed), max_collectives=5, max_compute=9) for seed in range(40)
    )
    for problem in (with_an_embedding(20, gradient=40, last=12, norms=True), *several):
        small = problem_arrays(problem)
        search = Search(
            instance=Instance(problem=problem, arrays=small, caps=Caps()),
            report=lambda *_: None,
            max_evaluations=20,
            floor_bytes=0,
        )
        search.portfolio()
        program, mover = search.program(), ComputeMover(Instance(problem=problem, arrays=small))
        p = mover.orders.precedence
        tail = tail_of(small, program)
        for order in (
            orders_of_the_end(mover, Caps(max_compute_move=None), mover.captured, program, tail)
            if tail is not None
            else ()
        ):
            place = np.argsort(order)
            assert sorted(order.tolist()) == list(range(len(p.block_ticks)))
            for block in range(len(order)):
                assert all(
                    place[p.before_list[p.before_begin[block] : p.before_begin[block + 1]]]
                    < place[block]
                )
            made += not np.array_equal(order, mover.captured)
    assert made > 8


@pytest.mark.parametrize("seed", range(20))
def test_owners_and_ancestors_are_those_of_the_graph(seed: int) -> None:
    """Against sets: the buckets behind a block, and the blocks before a launch."""
    problem = random_problem(random.Random(seed), max_collectives=5)
    mover = ComputeMover(Instance.of(problem))
    p, bucket_of = mover.orders.precedence, np.arange(len(problem.collectives)) // 2
    count = len(p.block_ticks)
    served: list[set[int]] = [set() for _ in range(count)]
    before: list[set[int]] = [set() for _ in range(count)]
    for k in reversed(range(count)):
        served[k] |= set(bucket_of[p.feeds_list[p.feeds_begin[k] : p.feeds_begin[k + 1]]].tolist())
        for after in p.behind_list[p.behind_begin[k] : p.behind_begin[k + 1]].tolist():
            served[k] |= served[after]
    for k in range(count):
        before[k].add(k)
        for sooner in p.before_list[p.before_begin[k] : p.before_begin[k + 1]].tolist():
            before[k] |= before[sooner]
    expected = [
        NO_OWNER if not buckets else min(buckets) if len(buckets) == 1 else SEVERAL
        for buckets in served
    ]
    assert owners(p, bucket_of).tolist() == expected
    for c in range(len(problem.collectives)):
        ready = {int(p.block_of[j]) for j in p.ready_list[p.ready_begin[c] : p.ready_begin[c + 1]]}
        needed = set[int]().union(*(before[block] for block in ready))
        assert np.nonzero(ancestors(p, np.array([c])))[0].tolist() == sorted(needed)
