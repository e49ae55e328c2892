"""``apsched study``: a grid of questions, answered once and kept."""

import argparse
import json
import os
import platform
import uuid
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table

from apsched.artifacts.output_dir import check_writable
from apsched.cli.options import cost_choice, direction, plan_choice, search_choice, source_request
from apsched.errors import InfeasibleError, InputError
from apsched.progress import Progress
from apsched.quantities import parse_count, parse_share, show_bytes
from apsched.report.summary import console
from apsched.study.axes import SPEEDS, SWITCHES, Axis, MemoryAxis, parse_vary
from apsched.study.engine import Engine, LocalEngine
from apsched.study.prepare import Prepared, prepare
from apsched.study.report.across import Line, along_json, alongs
from apsched.study.report.binding import bindings
from apsched.study.report.exports import flat, write_table
from apsched.study.report.frontier import DEFAULT_SLOWDOWN, fitting, frontier_json
from apsched.study.report.merge import Compared, compared, merge
from apsched.study.report.text import print_study
from apsched.study.report.what_if import Answer, cap_then, parse_what_if, then
from apsched.study.report.what_if_text import answer_json, print_answers
from apsched.study.run import Board, OpenChain, chains, share_schedules
from apsched.study.run import run as answer
from apsched.study.setting import Setting
from apsched.study.speeds import Speeds, parse_times
from apsched.study.store import FILE, Point, Store


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Answer all that is open of the grid, and print all of it; or do something with studies that
    are there.
    """
    words = args.source
    if words[0] in ACTIONS:
        ACTIONS[words[0]](args, words[1:], stdout)
        return
    if len(words) > 1:
        raise InputError(
            f"expected one SOURCE, or {', '.join(ACTIONS)} and studies; found {words[0]!r} and"
            f" {words[1]!r}"
        )
    args = argparse.Namespace(**{**vars(args), "source": words[0]})
    if args.what_if:
        ask_what_if(args, stdout)
        return
    axes, memory = parse_vary(args.vary)
    if memory is None:
        choice = search_choice(args)
        memory = MemoryAxis(caps=(choice.memory_cap,))
    elif args.memory_cap is not None:
        raise InputError("--memory-cap: --vary memory_cap states it already; leave one out")
    slowdown = parse_share(args.slowdown or DEFAULT_SLOWDOWN, "--slowdown")
    engine = engine_of(args)
    combinations = list(product(*(axis.values for axis in axes)))
    labels = [
        dict(zip((axis.name for axis in axes), values, strict=True)) for values in combinations
    ]
    settings = [setting_of(_with(args, axes, values)) for values in combinations]
    store, run_id = opened(args)
    prepared = prepare(settings, store, Progress())
    lives = chains(prepared, memory, store, full=args.full)
    labelled = _labelled(prepared, settings, labels)
    board = Board(lives, engine.slots)
    try:
        answer(lives, engine, run_id, board.told)
    except KeyboardInterrupt:
        _print(lives, labelled, slowdown, store, args, stdout)
        raise
    engine.stop()
    store.end_run(run_id, _now(), sum(len(live.known) for live in lives))
    _print(lives, labelled, slowdown, store, args, stdout)
    if not any(outcome.step_ticks is not None for live in lives for outcome in live.known.values()):
        raise InfeasibleError(
            f"no schedule fits at any point of the study; {store.directory / FILE} says what"
            " would do"
        )


def opened(args: argparse.Namespace) -> tuple[Store, str]:
    """Return the study that ``-o`` names, made where there is none, and the name of this run in
    it.
    """
    directory = (
        Path(args.out)
        if args.out is not None
        else Path("apsched-out") / f"study-{_slug(args.source)}"
    )
    check_writable(directory)
    store = Store(directory, create=True)
    run_id = uuid.uuid4().hex
    store.begin_run(run_id, _command(args), _versions(), _now())
    return store, run_id


def ask_what_if(args: argparse.Namespace, stdout: TextIO) -> None:
    """Answer one question about other hardware or another size directly."""
    if args.vary:
        raise InputError(
            "--if: it asks one question; --vary asks many (network, compute and memory_cap can"
            " vary, too): leave one out"
        )
    what_if = parse_what_if(args.what_if)
    now = setting_of(args)
    later = then(now, what_if)
    cap = search_choice(args).memory_cap
    engine = engine_of(args)
    store, run_id = opened(args)
    progress = Progress()
    before, after = prepare((now,), store, progress), prepare((later,), store, progress)
    lives = [
        *chains(before, MemoryAxis(caps=(cap,)), store, full=False),
        *(
            live
            for one in after
            for live in chains(
                (one,),
                MemoryAxis(caps=(cap_then(cap, what_if, one.graph.device_memory_bytes),)),
                store,
                full=False,
            )
        ),
    ]
    answer(lives, engine, run_id, Board(lives, engine.slots).told)
    engine.stop()
    pairs = list(zip(lives[: len(before)], lives[len(before) :], strict=True))
    for one, other in pairs:
        share_schedules(one, other, run_id)
    store.end_run(run_id, _now(), len(lives))
    answers = [
        Answer(
            now=one.points()[0],
            then=other.points()[0],
            notes=other.prepared.graph.notes[len(one.prepared.graph.notes) :],
        )
        for one, other in pairs
    ]
    if args.json:
        graphs = [answer_json(found) for found in answers]
        print(
            json.dumps(
                {"schema": 1, "study": str(store.directory), "if": what_if.text, "graphs": graphs}
            ),
            file=stdout,
        )
    else:
        print_answers(what_if.text, answers, stdout)
    if all(found.now.step_time_us is None or found.then.step_time_us is None for found in answers):
        raise InfeasibleError(
            "no schedule fits now, or none would then; "
            + str(store.directory / FILE)
            + " says what would do"
        )


def _print(
    lives: tuple[OpenChain, ...],
    labels: list[dict[str, str]],
    slowdown: float,
    store: Store,
    args: argparse.Namespace,
    out: TextIO,
) -> None:
    lines = [
        Line(
            labels=label,
            graph=live.prepared.graph.name,
            points=live.points(),
            expected=len(live.chain.names(live.known)) or live.chain.expected(),
        )
        for live, label in zip(lives, labels, strict=True)
    ]
    if args.json:
        found = [_line_json(line, slowdown) for line in lines]
        across = [along_json(along) for along in alongs(lines)]
        print(
            json.dumps(
                {"schema": 1, "study": str(store.directory), "lines": found, "across": across}
            ),
            file=out,
        )
        return
    print_study(lines, slowdown, out)
    console(out).print(f"study in {store.directory}: {FILE}, graphs, schedules", markup=False)


def _line_json(line: Line, slowdown: float) -> dict[str, Any]:
    fit = fitting(line.points)
    binds = dict(zip((point.point_id for point in fit), bindings(fit), strict=True))
    points = [
        {
            **point_json(point),
            "binds": asdict(binds[point.point_id]) if point.point_id in binds else None,
        }
        for point in line.points
    ]
    return {
        "labels": dict(line.labels),
        "graph": line.graph,
        "points": points,
        "frontier": frontier_json(fit, slowdown),
    }


def point_json(point: Point) -> dict[str, Any]:
    """Return what ``--json`` says of a point."""
    return {
        "point_id": point.point_id,
        "memory_cap": point.memory_cap,
        "how": point.outcome.how,
        "seconds": round(point.outcome.seconds, 3),
        "schedule": point.schedule,
        "described": dict(point.described),
        **point.outcome.report,
    }


def _with(
    args: argparse.Namespace, axes: tuple[Axis, ...], values: tuple[str, ...]
) -> argparse.Namespace:
    """Return the arguments with the values of one combination."""
    changed: dict[str, Any] = {}
    for axis, value in zip(axes, values, strict=True):
        if axis.name in SWITCHES:
            if value not in ("yes", "no"):
                raise InputError(f"--vary {axis.name}: expected yes or no, found {value!r}")
            changed[axis.name] = value == "yes"
        elif axis.name == "collectives":
            changed[axis.name] = [] if value == "none" else [value]
        elif axis.name in ("plan", "costs") and value == "none":
            changed[axis.name] = None
        else:
            changed[axis.name] = value
    return argparse.Namespace(**{**vars(args), **changed})


def setting_of(args: argparse.Namespace) -> Setting:
    choice = search_choice(args)
    speeds = {
        name: parse_times(getattr(args, name), name)
        for name in SPEEDS
        if getattr(args, name, None) is not None
    }
    return Setting(
        request=source_request(args),
        costs=cost_choice(args),
        direction=direction(args),
        caps=choice.caps,
        options=choice.options,
        plan=plan_choice(args),
        bitwise=args.bitwise,
        speeds=Speeds(**speeds),
    )


def _labelled(
    prepared: tuple[Prepared, ...], settings: list[Setting], labels: list[dict[str, str]]
) -> list[dict[str, str]]:
    """Return the labels of each graph's setting."""
    by_setting = {id(setting): label for setting, label in zip(settings, labels, strict=True)}
    return [by_setting[id(one.setting)] for one in prepared]


