"""The parts of a report that are text and tables: plain HTML, complete without scripts."""

from collections.abc import Sequence
from html import escape

from apsched.artifacts.solved_run import SolvedGraph
from apsched.pipeline.result import Result
from apsched.problem.problem import Collective
from apsched.quantities import show_bytes, show_gap, show_us
from apsched.report.answer.first import best_baseline
from apsched.report.assumed_sizes import assumed_text
from apsched.report.binding import memory_text, shares, where_text
from apsched.report.page.table import Html, table
from apsched.report.summary import summary_lines
from apsched.schedule.analysis.metrics import Metrics
from apsched.schedule.analysis.usage import launch_positions
from apsched.schedule.result import Score, captured_of
from apsched.schedule.simulate import Transfer
from apsched.schedule.verify import prefetch_distances
from apsched.units import ticks_to_us

_MOST_LAUNCHES = 2000
"""Rows of the table of launches; the pictures show all of them."""
_MOST_NAMES = 3
_SOURCES = {
    "formula": "roofline of the device and alpha-beta of the links",
    "table": "tables of measured collectives",
    "profile": "a profile of the job",
    "measured": "measured on the device",
}


def _in_words(percent_less: float) -> str:
    if f"{percent_less:.2f}" in ("0.00", "-0.00"):
        return "as long as"
    return f"{abs(percent_less):.2f} % {'less' if percent_less > 0 else 'MORE'} than"


def figures(graph: SolvedGraph) -> str:
    """Return the figures that people look for first."""
    result = graph.result
    best, before = result.best, _compared_with(result)
    assert best is not None
    less = (
        100 * (1 - best.step_time_ticks / before.step_time_ticks) if before.step_time_ticks else 0.0
    )
    shown = (
        (
            _ms(best),
            f"step time, {_in_words(less)} {before.name}"
            f"{', the best baseline that fits' if before.fits else ''} ({_ms(before)})",
        ),
        (show_gap(result.gap), f"gap to the proven bound of {show_us(result.bound_us)}"),
        (
            show_us(ticks_to_us(best.exposed_ticks)),
            f"exposed, {show_us(ticks_to_us(before.exposed_ticks))} in {before.name}",
        ),
        (
            show_bytes(best.peak_memory_bytes),
            f"peak memory, cap {show_bytes(result.caps.memory_cap_bytes)}",
        ),
        (f"{best.num_launches}", f"launches, {before.num_launches} in {before.name}"),
    )
    cards = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in shown
    )
    return f'<div class="figures">{cards}</div>'


def _compared_with(result: Result) -> Score:
    """Return the best baseline that fits; the order as captured if none does."""
    found = best_baseline(result)
    scores = (*result.answer.baselines, *result.others)
    named = [score for score in scores if found is not None and score.name == found[0]]
    before = named[0] if named else captured_of(result.answer.baselines)
    assert before is not None
    return before


def _ms(score: Score) -> str:
    return show_us(ticks_to_us(score.step_time_ticks))


def baselines(result: Result) -> str:
    """Return every baseline beside the schedule found, and the bound."""
    best = result.best
    assert best is not None
    scores = (*result.answer.baselines, *result.others, best)
    rows = [
        (
            score.name,
            _ms(score),
            (
                f"{100 * (score.step_time_ticks / result.answer.bound_ticks - 1):.2f} %"
                if result.answer.bound_ticks
                else ""
            ),
            show_us(ticks_to_us(score.exposed_ticks)),
            show_bytes(score.peak_memory_bytes),
            f"{score.num_launches}",
            "yes" if score.fits else f"no: {score.violations[0]}",
        )
        for score in scores
    ]
    rows.append(
        (
            "bound (proven)",
            show_us(result.bound_us),
            "",
            "",
            show_bytes(result.answer.floor_bound_bytes),
            "",
            "",
        )
    )
    head = (
        "schedule",
        "step time",
        "above bound",
        "exposed",
        "peak memory",
        "collectives",
        "fits the caps",
    )
    return f'<div class="wide">{table(head, rows, text=(6,), best=len(scores) - 1)}</div>'


