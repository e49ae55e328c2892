"""``python -m benchmarks.execution``: schedules that run, beside their predictions. One report, in
parts.

``network``: process ranks in network namespaces of their own (Linux, root; see ``slow_network``)
run a small LLaMA, forward and backward, under each schedule: as captured, the greedy baselines,
torch's ``schedule_overlap_bucketing``, and apsched with and without a cap on memory. Compute binds
long sequences on a fast link, the network all others. Costs are measured on the same link first.
Schedules run by turns; a table has medians, spread, predicted times, and the peak of live bytes as
counted while running. Nothing else should run meanwhile: the report gives the cores that other
programs kept busy. ``keep``: the same step with choices of kept parameters. ``micro_batches``: a
step of two micro-batches under tensor parallelism. ``accumulate``: three micro-batches in a row
that share parameters and reductions. ``device``: memory and operators on a GPU (``python -m
benchmarks.device``); skipped, with a line, where there is none. ``checks``: a long run against
eager FSDP2, faults, random graphs, files of any bytes.

A part that is made again replaces its own in the report of the day. Exit status: 0 done, 1 a check
failed, 2 wrong use.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from apsched.errors import ApschedError, InputError
from apsched.quantities import parse_count, parse_number
from benchmarks.execution.checks import checks
from benchmarks.execution.job import run_job
from benchmarks.execution.report import markdown
from benchmarks.execution.steps.report import PARTS

_RESULTS = Path(__file__).resolve().parents[1] / "results"
_ON_NETWORKS = {"network": "networks", **{part: part for part in PARTS}}
"""Parts that run on networks -> key of their figures in the report."""
_PARTS = (*_ON_NETWORKS, "device", "checks")
_SMOKE = {"rates": "2000", "seq": "32", "rounds": "2", "once": True}
_SMOKE_SIZES = {
    "network": {"num_layers": 2, "budget": 0.0},
    "keep": {"num_layers": 2, "budget": 0.05},
    "micro_batches": {"num_layers": 1, "budget": 0.0},
    "accumulate": {"num_layers": 1, "budget": 0.0},
}
"""Part -> size of its case: the least processor time. Choices of kept parameters need a search that
tells them apart, and graphs of one layer are small enough for CP-SAT, which uses any budget up.
"""
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    args = _parser().parse_args(arguments)
    if args.smoke:
        vars(args).update(_SMOKE)
    numbers = _numbers(args)
    try:
        report: dict[str, Any] = {}
        if numbers is not None and numbers.is_file():
            report = json.loads(numbers.read_text())
        parts = _parts(args)
        for part in (part for part in parts if part in _ON_NETWORKS):
            for network in _networks(args, part):
                report.setdefault(_ON_NETWORKS[part], {}).update(network)
                _keep(report, numbers)
        if "device" in parts:
            report["device"] = _device()
        if "checks" in parts:
            report["checks"] = [
                asdict(one) for one in checks(parse_number(args.fuzz_minutes, "--fuzz-minutes"))
            ]
    except ApschedError as error:
        print(f"benchmarks.execution: error: {error}", file=sys.stderr)
        return 2
    print(_keep(report, numbers))
    return 0 if all(one["passed"] for one in report.get("checks", [])) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.execution",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--parts",
        metavar="NAMES",
        help=f"by commas (default {','.join(_PARTS)})",
    )
    parser.add_argument(
        "--rates",
        metavar="NUMBERS",
        default="200,1000",
        help="Mb/s of each link, by commas (default 200,1000)",
    )
    parser.add_argument(
        "--processes", metavar="NUMBER", default="2", help="process ranks (default 2)"
    )
    parser.add_argument(
        "--seq",
        metavar="NUMBERS",
        default="512,2048",
        help="sequence lengths, by commas (default 512,2048)",
    )
    parser.add_argument(
        "--rounds", metavar="NUMBER", default="24", help="timed steps of each schedule (default 24)"
    )
    parser.add_argument("--budget", metavar="WORK", default="4", help="of the solver (default 4)")
    parser.add_argument(
        "--timeout", metavar="SECONDS", default="3600", help="of one rate and length (default 3600)"
    )
    parser.add_argument(
        "--fuzz-minutes", metavar="NUMBER", default="5", help="of random graphs (default 5)"
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="whole steps of small size, each measured once, about a minute; nothing is written"
        " without --out",
    )
    parser.set_defaults(once=False)  # whether what others disturb is measured once, too
    parser.add_argument(
        "-o",
        "--out",
        metavar="DIR",
        help="where the table and the numbers go (default benchmarks/results)",
    )
    return parser


def _parts(args: argparse.Namespace) -> list[str]:
    """Return the parts of the report to make."""
    if args.parts is None:
        return list(PARTS if args.smoke else _PARTS)
    parts: list[str] = args.parts.split(",")
    if not set(parts) <= set(_PARTS):
        raise InputError(f"--parts: expected some of {', '.join(_PARTS)}, found {args.parts!r}")
    return parts


def _numbers(args: argparse.Namespace) -> Path | None:
    """Return the file of the numbers; ``None`` where none is written."""
    if args.smoke and args.out is None:
        return None
    return Path(args.out or _RESULTS) / f"{datetime.now(UTC):%Y-%m-%d}-execution.json"


def _keep(report: dict[str, Any], numbers: Path | None) -> str:
    """Write the report so far, and return its text."""
    text = markdown(report)
    if numbers is None:
        return text
    numbers.parent.mkdir(parents=True, exist_ok=True)
    numbers.write_text(json.dumps(report, indent=1) + "\n")
    numbers.with_suffix(".md").write_text(text + "\n")
    return text


def _networks(args: argparse.Namespace, part: str) -> Iterator[dict[str, Any]]:
    """Yield each network's figures as soon as they are there: an hour of measuring does not end
    with the last one's timeout.
    """
    rounds = parse_count(args.rounds, "--rounds", least=2)
    same: dict[str, Any] = {
        "rounds": rounds,
        "profiled_steps": rounds,
        "budget": parse_number(args.budget, "--budget"),
        "num_layers": None,
        "once": args.once,
    }
    if args.smoke:
        same |= _SMOKE_SIZES[part]
    if part in PARTS:
        same["part"] = part
    processes, timeout_s = (
        parse_count(args.processes, "--processes", least=2),
        parse_count(args.timeout, "--timeout", least=1),
    )
    rates = [parse_number(part, "--rates") for part in args.rates.split(",")]
    requests = [
        {"seq_len": parse_count(part, "--seq", least=8), **same} for part in args.seq.split(",")
    ]
    for rate, request in product(rates, requests):
        yield {
            f"{processes} x {rate:g} Mb/s, {request['seq_len']} tokens": {
                "processes": processes,
                "megabits_per_s": rate,
                "request": request,
                "found": run_job(processes, rate, request, timeout_s=timeout_s),
                "cores": os.cpu_count(),
                "machine": _machine(),
            }
        }


def _machine() -> str:
    congestion = f", TCP {_CONGESTION.read_text().strip()}" if _CONGESTION.is_file() else ""
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
        f" {platform.release().split('-')[0]}{congestion}, Python {platform.python_version()},"
        f" torch {version('torch')}, {datetime.now(UTC):%Y-%m-%d}"
    )


def _device() -> dict[str, Any]:
    """Return the report of ``benchmarks.device`` from a process of its own, so that the GPU holds
    no earlier data of this one.
    """
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.device", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode not in (0, 1):
        raise InputError(f"benchmarks.device failed: {ran.stderr.strip()[-1500:]}")
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