def engine_of(args: argparse.Namespace) -> Engine:
    if args.engine is not None:
        if args.jobs is not None:
            raise InputError(
                "--jobs: it counts processes on this machine; leave it out with --engine"
            )
        scheme, _, address = args.engine.partition("://")
        if scheme != "dask" or not address:
            raise InputError(f"--engine: expected dask://host:port, found {args.engine!r}")
        from apsched.study.dask_engine import DaskEngine

        return DaskEngine(f"tcp://{address}")
    jobs = (
        parse_count(args.jobs, "--jobs", least=1) if args.jobs is not None else os.cpu_count() or 1
    )
    return LocalEngine(jobs)


def _slug(source: str) -> str:
    kept = "".join(
        letter if letter.isalnum() or letter in "-_." else "-" for letter in Path(source).name
    )
    return kept.strip("-.") or "source"


def _command(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name != "run"}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("apsched", "ortools", "numpy", "numba", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def run_compare(args: argparse.Namespace, words: list[str], stdout: TextIO) -> None:
    """Put the answers of two studies to the same questions side by side."""
    one, other = (
        Store(Path(word)).points()
        for word in _exactly(words, 2, "two studies: apsched study compare A B")
    )
    found = compared(one, other, tuple(args.ignore or ()))
    if args.json:
        print(json.dumps({"schema": 1, **_json(found)}), file=stdout)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("graph", "options that differ from point to point", "memory cap"):
        table.add_column(heading)
    for heading in (f"{words[0]} ms", f"{words[1]} ms", "shorter by", "proven"):
        table.add_column(heading, justify="right")
    differing = _differing([pair.one for pair in found.pairs])
    for pair in found.pairs:
        labels = " ".join(f"{name}={pair.one.described[name]}" for name in differing)
        cap = pair.one.outcome.memory_cap_bytes
        gain = "" if pair.gain is None else f"{100 * pair.gain:.2f} %"
        cells = [
            pair.one.graph.name,
            labels,
            "none" if cap is None else show_bytes(cap),
            _ms(pair.one),
            _ms(pair.other),
            gain,
        ]
        table.add_row(*cells, "yes" if pair.proven else "no")
    out = console(stdout)
    out.print(table)
    out.print(
        f"{len(found.pairs)} points in both, {len(found.only_one)} only in {words[0]},"
        f" {len(found.only_other)} only in {words[1]}"
    )


def run_merge(args: argparse.Namespace, words: list[str], stdout: TextIO) -> None:
    """Make one study of several; the better of two answers stays."""
    if len(words) < 2 or args.out is None:
        raise InputError(
            "expected studies and a directory to merge them into: apsched study merge A B -o DIR"
        )
    sources = [Store(Path(word)) for word in words]
    check_writable(Path(args.out))
    count = merge(sources, Store(Path(args.out), create=True))
    print(f"{count} points in {args.out}: {FILE}, graphs, schedules", file=stdout)


def run_export(args: argparse.Namespace, words: list[str], stdout: TextIO) -> None:
    """Write a study as one flat table."""
    (directory,) = _exactly(words, 1, "one study: apsched study export DIR -o FILE.csv")
    points = Store(Path(directory)).points()
    if args.out is None:
        raise InputError("-o: expected the name of a file that ends in .csv or .parquet")
    check_writable(Path(args.out).parent)
    write_table(points, Path(args.out))
    print(f"{len(points)} points, {len(flat(points)[0])} columns -> {args.out}", file=stdout)


ACTIONS: dict[str, Callable[[argparse.Namespace, list[str], TextIO], None]] = {
    "compare": run_compare,
    "merge": run_merge,
    "export": run_export,
}


def _exactly(words: list[str], count: int, what: str) -> list[str]:
    if len(words) != count:
        raise InputError(f"expected {what}; found {len(words)} names")
    return words


def _differing(points: list[Point]) -> list[str]:
    names = points[0].described if points else {}
    return [
        name for name in names if len({json.dumps(point.described[name]) for point in points}) > 1
    ]


def _ms(point: Point) -> str:
    return "none fits" if point.step_time_us is None else f"{point.step_time_us / 1000:,.3f}"


def _json(found: Compared) -> dict[str, Any]:
    return {
        "pairs": [
            {
                "graph": pair.one.graph.name,
                "memory_cap": pair.one.memory_cap,
                "described": [dict(pair.one.described), dict(pair.other.described)],
                "step_time_us": [pair.one.step_time_us, pair.other.step_time_us],
                "bound_us": [pair.one.bound_us, pair.other.bound_us],
                "gain": pair.gain,
                "proven": pair.proven,
            }
            for pair in found.pairs
        ],
        "only_first": [point.point_id for point in found.only_one],
        "only_second": [point.point_id for point in found.only_other],
    }
