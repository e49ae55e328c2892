"""The output of ``apsched calibrate``."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console

from apsched.calibrate.profile.predict import Prediction
from apsched.calibrate.profile.profile import Profile
from apsched.costs.measured import MeasuredCosts
from apsched.quantities import show_us
from apsched.report.console import console, plain_table, print_json

if TYPE_CHECKING:
    from apsched.calibrate.measure import Measured

_SHOWN = 8
_MUCH_IDLE = 0.05
"""A larger idle share of a step is worth a line."""


def print_profile(
    profile: Profile, prediction: Prediction, path: str, stdout: TextIO, *, as_json: bool
) -> None:
    """Print measured times next to those that the costs predict, and the nodes that do not
    match.
    """
    if as_json:
        print_json(stdout, **_profile_json(profile, prediction, path))
        return
    out = console(stdout)
    figures = ("measured", "predicted", "difference")
    table = plain_table("", *figures, right=figures)
    for what, measured, predicted in _rows(profile, prediction):
        table.add_row(
            what,
            show_us(measured),
            show_us(predicted),
            f"{100 * (predicted / measured - 1):+.1f} %" if measured else "",
        )
    out.print(table)
    out.print()
    out.print(
        f"{profile.num_matched} of {profile.num_nodes} nodes matched; costs are means over"
        f" {profile.num_used} of {profile.num_steps} steps, those in the middle half",
        markup=False,
    )
    if profile.costs.sizes:
        seen = ", ".join(f"{symbol} = {size:,}" for symbol, size in profile.costs.sizes.items())
        out.print(f"sizes that depend on data, medians over the steps: {seen}", markup=False)
    for text in _waits(profile):
        out.print(text, markup=False)
    if profile.other_collectives:
        counts = ", ".join(
            f"{in_step} {kind} of its sizes in a step of the trace, {in_graph} in the graph"
            for kind, in_step, in_graph in profile.other_collectives
        )
        out.print(
            f"the trace has other collectives than the graph ({counts}): the job runs another"
            " graph, or one with buckets. Check the model, the mesh and the sizes; capture the"
            " graph that the job runs (docs/files.md), and profile the job without a pass that"
            " makes buckets: backend='aot_eager' in place of apsched.backend(...)",
            markup=False,
        )
    if profile.unmatched:
        other = sum(entry.share for entry in profile.unmatched)
        lines = [f"{100 * entry.share:5.1f} %  {entry.name}" for entry in profile.unmatched]
        _print_list(out, f"not in the graph: {100 * other:.1f} % of a step", lines)
    if profile.missing:
        share = prediction.unpriced_us / prediction.compute_us if prediction.compute_us else 0.0
        _print_list(
            out,
            f"not in the trace, priced by the formulas of the cluster: {100 * share:.1f} % of the"
            " compute predicted",
            [f"{count:5d} x  {operation}" for operation, count in profile.missing],
        )
    _print_file(out, profile.costs, path)


def _waits(profile: Profile) -> list[str]:
    """Return lines on the time in which a rank waits for others, and the device for its host."""
    lines = []
    if profile.late_share is not None:
        share = 100 * profile.late_share
        lines.append(f"waiting for late process ranks: {share:.1f} % of the time of transfers")
    if profile.idle_us is not None and profile.idle_us > _MUCH_IDLE * profile.step_us:
        lines.append(
            f"the device is idle for {100 * profile.idle_us / profile.step_us:.1f} % of the"
            " measured step: the host launches too late, and such gaps are not in the prediction"
        )
    return lines


def _profile_json(profile: Profile, prediction: Prediction, path: str) -> dict[str, Any]:
    """Return the entry of a profile for ``--json``."""
    return {
        "file": path,
        "device": profile.costs.device,
        "steps": profile.num_steps,
        "steps_used": profile.num_used,
        "nodes": profile.num_nodes,
        "nodes_matched": profile.num_matched,
        "streams": {
            what: {"measured_us": measured, "predicted_us": predicted}
            for what, measured, predicted in _rows(profile, prediction)
        },
        "unmatched": [asdict(entry) for entry in profile.unmatched],
        "missing": [
            {"operation": operation, "nodes": count} for operation, count in profile.missing
        ],
        "missing_us": prediction.unpriced_us,
        "other_collectives": [
            {"kind": kind, "in_step": in_step, "in_graph": in_graph}
            for kind, in_step, in_graph in profile.other_collectives
        ],
        "late_share": profile.late_share,
        "idle_us": profile.idle_us,
        "sizes": dict(profile.costs.sizes),
    }


def print_measured(measured: "Measured", path: str, stdout: TextIO, *, as_json: bool) -> None:
    """Print the operations that ran here, the known ones, and those that cannot run."""
    groups = sorted({(t.kind, t.num_ranks, t.num_nodes) for t in measured.costs.transfers})
    if as_json:
        content = {
            "file": path,
            "device": measured.costs.device,
            "measured": measured.num_measured,
            "known": measured.num_known,
            "failed": dict(measured.failed),
            "transfers": [
                {"kind": kind, "ranks": ranks, "nodes": nodes} for kind, ranks, nodes in groups
            ],
        }
        print_json(stdout, **content)
        return
    out = console(stdout)
    known = f", {measured.num_known} known from before" if measured.num_known else ""
    out.print(f"{measured.num_measured} operations measured{known}", markup=False)
    if groups:
        measured_on = (f"{kind} on {ranks} ranks of {nodes} nodes" for kind, ranks, nodes in groups)
        out.print(f"collectives: {', '.join(measured_on)}", markup=False)
    else:
        out.print(
            "collectives: not measured, priced by the formulas of the cluster (run under torchrun"
            " with all process ranks)",
            markup=False,
        )
    if measured.failed:
        _print_list(
            out,
            "cannot run here, priced by the formulas:",
            [f"{name}: {why}" for name, why in _sorted(measured.failed)],
        )
    _print_file(out, measured.costs, path)


def _rows(profile: Profile, prediction: Prediction) -> list[tuple[str, float, float]]:
    """Return label, measured and predicted time, in microseconds."""
    groups = sorted({*profile.transfer_us, *prediction.transfer_us})
    return [
        ("step", profile.step_us, prediction.step_us),
        ("compute stream", profile.compute_us, prediction.compute_us),
        *(
            (
                f"stream of group {group}",
                profile.transfer_us.get(group, 0.0),
                prediction.transfer_us.get(group, 0.0),
            )
            for group in groups
        ),
    ]


def _sorted(failed: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted(failed.items())


def _print_list(out: Console, heading: str, lines: Sequence[str]) -> None:
    out.print(heading, markup=False)
    for line in lines[:_SHOWN]:
        out.print(f"  {line}", markup=False)
    if len(lines) > _SHOWN:
        out.print(f"  and {len(lines) - _SHOWN} more (--json has all)", markup=False)


def _print_file(out: Any, costs: MeasuredCosts, path: str) -> None:
    out.print(f"costs of {costs.device} in {path}; use them with --costs {path}", markup=False)
