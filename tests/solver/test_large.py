"""Search, which large problems get, on middle-size ones: never worse than a baseline, never over a
cap, the same answer everywhere.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from apsched.config import SolveOptions
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.solver import solve
from apsched.solver.arrays.instance import Instance
from apsched.solver.bounds.best import fixed_order_bound
from tests.helpers.problems.strategies import layered_problem, random_caps
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


@pytest.fixture(scope="module")
def digests() -> list[str]:
    """What this process finds."""
    return digest_worker.digests()


@pytest.mark.parametrize(("hash_seed", "threads"), [("1", 1), ("2", 2)])
def test_the_same_answer_whatever_the_hash_seed_and_the_number_of_cores(
    hash_seed: str, threads: int, digests: list[str]
) -> None:
    """Of another process, to the byte: schedules, figures, bounds, and the work that was
    counted.
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
