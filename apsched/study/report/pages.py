"""Studies as reports show them: the frontiers of a run's graphs, or a page of a study's own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from apsched.artifacts.solved_run import SolvedGraph, SolvedRun, solved_graph
from apsched.artifacts.stated_options import stated_options
from apsched.errors import InputError
from apsched.report.page.frontier import Baseline, Frontier, FrontierPoint, Slowdown
from apsched.study.axes import SPEEDS, axis_text, parse_vary
from apsched.study.report.across import Line, along_text, alongs
from apsched.study.report.binding import binding, bucket_bytes, bucketing, cap_text
from apsched.study.report.frontier import ascending, fitting, least_memory, prices_ms_per_gib
from apsched.study.report.text import LEGEND, mark, sentences
from apsched.study.rows import SOLVE, Point
from apsched.study.store import Store
from apsched.units import us_to_ticks
from apsched.whole_step.keep_request import AUTO, KEPT_FILE

SLOWDOWNS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1)
MOST_DETAILS = 6
"""Points of a study that its page shows in detail where none are named: one a frontier."""


def lines_of(points: Sequence[Point]) -> tuple[Line, ...]:
    """Return all frontiers among ``points``; labels are the options in which they differ."""
    differing = [
        name
        for name in _options(points)
        if len({repr(point.described.get(name)) for point in points}) > 1
    ]
    grouped: dict[tuple[Any, ...], list[Point]] = {}
    for point in sorted(
        points,
        key=lambda p: (
            p.graph.name,
            [_order(p.described.get(name)) for name in differing],
            p.graph.graph_id,
        ),
    ):
        labels = tuple((name, axis_text(name, point.described.get(name))) for name in differing)
        chosen_anew = point.described.get("keep") == AUTO  # a graph for each cap
        graph_id = None if chosen_anew else point.graph.graph_id
        grouped.setdefault((point.graph.name, graph_id, labels), []).append(point)
    return tuple(
        Line(labels=dict(labels), graph=name, points=ascending(points), expected=len(points))
        for (name, _, labels), points in grouped.items()
    )


def _options(points: Sequence[Point]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for point in points for name in point.described))


def _order(value: Any) -> tuple[bool, float, str]:
    """Return the sort key of values of an option: numbers, also within words such as ``fsdp=64``,
    as numbers.
    """
    text = axis_text("", value)
    digits = "".join(
        letter if letter.isdigit() or letter == "." else " " for letter in text
    ).split()
    number = float(digits[0]) if digits and digits[0].replace(".", "", 1).isdigit() else 0.0
    return value is None, number, text


def frontiers_of(lines: Sequence[Line], slowdown: float) -> tuple[Frontier, ...]:
    """Return the frontiers of ``lines`` for a report; those without a schedule are left out. The
    gain from buckets along an axis stands below the last of the frontiers that it compares.
    """
    found = tuple(_frontier(line, slowdown) for line in lines if fitting(line.points))
    across: dict[str, list[str]] = {}
    for along in alongs(lines):
        across.setdefault(along.lines[-1].title, []).append(along_text(along))
    return tuple(
        replace(frontier, sentences=(*frontier.sentences, *across.get(frontier.title, ())))
        for frontier in found
    )


def _frontier(line: Line, slowdown: float) -> Frontier:
    points = fitting(line.points)
    least = (
        [(share, least_memory(points, share)) for share in sorted({*SLOWDOWNS, slowdown})]
        if len(points) > 1
        else []
    )
    return Frontier(
        graph=line.graph,
        title=line.title,
        points=tuple(_point(points, k, price) for k, price in enumerate(prices_ms_per_gib(points))),
        sentences=tuple(sentences(line, slowdown)),
        slowdowns=tuple(
            Slowdown(
                share=share,
                limit_us=found.step_limit_us,
                peak_bytes=found.peak_memory_bytes,
                step_us=found.step_time_us,
                refuted_bytes=found.refuted_bytes,
                slower_bytes=found.slower_bytes,
            )
            for share, found in least
            if found is not None
        ),
        floor_bytes=min(point.outcome.floor_memory_bytes for point in points),
        legend=LEGEND,
        beside_bytes=points[0].graph.in_step.beside_bytes,
    )


def _point(points: Sequence[Point], k: int, price: float | None) -> FrontierPoint:
    point, outcome = points[k], points[k].outcome
    baselines: Mapping[str, Any] = outcome.report["baselines"]
    return FrontierPoint(
        name=point.point_id,
        cap_bytes=outcome.memory_cap_bytes,
        peak_bytes=outcome.peak_memory_bytes or 0,
        step_ticks=outcome.step_ticks or 0,
        bound_ticks=outcome.bound_ticks,
        num_launches=outcome.num_launches or 0,
        bucket_bytes=bucket_bytes(point),
        baselines=tuple(
            Baseline(
                name=name,
                step_ticks=us_to_ticks(b["step_time_us"]),
                peak_bytes=b["peak_memory_bytes"] + point.graph.in_step.beside_bytes,
                fits=b["fits"],
            )
            for name, b in baselines.items()
        ),
        price_ms_per_gib=price,
        binds=str(binding(point, points[k + 1 :])),
        saved_us=bucketing((point,)).proven_us(point),
        mark=mark(point),
    )


def frontiers_of_run(run: SolvedRun, directory: Path, slowdown: float) -> tuple[Frontier, ...]:
    """Return the frontiers in the study ``directory`` of the graphs of ``run``, at the same costs;
    ``InputError`` where it has none.
    """
    ids = {graph.graph_id for graph in run.graphs}
    points = [point for point in Store(directory).points() if point.graph.graph_id in ids]
    found = frontiers_of(lines_of(points), slowdown)
    if not found:
        kept = run.path / KEPT_FILE
        options = f", costs and kept parameters (--keep {kept})" if kept.is_file() else " and costs"
        raise InputError(
            f"{directory}: expected a study of the graphs in {run.path}, found none of them at"
            f" these costs; make it with the source, mesh, sizes{options} of the run, or report"
            " the study by itself"
        )
    return found


def study_page_of(
    directory: Path, chosen: Sequence[str], slowdown: float
) -> tuple[SolvedRun, tuple[Frontier, ...], str]:
    """Return the content of the page of a study: points in detail (``chosen``, or one a frontier),
    its frontiers, and its heading.
    """
    store = Store(directory)
    points = store.points()
    if not any(point.schedule for point in points):
        raise InputError(
            f"{directory}: expected a study with answers, found none; `apsched study` resumes it"
        )
    lines = lines_of(points)
    commands = store.commands()
    details = tuple(
        _detail(store, line, point, commands[point.run_id]) for line, point in _shown(lines, chosen)
    )
    sources = list(dict.fromkeys(str(point.graph.described["source"]) for point in points))
    clusters = list(dict.fromkeys(point.graph.cluster for point in points))
    run = SolvedRun(
        path=directory, source=" ".join(sources), cluster=", ".join(clusters), graphs=details
    )
    return run, frontiers_of(lines, slowdown), f"study of {' and '.join(sources)}"


def _shown(lines: Sequence[Line], chosen: Sequence[str]) -> list[tuple[Line, Point]]:
    """Return the points to show in detail: those named, else the fastest of each of the first
    frontiers.
    """
    if not chosen:
        return [(line, line.fastest) for line in lines if line.fastest is not None][:MOST_DETAILS]
    found = []
    for name in chosen:
        matching = [
            (line, point)
            for line in lines
            for point in fitting(line.points)
            if point.point_id.startswith(name)
        ]
        if len(matching) != 1:
            raise InputError(
                "--point: expected the name of one point with a schedule (or a prefix of it), found"
                f" {name!r}: {len(matching)} have it"
            )
        found += matching
    return found


def _detail(store: Store, line: Line, point: Point, command: Mapping[str, Any]) -> SolvedGraph:
    entry = {**point.outcome.report, "bound_source": point.outcome.bound_source}
    assert point.schedule is not None
    found = solved_graph(store.directory, point.graph.file, point.schedule, entry)
    source, options = _source_and_options(point, command)
    is_own_floor = point.memory_cap.startswith("floor") and options.get("--keep") != "none"
    return replace(
        found,
        title=f"{line.title}, memory cap {cap_text(point)}",
        source=source,
        options=options,
        of_study=True,
        is_made_again=point.schedule_from == SOLVE and not is_own_floor,
    )


def _source_and_options(point: Point, command: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the source and the options that ``apsched solve`` takes for this point: the study's
    command, with the varied options as at this point.
    """
    varied = [axis.name for axis in parse_vary(list(command.get("vary", ())))[0]]
    values = {
        **command,
        **{name: point.described.get(name) for name in varied if name not in SPEEDS},
    }
    if not values.get("keep") and not values.get("accumulate"):
        values["keep"] = "none"  # the default of a study; that of solve is auto
    values["memory_cap"] = None if point.memory_cap == "device" else point.memory_cap
    options = {
        flag: value if isinstance(value, list | bool) else str(value)
        for flag, value in stated_options(values).items()
    }
    return str(values["source"]), options
