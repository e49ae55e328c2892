"""A study as one flat table: CSV, or Parquet where ``pyarrow`` is (extra ``apsched[parquet]``)."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apsched.atomic_files import write_atomic
from apsched.errors import InputError
from apsched.study.rows import Point

_FIGURES = ("exposed_us", "compute_us", "fastest_us", "peak_bound_bytes", "launches_bound")
_CHOSEN = ("bucket_bytes", "topo_span", "prefetch", "in_flight_bytes", "compute_move")


def flat(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return a row for each point; all rows have the same columns: options, figures, chosen values,
    every baseline's step time.
    """
    baselines = list(
        dict.fromkeys(name for point in points for name in point.outcome.report["baselines"])
    )
    keeps = any("keep" in point.described for point in points)
    options = dict.fromkeys(name for point in points for name in point.described)
    rows = []
    for point in points:
        outcome, report = point.outcome, point.outcome.report
        chosen = report["chosen"] or {}
        rows.append(
            {
                "point_id": point.point_id,
                "graph": point.graph.name,
                "graph_hash": point.graph.graph_hash,
                "cluster_of_costs": point.graph.cluster,
                **{name: _plain(point.described.get(name)) for name in options},
                "memory_cap": point.memory_cap,
                "memory_cap_bytes": outcome.memory_cap_bytes,
                "status": outcome.status,
                "how": outcome.how,
                "schedule_from": point.schedule_from,
                "step_time_us": point.step_time_us,
                "bound_us": point.bound_us,
                "bound_source": outcome.bound_source,
                "gap": point.gap,
                "peak_memory_bytes": outcome.peak_memory_bytes,
                "floor_memory_bytes": outcome.floor_memory_bytes,
                **({"kept_bytes": point.graph.in_step.kept_bytes} if keeps else {}),
                "num_launches": outcome.num_launches,
                **{name: report[name] for name in _FIGURES},
                **{f"chosen_{name}": chosen.get(name) for name in _CHOSEN},
                **{f"{name}_us": _fitting(report["baselines"].get(name)) for name in baselines},
                "seconds": outcome.seconds,
                "schedule": point.schedule,
            }
        )
    return rows


def write_table(points: Sequence[Point], path: Path) -> None:
    """Write ``points`` to ``path``, by its suffix: .csv or .parquet."""
    rows = flat(points)
    if not rows:
        raise InputError(f"{path}: the study has no answers yet")
    match path.suffix:
        case ".csv":
            text = io.StringIO()
            writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            write_atomic(path, text.getvalue().encode())
        case ".parquet":
            write_atomic(path, _parquet(rows))
        case _:
            raise InputError(f"{path}: expected a name that ends in .csv or .parquet")


def _parquet(rows: Sequence[dict[str, Any]]) -> bytes:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(
            "Parquet files need pyarrow: install apsched[parquet], or write .csv"
        ) from None
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), sink)
    return bytes(sink.getvalue().to_pybytes())


def _plain(value: Any) -> Any:
    """Return a list as text; numbers that may be ``none`` stay numbers or nothing."""
    return json.dumps(value) if isinstance(value, list) else value


def _fitting(score: dict[str, Any] | None) -> float | None:
    """Return the step time of a baseline that fits."""
    return score["step_time_us"] if score and score["fits"] else None
