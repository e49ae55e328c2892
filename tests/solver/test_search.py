"""Search: its work does not grow with the problem, moves keep partitions whole, and what a tight cap finds a looser one keeps."""

import random
from dataclasses import replace

import numpy as np
import pytest
from strategies import layered_problem

from apsched.config import Caps, SolveOptions
from apsched.solver.compact import compact
from apsched.solver.least_memory import least_memory
from apsched.solver.moves import CHANGE, CUT, JOIN, apply
from apsched.solver.search import Search


def searched(num_layers: int, max_evaluations: int) -> Search:
    problem = layered_problem(random.Random(3), num_layers=num_layers)
    search = Search(
        problem=problem,
        compact=compact(problem),
        caps=Caps(),
        report=lambda stage, ticks: None,
        max_evaluations=max_evaluations,
        floor_bytes=least_memory(problem)[0],
    )
    search.portfolio()
    return search


def test_the_number_of_evaluations_does_not_grow_with_the_problem() -> None:
    """Each costs time in proportion to the nodes, so that the time of a search grows no faster than they do."""
    few, many = searched(3, 1_500), searched(24, 1_500)
    assert len(many.compact.kind) >= 5 * len(few.compact.kind)
    assert many.evaluations <= 1.5 * few.evaluations
    for search in (few, many):
        search.improve(0)
        assert search.evaluations <= 1_500 + 50  # a move may need a few to keep the memory cap


@pytest.mark.parametrize("seed", range(20))
def test_a_move_changes_what_it_says(seed: int) -> None:
    rng = random.Random(seed)
    size = 9
    labels = np.arange(size)
    place = np.array(rng.sample(range(size), size))
    for _ in range(30):
        kind, of, to = rng.choice((JOIN, CUT, CHANGE)), rng.randrange(size), rng.randrange(size)
        moved = apply(labels, kind, np.array([of]), np.array([to]), place)
        before = [{c for c in range(size) if labels[c] == label} for label in labels]
        after = [{c for c in range(size) if moved[c] == label} for label in moved]
        assert [min(bucket) for bucket in after] == moved.tolist()  # a bucket is named by its lowest member
        if kind == JOIN:
            expected = before[of] | before[to]
        elif kind == CUT:
            expected = {c for c in before[of] if place[c] >= place[of]}
        else:
            expected = before[to] | {of}
        assert after[of] == expected
        others = before[of] | before[to] if kind != CUT else before[of]
        assert all(after[c] == before[c] for c in range(size) if c not in others)
        labels = moved


@pytest.mark.parametrize("seed", range(4))
def test_what_is_found_under_a_lower_cap_is_kept(seed: int) -> None:
    problem = layered_problem(random.Random(seed), num_layers=6)
    floor_bytes = least_memory(problem, options=SolveOptions(budget=1))[0]
    tight = Caps(memory_cap_bytes=floor_bytes)
    loose = replace(tight, memory_cap_bytes=floor_bytes * 3 // 2)
    small = compact(problem)

    def search(caps: Caps) -> Search:
        made = Search(
            problem=problem,
            compact=small,
            caps=caps,
            report=lambda stage, ticks: None,
            max_evaluations=400,
            floor_bytes=floor_bytes,
        )
        made.portfolio()
        return made

    below = search(tight)
    below.improve(0)
    above = search(loose)
    above.look_below(floor_bytes, 400, 0)
    if below.best is not None:
        assert above.best is not None
        assert above.best.figures.step_time_ticks <= below.best.figures.step_time_ticks
        assert above.best.figures.peak_memory_bytes <= floor_bytes * 3 // 2
