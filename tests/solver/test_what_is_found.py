"""What search and moves find does not get worse: totals over small problems, which are the
same on every machine.
"""

import random
from collections import Counter
from dataclasses import replace

import pytest

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.solver.arrays.instance import Instance
from apsched.solver.program.to_schedule import expand
from apsched.solver.reorder.lower_peak import lower_peak
from apsched.solver.reorder.reorder import ComputeMover, Moved
from apsched.solver.reorder.shorten_tail import with_shorter_tail
from apsched.solver.requested import solve_requested
from apsched.solver.search.just_in_time import just_in_time
from apsched.solver.search.late_waits import late_waits
from apsched.solver.search.local_search import Search
from tests.helpers.problems.strategies import layered_problem, random_problem

ANY_ORDER = Caps(max_compute_move=None)
OPTIONS = SolveOptions(budget=0.1)


def case(seed: int) -> Problem:
    rng = random.Random(seed)
    if seed % 2:
        return layered_problem(rng, num_layers=2)
    return random_problem(rng, max_collectives=7, max_compute=7)


def totals(seed: int) -> Counter[str]:
    """Return what each part finds: ticks, bytes and launches; all of it is legal."""
    problem = case(seed)
    instance, rng = Instance.of(problem), random.Random(seed)
    floor = just_in_time(instance)
    assert floor is not None
    least = floor.peak_memory_bytes
    caps = Caps(
        memory_cap_bytes=least * rng.choice((8, 9, 12)) // 8,
        max_prefetch=rng.choice((None, None, 3)),
    )
    search = Search(
        instance=instance.within(caps),
        report=lambda *_: None,
        max_evaluations=30,
        floor_bytes=least,
    )
    search.portfolio()
    found = {"least memory": least}
    lower = lower_peak(ComputeMover(instance), ANY_ORDER, 0)
    found["least memory, moved"] = min([least, *(one.peak_bytes for one in lower)])
    if search.best is None:
        return Counter(found | {"nothing": 1})
    found["policies"] = search.best.figures.step_time_ticks
    mover, moves = ComputeMover(instance), replace(caps, max_compute_move=None)
    moved = mover.improve(Moved(blocks=mover.captured, candidate=search.best), moves, 0)
    found["moved"] = moved.candidate.figures.step_time_ticks
    search.improve(0)
    found["search"] = search.best.figures.step_time_ticks
    found["tail"] = with_shorter_tail(mover, search, 0, 15, 0).step_time_ticks
    search.lower_memory(found["search"] * 21 // 20)
    found["memory"] = search.best.figures.peak_memory_bytes
    search.fewer_launches(found["search"] * 21 // 20)
    found["launches"] = search.best.figures.num_launches
    schedule = expand(instance, late_waits(search.instance, search.program()))
    assert verify(problem, schedule, caps) == ()
    timeline = simulate(problem, schedule)
    assert timeline.step_time_ticks <= found["search"] * 21 // 20
    early = sum(len(schedule.steps) - t.wait_step for t in timeline.transfers)
    return Counter(found | {"steps behind waits": early})


NAMES = (
    *("policies", "moved", "search", "tail", "memory", "launches"),
    *("least memory", "least memory, moved", "steps behind waits", "nothing"),
)
KNOWN = {
    0: (45, 45, 45, 45, 24576, 2, 24576, 24576, 11, 0),
    2: (83, 83, 83, 83, 4096, 5, 4096, 4096, 40, 0),
    4: (113, 113, 113, 113, 4096, 7, 4096, 4096, 78, 0),
    5: (1252, 1252, 1252, 1252, 7680, 8, 6656, 6656, 157, 0),
    6: (144, 144, 144, 144, 55296, 6, 46592, 46592, 48, 0),
    7: (487, 485, 487, 487, 75264, 17, 75264, 75264, 516, 0),
    8: (70, 70, 70, 70, 2560, 2, 2560, 2048, 11, 0),
    10: (237, 237, 237, 237, 121856, 6, 92672, 92672, 47, 0),
}
"""The result of each part for the problem of a seed."""


@pytest.mark.parametrize("seed", KNOWN)
def test_nothing_that_is_found_is_worse_than_it_has_been(seed: int) -> None:
    found = totals(seed)
    worse = {
        name: (found[name], known)
        for name, known in zip(NAMES, KNOWN[seed], strict=True)
        if found[name] > known
    }
    assert worse == {}


def test_a_search_alone_says_that_cp_sat_may_improve_it() -> None:
    """Its bound holds, and CP-SAT, which starts from the same search, finds nothing slower."""
    improved = 0
    for seed in range(5):
        problem = case(seed)
        alone, whole = (
            solve_requested(problem, Caps(), OPTIONS, search_alone=alone) for alone in (True, False)
        )
        assert alone.best is not None
        assert whole.best is not None
        assert (alone.may_improve, whole.may_improve) == (True, False)
        assert alone.bound_ticks <= whole.fastest_ticks <= alone.fastest_ticks
        assert alone.search_ticks == 0
        improved += whole.fastest_ticks < alone.fastest_ticks
    assert improved