def certificate(result: Result) -> str:
    """Return the proven claims, and the shares of the step time."""
    best = result.answer.best
    step_ticks = max(1, best.step_time_ticks if best else 1)
    rows = [
        (
            share.label,
            show_us(ticks_to_us(share.ticks)),
            f"{100 * share.ticks / step_ticks:.2f} %",
            show_us(ticks_to_us(share.exposed_ticks)) if share.exposed_ticks else "",
            where_text(result, share),
        )
        for share in shares(result)
    ]
    lines = [line.strip() for line in summary_lines(result) if not line.startswith("  rests on")]
    if memory := memory_text(result):
        lines.append(memory)
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    head = ("the step time rests on", "time", "share", "of it exposed", "where")
    return f"<ul>{items}</ul>\n<div class=wide>{table(head, rows, text=(4,))}</div>"


def launches(graph: SolvedGraph) -> str:
    """Return the launches: a table by kind, and one with each of them."""
    result = graph.result
    timeline, metrics = result.timeline, result.metrics
    assert timeline is not None
    assert metrics is not None
    shown = timeline.transfers[:_MOST_LAUNCHES]
    prefetch = prefetch_distances(
        result.problem, graph.after, launch_positions(result.problem, graph.after)
    )
    rows = [
        _launch(result, k, transfer, prefetch.get(transfer.members))
        for k, transfer in enumerate(shown)
    ]
    more = "" if len(shown) == len(timeline.transfers) else f", the first {len(shown)}"
    each = table(
        (
            "launch",
            "kind",
            "group",
            "form",
            "members",
            "bytes",
            "span",
            "prefetch",
            "begins",
            "takes",
            "serves",
        ),
        rows,
        caption=(
            "span: ranks between the first and the last member; prefetch: compute nodes between the"
            " launch and the first that needs it"
        ),
        text=(10,),
    )
    number = len(timeline.transfers)
    head = "the only launch" if number == 1 else f"all {number} launches in order"
    return (
        f"<div class=wide>{_launches_by_kind(metrics)}</div>\n"
        f"<details><summary>{head}{more}</summary>\n"
        '<div class="scroll" tabindex="0" role="region" aria-label="launches of'
        f' {escape(result.problem.name)}">{each}</div></details>'
    )


def _launches_by_kind(metrics: Metrics) -> str:
    by_kind = [
        (
            f"{m.kind}, group {m.group} ({m.group_size})",
            f"{m.num_collectives}",
            f"{m.num_launches}",
            f"{m.num_buckets}",
            show_bytes(m.largest_bytes),
            show_bytes(round(m.mean_bytes)),
            f"{m.largest_span}",
        )
        for m in metrics.launches
    ]
    head = (
        "FSDP collectives",
        "as captured",
        "launches",
        "of them buckets",
        "largest",
        "mean",
        "widest span",
    )
    return table(head, by_kind)


def _launch(result: Result, k: int, transfer: Transfer, prefetch: int | None) -> tuple[str, ...]:
    problem = result.problem
    members = [problem.collectives[c] for c in transfer.members]
    key = problem.keys[members[0].key]
    starts = [m.start for m in members]
    form = "alone" if len(members) == 1 else "coalesced" if transfer.coalesced else "flat"
    return (
        f"{k}",
        key.kind + (" (on the path)" if members[0].on_path else ""),
        key.group,
        form,
        f"{len(members)}",
        show_bytes(transfer.size_bytes),
        f"{max(starts) - min(starts)}" if len(members) > 1 else "",
        "" if prefetch is None else f"{prefetch}",
        show_us(ticks_to_us(transfer.begin_ticks)),
        show_us(ticks_to_us(transfer.end_ticks - transfer.begin_ticks)),
        _serves(result, members),
    )


def _serves(result: Result, members: Sequence[Collective]) -> str:
    """Return the parameters that a launch serves, folded away where there are many."""
    names = [member.module or result.problem.node_names[member.start] for member in members]
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return Html(
        f"<details><summary>{escape(names[0])} and {len(names) - 1}"
        f" more</summary>{escape(', '.join(names[1:]))}</details>"
    )


def costs(result: Result) -> str:
    """Return which share of the time each source of costs priced."""
    ranked = sorted(result.cost_shares.items(), key=lambda item: -item[1])
    rows = [(name, f"{100 * share:.1f} %", _SOURCES.get(name, "")) for name, share in ranked]
    found = table(
        ("source", "share of the time of all nodes and transfers", "meaning"), rows, text=(2,)
    )
    assumed = (
        f"<p>Sizes that depend on data: {escape(assumed_text(result.assumptions))}.</p>\n"
        if result.assumptions
        else ""
    )
    return (
        f"{assumed}<p>Costs of cluster <b>{escape(result.cluster or 'your own model')}</b>.</p>\n"
        f"<div class=wide>{found}</div>"
    )
