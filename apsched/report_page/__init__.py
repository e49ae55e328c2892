"""A run as one HTML file that needs nothing else: no network, no torch, no library.

The pictures are drawn by scripts of our own on canvas, not by a plotting library. A step of LLaMA-3 8B has eight thousand bars in two
orders and two directions: canvas draws those in view at every move in milliseconds, where one element (or one trace) a bar would crawl;
Plotly's smallest bundle is a megabyte, has neither timelines nor patterns on canvas, and would have to be vendored and kept up to date.
What we need (bars, one axis that zooms, a tooltip) takes a few hundred lines, under the licence of the rest.
"""

from html import escape
from importlib.resources import files

from apsched.report_page import sections
from apsched.report_page.columns import packed, page_data
from apsched.run_files import SolvedGraph, SolvedRun

_SCRIPTS = ("view.js", "timeline.js", "memory.js", "page.js")
_NO_NETWORK = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_TOOLS = (
    ("in", "+", "zoom in"),
    ("out", "&minus;", "zoom out"),
    ("left", "&larr;", "to the left"),
    ("right", "&rarr;", "to the right"),
    ("reset", "all", "show all"),
)
_HINT = "Ctrl+wheel, pinch or double click zooms, dragging moves; keys + - 0 and arrows"


def report_page(run: SolvedRun) -> bytes:
    """Return the report of ``run``; the same run gives the same bytes."""
    title = f"apsched: {run.source}"
    graphs = "\n".join(_graph_section(graph, g) for g, graph in enumerate(run.graphs))
    links = "".join(f'<a href="#{escape(g.result.problem.name)}">{escape(g.result.problem.name)}</a>' for g in run.graphs)
    versions = ", ".join(f"{name} {version}" for name, version in (run.graphs[0].versions if run.graphs else {}).items() if version)
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_NO_NETWORK}">
<title>{escape(title)}</title>
<style>
{_resource("page.css")}</style>
</head>
<body>
<header><h1>{escape(run.source)}</h1>
<span class="soft">on cluster {escape(run.cluster or "of your own")}; {escape(versions)}</span>
<nav aria-label="sections">{links}<a href="#apply">apply</a>
<button id="theme" type="button" aria-label="change between light and dark">Dark</button></nav>
</header>
<main>
<p id="trouble" role="alert" hidden></p>
<noscript><p>The pictures need JavaScript; the tables are complete without it.</p></noscript>
{graphs}
<section id="apply"><h2>How to apply it</h2>
{sections.how_to_apply(run)}
</section>
</main>
<script type="text/plain" id="data">{packed(page_data(run))}</script>
<script>
{"".join(_resource(name) for name in _SCRIPTS)}</script>
</body>
</html>
"""
    return page.encode()


def _resource(name: str) -> str:
    text = files("apsched.report_page").joinpath(name).read_text(encoding="utf-8")
    return text.replace('"use strict";\n', "", 1) if name not in (_SCRIPTS[0],) else text


def _graph_section(graph: SolvedGraph, g: int) -> str:
    result = graph.result
    name = escape(result.problem.name)
    size = f"{result.problem.num_nodes:,} nodes, {len(result.problem.collectives):,} collectives, {result.answer.status}"
    return f"""<section class="graph" id="{name}" aria-labelledby="{name}-head">
<h2 id="{name}-head">{name}</h2>
<p class="soft">{escape(size)}; graph {escape(result.problem.graph_hash[:12])}</p>
{sections.figures(graph)}
{_timeline(g, name)}
<h3>Memory along the order</h3>
{_memory(g, 0, name, "as captured")}
{_memory(g, 1, name, "solved")}
<h3>Beside the baselines</h3>
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
    peak = '<button type="button" data-act="peak">what is alive at the peak</button>'
    after = '<div class="alive" role="status" aria-live="polite"></div>'
    what = "bytes alive at each step of the order"
    return _picture("memory", g, f"Memory of {name}, {label}", what, tools=peak, after=after, order=order)


def _picture(kind: str, g: int, title: str, what: str, *, tools: str = "", after: str = "", order: int = 0) -> str:
    buttons = "".join(f'<button type="button" data-act="{act}" aria-label="{text}">{sign}</button>' for act, sign, text in _TOOLS)
    hint = f'<span class="soft">{_HINT}</span>' if kind == "timeline" else '<span class="soft">click: what is alive there</span>'
    return f"""<figure data-picture="{kind}" data-graph="{g}" data-order="{order}">
<div class="tools"><figcaption>{title}</figcaption>{buttons}{tools}{hint}</div>
<canvas role="img" aria-label="{title}: {what}; the tables below say the same in words"></canvas>
{after}
</figure>"""
