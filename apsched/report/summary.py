"""The answers of solved graphs: the table with its columns and the lines below it, or JSON."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from apsched.names import first_name
from apsched.pipeline.assumptions import assumed_json
from apsched.pipeline.device_memory import account_json
from apsched.pipeline.result import Result
from apsched.problem.contention import contention_json
from apsched.problem.plan.rules import digest
from apsched.problem.second_group import second_groups
from apsched.quantities import show_bytes, show_gap, show_us
from apsched.report.answer.account import account_table
from apsched.report.assumed_sizes import assumed_text
from apsched.report.binding import binds_line, path_json
from apsched.report.console import console, hanging, plain_table, result_json
from apsched.report.robustness import robustness_json, robustness_line, robustness_table
from apsched.schedule.analysis.metrics import without_buckets_ticks
from apsched.schedule.analysis.moved_compute import furthest_move, moved_compute
from apsched.schedule.result import IN_A_ROW, Infeasibility, Score, TradeOff
from apsched.units import ticks_to_us

_FULL_WIDTH = 100
"""Columns that the table takes; on narrower terminals the exposed time is left out."""
_STAGES = ("capture", "export", "solve", "write_back")


def report_json(
    source: str, cluster: str, results: Iterable[Result], options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the object that ``--json`` prints; ``options`` are those stated, for files that are
    read back.
    """
    stated = {} if options is None else {"options": dict(options)}
    graphs = [graph_json(result) for result in results]
    return result_json(source=source, cluster=cluster, **stated, graphs=graphs)


def _solved_by(result: Result) -> dict[str, object]:
    """Return the method that found the schedule, and the step time of the search before CP-SAT."""
    return {
        "solved_by": result.answer.solved_by if result.best else None,
        "search_us": ticks_to_us(result.answer.search_ticks) or None,
    }


def graph_json(result: Result) -> dict[str, Any]:
    """Return one graph for ``--json``; an infeasible one also has ``infeasibility``."""
    best, timeline = result.best, result.timeline
    report = {
        "name": result.problem.name,
        "graph_hash": result.problem.graph_hash,
        "num_nodes": result.problem.num_nodes,
        "num_collectives": len(result.problem.collectives),
        "status": result.answer.status,
        "step_time_us": result.step_time_us,
        "bound_us": result.bound_us,
        "bound_source": result.answer.bound_source,
        "gap": result.gap if best else None,
        "fastest_us": ticks_to_us(result.answer.fastest_ticks) if best else None,
        "fastest_gap": result.answer.fastest_gap if best else None,
        **_solved_by(result),
        "compute_us": ticks_to_us(timeline.compute_ticks) if timeline else None,
        "exposed_us": ticks_to_us(timeline.exposed_ticks) if timeline else None,
        "peak_memory_bytes": best.peak_memory_bytes if best else None,
        "peak_bound_bytes": result.answer.peak_bound_bytes,
        "peak_gap": result.answer.peak_gap if best else None,
        "floor_memory_bytes": result.answer.floor_memory_bytes,
        "floor_bound_bytes": result.answer.floor_bound_bytes,
        "memory_cap_bytes": result.caps.memory_cap_bytes,
        "num_launches": best.num_launches if best else None,
        "launches_bound": result.answer.launches_bound if best else None,
        "launches_gap": result.answer.launches_gap if best else None,
        "without_buckets_us": ticks_to_us(without_buckets_ticks(result.problem)),
        "time_limit_us": ticks_to_us(result.answer.time_limit_ticks) if best else None,
        "trade_offs": [_trade_off_json(point) for point in result.answer.trade_offs],
        "chosen": asdict(result.chosen) if result.chosen else None,
        "rests_on": path_json(result),
        "metrics": asdict(result.metrics) if result.metrics else None,
        "round_trip_exact": result.round_trip_exact,
        "costs": dict(result.cost_shares),
        "baselines": {
            score.name: _score_json(score) for score in (*result.answer.baselines, *result.others)
        },
        "seconds": {stage: round(result.seconds.get(stage, 0.0), 3) for stage in _STAGES},
    }
    if result.account is not None:
        report["device_memory"] = account_json(result.account)
    if (contention := result.problem.contention) is not None:
        report["contention"] = contention_json(contention)
    if result.problem.chains:
        report["micro_batches"] = max(result.problem.chains) + 1
    if result.robustness is not None:
        report["robustness"] = robustness_json(result.robustness)
    if result.assumptions is not None:
        report["assumed"] = assumed_json(result.assumptions)
    if result.problem.rules:
        report["plan"] = {
            "digest": digest(result.problem.rules),
            "rules": result.problem.rules,
            "not_kept_by": dict(_broken_by(result)),
        }
    if result.bitwise is not None:
        report["bitwise"] = {**asdict(result.bitwise), "share": result.bitwise.share}
    if result.answer.infeasibility is not None:
        report["infeasibility"] = infeasibility_json(result.answer.infeasibility)
    return report


