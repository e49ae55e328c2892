"""``python -m benchmarks.execution``: does what was predicted happen? Every schedule runs for real, on a network slow enough to matter.

Process ranks in network namespaces of their own (Linux, root; see ``slow_network``) run a small LLaMA, forward and backward, under each
schedule: as captured, the greedy baselines, torch's ``schedule_overlap_bucketing``, and apsched with and without a cap on memory. Costs
are measured on the same link first. Schedules run by turns; a table has medians, spread, what was predicted, and the peak of live bytes
as counted while running. Exit status: 0 done, 2 wrong use. Nothing else should run meanwhile.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from apsched.errors import ApschedError, InputError
from apsched.options import parse_count, parse_number
from benchmarks.slow_network import SlowNetwork

_WORKER = Path(__file__).with_name("execution_worker.py")
_RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.execution", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", metavar="NUMBERS", default="200,1000", help="Mb/s of each link, by commas (default 200,1000)")
    parser.add_argument("--processes", metavar="NUMBER", default="2", help="process ranks (default 2)")
    parser.add_argument("--seq", metavar="NUMBER", default="512", help="sequence length (default 512)")
    parser.add_argument("--rounds", metavar="NUMBER", default="24", help="timed steps of each schedule (default 24)")
    parser.add_argument("--budget", metavar="WORK", default="4", help="of the solver (default 4)")
    parser.add_argument("--timeout", metavar="SECONDS", default="1500", help="of one rate (default 1500)")
    parser.add_argument("-o", "--out", metavar="DIR", default=str(_RESULTS), help="where the table and the numbers go")
    args = parser.parse_args(arguments)
    try:
        request = {
            "seq_len": parse_count(args.seq, "--seq", least=8),
            "rounds": parse_count(args.rounds, "--rounds", least=2),
            "profiled_steps": 16,
            "budget": parse_number(args.budget, "--budget"),
        }
        num_ranks, timeout_s = parse_count(args.processes, "--processes", least=2), parse_count(args.timeout, "--timeout", least=1)
        rates = [parse_number(part, "--rates") for part in args.rates.split(",")]
        reports = {rate: run_job(num_ranks, rate, request, timeout_s=timeout_s) for rate in rates}
    except ApschedError as error:
        print(f"benchmarks.execution: error: {error}", file=sys.stderr)
        return 2
    text = markdown(reports, num_ranks, request)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    stem = f"{datetime.now(UTC):%Y-%m-%d}-execution"
    (out / f"{stem}.md").write_text(text + "\n")
    (out / f"{stem}.json").write_text(json.dumps({"request": request, "processes": num_ranks, "rates": reports}, indent=1) + "\n")
    print(text)
    return 0


def run_job(num_ranks: int, megabits_per_s: float, request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """Return what process rank 0 of a job on a slow network found; InputError, with its log, where one fails or takes too long."""
    paths = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with TemporaryDirectory() as name, SlowNetwork(num_ranks, megabits_per_s) as network:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(dict(request)))
        logs = [folder / f"{rank}.log" for rank in range(num_ranks)]
        processes = []
        try:
            for rank, log in enumerate(logs):
                command = [sys.executable, str(_WORKER), str(rank), str(num_ranks), str(folder)]
                with log.open("w") as written:
                    processes.append(network.popen(rank, command, log=written, environment=environment))
            codes = [process.wait(timeout=timeout_s) for process in processes]
        except subprocess.TimeoutExpired:
            codes = [1]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise InputError(f"a job of {num_ranks} process ranks at {megabits_per_s:g} Mb/s failed: {logs[0].read_text()[-1500:]}")
        report: dict[str, Any] = json.loads((folder / "0.json").read_text())
    return report


def markdown(reports: Mapping[float, Mapping[str, Any]], num_ranks: int, request: Mapping[str, Any]) -> str:
    """Return the tables."""
    lines = [
        "# Schedules run for real, on a slow network",
        "",
        f"`llama3-small`, sequences of {request['seq_len']} tokens, `fsdp={num_ranks}`, forward and backward, fp32; {num_ranks} gloo "
        f"processes of one thread in network namespaces; {request['rounds']} rounds, by turns. {platform.machine()}, {os.cpu_count()} "
        f"cores, torch {version('torch')}, load average at the end {os.getloadavg()[0]:.1f}, {datetime.now(UTC):%Y-%m-%d}.",
    ]
    for rate, report in reports.items():
        rows = sorted(report["schedules"], key=lambda row: median(row["measured_us"]))
        best = min(median(row["measured_us"]) for row in rows if not row["name"].startswith("apsched"))
        lines += [
            "",
            f"## {rate:g} Mb/s; compute beside a collective is slower by {report['slowdown']:.3f}",
            "",
            "| schedule | fits tight cap | measured, ms | quartiles, ms | to the best baseline | predicted, ms | off | contended, ms | off "
            "| peak counted, MiB | predicted, MiB |",
            "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for row in rows:
            time_us = median(row["measured_us"])
            low, _, high = quantiles(row["measured_us"], n=4)
            plain, contended = row["predicted_us"], row["predicted_contended_us"]
            counted, told = (max(graph[key] for graph in row["memory"]) / 2**20 for key in ("counted_bytes", "predicted_bytes"))
            lines.append(
                f"| {row['name']} | {'yes' if row['fits'][1] else 'no'} | {time_us / 1e3:.1f} | {low / 1e3:.1f} to {high / 1e3:.1f} "
                f"| {time_us / best:.3f} | {plain / 1e3:.1f} | {100 * (plain / time_us - 1):+.1f} % "
                f"| {contended / 1e3:.1f} | {100 * (contended / time_us - 1):+.1f} % | {counted:.2f} | {told:.2f} |"
            )
        wrong = inversions(rows)
        lines += ["", f"Pairs whose order by prediction is not that by measurement, though quartiles do not overlap: {len(wrong)}."]
        lines += [f"- {a} and {b}" for a, b in wrong]
    return "\n".join(lines)


def inversions(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return pairs of schedules that were measured in another order than predicted, by more than the noise."""
    found = []
    for one, other in combinations(rows, 2):
        fast, slow = sorted((one, other), key=lambda row: median(row["measured_us"]))
        apart = quantiles(fast["measured_us"], n=4)[2] < quantiles(slow["measured_us"], n=4)[0]
        if apart and fast["predicted_contended_us"] > slow["predicted_contended_us"]:
            found.append((fast["name"], slow["name"]))
    return found


if __name__ == "__main__":
    sys.exit(main())
