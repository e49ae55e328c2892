"""``apsched calibrate``: costs from a profile of a job, or from the device at hand, as a file for ``--costs``."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table

from apsched.calibrate.predict import Prediction, predicted
from apsched.calibrate.profile import Profile, profile_costs
from apsched.calibrate.trace import load_trace
from apsched.cli.choices import direction, source_request
from apsched.cost_choice import CostChoice
from apsched.costs.cluster import load_cluster
from apsched.costs.measured_file import dump_costs
from apsched.errors import InputError
from apsched.files import write_atomic
from apsched.options import show_us
from apsched.out_files import check_writable
from apsched.pipeline import loaded
from apsched.progress import Progress
from apsched.report import console

_SHOWN = 8


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Write the costs and say how well they tell what they were made of."""
    path = Path(args.out)
    if path.is_dir() or path.name in ("", ".", ".."):
        raise InputError(f"-o: expected the name of a file such as costs.toml; found {args.out!r}")
    if bool(args.trace) == args.measure:
        raise InputError("expected --trace FILE (a profile of a job) or --measure (this device), and not both")
    request, wanted = source_request(args), direction(args)
    check_writable(path.parent)
    progress = Progress()
    with loaded(request, CostChoice(cluster=args.cluster), wanted, progress) as source:
        dags = [graph.dag for graph in source.graphs]
        name = args.cluster or source.cluster
        cluster = load_cluster(name)
        with progress.stage("profile"):
            profile = profile_costs(dags, [load_trace(trace) for trace in args.trace], cluster, name)
            prediction = predicted(dags, profile.costs, cluster)
    write_atomic(path, dump_costs(profile.costs))
    if args.json:
        print(json.dumps(_json(profile, prediction, str(path))), file=stdout)
    else:
        _print(profile, prediction, str(path), stdout)


def _rows(profile: Profile, prediction: Prediction) -> list[tuple[str, float, float]]:
    """Return what, measured and predicted, in microseconds."""
    groups = sorted({*profile.transfer_us, *prediction.transfer_us})
    return [
        ("step", profile.step_us, prediction.step_us),
        ("compute stream", profile.compute_us, prediction.compute_us),
        *((f"stream of group {group}", profile.transfer_us.get(group, 0.0), prediction.transfer_us.get(group, 0.0)) for group in groups),
    ]


def _json(profile: Profile, prediction: Prediction, path: str) -> dict[str, Any]:
    return {
        "schema": 1,
        "file": path,
        "device": profile.costs.device,
        "steps": profile.num_steps,
        "steps_used": profile.num_used,
        "nodes": profile.num_nodes,
        "nodes_matched": profile.num_matched,
        "streams": {what: {"measured_us": measured, "predicted_us": said} for what, measured, said in _rows(profile, prediction)},
        "unmatched": [asdict(entry) for entry in profile.unmatched],
        "missing": [{"operation": operation, "nodes": count} for operation, count in profile.missing],
        "missing_us": prediction.unpriced_us,
    }


def _print(profile: Profile, prediction: Prediction, path: str, stdout: TextIO) -> None:
    out = console(stdout)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for heading in ("measured", "predicted", "difference"):
        table.add_column(heading, justify="right")
    for what, measured, said in _rows(profile, prediction):
        table.add_row(what, show_us(measured), show_us(said), f"{100 * (said / measured - 1):+.1f} %" if measured else "")
    out.print(table)
    out.print()
    out.print(
        f"{profile.num_matched} of {profile.num_nodes} nodes matched; "
        f"costs are means over {profile.num_used} of {profile.num_steps} steps, those in the middle half",
        markup=False,
    )
    other = sum(entry.share for entry in profile.unmatched)
    if profile.unmatched:
        out.print(f"not in the graph: {100 * other:.1f} % of a step", markup=False)
        for entry in profile.unmatched[:_SHOWN]:
            out.print(f"  {100 * entry.share:5.1f} %  {entry.name}", markup=False)
        _print_more(out, len(profile.unmatched))
    if profile.missing:
        share = prediction.unpriced_us / prediction.compute_us if prediction.compute_us else 0.0
        out.print(f"not in the trace, priced by the formulas of the cluster: {100 * share:.1f} % of the compute predicted", markup=False)
        for operation, count in profile.missing[:_SHOWN]:
            out.print(f"  {count:5d} x  {operation}", markup=False)
        _print_more(out, len(profile.missing))
    out.print(f"costs of {profile.costs.device} in {path}; use them with --costs {path}", markup=False)


def _print_more(out: Any, count: int) -> None:
    if count > _SHOWN:
        out.print(f"  and {count - _SHOWN} more (--json has all)", markup=False)