def _trade_off_json(point: TradeOff) -> dict[str, float]:
    return {
        "peak_memory_bytes": point.peak_memory_bytes,
        "step_time_us": ticks_to_us(point.step_time_ticks),
    }


def _broken_by(result: Result) -> Iterator[tuple[str, str]]:
    """Yield each baseline that does not fit under the plan, with the first reason."""
    return (
        (score.name, score.violations[0])
        for score in (*result.answer.baselines, *result.others)
        if not score.fits
    )


def infeasibility_json(why: Infeasibility) -> dict[str, Any]:
    """Return why nothing fits: ``least`` has the values known to fit, ``relaxations`` also the
    proven limits of them.
    """
    return {
        "caps": why.caps,
        "clashes": why.clashes,
        "proven": why.proven,
        "nodes": why.nodes,
        "least": dict(why.least),
        "relaxations": {
            r.cap: {"stated": r.stated, "least": r.least, "bound": r.bound, "lifted": r.lifted}
            for r in why.relaxations
        },
        "places": [
            {
                "node": place.node,
                "live_bytes": place.live_bytes,
                "alive": [
                    {"what": what, "tensors": count, "bytes": size}
                    for what, count, size in place.alive
                ],
            }
            for place in why.places
        ],
        "message": why.message,
    }


def _score_json(score: Score) -> dict[str, Any]:
    return {
        "step_time_us": ticks_to_us(score.step_time_ticks),
        "exposed_us": ticks_to_us(score.exposed_ticks),
        "peak_memory_bytes": score.peak_memory_bytes,
        "num_launches": score.num_launches,
        "fits": score.fits,
        "violations": score.violations,
    }


def print_table(
    results: Sequence[Result],
    stream: TextIO,
    *,
    rows: Sequence[Sequence[Score]] | None = None,
    ratio: bool = False,
) -> None:
    """Print every schedule of every graph beside the bound; ``rows`` in place of the baselines and
    the solution.
    """
    out = console(stream)
    narrow = out.width < _FULL_WIDTH
    figures = (
        *("step time ms", "above bound", "exposed ms", "peak memory"),
        "launches" if narrow else "collectives",
        *(["ratio to apsched"] if ratio else []),
    )
    names = ("graph", "schedule")  # never cut: two schedules would look alike
    columns = [*names, *figures, "fits"]
    left_out = columns.index("exposed ms") if narrow else len(columns)
    shown_columns = _without(columns, left_out)
    table = plain_table(*shown_columns, right=figures, no_wrap=(*names, "peak memory"))
    for k, result in enumerate(results):
        shown = rows[k] if rows is not None else _all_rows(result)
        for first, scored in enumerate(shown):
            name = result.problem.name if first == 0 else ""
            table.add_row(*_without(_cells(result, scored, name=name, ratio=ratio), left_out))
        bound = [
            "",
            "bound",
            f"{result.bound_us / 1000:,.3f}",
            "",
            "",
            show_bytes(result.answer.floor_bound_bytes),
            "",
        ]
        cells = _without([*bound, *([""] if ratio else []), ""], left_out)
        table.add_row(*cells, style="dim", end_section=k + 1 < len(results))
    out.print(table)
    if robust := [
        (result.problem.name, result.robustness)
        for result in results
        if result.robustness is not None
    ]:
        out.print()
        out.print(robustness_table(robust))


def _without(cells: list[str], place: int) -> list[str]:
    return [*cells[:place], *cells[place + 1 :]]


def _all_rows(result: Result) -> tuple[Score, ...]:
    """Return the baselines and the answer, which may be the schedule of one of them."""
    answer = (replace(result.best, name="apsched"),) if result.best else ()
    return (*result.answer.baselines, *result.others, *answer)


