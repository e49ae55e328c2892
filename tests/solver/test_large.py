"""Search, which large problems get, on middle-size ones: never worse than a baseline, never over a
cap, the same answer everywhere.
"""

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from apsched.config import Caps, SolveOptions
from apsched.schedule.kernel_cuts import cuts_made
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.solver import solve
from apsched.solver.arrays.instance import Instance
from apsched.solver.bounds.best import fixed_order_bound
from apsched.solver.large import Climb, _rounds
from tests.helpers.problems.layered import Layer, layered
from tests.helpers.problems.strategies import (
    layered_problem,
    random_caps,
    random_problem,
    with_cuts,
    with_kernels,
)
from tests.workers.graphs import digest_worker

QUICK = SolveOptions(budget=0.2)


@pytest.fixture
def by_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """No problem is small."""
    module, name = digest_worker.LIMIT
    monkeypatch.setattr(sys.modules[module], name, -1)


@pytest.mark.usefixtures("by_search")
@pytest.mark.parametrize("seed", range(14))
def test_never_worse_than_a_baseline_and_never_over_a_cap(seed: int) -> None:
    rng = random.Random(seed)
    problem = layered_problem(rng, num_layers=2 + seed % 6)
    caps = random_caps(rng, problem)
    result = solve(problem, caps, QUICK)
    fitting = [b for b in result.baselines if not verify(problem, b.schedule, caps)]
    assert [b.name for b in result.baselines if b.fits] == [b.name for b in fitting]
    if result.best is None:
        assert not fitting
        assert result.infeasibility is not None
        return
    assert verify(problem, result.best.schedule, caps) == ()
    timeline = simulate(problem, result.best.schedule)
    claimed = result.best.step_time_ticks, result.best.peak_memory_bytes, result.best.num_launches
    assert claimed == (timeline.step_time_ticks, timeline.peak_memory_bytes, timeline.num_launches)
    assert result.best.step_time_ticks <= min(
        (b.step_time_ticks for b in fitting), default=result.best.step_time_ticks
    )
    assert fixed_order_bound(Instance.of(problem, caps)).ticks <= result.best.step_time_ticks
    assert result.floor_bound_bytes <= result.floor_memory_bytes <= result.best.peak_memory_bytes


@pytest.mark.usefixtures("by_search")
def test_three_layers_are_as_fast_as_their_bound_but_for_one_tick() -> None:
    """The best baseline, a bucket for each block, takes 4 ticks more."""
    found = solve(layered([Layer()] * 3), Caps(max_compute_move=0), QUICK)
    assert found.best is not None
    assert found.best.step_time_ticks <= 333
    assert min(b.step_time_ticks for b in found.baselines if b.fits) == 337
    assert found.bound_ticks == 332


@pytest.mark.usefixtures("by_search")
def test_memory_is_lowered_at_the_same_step_time() -> None:
    """The fastest schedule that search comes by holds 4608 bytes more than need be."""
    problem = layered_problem(random.Random(1), num_layers=2)
    found = solve(problem, Caps(max_compute_move=0), SolveOptions(budget=0.2, time_slack=0.0))
    assert found.best is not None
    assert found.best.step_time_ticks == found.fastest_ticks
    assert found.best.peak_memory_bytes <= 254_976


@pytest.mark.usefixtures("by_search")
@pytest.mark.parametrize("seed", [3, 16, 19, 25, 39])
def test_a_larger_slack_never_has_more_memory_nor_more_than_is_known_within_it(seed: int) -> None:
    """In graphs 16 and 39 the start within a larger slack does not become as small as that within
    a smaller one; in the others a baseline is smaller.
    """
    rng = random.Random(seed)
    problem = layered_problem(rng, num_layers=2 + seed % 6)
    caps = Caps(max_compute_move=0) if seed % 2 else random_caps(rng, problem)
    before = None
    for slack in (0.0, 0.001, 0.01, 0.05, 0.2):
        found = solve(problem, caps, replace(QUICK, time_slack=slack))
        assert found.best is not None
        peak = found.best.peak_memory_bytes
        assert before is None or peak <= before
        before = peak
        known = (t for t in found.trade_offs if t.step_time_ticks <= found.time_limit_ticks)
        assert peak == min(t.peak_memory_bytes for t in known)


