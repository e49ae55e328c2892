"""A run as one HTML file that needs nothing else: no network, no torch, no library.

The pictures are drawn by scripts of our own on canvas, not by a plotting library. A step of LLaMA-3
8B has eight thousand bars in two orders and two directions: canvas draws the bars in view in
milliseconds at every move, while one element (or one trace) for each bar would be slow; Plotly's
smallest bundle is a megabyte, has neither timelines nor patterns on canvas, and would have to be
vendored and kept up to date. The parts that we need (bars, one axis that zooms, a tooltip) take a
few hundred lines, under the licence of the rest.
"""

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from apsched.artifacts.solved_run import OTHER_SHAPE, SolvedGraph, SolvedRun, other_answers
from apsched.pipeline.sources import DEFAULT_MESH, DEFAULT_SEQ_LEN
from apsched.report.page import kept, micro_batches, sections
from apsched.report.page.apply import how_to_apply
from apsched.report.page.columns import packed, page_data
from apsched.report.page.frontier import (
    Frontier,
    RunPoint,
    frontier_data,
    frontier_tables,
    graph_names,
    one_point_text,
    point_of,
)
from apsched.report.page.kept import joint_section, kept_section
from apsched.report.page.micro_batches import micro_batches_section

_SCRIPTS = ("view.js", "timeline.js", "memory.js", "frontier.js", "page.js")
_NO_NETWORK = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
)
_TOOLS = (
    ("in", "+", "zoom in"),
    ("out", "&minus;", "zoom out"),
    ("left", "&larr;", "to the left"),
    ("right", "&rarr;", "to the right"),
    ("reset", "all", "show all"),
)
_HINTS = {
    "timeline": "Ctrl+wheel, pinch or double click zooms, dragging moves; keys + - 0 and arrows",
    "memory": "click: the live tensors there",
    "frontier": "click a point: the baselines there",
}
_NO_STUDY = (
    "Only the point of this run is known. <code>apsched study</code> with the options of this run,"
    " <code>--keep</code> with its <code>kept.txt</code> (if there is one) and <code>--vary"
    " memory_cap=floor..none:20 -o STUDY</code> finds the frontier, and <code>apsched report</code>"
    " with <code>--study STUDY</code> shows it here."
)