def _cells(result: Result, scored: Score, *, name: str, ratio: bool) -> list[str]:
    step_us = ticks_to_us(scored.step_time_ticks)
    above = f"{100 * (step_us / result.bound_us - 1):.2f} %" if result.bound_us > 0 else ""
    cells = [
        name,
        scored.name,
        f"{step_us / 1000:,.3f}",
        above,
        f"{ticks_to_us(scored.exposed_ticks) / 1000:,.3f}",
        show_bytes(scored.peak_memory_bytes),
        f"{scored.num_launches}",
    ]
    if ratio:
        best_us = result.step_time_us
        cells.append(f"{step_us / best_us:.3f}" if best_us else "")
    return [*cells, "yes" if scored.fits else "no"]


def _micro_batches_line(result: Result) -> str:
    """Return the time of one of several micro-batches; empty if there is one."""
    several, best = max(result.problem.chains, default=0) + 1, result.answer.best
    if several < 2 or best is None:
        return ""

    def each(ticks: int) -> str:
        return show_us(ticks_to_us(ticks) / several)

    row = next((b for b in result.answer.baselines if b.name == IN_A_ROW), None)
    beside = f", in a row {each(row.step_time_ticks)}" if row is not None else ""
    return (
        f"  {several} micro-batches: {each(best.step_time_ticks)} each{beside}, bound"
        f" {each(result.answer.bound_ticks)}"
    )


def _moved_line(result: Result) -> str:
    """Return which compute nodes moved, and how far; empty where none could."""
    if result.schedule is None or result.caps.max_compute_move == 0:
        return ""
    most = (
        "any number of"
        if result.caps.max_compute_move is None
        else f"at most {result.caps.max_compute_move}"
    )
    nodes = moved_compute(result.problem, result.schedule)
    if not nodes:
        return (
            f"  moved: no compute node, of {len(result.problem.captured_order)} that could move by"
            f" {most} places"
        )
    ticks = sum(result.problem.duration_ticks[node] for node in nodes)
    furthest = furthest_move(result.problem, result.schedule)
    return (
        f"  moved: {len(nodes)} of {len(result.problem.captured_order)} compute nodes,"
        f" {show_us(ticks_to_us(ticks))} of work, by up to {furthest} places"
    )


def _forms(result: Result) -> str:
    """Return the number of buckets of each form, if there are two forms."""
    if result.schedule is None or all(
        key.coalesced_member_ticks is None for key in result.problem.keys
    ):
        return ""
    num_coalesced = sum(bucket.coalesced for bucket in result.schedule.buckets)
    return (
        f"; buckets: {num_coalesced} coalesced, {len(result.schedule.buckets) - num_coalesced} flat"
    )


def metrics_lines(result: Result) -> tuple[str, ...]:
    """Return the metrics of the collectives, a line for each direction, group and kind."""
    return tuple(f"  {line}" for line in result.metrics.lines()) if result.metrics else ()


def summary_lines(result: Result) -> tuple[str, ...]:
    """Return the answer, its distance from the best, and its chosen figures."""
    name = result.problem.name
    cap = show_bytes(result.caps.memory_cap_bytes)
    if result.best is None or result.chosen is None:
        return (f"{name}: no schedule fits; memory cap {cap}",)
    chose, answer = result.chosen, result.answer
    fastest, alone = (
        show_us(ticks_to_us(ticks)) for ticks in (answer.fastest_ticks, answer.search_ticks)
    )
    search = f", the search alone {alone}" if answer.search_ticks and alone != fastest else ""
    floor = show_bytes(answer.floor_memory_bytes)
    if answer.floor_bound_bytes:  # a replay has none
        floor += f", bound {show_bytes(answer.floor_bound_bytes)}"
    lines = (
        (
            f"{name}: {answer.status}, step time {show_us(result.step_time_us or 0.0)}, bound"
            f" {show_us(result.bound_us)} ({answer.bound_source}), gap {show_gap(result.gap)}"
        ),
        (
            f"  fastest found {fastest}, gap"
            f" {show_gap(answer.fastest_gap)} (by {answer.solved_by}{search}); within"
            f" {show_us(ticks_to_us(answer.time_limit_ticks))}: peak"
            f" {show_bytes(result.best.peak_memory_bytes)}, bound"
            f" {show_bytes(answer.peak_bound_bytes)}, gap {show_gap(answer.peak_gap)};"
            f" collectives {result.best.num_launches}, bound {answer.launches_bound}, gap"
            f" {show_gap(answer.launches_gap)}"
        ),
        binds_line(result),
        f"  memory cap {cap}; least peak known {floor}",
        (
            f"  chosen: largest bucket {show_bytes(chose.bucket_bytes)}, span {chose.topo_span},"
            f" prefetch {chose.prefetch}, in flight"
            f" {show_bytes(chose.in_flight_bytes)}{_forms(result)}"
        ),
    )
    return (*lines, *_option_lines(result), *_check_lines(result))


