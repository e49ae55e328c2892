"""``python -m benchmarks.solver``: how good the solver is, how fast, and whether it reaches what it must.

Writes a dated table, and the raw numbers beside it. Every case runs in a process of its own; what is finished is kept, and a run that
was interrupted, or had a case that failed, is taken up again by ``--resume``. Exit status: 0 done (what misses stands in the table),
1 something that must hold in every run does not, 2 wrong use, 130 interrupted.
"""

import argparse
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from apsched.errors import ApschedError, InputError
from apsched.files import write_atomic
from apsched.options import parse_count
from benchmarks.figures import verdicts
from benchmarks.grid import CAPS, GRID, SMOKE, Case
from benchmarks.processes import Asked, CaseProcesses
from benchmarks.records import RunRecord, load_run, save_run
from benchmarks.table import markdown, print_run

_HERE = Path(__file__).resolve().parent
_NOTES = _HERE / "notes.md"
_SUFFIX = "-solver.json"
_PACKAGES = ("torch", "ortools", "numba", "numpy")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    args = _parser().parse_args(arguments)
    try:
        return _table_again(Path(args.table)) if args.table is not None else _run(args)
    except ApschedError as error:
        print(f"benchmarks.solver: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("benchmarks.solver: interrupted; what is finished is kept (--resume goes on)", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.solver", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", metavar="REGEX", default="", help="only cases whose name matches somewhere (names: --list)")
    parser.add_argument(
        "--caps", metavar="NAMES", default=",".join(CAPS), help=f"memory caps, separated by commas (default {','.join(CAPS)!r})"
    )
    parser.add_argument("--smoke", action="store_true", help="one tiny case, not the grid: a minute; writes nothing without --out")
    parser.add_argument("--out", metavar="DIR", help="where the table and the numbers go (default benchmarks/results)")
    parser.add_argument("--resume", action="store_true", help="take up the newest run in DIR: cases that finished are kept")
    parser.add_argument("--torch-up-to", metavar="NODES", help="leave torch's schedulers out on larger graphs")
    parser.add_argument(
        "--timeout", metavar="SECONDS", default="7200", help="of one case (default 7200); what it has found by then is kept"
    )
    parser.add_argument("--jobs", metavar="NUMBER", default="1", help="cases at the same time (default 1)")
    parser.add_argument("--table", metavar="FILE", help="make the table from the numbers of an earlier run, and run nothing")
    parser.add_argument("--list", action="store_true", help="print the names of the cases, and run nothing")
    return parser


def _run(args: argparse.Namespace) -> int:
    cases, caps = _chosen(args)
    if args.list:
        print("\n".join(case.name for case in cases))
        return 0
    timeout_s = parse_count(args.timeout, "--timeout", least=1)
    num_jobs = parse_count(args.jobs, "--jobs", least=1)
    up_to = None if args.torch_up_to is None else parse_count(args.torch_up_to, "--torch-up-to")
    with TemporaryDirectory() as scratch:
        folder = Path(args.out) if args.out is not None else Path(scratch) if args.smoke else _HERE / "results"
        folder.mkdir(parents=True, exist_ok=True)
        file, run = _begun(folder, resume=args.resume)
        asked = Asked(caps=tuple(caps), torch_up_to_nodes=up_to, commit=_commit(), timeout_s=timeout_s)
        run = _measure_all(cases, file, run, asked, num_jobs)
        print_run(run, sys.stdout)
        if not args.smoke or args.out is not None:
            print(f"{_write_table(file, run)} and {file.name}")
    wrong = [verdict for verdict in verdicts(run) if verdict.always and verdict.misses]
    for verdict in wrong:
        print(f"benchmarks.solver: {verdict.figure} must be {verdict.must}: {verdict.misses[0]}", file=sys.stderr)
    return 1 if wrong else 0


def _chosen(args: argparse.Namespace) -> tuple[list[Case], list[str]]:
    try:
        pattern = re.compile(args.cases)
    except re.error as error:
        raise InputError(f"--cases: expected a regular expression, found {args.cases!r} ({error})") from None
    every = SMOKE if args.smoke else GRID
    cases = [case for case in every if pattern.search(case.name)]
    if not cases:
        raise InputError(f"--cases: expected a match among {'; '.join(case.name for case in every)}; {args.cases!r} matches none")
    caps = [cap.strip() for cap in args.caps.split(",")]
    unknown = [cap for cap in caps if cap not in CAPS]
    if unknown:
        raise InputError(f"--caps: expected names among {', '.join(CAPS)}; found {unknown[0]!r}")
    return cases, caps


def _begun(folder: Path, *, resume: bool) -> tuple[Path, RunRecord]:
    """Return the file of numbers, and the run so far: a new one, or the newest in ``folder``."""
    today = date.today().isoformat()
    environment = {
        "cores": str(os.cpu_count()),
        "Python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
    }
    known = sorted(folder.glob(f"*{_SUFFIX}"))
    if resume and known:
        return known[-1], replace(load_run(known[-1]), environment=environment)
    return folder / f"{today}{_SUFFIX}", RunRecord(date=today, environment=environment)


def _measure_all(cases: Sequence[Case], file: Path, run: RunRecord, asked: Asked, num_jobs: int) -> RunRecord:
    """Measure what ``run`` does not have yet, and save after every case."""
    kept = {record.case for record in run.cases if record.finished}
    todo = [case for case in cases if case.name not in kept]
    if num_jobs > 1:
        todo.sort(key=lambda case: -case.weight)  # the longest first, so that nobody waits for it in the end
    began, weights = time.perf_counter(), {case.name: case.weight for case in todo}
    with CaseProcesses(asked, num_jobs) as processes:
        for number, record in enumerate(processes.measure(todo), start=1):
            run = run.with_case(record)
            save_run(file, run)
            _write_table(file, run)
            done = sum(weight for name, weight in weights.items() if name in {r.case for r in run.cases})
            left_s = (time.perf_counter() - began) / done * (sum(weights.values()) - done)
            said = f"did not finish: {record.message}" if not record.finished else f"took {record.wall_s / 60:.1f} minutes"
            print(f"[{number}/{len(todo)}] {record.case} {said}; about {left_s / 60:.0f} minutes left", file=sys.stderr, flush=True)
    order = {case.name: k for k, case in enumerate((*GRID, *SMOKE))}
    run = replace(run, cases=tuple(sorted(run.cases, key=lambda record: order.get(record.case, len(order)))))
    save_run(file, run)
    return run


def _write_table(file: Path, run: RunRecord) -> Path:
    path = file.with_suffix(".md")
    notes = _NOTES.read_text() if _NOTES.exists() else ""
    write_atomic(path, markdown(run, notes).encode())
    return path


def _table_again(file: Path) -> int:
    run = load_run(file)
    print_run(run, sys.stdout)
    print(_write_table(file, run))
    return 0


def _commit() -> str:
    """Return which state of the code this is; empty where nobody knows."""
    try:
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(command, cwd=_HERE, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an interrupt, which ends the process of the case, too
    sys.exit(main())
