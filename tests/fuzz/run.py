"""Try random FX graphs on two gloo processes until the time is up; print those that fail,
shortened, as programs.

usage: python tests/fuzz/run.py [--minutes 60] [--first-seed 0] [--solve-every 5]
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.helpers.processes import WORKERS, run_processes


def try_seeds(
    *, first_seed: int, num_seeds: int, solve_every: int, seconds: float, folder: Path
) -> dict:
    """Return what process rank 0 found: how many seeds it ``tried``, and ``failures``."""
    request = {
        "first_seed": first_seed,
        "num_seeds": num_seeds,
        "solve_every": solve_every,
        "seconds": seconds,
    }
    (folder / "request.json").write_text(json.dumps(request))
    found, other = run_processes(
        WORKERS / "graphs/fuzz_worker.py", folder, 2, timeout_s=seconds + 600
    )
    assert found == other, "process ranks found different things"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Try random FX graphs on two gloo processes until the time is up."
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--solve-every",
        type=int,
        default=5,
        help="solve every N-th graph; the others get random legal schedules",
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = try_seeds(
            first_seed=given.first_seed,
            num_seeds=10**9,
            solve_every=given.solve_every,
            seconds=60 * given.minutes,
            folder=Path(folder),
        )
    for failure in found["failures"]:
        how = "solved" if failure["solved"] else "in random order"
        print(f"seed {failure['seed']}, {how}: {failure['failure']}\n{failure['program']}\n")
    print(f"{found['tried']} graphs, {len(found['failures'])} failures")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
