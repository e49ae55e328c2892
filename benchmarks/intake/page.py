"""The survey as a page: totals, then every case."""

from collections.abc import Callable, Iterable, Sequence

from benchmarks.intake.case import EQUAL, EXACT, TAKEN, CaseOutcome, GraphOutcome

_TOTALS: tuple[tuple[str, Callable[[GraphOutcome], bool]], ...] = (
    ("graphs", lambda graph: True),
    ("torch", lambda graph: graph.torch == TAKEN),
    ("apsched", lambda graph: graph.apsched == TAKEN),
    ("torch alone", lambda graph: graph.torch == TAKEN and graph.apsched != TAKEN),
    ("equal bits", lambda graph: graph.bits == EQUAL),
    ("other bits", lambda graph: graph.apsched == TAKEN and _differs(graph)),
    ("not run", lambda graph: graph.bits.startswith("not run")),
    ("exact", lambda graph: graph.round_trip == EXACT),
)


def failures(outcomes: Iterable[CaseOutcome]) -> list[str]:
    """Return the failures: a graph that torch takes and apsched refuses, other bits, and a round
    trip that is not exact.
    """
    return [
        f"{outcome.name} {graph.name}: {wrong}"
        for outcome in outcomes
        for graph in outcome.graphs
        for wrong in _wrong(graph)
    ]


def line(outcome: CaseOutcome) -> str:
    """Return a case in one line."""
    if not outcome.graphs:
        return f"{outcome.name}: not traced: {outcome.not_traced}"
    parts = [
        f"{graph.name} {graph.launches} -> {graph.launches_after}"
        + (f" ({'; '.join(wrong)})" if (wrong := _wrong(graph)) else "")
        for graph in outcome.graphs
    ]
    return f"{outcome.name}: {', '.join(parts)}, {outcome.seconds:.1f} s"


def totals(outcomes: Sequence[CaseOutcome]) -> list[tuple[str, ...]]:
    """Return the rows of the table of totals: one for each group, and one for all."""
    groups = [*dict.fromkeys(outcome.group for outcome in outcomes)]
    rows = [_total(group, [o for o in outcomes if o.group == group]) for group in groups]
    return [*rows, _total("all", outcomes)] if len(groups) > 1 else rows


def headings() -> tuple[str, ...]:
    """Return the headings of the table of totals."""
    return ("group", "cases", "not traced", *(name for name, _ in _TOTALS))


def markdown(outcomes: Sequence[CaseOutcome], about: str) -> str:
    """Return the page."""
    rows = [
        (
            outcome.group,
            outcome.name,
            graph.name,
            graph.torch,
            graph.apsched,
            f"{graph.launches}",
            f"{graph.launches_after}" if graph.apsched == TAKEN else "",
            graph.bits,
            graph.round_trip,
            f"{outcome.seconds:.1f}",
        )
        for outcome in outcomes
        for graph in outcome.graphs
    ]
    columns = ["group", "case", "graph", "torch", "apsched"]
    columns += ["launches", "after", "bits", "round trip", "s"]
    missing = [(o.group, o.name, o.not_traced) for o in outcomes if not o.graphs]
    parts = [
        "# Graphs that apsched takes",
        f"`python -m benchmarks.intake`. {about}",
        _bar(outcomes),
        "Graphs with collectives are counted; a case that gives none is not traced. *torch* is"
        " `schedule_overlap_bucketing` on a copy of the graph; *torch alone* counts graphs"
        " that it accepts and apsched refuses.",
        _table(headings(), totals(outcomes)),
        "## Every graph",
        _table(columns, rows),
    ]
    if missing:
        parts += ["## Not traced", _table(("group", "case", "why"), missing)]
    return "\n\n".join(parts) + "\n"


def _bar(outcomes: Sequence[CaseOutcome]) -> str:
    graphs = [graph for outcome in outcomes for graph in outcome.graphs]
    by_torch = [graph for graph in graphs if graph.torch == TAKEN]
    taken = [graph for graph in graphs if graph.apsched == TAKEN]
    ran = [graph for graph in taken if graph.bits and not graph.bits.startswith("not run")]
    return (
        f"Of {len(by_torch)} graphs that torch takes, apsched takes"
        f" {sum(graph.apsched == TAKEN for graph in by_torch)}. Of {len(ran)} that run here,"
        f" {sum(graph.bits == EQUAL for graph in ran)} give equal bits. Of {len(taken)} round"
        f" trips, {sum(graph.round_trip == EXACT for graph in taken)} are exact."
    )


def _total(group: str, outcomes: Sequence[CaseOutcome]) -> tuple[str, ...]:
    graphs = [graph for outcome in outcomes for graph in outcome.graphs]
    untraced = sum(not outcome.graphs for outcome in outcomes)
    counts = (sum(counted(graph) for graph in graphs) for _, counted in _TOTALS)
    return (group, str(len(outcomes)), str(untraced), *map(str, counts))


def _wrong(graph: GraphOutcome) -> list[str]:
    if graph.apsched != TAKEN:
        return [f"refused: {graph.apsched}"] if graph.torch == TAKEN else []
    found = [graph.bits] if _differs(graph) else []
    return found + ([graph.round_trip] if graph.round_trip != EXACT else [])


def _differs(graph: GraphOutcome) -> bool:
    return bool(graph.bits) and graph.bits != EQUAL and not graph.bits.startswith("not run")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines
    )