def _option_lines(result: Result) -> list[str]:
    """Return a line for each option that is on, and for the sources of costs."""
    lines = []
    if result.problem.contention is not None:
        lines.append(f"  contention: {result.problem.contention}")
    if result.robustness is not None:
        lines.append(robustness_line(result.robustness))
    if second := second_groups(result.problem):
        lines.append(f"  gathers on second groups: {', '.join(map(first_name, second))}")
    if each := _micro_batches_line(result):
        lines.append(each)
    if moved := _moved_line(result):
        lines.append(moved)
    if set(result.cost_shares) - {"formula"}:
        by_source = (
            f"{source} {100 * share:.1f} %" for source, share in result.cost_shares.items()
        )
        lines.append(f"  costs: {', '.join(by_source)}")
    if result.assumptions is not None:
        lines.append(f"  assumed: {assumed_text(result.assumptions)}")
    if result.problem.rules:
        broken = [name for name, _ in _broken_by(result)]
        rules = f"{len(result.problem.rules)} rule{'s' if len(result.problem.rules) > 1 else ''}"
        lines.append(
            f"  plan {digest(result.problem.rules)} of {rules}"
            + (f"; it is not kept by {', '.join(broken)}" if broken else "")
        )
    if result.bitwise is not None:
        cost = f"{result.bitwise.cost_us:,.2f} µs ({100 * result.bitwise.share:.2f} %)"
        lines.append(
            f"  bitwise costs {cost}: the fastest found without it takes"
            f" {show_us(result.bitwise.step_time_us)}"
        )
    return lines


def _check_lines(result: Result) -> list[str]:
    """Return the baselines that are faster, if any, and the outcome of the round trip."""
    lines = [
        f"  NOT the fastest: {score.name} fits and is"
        f" {show_us(result.step_time_us - ticks_to_us(score.step_time_ticks))} faster"
        for score in result.beaten_by
        if result.step_time_us is not None
    ]
    if result.round_trip_exact is not None:
        exactness = "exact to the tick and to the byte" if result.round_trip_exact else "NOT exact"
        lines.append(
            f"  round trip: the rewritten graph, exported and simulated again, is {exactness}"
        )
    return lines


def print_first(lines: Iterable[str], stdout: TextIO) -> None:
    """Print the summary of the step (:func:`apsched.report.answer.first.first_lines`)."""
    out = console(stdout)
    for line in lines:
        out.print(line, markup=False)
    out.print()


def print_solved(
    results: Sequence[Result],
    written: Sequence[Path],
    notes: Sequence[str],
    stdout: TextIO,
    *,
    metrics: bool,
    rewritten: bool,
) -> None:
    """Print the account of the device's memory, the table, the certificates (with ``metrics`` by
    direction, group and kind, too), and the written files. ``rewritten``: the source had FX graphs.
    """
    out = console(stdout)
    if (account := account_table(results)) is not None:
        out.print(account)
        out.print()
    print_table(results, stdout)
    out.print()
    for result in results:
        for line in (*summary_lines(result), *(metrics_lines(result) if metrics else ())):
            out.print(line, markup=False)
    if not rewritten:
        out.print(
            "solved from a graph file: nothing was rewritten (solve the source itself, or `apsched"
            " apply` the schedule to it)"
        )
    print_notes(notes, results, stdout)
    print_files(written, stdout)


def print_notes(
    notes: Sequence[str], results: Sequence[Result], stdout: TextIO, *, columns: int | None = None
) -> None:
    """Print the notes on costs, and those of each result, in lines of at most ``columns``."""
    for note in (*notes, *(note for result in results for note in result.notes)):
        text = f"note: {note}"
        console(stdout).print(text if columns is None else hanging(text, columns), markup=False)


def print_files(written: Sequence[Path], stdout: TextIO) -> None:
    """Print where files went, all to one directory."""
    if not written:
        return
    console(stdout).print(
        f"files in {written[0].parent}: {', '.join(path.name for path in written)}", markup=False
    )
