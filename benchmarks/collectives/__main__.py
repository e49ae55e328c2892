"""``python -m benchmarks.collectives``: the model of collectives and published measurements;
writes ``docs/collectives.md``.

The measurements stand in ``published.csv``, each with its source. Nothing is measured here.
"""

import csv
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median

from apsched.costs.clusters.cluster import load_cluster
from apsched.costs.network.alpha_beta import bus_factor, collective_us, group_shape
from apsched.quantities import show_bytes

HERE = Path(__file__).resolve().parent
PUBLISHED = HERE / "published.csv"
REPORT = HERE.parents[1] / "docs" / "collectives.md"
TRAINING_BYTES = 16 << 20
"""The smallest message that counts as a bucket of a training step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One published measurement beside the bandwidth that the model gives for it."""

    cluster: str
    kind: str
    num_ranks: int
    size_bytes: int
    published_gb_per_s: float
    modelled_gb_per_s: float
    source: str

    @property
    def error(self) -> float:
        """Error of the modelled time: above 0 where the model is too slow."""
        return self.published_gb_per_s / self.modelled_gb_per_s - 1


def comparisons() -> list[Comparison]:
    """Return every published measurement beside the model."""
    with PUBLISHED.open(newline="") as file:
        return [_compare(row) for row in csv.DictReader(file)]


def _compare(row: dict[str, str]) -> Comparison:
    cluster, size_bytes, num_ranks = (
        load_cluster(row["cluster"]),
        int(row["size_bytes"]),
        int(row["ranks"]),
    )
    time_us = collective_us(cluster, row["kind"], group_shape(cluster, num_ranks), size_bytes)
    return Comparison(
        cluster=row["cluster"],
        kind=row["kind"],
        num_ranks=num_ranks,
        size_bytes=size_bytes,
        published_gb_per_s=float(row["busbw_gb_per_s"]),
        modelled_gb_per_s=bus_factor(row["kind"], num_ranks) * size_bytes / time_us / 1e3,
        source=row["source"],
    )


def report(found: Sequence[Comparison]) -> str:
    """Return the document: a summary by number of ranks, and every figure."""
    in_training = [one for one in found if one.size_bytes >= TRAINING_BYTES]
    lines = [
        "# The model of collectives and published measurements",
        "",
        (
            "Written by `python -m benchmarks.collectives` from"
            " `benchmarks/collectives/published.csv`; a test keeps it up to date."
        ),
        (
            "Bus bandwidth as nccl-tests prints it, out of place. The error is that of the modelled"
            " time: +10 % is a model that is too slow"
        ),
        (
            "by a tenth. The clusters' own figures (`apsched clusters`) come partly from the same"
            " measurements: in a node the bandwidth of"
        ),
        (
            "large messages and the curve of an all-reduce in the switch, on EFA and TCPX the"
            " latency of a hop. Other sizes, numbers of nodes"
        ),
        (
            "and kinds follow from the formulas (`apsched/costs/network/alpha_beta.py`). Where two"
            " clusters of one make are listed they differ by up"
        ),
        (
            "to a quarter from each other: no formula can know that. Measure yours with nccl-tests"
            " and hand the output to `--collectives`."
        ),
        "",
        (
            f"Error of the time of messages of {show_bytes(TRAINING_BYTES)} and more, the sizes of"
            " buckets in a training step:"
        ),
        "",
        "| process ranks | measurements | median | median of the error's size | largest |",
        "|---:|---:|---:|---:|---:|",
    ]
    for num_ranks in sorted({one.num_ranks for one in in_training}):
        lines.append(
            _summary(
                f"{num_ranks}", [one.error for one in in_training if one.num_ranks == num_ranks]
            )
        )
    lines += [_summary("all", [one.error for one in in_training]), ""]
    for (cluster, kind), of_kind in groupby(
        sorted(found, key=_place), key=lambda one: (one.cluster, one.kind)
    ):
        lines += [
            f"## {cluster}, {kind}",
            "",
            "| process ranks | message | published, GB/s | model, GB/s | error of time | source |",
        ]
        lines += ["|---:|---:|---:|---:|---:|---|", *map(_row, of_kind), ""]
    return "\n".join(lines).rstrip() + "\n"


def _place(one: Comparison) -> tuple[str, str, int, str, int]:
    return one.cluster, one.kind, one.num_ranks, one.source, one.size_bytes


def _summary(name: str, errors: Iterable[float]) -> str:
    found = list(errors)
    largest = max(found, key=abs)
    return (
        f"| {name} | {len(found)} | {median(found):+.0%} | {median(map(abs, found)):.0%} |"
        f" {largest:+.0%} |"
    )


def _row(one: Comparison) -> str:
    return (
        f"| {one.num_ranks} | {show_bytes(one.size_bytes)} | {one.published_gb_per_s:.1f} |"
        f" {one.modelled_gb_per_s:.1f} | {one.error:+.0%} | {one.source} |"
    )


if __name__ == "__main__":
    REPORT.write_text(report(comparisons()))
    print(f"wrote {REPORT}", file=sys.stderr)