@pytest.mark.usefixtures("by_search")
def test_kernels_are_cut_for_a_cap_below_what_whole_ones_need() -> None:
    """The least peak of whole kernels is 15,872 bytes; the bound is that of schedules that cut
    kernels, too.
    """
    problem = random_problem(random.Random(58), max_collectives=4, max_compute=6)
    problem = with_cuts(with_kernels(problem, 58), 58)
    caps = Caps(memory_cap_bytes=15_871, max_compute_move=None)
    found = solve(problem, caps, QUICK)
    assert found.best is not None
    assert verify(problem, found.best.schedule, caps) == ()
    assert cuts_made(problem, found.best.schedule)
    assert 0 < found.bound_ticks <= found.best.step_time_ticks


@pytest.fixture(scope="module")
def digests() -> list[str]:
    """Return the digests of this process."""
    return digest_worker.digests()


@pytest.mark.parametrize(("hash_seed", "threads"), [("1", 1), ("2", 2)])
@pytest.mark.slow
def test_the_same_answer_whatever_the_hash_seed_and_the_number_of_cores(
    hash_seed: str, threads: int, digests: list[str]
) -> None:
    """The answer of another process is equal to the byte: schedules, figures, bounds, and
    the work that was counted.
    """
    names = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    environment = os.environ | {"PYTHONHASHSEED": hash_seed} | dict.fromkeys(names, str(threads))
    root = Path(__file__).resolve().parents[2]
    command = [
        sys.executable,
        str(root / "tests" / "workers" / "graphs" / "digest_worker.py"),
        str(threads),
    ]
    other = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=False, timeout=600
    )
    assert other.returncode == 0, other.stderr[-2000:]
    assert other.stdout.splitlines() == digests


@pytest.mark.parametrize(("seed", "move"), [(0, 20), (8, 0), (10, 20), (16, 0)])
def test_a_larger_budget_begins_with_the_search_under_the_default(seed: int, move: int) -> None:
    """So it is never slower: without that seed 10 takes 580 ticks under 40, and 577 under 20."""
    problem = layered_problem(random.Random(seed), num_layers=9)
    times = [
        solve(
            problem, Caps(max_compute_move=move), SolveOptions(budget=budget, time_slack=0.0)
        ).fastest_ticks
        for budget in (20.0, 40.0, 160.0)
    ]
    assert times == sorted(times, reverse=True)


def test_budgets_grow_from_the_default_to_the_stated_one() -> None:
    stated = (0.0, 1.0, 20.0, 39.0, 40.0, 159.0, 160.0, 1000.0)
    assert [_rounds(budget) for budget in stated] == [
        [0.0],
        [1.0],
        [20.0],
        [39.0],
        [20.0, 40.0],
        [20.0, 159.0],
        [20.0, 80.0, 160.0],
        [20.0, 80.0, 320.0, 1000.0],
    ]


@pytest.mark.usefixtures("by_search")
def test_a_larger_budget_does_not_search_again_near_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[int | None] = []
    under = Climb.under

    def counted(climb: Climb, cap_bytes: int | None) -> None:
        searched.append(cap_bytes)
        under(climb, cap_bytes)

    monkeypatch.setattr(Climb, "under", counted)
    problem = layered([Layer(ticks=(20_000, 30_000))] * 3)
    counts = []
    for budget in (20, 80):
        searched.clear()
        solve(problem, Caps(), SolveOptions(budget=budget))
        counts.append(len(searched))
    assert counts[0] == counts[1] > 0


def test_the_search_goes_on_around_the_best_order_of_tighter_caps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Buckets around a known order of the compute are searched under the next memory cap, too."""
    problems = [
        layered([Layer(ticks=ticks, on_path=True)] * 12, backward=True, ticks=(100, 1))
        for ticks in ((40, 60), (20, 90))
    ]
    caps, options = Caps(max_compute_move=None), SolveOptions(budget=1, time_slack=0.0)
    found = [solve(problem, caps, options).fastest_ticks for problem in problems]
    monkeypatch.setattr(Climb, "_around_known_order", lambda *_: None)
    without = [solve(problem, caps, options).fastest_ticks for problem in problems]
    assert all(ticks < 0.99 * other for ticks, other in zip(found, without, strict=True))
