"""The report of ``python -m benchmarks.execution``: the runs on each network, memory, the device,
the checks.
"""

from collections.abc import Mapping
from statistics import fmean, median, quantiles
from typing import Any

from apsched.schedule.result import AS_CAPTURED
from benchmarks.device.measure import markdown as device_markdown
from benchmarks.execution.steps.report import PARTS, inversions, slowdowns, steps_section


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report, of those parts that there are."""
    of_steps = "networks" not in report and not PARTS.keys().isdisjoint(report)
    lines = [f"# {'Whole steps' if of_steps else 'Schedules'} run for real", ""]
    for run in report.get("networks", {}).values():
        lines += [*_network(run), ""]
    for part in PARTS:
        for run in report.get(part, {}).values():
            lines += [*steps_section(run), ""]
    if "device" in report:
        skipped = report["device"].get("skipped")
        lines += [
            "## A GPU: memory, operators, launches",
            "",
            skipped or device_markdown(report["device"]),
            "",
        ]
    if "checks" in report:
        lines += ["## Tried", "", "| check | passed | says | seconds |", "|---|---|---|---:|"]
        for one in report["checks"]:
            lines.append(
                f"| {one['name']} | {'yes' if one['passed'] else '**no**'} | {one['says']} |"
                f" {one['seconds']:.0f} |"
            )
    return "\n".join(lines).rstrip()


def _network(run: Mapping[str, Any]) -> list[str]:
    request, found, ranks = run["request"], run["found"], run["processes"]
    rows = sorted(found["schedules"], key=lambda row: median(row["measured_us"]))
    best = min(median(row["measured_us"]) for row in rows if not row["name"].startswith("apsched"))
    wrong = inversions(rows)
    slows, slowed = (slowdowns(found[when]) for when in ("contention", "solved_with"))
    cores = [busy for row in rows for busy in row["others_cores"]]
    (captured_us,) = (median(row["measured_us"]) for row in rows if row["name"] == AS_CAPTURED)
    first_us, then_us = (
        median(found["captured_beside_profiler_us"][when]) for when in ("first", "in_rounds")
    )
    left_out = len(cores) - sum(len(row["measured_us"]) for row in rows)
    lines = [
        (
            f"## {run['megabits_per_s']:g} Mb/s, sequences of {request['seq_len']} tokens, {ranks}"
            " process ranks"
        ),
        "",
        (
            f"`llama3-small`, `fsdp={ranks}`, forward and backward, fp32: compute takes"
            f" {found['compute_us'] / 1e3:.0f} ms, collectives as captured"
            f" {found['transfer_us'] / 1e3:.0f} ms. Gloo processes of one thread in network"
            " namespaces, each group with one more for its collectives, each process on a core of"
            " its own while there are so many; freed memory stays with the process, and processors"
            f" {'do not' if found['awake'] else 'may'} sleep. {request['rounds']} rounds or more,"
            f" by turns. {run['machine']}. Other programs and virtual machines kept"
            f" {found['others_cores']:.2f} cores busy during calibration and {fmean(cores):.2f}"
            f" during the rounds; {left_out} of {len(cores)} steps, those that they disturbed, are"
            " left out. Schedules are solved with profiles of"
            f" {len(found['captured_beside_profiler_us']['first'])} steps as captured and predicted"
            f" with those of one in each round: beside the profiler they took {first_us / 1e3:.0f}"
            f" ms at first and {then_us / 1e3:.0f} ms in the rounds, where steps without it took"
            f" {captured_us / 1e3:.0f} ms. At first {slowed}, and in the rounds {slows}. The"
            " prediction without such a slowdown stands beside the prediction."
        ),
        "",
    ]
    if ranks > run["cores"]:
        lines += [
            (
                f"{ranks} process ranks share {run['cores']} cores: the compute of one slows the"
                " others, which no model here counts."
            ),
            "",
        ]
    lines += [
        (
            "| schedule | fits tight cap | measured, ms | quartiles, ms | to the best baseline |"
            " predicted, ms | off | neither slowed, ms | peak counted, MiB | predicted, MiB |"
        ),
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(_schedule(row, best) for row in rows),
        "",
        (
            "Pairs whose order by prediction is not that by measurement, though quartiles do not"
            f" overlap: {len(wrong)}."
        ),
    ]
    return [*lines, *(f"- {a} and {b}" for a, b in wrong)]


def _schedule(row: Mapping[str, Any], best_us: float) -> str:
    time_us = median(row["measured_us"])
    low, _, high = quantiles(row["measured_us"], n=4)
    predicted, alone = row["predicted_us"], row["predicted_alone_us"]
    counted, told = (
        max(graph[key] for graph in row["memory"]) / 2**20
        for key in ("counted_bytes", "predicted_bytes")
    )
    return (
        f"| {row['name']} | {'yes' if row['fits'][1] else 'no'} | {time_us / 1e3:.1f} |"
        f" {low / 1e3:.1f} to {high / 1e3:.1f} | {time_us / best_us:.3f} | {predicted / 1e3:.1f} |"
        f" {100 * (predicted / time_us - 1):+.1f} % | {alone / 1e3:.1f} | {counted:.2f} |"
        f" {told:.2f} |"
    )
