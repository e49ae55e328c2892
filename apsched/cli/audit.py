"""``apsched audit``: how good is the order that a graph has now, whoever made it?"""

import argparse
import json
from dataclasses import asdict
from typing import TextIO

from apsched.cli.choices import cost_choice, direction, search_choice, source_request
from apsched.graph_result import Result
from apsched.pipeline import loaded, resolve_caps, solve_graph
from apsched.progress import Progress
from apsched.report import console, graph_json, print_table
from apsched.result import Scored
from apsched.units import ticks_to_us
from apsched.what_if_chunked import line, what_if_chunked

AS_CAPTURED = "as_captured"


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Score the captured order of every graph against the bound that the solver proves."""
    request, costs, wanted, choice = source_request(args), cost_choice(args), direction(args), search_choice(args)
    progress = Progress()
    with loaded(request, costs, wanted, progress) as source:
        results = [
            solve_graph(graph, resolve_caps(graph, choice.caps, choice.memory_cap, progress, choice.options), choice.options, progress)
            for graph in source.graphs
        ]
        asked = zip(source.graphs, results, strict=True) if args.what_if_chunked else ()
        chunked = [what_if_chunked(graph.dag, graph.problem, result.caps) for graph, result in asked]
    if args.json:
        graphs = [{**_captured_json(result), "graph": graph_json(result)} for result in results]
        for graph, found in zip(graphs, chunked, strict=False):
            graph["what_if_chunked"] = asdict(found)
        print(json.dumps({"schema": 1, "source": args.source, "cluster": source.cluster, "audit": graphs}), file=stdout)
        return
    print_table(results, stdout, rows=[(as_captured(result),) for result in results])
    out = console(stdout)
    out.print()
    for result in results:
        out.print(verdict(result), markup=False)
    for result, found in zip(results, chunked, strict=False):
        out.print(line(result.problem.name, found), markup=False)


def as_captured(result: Result) -> Scored:
    """Return the score of the order that the graph has."""
    return next(scored for scored in result.answer.baselines if scored.name == AS_CAPTURED)


def above_bound(result: Result) -> float:
    """Return how far the captured order is above the bound, as a share of the bound."""
    return as_captured(result).step_time_ticks / result.answer.bound_ticks - 1 if result.answer.bound_ticks else 0.0


def verdict(result: Result) -> str:
    """Return one line on how far the captured order is above the bound, and what is known to be possible."""
    now = as_captured(result)
    text = f"{result.problem.name}: as captured {100 * above_bound(result):.2f} % above the bound"
    if result.best is not None:
        gain = 100 * (1 - result.best.step_time_ticks / now.step_time_ticks) if now.step_time_ticks else 0.0
        text += f"; a schedule {gain:.2f} % shorter is known (`apsched solve`)"
    return text if now.fits else f"{text}; it breaks a cap: {now.violations[0]}"


def _captured_json(result: Result) -> dict[str, object]:
    now = as_captured(result)
    return {
        "name": result.problem.name,
        "step_time_us": ticks_to_us(now.step_time_ticks),
        "bound_us": result.bound_us,
        "above_bound": above_bound(result),
        "exposed_us": ticks_to_us(now.exposed_ticks),
        "peak_memory_bytes": now.peak_memory_bytes,
        "num_launches": now.num_launches,
        "fits": now.fits,
    }
