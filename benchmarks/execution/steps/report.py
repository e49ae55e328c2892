"""The tables of whole steps in the report of ``python -m benchmarks.execution``."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean, median, quantiles
from typing import Any

from benchmarks.execution.machine.load import is_quiet

PARTS = {
    "keep": "Kept parameters",
    "micro_batches": "Two micro-batches",
    "accumulate": "Three micro-batches in a row",
}
"""Name of a part -> its title."""
_AXES = {"keep": "fsdp", "micro_batches": "tp", "accumulate": "fsdp"}
_HEADINGS = {
    "keep": ("kept", "parameters"),
    "micro_batches": ("micro-batches",),
    "accumulate": ("choice", "kept", "stay gathered", "reduced once"),
}
_COUNTS = {
    "keep": ("num_kept",),
    "micro_batches": (),
    "accumulate": ("num_kept", "num_held", "num_summed"),
}


def steps_section(run: Mapping[str, Any]) -> list[str]:
    """Return the lines on whole steps on one network."""
    request, found, ranks = run["request"], run["found"], run["processes"]
    part = request["part"]
    title = f"{PARTS[part]}, {run['megabits_per_s']:g} Mb/s, {request['seq_len']} tokens"
    rows = sorted(found["runs"], key=lambda row: median(row["measured_us"]))
    cores = [busy for row in rows for busy in row["others_cores"]]
    slows, rounds = slowdowns(found["contention"]), rows[0]["rounds_us"]
    headings = (
        *_HEADINGS[part],
        *("measured, ms", "quartiles, ms", "predicted, ms", "off", "neither slowed, ms"),
        *("peak counted, MiB", "predicted, MiB", f"bits of {found['runs'][0]['name']}"),
    )
    return [
        f"## {title}, {ranks} process ranks",
        "",
        (
            f"`llama3-small`, `{_AXES[part]}={ranks}`, forward and backward, fp32, gloo processes"
            f" of one thread on a core each, by turns, budget {request['budget']:g}."
            f" {run['machine']}. Other programs and virtual machines kept"
            f" {found['others_cores']:.2f} cores busy during calibration and {fmean(cores):.2f}"
            f" during the rounds; {sum(map(is_quiet, cores))} of {len(cores)} steps were"
            f" undisturbed. The {len(rows[0]['measured_us'])} least disturbed of {len(rounds)}"
            f" rounds are in the table. {slows[0].upper()}{slows[1:]}."
        ),
        "",
        f"| {' | '.join(headings)} |",
        f"|---|{'---:|' * (len(headings) - 1)}",
        *(_line(part, row) for row in rows),
        "",
        *_orders(rows),
    ]


def slowdowns(contention: Mapping[str, Any]) -> str:
    """Return a sentence on the mutual slowdown of compute and collectives."""
    f, g, h = (contention[f"{what}_slowdown"] for what in ("compute", "transfer", "latency"))
    return (
        f"compute beside a collective was slower by {f:.2f}, a collective beside compute by {g:.2f}"
        f" and its latency by {h:.2f}"
    )


def pairs_apart(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Any, Any]]:
    """Return the pairs of rows that differ by more than the noise, the faster one first: their
    quartiles do not overlap.
    """
    found = []
    for one, other in combinations(rows, 2):
        fast, slow = sorted((one, other), key=lambda row: median(row["measured_us"]))
        if quantiles(fast["measured_us"], n=4)[2] < quantiles(slow["measured_us"], n=4)[0]:
            found.append((fast, slow))
    return found


def inversions(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return pairs of schedules that were measured in another order than predicted, by more than
    the noise.
    """
    return [
        (fast["name"], slow["name"])
        for fast, slow in pairs_apart(rows)
        if fast["predicted_us"] > slow["predicted_us"]
    ]


def _line(part: str, row: Mapping[str, Any]) -> str:
    time_us = median(row["measured_us"])
    low, _, high = quantiles(row["measured_us"], n=4)
    predicted = row["predicted_us"]
    counted, told = (
        max(graph[key] for graph in row["memory"]) / 2**20
        for key in ("counted_bytes", "predicted_bytes")
    )
    cells = (
        *(row["name"], *(str(row[key]) for key in _COUNTS[part])),
        *(f"{time_us / 1e3:.1f}", f"{low / 1e3:.1f} to {high / 1e3:.1f}"),
        *(f"{predicted / 1e3:.1f}", f"{100 * (predicted / time_us - 1):+.1f} %"),
        f"{row['predicted_alone_us'] / 1e3:.1f}",
        *(f"{counted:.2f}", f"{told:.2f}", _bits(row)),
    )
    return f"| {' | '.join(cells)} |"


def _bits(row: Mapping[str, Any]) -> str:
    if row["same_bits"]:
        return "equal"
    return "close: sums in another order" if row.get("is_close") else "**differ**"


def _orders(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    apart, wrong = pairs_apart(rows), inversions(rows)
    by_prediction = sorted(rows, key=lambda row: row["predicted_us"])
    return [
        (
            f"{len(apart)} of {len(rows) * (len(rows) - 1) // 2} pairs have quartiles that do not"
            f" overlap; {len(wrong)} of them ran in another order than predicted."
        ),
        *(f"- {fast} and {slow}" for fast, slow in wrong),
        "",
        "In all rounds, disturbed ones too, the step that is faster by prediction was faster in:",
        "",
        *(_rounds_line(fast, slow) for fast, slow in combinations(by_prediction, 2)),
    ]


def _rounds_line(fast: Mapping[str, Any], slow: Mapping[str, Any]) -> str:
    ratios = [b / a for a, b in zip(fast["rounds_us"], slow["rounds_us"], strict=True)]
    return (
        f"- {fast['name']} before {slow['name']}: {sum(ratio > 1 for ratio in ratios)} of"
        f" {len(ratios)} rounds; median ratio {median(ratios):.3f}, predicted"
        f" {slow['predicted_us'] / fast['predicted_us']:.3f}"
    )
