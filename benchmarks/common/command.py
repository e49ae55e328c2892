"""The command of a benchmark: cases in processes of their own, a dated table, and the raw numbers
beside it.

The command keeps every finished case; ``--resume`` continues a run that was interrupted, or that
had a failed case. Exit status: 0 done (the table shows the misses), 1 a requirement of every run is
not met, 2 wrong use, 130 interrupted.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from apsched.atomic_files import write_atomic
from apsched.errors import ApschedError, InputError
from apsched.quantities import parse_count
from benchmarks.common.grid import Case
from benchmarks.common.processes import Asked, CaseProcesses
from benchmarks.common.records import RunRecord, load_run, save_run
from benchmarks.common.table import Report, markdown, print_run

_HERE = Path(__file__).resolve().parents[1]
_PACKAGES = ("torch", "ortools", "numba", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One question, and the cases that it is asked of."""

    name: str
    """``python -m benchmarks.NAME``"""
    about: str
    grid: tuple[Case, ...]
    smoke: tuple[Case, ...]
    caps: tuple[str, ...]
    """Memory caps to choose from; none for a benchmark of the gain of moving compute."""
    report: Report

    @property
    def notes(self) -> Path:
        """The file of notes about its numbers, written by hand."""
        return _HERE / ("notes.md" if self.caps else f"notes-{self.name}.md")


def main(benchmark: Benchmark, arguments: Sequence[str] | None = None) -> int:
    """Run ``benchmark``; returns the exit status."""
    args = _parser(benchmark).parse_args(arguments)
    try:
        return (
            _table_again(benchmark, Path(args.table))
            if args.table is not None
            else _run(benchmark, args)
        )
    except ApschedError as error:
        print(f"benchmarks.{benchmark.name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"benchmarks.{benchmark.name}: interrupted; finished results are kept (--resume"
            " goes on)",
            file=sys.stderr,
        )
        return 130


def _parser(benchmark: Benchmark) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark.name}",
        description=benchmark.about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cases",
        metavar="REGEX",
        default="",
        help="only cases whose name matches somewhere (names: --list)",
    )
    if benchmark.caps:
        every = ",".join(benchmark.caps)
        parser.add_argument(
            "--caps",
            metavar="NAMES",
            default=every,
            help=f"memory caps, separated by commas (default {every!r})",
        )
        parser.add_argument(
            "--torch-up-to", metavar="NODES", help="leave torch's schedulers out on larger graphs"
        )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="one tiny case, not the grid: a minute; writes nothing without --out",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="where the table and the numbers go (default benchmarks/results)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="take up the newest run in DIR: cases that finished are kept",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        default="7200",
        help="of one case (default 7200); its results by then are kept",
    )
    parser.add_argument(
        "--jobs", metavar="NUMBER", default="1", help="cases at the same time (default 1)"
    )
    parser.add_argument(
        "--table",
        metavar="FILE",
        help="make the table from the numbers of an earlier run, and run nothing",
    )
    parser.add_argument(
        "--list", action="store_true", help="print the names of the cases, and run nothing"
    )
    return parser


def _run(benchmark: Benchmark, args: argparse.Namespace) -> int:
    cases, caps = _chosen(benchmark, args)
    if args.list:
        print("\n".join(case.name for case in cases))
        return 0
    timeout_s = parse_count(args.timeout, "--timeout", least=1)
    num_jobs = parse_count(args.jobs, "--jobs", least=1)
    up_to = (
        parse_count(args.torch_up_to, "--torch-up-to")
        if benchmark.caps and args.torch_up_to is not None
        else None
    )
    with TemporaryDirectory() as scratch:
        folder = (
            Path(args.out)
            if args.out is not None
            else Path(scratch)
            if args.smoke
            else _HERE / "results"
        )
        folder.mkdir(parents=True, exist_ok=True)
        file, run = _begun(benchmark, folder, resume=args.resume)
        asked = Asked(
            caps=tuple(caps),
            torch_up_to_nodes=up_to,
            commit=_commit(),
            timeout_s=timeout_s,
            moves=not benchmark.caps,
        )
        run = _measure_all(benchmark, cases, file, run, asked, num_jobs)
        print_run(run, sys.stdout, benchmark.report)
        if not args.smoke or args.out is not None:
            print(f"{_write_table(benchmark, file, run)} and {file.name}")
    wrong = [
        verdict for verdict in benchmark.report.verdicts(run) if verdict.always and verdict.misses
    ]
    for verdict in wrong:
        print(
            f"benchmarks.{benchmark.name}: {verdict.figure} must be {verdict.must}:"
            f" {verdict.misses[0]}",
            file=sys.stderr,
        )
    return 1 if wrong else 0


