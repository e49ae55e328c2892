"""Requirements on graphs that run for real, checked by the tests of this checkout: a long run,
faults, random graphs, files of any bytes.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[2]
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing tried."""

    name: str
    passed: bool
    says: str
    """The end of its output."""
    seconds: float


def checks(fuzz_minutes: float) -> Iterator[Check]:
    """Try all of them; random graphs for ``fuzz_minutes``."""
    long_run = "200 training steps on 4 processes, against eager FSDP2"
    faults = "a killed rank, a cut and a restored link, a slowed rank"
    minutes = ("--minutes", f"{fuzz_minutes:g}")
    yield _check(long_run, *_PYTEST, "tests/end_to_end/test_long_run.py")
    yield _check(faults, *_PYTEST, "tests/end_to_end/test_faults.py")
    yield _check(
        f"random FX graphs on 2 processes, {fuzz_minutes:g} minutes",
        sys.executable,
        "tests/fuzz/run.py",
        *minutes,
    )
    files = "files of any bytes, guided by coverage, 5000 for each reader"
    yield _check(files, sys.executable, "tests/fuzz/run_files.py", "--runs", "5000", num_lines=12)


def _check(name: str, *command: str, num_lines: int = 1) -> Check:
    begin = time.monotonic()
    ran = subprocess.run(command, cwd=_CHECKOUT, capture_output=True, text=True, check=False)
    lines = [
        line for line in (ran.stdout.strip() or ran.stderr.strip()).splitlines() if line.strip()
    ]
    says = (
        "; ".join(line.strip("= ").replace("|", "/") for line in lines[-num_lines:])
        or f"exit status {ran.returncode}"
    )
    return Check(name=name, passed=ran.returncode == 0, says=says, seconds=time.monotonic() - begin)
