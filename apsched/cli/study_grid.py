"""Runs ``apsched study`` on a SOURCE: a grid of questions, or one about other hardware."""

import argparse
import os
import platform
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any, TextIO

from apsched.artifacts.output_dir import check_writable
from apsched.cli.requests import (
    cost_choice,
    direction,
    micro_batches_in_a_row,
    solve_request,
    source_request,
    stated,
)
from apsched.errors import InfeasibleError, InputError
from apsched.pipeline.sources import check_not_source
from apsched.progress import Progress
from apsched.quantities import parse_count, parse_share
from apsched.report.console import console, print_json
from apsched.study.axes import SPEEDS, SWITCHES, Axis, MemoryAxis, label_of, parse_vary
from apsched.study.engine import Engine, LocalEngine
from apsched.study.prepare import Prepared, prepare
from apsched.study.report.across import Line, along_json, alongs
from apsched.study.report.binding import bindings
from apsched.study.report.frontier import DEFAULT_SLOWDOWN, ascending, fitting, frontier_json
from apsched.study.report.steps import step_json, steps_of
from apsched.study.report.text import print_study
from apsched.study.report.what_if import Answer, cap_then, parse_what_if, then
from apsched.study.report.what_if_text import answer_json, print_answers
from apsched.study.rows import FILE, Point
from apsched.study.run import Board, OpenChain, chains, share_schedules
from apsched.study.run import run as answer
from apsched.study.setting import Setting
from apsched.study.speeds import Speeds, parse_times
from apsched.study.store import Store
from apsched.whole_step.keep_request import AUTO, keep_request, of_direction


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The questions of a study."""

    lives: tuple[OpenChain, ...]
    labels: list[dict[str, str]]
    """The values of the axes, for each of ``lives``."""
    slowdown: float
    store: Store
    run_id: str


def run_grid(args: argparse.Namespace, stdout: TextIO) -> None:
    """Answer all that is open of the grid, and print all of it."""
    engine = engine_of(args)
    grid = posed(args, Progress())
    try:
        answer_grid(grid, engine)
    except KeyboardInterrupt:
        _print(grid, args, stdout)
        raise
    _print(grid, args, stdout)
    known = (outcome for live in grid.lives for outcome in live.known.values())
    if not any(outcome.step_ticks is not None for outcome in known):
        raise InfeasibleError(
            f"no schedule fits at any point of the study; {grid.store.directory / FILE} has the"
            " least caps that fit"
        )


def answer_grid(grid: Grid, engine: Engine, stream: TextIO | None = None) -> None:
    """Answer all that is open; ``stream`` gets the progress (default: stderr)."""
    labels = [", ".join(f"{name} {value}" for name, value in each.items()) for each in grid.labels]
    board = Board(grid.lives, engine.slots, stream, labels)
    answer(grid.lives, engine, grid.run_id, board.after_answer, board.before_question)
    engine.stop()
    grid.store.end_run(grid.run_id, _now(), sum(len(live.known) for live in grid.lives))


def posed(args: argparse.Namespace, progress: Progress) -> Grid:
    """Return the questions of the command line, with the answers that are kept."""
    axes, memory = parse_vary(args.vary)
    if memory is None:
        memory = MemoryAxis(caps=(stated(args, "memory_cap"),))
    elif args.memory_cap is not None:
        raise InputError("--memory-cap: --vary memory_cap states it already; leave one out")
    slowdown = parse_share(args.slowdown or DEFAULT_SLOWDOWN, "--slowdown")
    combinations = list(product(*(axis.values for axis in axes)))
    settings = [setting_of(_with(args, axes, values)) for values in combinations]
    labels = [
        {axis.name: label_of(axis.name, value) for axis, value in zip(axes, values, strict=True)}
        for values in combinations
    ]
    with opened(args, axes) as (store, run_id):
        prepared = prepare(settings, store, progress, memory)
        lives = chains(prepared, memory, store, full=args.full)
    return Grid(
        lives=lives,
        labels=_labelled(prepared, settings, labels),
        slowdown=slowdown,
        store=store,
        run_id=run_id,
    )


def lines_of(grid: Grid) -> list[Line]:
    """Return the answers that are known, a line for each setting and graph."""
    together: dict[tuple[int, str], tuple[dict[str, str], list[OpenChain]]] = {}
    for live, label in zip(grid.lives, grid.labels, strict=True):  # with --keep auto one a cap
        key = id(live.prepared.setting), live.prepared.graph.name
        together.setdefault(key, (label, []))[1].append(live)
    return [
        Line(
            labels=label,
            graph=name,
            points=ascending([point for live in lives for point in live.points()]),
            expected=sum(
                len(live.chain.names(live.known)) or live.chain.expected() for live in lives
            ),
        )
        for (_, name), (label, lives) in together.items()
    ]


@contextmanager
def opened(args: argparse.Namespace, axes: Sequence[Axis] = ()) -> Iterator[tuple[Store, str]]:
    """Yield the study that ``-o`` names, made where there is none, and the name of this run in it.

    If the body refuses the questions, nothing of a new study stays, and the error says which
    options that it names ``--vary`` states, by ``axes``.
    """
    directory = (
        Path(args.out)
        if args.out is not None
        else Path("apsched-out") / f"study-{_slug(args.source)}"
    )
    check_not_source(directory, args.source)
    check_writable(directory)
    store = Store(directory, create=True)
    run_id = uuid.uuid4().hex
    store.begin_run(run_id, _command(args), _versions(), _now())
    try:
        yield store, run_id
    except InputError as error:
        store.remove_if_empty()
        words = {word.strip(".,:;()") for word in str(error).split()}
        named = [axis.name for axis in axes if f"--{axis.name.replace('_', '-')}" in words]
        stated = f" (stated by --vary {', '.join(named)})" if named else ""
        raise InputError(f"{error}{stated}") from None


def run_what_if(args: argparse.Namespace, stdout: TextIO) -> None:
    """Answer one question about other hardware or another size directly."""
    if args.vary:
        raise InputError(
            "--if: it asks one question; --vary asks many (network, compute and memory_cap can"
            " vary, too): leave one out"
        )
    what_if = parse_what_if(args.what_if)
    now = setting_of(args)
    if now.keep.mode == AUTO:
        raise InputError(
            "--keep auto: its choice depends on the change of --if; keep none, all or a file"
            " (kept.txt of an answer)"
        )
    later = then(now, what_if)
    cap = stated(args, "memory_cap")
    engine = engine_of(args)
    progress = Progress()
    with opened(args) as (store, run_id):
        before, after = prepare((now,), store, progress), prepare((later,), store, progress)
        lives = [
            *chains(before, MemoryAxis(caps=(cap,)), store, full=False),
            *(
                live
                for one in after
                for live in chains(
                    (one,),
                    MemoryAxis(caps=(cap_then(cap, what_if, one.memory_bytes),)),
                    store,
                    full=False,
                )
            ),
        ]
    board = Board(lives, engine.slots)
    answer(lives, engine, run_id, board.after_answer, board.before_question)
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
        content = {"study": str(store.directory), "if": what_if.text, "graphs": graphs}
        print_json(stdout, **content)
    else:
        print_answers(what_if.text, answers, stdout)
    if all(found.now.step_time_us is None or found.then.step_time_us is None for found in answers):
        raise InfeasibleError(
            "no schedule fits now, or none would then; "
            + str(store.directory / FILE)
            + " has the least caps that fit"
        )


def _print(grid: Grid, args: argparse.Namespace, out: TextIO) -> None:
    lines = lines_of(grid)
    if args.json:
        found = [_line_json(line, grid.slowdown) for line in lines]
        across = [along_json(along) for along in alongs(lines)]
        steps = [step_json(step) for step in steps_of(lines)]
        more = {"steps": steps} if steps else {}
        print_json(out, study=str(grid.store.directory), lines=found, across=across, **more)
        return
    print_study(lines, grid.slowdown, out)
    console(out).print(f"study in {grid.store.directory}: {FILE}, graphs, schedules", markup=False)


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
    """Return a point as ``--json`` has it."""
    return {
        "point_id": point.point_id,
        "memory_cap": point.memory_cap,
        "how": point.outcome.how,
        "schedule_from": point.schedule_from,
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
        elif axis.name in ("plan", "costs", "accumulate") and value == "none":
            changed[axis.name] = None
        else:
            changed[axis.name] = value
    return argparse.Namespace(**{**vars(args), **changed})


def setting_of(args: argparse.Namespace) -> Setting:
    """Return the setting of a study that the options state."""
    speeds = {
        name: parse_times(getattr(args, name), name)
        for name in SPEEDS
        if getattr(args, name, None) is not None
    }
    which = direction(args)
    num_micro_batches = micro_batches_in_a_row(args, which)
    by_default = AUTO if num_micro_batches > 1 else None  # they need a choice
    keep = of_direction(keep_request(args.keep or by_default), which)
    return Setting(
        request=source_request(args),
        costs=cost_choice(args),
        direction=which,
        search=replace(solve_request(args, keep), memory_cap=None, bitwise_price=False),
        speeds=Speeds(**speeds),
        keep=keep,
        num_micro_batches=num_micro_batches,
    )


def _labelled(
    prepared: tuple[Prepared, ...], settings: list[Setting], labels: list[dict[str, str]]
) -> list[dict[str, str]]:
    """Return the labels of each graph's setting."""
    by_setting = {id(setting): label for setting, label in zip(settings, labels, strict=True)}
    return [by_setting[id(one.setting)] for one in prepared]


def engine_of(args: argparse.Namespace) -> Engine:
    """Return the engine that answers questions."""
    if args.engine is not None:
        if args.jobs is not None:
            raise InputError(
                "--jobs: it counts processes on this machine; leave it out with --engine"
            )
        scheme, _, address = args.engine.partition("://")
        if scheme != "dask" or not address:
            raise InputError(f"--engine: expected dask://host:port, found {args.engine!r}")
        from apsched.study.dask_engine import DaskEngine

        return DaskEngine.at(f"tcp://{address}")
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