def report_page(run: SolvedRun, frontiers: Sequence[Frontier] = (), heading: str = "") -> bytes:
    """Return the report of ``run`` with ``frontiers`` of its graphs; the same files give the same
    bytes.

    With ``heading`` it is the report of a study: the frontiers first, then graphs in detail, none
    of which is "this run".
    """
    of_study = heading not in ("", run.source)
    heading = heading if of_study else run_title(run)
    ids = section_ids(run.graphs)
    run_points = (
        () if frontiers and of_study else tuple(run_point(graph, frontiers) for graph in run.graphs)
    )
    graphs = "\n".join(_graph_section(graph, g, ids[g]) for g, graph in enumerate(run.graphs))
    frontier = _frontier_section(frontiers, run_points)
    first, then = (graphs, frontier) if run_points else (frontier, graphs)
    step, of_step = _step_sections(run)
    anchors = [*zip(ids, (_title(graph) for graph in run.graphs), strict=True)]
    anchors = (
        [*anchors, ("frontier", "frontier")] if run_points else [("frontier", "frontier"), *anchors]
    )
    links = "".join(
        f'<a href="#{escape(anchor)}">{escape(title)}</a>' for anchor, title in of_step + anchors
    )
    versions = ", ".join(
        f"{name} {version}"
        for name, version in (run.graphs[0].versions if run.graphs else {}).items()
        if version
    )
    data = packed({**page_data(run), "frontiers": frontier_data(frontiers, run_points)})
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_NO_NETWORK}">
<title>{escape(f"apsched: {heading}")}</title>
<style>
{_resource("page.css")}</style>
</head>
<body>
<header><h1>{escape(heading)}</h1>
<span class="soft">on cluster {escape(run.cluster or "of your own")}; {escape(versions)}</span>
<nav aria-label="sections">{links}<a href="#apply">apply</a>
<button id="theme" type="button" aria-label="change between light and dark">Dark</button></nav>
</header>
<main>
<p id="trouble" role="alert" hidden></p>
<noscript><p>The pictures need JavaScript; the tables are complete without it.</p></noscript>
{step}
{first}
{then}
<section id="apply"><h2>How to apply it</h2>
{how_to_apply(run)}
</section>
</main>
<script type="text/plain" id="data">{data}</script>
<script>
{"".join(_resource(name) for name in _SCRIPTS)}</script>
</body>
</html>
"""
    return page.encode()


def run_title(run: SolvedRun) -> str:
    """Return the source of a run with its mesh, sequence and layers, as far as they are stated or,
    for presets, known.
    """
    options = run.graphs[0].options if run.graphs else {}
    preset = re.fullmatch(r"[a-z0-9-]+", run.source) is not None
    mesh = options.get("--mesh", DEFAULT_MESH if preset else "")
    seq = options.get("--seq", DEFAULT_SEQ_LEN if preset else "")
    layers = options.get("--layers", "all" if preset else "")
    parts = (run.source, mesh, seq and f"{seq} tokens", layers and f"{layers} layers")
    return ", ".join(str(part) for part in parts if part)


def section_ids(graphs: Sequence[SolvedGraph]) -> tuple[str, ...]:
    """Return the anchor of each graph: its name, with its number where others have that name,
    too.
    """
    names = [graph.result.problem.name for graph in graphs]
    return tuple(name if names.count(name) == 1 else f"{name}-{k}" for k, name in enumerate(names))


def _title(graph: SolvedGraph) -> str:
    return graph.title or graph.result.problem.name


def _step_sections(run: SolvedRun) -> tuple[str, list[tuple[str, str]]]:
    """Return the section on the whole step, if there is one, and its anchor with a title;
    ``InputError`` where the result file has other figures than this version writes.
    """
    try:
        return _sections_of_step(run)
    except (*OTHER_SHAPE, ValueError) as error:
        raise other_answers(run.path, error) from None


def _sections_of_step(run: SolvedRun) -> tuple[str, list[tuple[str, str]]]:
    if run.accumulate is not None:
        return micro_batches_section(run.accumulate), [(micro_batches.ANCHOR, "micro-batches")]
    if run.joint is not None:
        return joint_section(run.joint, run.apart), [(kept.ANCHOR, "kept")]
    if run.keep is not None:
        return kept_section(run.keep), [(kept.ANCHOR, "kept")]
    return "", []


def run_point(graph: SolvedGraph, frontiers: Sequence[Frontier]) -> RunPoint:
    """Return the point of ``graph``, on the scale of its ``frontiers``."""
    name = graph.result.problem.name
    lines = [line for line in frontiers if line.graph == name]
    return RunPoint(
        graph=name,
        title="" if lines else name,
        point=point_of(graph, lines[0].beside_bytes if lines else 0),
    )


def _frontier_section(frontiers: Sequence[Frontier], run_points: Sequence[RunPoint]) -> str:
    """Return memory against step time, of each graph."""
    known = {line.graph for line in frontiers}
    parts = []
    for f, name in enumerate(graph_names(frontiers, run_points)):
        hint = f"<p>{_NO_STUDY}</p>" if name not in known else ""
        points = [point for line in frontiers if line.graph == name for point in line.points]
        points += [one.point for one in run_points if one.graph == name]
        if len(points) == 1:
            sentence = escape(one_point_text(points[0]))
            parts.append(f"<h3>{escape(name)}</h3>\n<p>{sentence}</p>\n{hint}")
            continue
        title = f"Memory against step time, {name}"
        range_button = (
            '<button type="button" data-act="range" aria-label="which step times the picture'
            ' fits">with the bound</button>'
        )
        after = (
            '<div class="legend"></div><div class="alive" role="status" aria-live="polite"></div>'
        )
        picture = _picture(
            "frontier",
            f,
            title,
            "step time found and proven under each memory cap",
            tools=range_button,
            after=after,
        )
        tables = frontier_tables(name, frontiers, run_points)
        parts.append(f"<h3>{escape(name)}</h3>\n{hint}{picture}\n{tables}")
    return (
        '<section class="graph" id="frontier"><h2>Frontier: memory against step time</h2>\n'
        + "\n".join(parts)
        + "\n</section>"
    )


def _resource(name: str) -> str:
    text = files("apsched.report.page").joinpath(name).read_text(encoding="utf-8")
    return text.replace('"use strict";\n', "", 1) if name not in (_SCRIPTS[0],) else text


def _graph_section(graph: SolvedGraph, g: int, anchor: str) -> str:
    result = graph.result
    anchor, name = escape(anchor), escape(_title(graph))
    size = (
        f"{result.problem.num_nodes:,} nodes, {len(result.problem.collectives):,} collectives,"
        f" {result.answer.status}"
    )
    return f"""<section class="graph" id="{anchor}" aria-labelledby="{anchor}-head">
<h2 id="{anchor}-head">{name}</h2>
<p class="soft">{escape(size)}; graph {escape(result.problem.graph_hash[:12])}</p>
{sections.figures(graph)}
{_timeline(g, name)}
<h3>Memory along the order</h3>
{_memory(g, 0, name, "as captured")}
{_memory(g, 1, name, "solved")}
<h3>Comparison with the baselines</h3>
{sections.baselines(result)}
<h3>Certificate</h3>
{sections.certificate(result)}
<h3>Buckets and launches</h3>
{sections.launches(graph)}
<h3>Costs</h3>
{sections.costs(result)}
</section>"""


def _timeline(g: int, name: str) -> str:
    what = "when each stream works, as captured and solved, on one axis"
    return _picture("timeline", g, f"Timeline of {name}", what, after='<div class="legend"></div>')


def _memory(g: int, order: int, name: str, label: str) -> str:
    peak = '<button type="button" data-act="peak">live tensors at the peak</button>'
    after = '<div class="alive" role="status" aria-live="polite"></div>'
    what = "bytes alive at each step of the order"
    return _picture(
        "memory", g, f"Memory of {name}, {label}", what, tools=peak, after=after, order=order
    )


def _picture(
    kind: str, g: int, title: str, what: str, *, tools: str = "", after: str = "", order: int = 0
) -> str:
    buttons = "".join(
        f'<button type="button" data-act="{act}" aria-label="{text}">{sign}</button>'
        for act, sign, text in _TOOLS
    )
    hint = f'<span class="soft">{_HINTS[kind]}</span>'
    return f"""<figure data-picture="{kind}" data-graph="{g}" data-order="{order}">
<div class="tools"><figcaption>{title}</figcaption>{buttons}{tools}{hint}</div>
<canvas role="img" aria-label="{title}: {what}; the tables below say the same in words"></canvas>
{after}
</figure>"""
