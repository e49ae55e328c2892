"""The merge by labels, against every merge of the same units with its best schedule."""

import random
from itertools import permutations

import pytest

from apsched.config import Caps
from apsched.problem.permuted import permuted
from apsched.problem.problem import Problem
from apsched.solver.interleave import merge as merge_module
from apsched.solver.interleave.merge import Merge, merged
from apsched.solver.interleave.units import units_of
from tests.helpers.oracle import best_schedule
from tests.helpers.problems.chains import chains_of, random_chains


def ticks_of(problem: Problem, order: tuple[int, ...]) -> int:
    """Return the step time of compute in ``order``, with the best places of launches and waits."""
    best = best_schedule(permuted(problem, order), Caps(max_compute_move=0))
    assert best is not None
    return best.step_time_ticks


def all_merges(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the step times of all merges of the units of ``problem``."""
    lengths = [len(units) for units in units_of(problem, stretches=False)]
    turns = {*permutations([k for k, length in enumerate(lengths) for _ in range(length)])}
    found = []
    for way in turns:
        numbers = [
            [place for place, k in enumerate(way) if k == chain] for chain in range(len(lengths))
        ]
        monkeypatch.setattr(merge_module, "fastest_numbers", lambda *_, n=numbers: n)
        found.append(ticks_of(problem, merged(problem, Merge())))
    monkeypatch.undo()
    return found


@pytest.mark.parametrize("seed", range(40))
def test_of_two_chains_the_merge_is_the_fastest_of_all(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    problem = random_chains(rng, num_stages=rng.randint(2, 3), late=rng.choice((0.0, 0.4)))
    known = all_merges(problem, monkeypatch)
    found = ticks_of(problem, merged(problem, Merge()))
    assert found == min(known)
    assert len(set(known)) > 1


def test_of_merges_as_fast_the_chains_of_one_stay_together() -> None:
    """Transfers of no time: no merge waits."""
    problem = chains_of(((5,) * 6,) * 2, transfer_ticks=0)
    order = [problem.chains[n] for n in merged(problem, Merge()) if n in problem.captured_places]
    assert all(order[k] != order[k + 1] for k in range(0, len(order), 2))
