"""``apsched period``: what one layer costs for all depths, and what memory buys it."""

import argparse
import json
from dataclasses import replace
from typing import TextIO

from rich.table import Table

from apsched.cli.choices import cost_choice, direction, search_choice, source_request
from apsched.load_source import LoadedGraph, loaded
from apsched.options import show_bytes, show_us
from apsched.pipeline import resolve_caps
from apsched.progress import Progress
from apsched.report import console
from apsched.solver.least_period import CurvePoint, PeriodCurve, period_curve
from apsched.units import ticks_to_us


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Print, for every graph, the least time in which its layer can repeat, and the least memory for that and longer times."""
    request, costs, wanted, choice = source_request(args), cost_choice(args), direction(args), search_choice(args)
    progress = Progress()
    with loaded(request, costs, wanted, progress) as source:
        curves = []
        for graph in source.graphs:
            caps = resolve_caps(graph, replace(choice.caps, max_compute_move=0), choice.memory_cap, progress, choice.options)
            with progress.stage(f"period {graph.problem.name}"):
                curves.append((graph, period_curve(graph.problem, caps, budget=choice.options.budget)))
    if args.json:
        graphs = [{"name": graph.problem.name, **_curve_json(curve)} for graph, curve in curves]
        print(json.dumps({"schema": 1, "source": args.source, "cluster": source.cluster, "period": graphs}), file=stdout)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("graph")
    for heading in ("time of a layer", "beyond compute", "memory", "proven least", "collectives of a layer"):
        table.add_column(heading, justify="right")
    for graph, curve in curves:
        for k, point in enumerate(curve.points if curve else ()):
            assert curve is not None
            table.add_row(graph.problem.name if k == 0 else "", *_cells(curve, point), end_section=point is curve.points[-1])
    out = console(stdout)
    if table.row_count:
        out.print(table)
        out.print()
    for graph, curve in curves:
        out.print(verdict(graph, curve), markup=False)


def verdict(graph: LoadedGraph, curve: PeriodCurve | None) -> str:
    """Return one line on what repeats, and what is proven of it."""
    name = graph.problem.name
    if curve is None:
        return f"{name}: no layer repeats three times or more"
    compute = show_us(ticks_to_us(curve.compute_ticks))
    text = f"{name}: {curve.period.count} layers of {curve.period.length} compute nodes, {compute} of compute each"
    bound = show_us(ticks_to_us(curve.least.bound_ticks))
    if curve.least.schedule is None:
        return f"{text}; no schedule of a layer was found within the caps (none is shorter than {bound}; try a larger --budget or cap)"
    if curve.least.schedule.period_ticks == curve.least.bound_ticks:
        return f"{text}; no schedule of a layer is shorter (head and tail of the graph come on top)"
    return f"{text}; a layer shorter than {bound} is impossible"


def _cells(curve: PeriodCurve, point: CurvePoint) -> list[str]:
    proven = "yes" if point.bound_bytes == point.peak_memory_bytes else f"> {show_bytes(point.bound_bytes)}"
    return [
        show_us(ticks_to_us(point.period_ticks)),
        show_us(ticks_to_us(point.period_ticks - curve.compute_ticks)),
        show_bytes(point.peak_memory_bytes),
        proven,
        str(point.num_launches),
    ]


def _curve_json(curve: PeriodCurve | None) -> dict[str, object]:
    if curve is None:
        return {"num_layers": 0}
    return {
        "num_layers": curve.period.count,
        "nodes_of_a_layer": curve.period.length,
        "compute_us": ticks_to_us(curve.compute_ticks),
        "period_bound_us": ticks_to_us(curve.least.bound_ticks),
        "deterministic_work": curve.least.deterministic_work,
        "points": [
            {
                "period_us": ticks_to_us(point.period_ticks),
                "peak_memory_bytes": point.peak_memory_bytes,
                "bound_bytes": point.bound_bytes,
                "num_launches": point.num_launches,
            }
            for point in curve.points
        ],
    }