def _chosen(benchmark: Benchmark, args: argparse.Namespace) -> tuple[list[Case], list[str]]:
    try:
        pattern = re.compile(args.cases)
    except re.error as error:
        raise InputError(
            f"--cases: expected a regular expression, found {args.cases!r} ({error})"
        ) from None
    every = benchmark.smoke if args.smoke else benchmark.grid
    cases = [case for case in every if pattern.search(case.name)]
    if not cases:
        raise InputError(
            f"--cases: expected a match among {'; '.join(case.name for case in every)};"
            f" {args.cases!r} matches none"
        )
    caps = [cap.strip() for cap in args.caps.split(",")] if benchmark.caps else []
    unknown = [cap for cap in caps if cap not in benchmark.caps]
    if unknown:
        raise InputError(
            f"--caps: expected names among {', '.join(benchmark.caps)}; found {unknown[0]!r}"
        )
    return cases, caps


def _begun(benchmark: Benchmark, folder: Path, *, resume: bool) -> tuple[Path, RunRecord]:
    """Return the file of numbers, and the run so far: a new one, or the newest in ``folder``."""
    today = date.today().isoformat()
    environment = {
        "cores": str(os.cpu_count()),
        "Python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
    }
    suffix = f"-{benchmark.name}.json"
    known = sorted(folder.glob(f"*{suffix}"))
    if resume and known:
        return known[-1], replace(load_run(known[-1]), environment=environment)
    return folder / f"{today}{suffix}", RunRecord(date=today, environment=environment)


def _measure_all(
    benchmark: Benchmark,
    cases: Sequence[Case],
    file: Path,
    run: RunRecord,
    asked: Asked,
    num_jobs: int,
) -> RunRecord:
    """Measure the cases that ``run`` does not have yet, and save after every case."""
    kept = {record.case for record in run.cases if record.finished}
    todo = [case for case in cases if case.name not in kept]
    if num_jobs > 1:
        todo.sort(
            key=lambda case: -case.weight
        )  # the longest first, so that it does not run alone at the end
    began, weights = time.perf_counter(), {case.name: case.weight for case in todo}
    with CaseProcesses(asked, num_jobs) as processes:
        for number, record in enumerate(processes.measure(todo), start=1):
            run = run.with_case(record)
            save_run(file, run)
            _write_table(benchmark, file, run)
            done = sum(
                weight for name, weight in weights.items() if name in {r.case for r in run.cases}
            )
            left_s = (time.perf_counter() - began) / done * (sum(weights.values()) - done)
            said = (
                f"did not finish: {record.message}"
                if not record.finished
                else f"took {record.wall_s / 60:.1f} minutes"
            )
            print(
                f"[{number}/{len(todo)}] {record.case} {said}; about {left_s / 60:.0f} minutes"
                " left",
                file=sys.stderr,
                flush=True,
            )
    order = {case.name: k for k, case in enumerate((*benchmark.grid, *benchmark.smoke))}
    run = replace(
        run, cases=tuple(sorted(run.cases, key=lambda record: order.get(record.case, len(order))))
    )
    save_run(file, run)
    return run


def _write_table(benchmark: Benchmark, file: Path, run: RunRecord) -> Path:
    path = file.with_suffix(".md")
    notes = benchmark.notes.read_text() if benchmark.notes.exists() else ""
    write_atomic(path, markdown(run, notes, benchmark.report).encode())
    return path


def _table_again(benchmark: Benchmark, file: Path) -> int:
    run = load_run(file)
    print_run(run, sys.stdout, benchmark.report)
    print(_write_table(benchmark, file, run))
    return 0


def _commit() -> str:
    """Return which state of the code this is; empty if unknown."""
    try:
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(
            command, cwd=_HERE, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
