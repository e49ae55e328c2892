"""The least peak is that of a schedule that keeps the other caps, too."""

import random

import pytest

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.verify import verify
from apsched.solver import least_memory, solve
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.problem_arrays import problem_arrays
from apsched.solver.arrays.reordered import Orders
from apsched.solver.bounds.any_order.memory import memory_bound_of_any_order
from apsched.solver.bounds.step_time import memory_bound
from apsched.solver.program.to_schedule import expand
from apsched.solver.search.just_in_time import just_in_time
from tests.helpers.oracle import least_memory as least_of_oracle
from tests.helpers.problems.by_hand import ByHand
from tests.helpers.problems.strategies import random_problem


def test_what_starts_just_in_time_keeps_the_other_caps() -> None:
    """A collective on the path, ready long before its need, waits for the cap on prefetch, too (it
    once did not).
    """
    for seed in range(200):
        rng = random.Random(seed)
        problem = random_problem(
            rng, max_collectives=6, max_compute=12, chained=rng.choice((0.0, 0.3, 0.6))
        )
        small = problem_arrays(problem)
        most = max(c.output_bytes for c in problem.collectives)
        most += sum(c.output_bytes for c in problem.collectives if c.on_path)
        caps = Caps(
            max_prefetch=rng.choice((1, 2, 4)),
            in_flight_cap_bytes=rng.choice((None, most)),
            max_topo_span=rng.choice((None, 3)),
        )
        floor = just_in_time(Instance(problem=problem, arrays=small, caps=caps))
        assert floor is not None, seed  # room for one in flight is room for one after the other
        assert (
            verify(problem, expand(Instance(problem=problem, arrays=small), floor.program), caps)
            == ()
        ), seed


def with_unused_inputs(unused_bytes: int, view: bool) -> Problem:
    """Two gathers before the first compute node, beside an input that nothing uses, or a view of it
    that nothing uses.
    """
    b = ByHand()
    shards = [b.input(f"shard{k}", 512, kept=True) for k in range(2)]
    unused = b.input("unused", unused_bytes)
    if view:
        b.view("view", unused)
    gathered = [
        b.wait(f"w{k}", b.start("all_gather", f"ag{k}", shard, 512, 4096))
        for k, shard in enumerate(shards)
    ]
    first = b.compute("first", 10, gathered[0], size=512)
    return b.output(b.compute("second", 10, first, gathered[1], size=512))


@pytest.mark.parametrize("max_compute_move", [0, 5])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("unused_bytes", [512, 4096, 32768])
def test_an_input_that_nothing_uses_is_gone_before_the_first_launch(
    unused_bytes: int, view: bool, max_compute_move: int
) -> None:
    """It counts beside the other inputs and beside nothing else; the bounds know it (they once had
    it beside the first launches).
    """
    problem = with_unused_inputs(unused_bytes, view)
    small = problem_arrays(problem)
    caps = Caps(max_compute_move=max_compute_move)
    least, bound = least_memory(problem, caps)
    assert least == least_of_oracle(problem, caps) == bound
    assert least == max(
        1024 + unused_bytes, 1024 + 512 + 4096 + 512
    )  # all inputs; the shards, and what the second node has
    bounds = (
        memory_bound(small),
        memory_bound_of_any_order(Orders(Instance(problem=problem, arrays=small)), None),
    )
    assert max(bounds) <= least
    if 1024 + unused_bytes == least:
        assert bounds == (least, least)  # all inputs are there at once
    answer = solve(
        problem,
        Caps(memory_cap_bytes=least, max_compute_move=max_compute_move),
        SolveOptions(budget=0.02),
    )
    assert answer.best is not None
    assert answer.best.peak_memory_bytes == least
