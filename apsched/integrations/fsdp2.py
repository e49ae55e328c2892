"""A solved schedule as settings of eager FSDP2: no graph, only the public setters of
``fully_shard``'s modules.

FSDP2 has settings for a part of a schedule: which gathers run in which order, before which unit
each is launched, which parameters stay from forward to backward, and how many reduce-scatters may
be in flight. FSDP2 launches each reduce-scatter itself, as soon as the backward of its unit has
ended. A schedule that does not fit these settings is refused.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from apsched.artifacts.replay import replay
from apsched.artifacts.schedule_file import load_schedule
from apsched.artifacts.solved_run import RESULT_FILE
from apsched.errors import InputError
from apsched.integrations.eager.agreed import DEADLINE_S, same_on_all
from apsched.integrations.eager.settings import (
    Fsdp2Settings,
    UnitSettings,
    check_resharded,
    in_words,
    set_up,
)
from apsched.integrations.fsdp2_units import (
    ROOT,
    Unit,
    backward_order,
    check_names,
    check_same_model,
    forward_hooks,
    launches_of,
    movable,
    needs_of,
    refuse_apart,
    units_of,
)
from apsched.integrations.prefetch_order import Hook, Launch, prefetch_lists
from apsched.integrations.unit_order import reduced_as_units_run
from apsched.kinds import CollectiveKind
from apsched.pipeline.result import Result
from apsched.problem.build import build_problem
from apsched.problem.plan.module_buckets import ModuleBuckets
from apsched.problem.plan.rules import Plan
from apsched.problem.problem import Problem
from apsched.schedule.analysis.moved_compute import moved_compute
from apsched.schedule.schedule import Schedule, StepKind
from apsched.torch_compat.compilers import uncompiled

if TYPE_CHECKING:
    import networkx as nx

Solved = tuple[Problem, Schedule]


def apply_fsdp2(
    model: nn.Module,
    solved: Result | Iterable[Result] | str | PathLike[str],
    *,
    deadline_s: float | None = DEADLINE_S,
) -> Fsdp2Settings:
    """Set up ``model``, on which ``fully_shard`` was called, to gather in the order of ``solved``;
    returns the settings.

    ``solved`` are the results of the forward and the backward graph, or the directory that
    ``apsched solve`` or ``StepResult.save_run`` wrote. Every process rank must pass the same
    results. Call the function on all, once the model is built, before the first step: where a
    process group runs, they compare their settings before any is set.

    Parameters
    ----------
    deadline_s
        Seconds that one process rank waits for another; ``None``: without limit.

    Raises
    ------
    InputError
        where FSDP2 cannot follow the schedule; the message names the bucket, and the nearest bucket
        that FSDP2 can form. Also where the schedule is of another model or mesh, or where process
        ranks pass different results. Nothing is set then, on any process rank.
    AgreementError
        where a process rank does not answer.
    """
    model = uncompiled(model)
    if not isinstance(solved, str | PathLike):
        solved = [solved] if isinstance(solved, Result) else list(solved)

    def prepared() -> tuple[tuple[Unit, ...], Fsdp2Settings]:
        units = units_of(model)
        return units, checked_settings(model, units, solved_graphs(solved), _memory_cap(solved))

    units, settings = same_on_all(model, prepared, lambda found: in_words(found[1]), deadline_s)
    set_up(model, units, settings)
    return settings


def checked_settings(
    model: nn.Module,
    units: Sequence[Unit],
    graphs: Mapping[str, Solved],
    memory_cap_bytes: int | None = 0,
) -> Fsdp2Settings:
    """Return the settings of the ``units`` of ``model`` by the schedules of ``graphs``;
    ``memory_cap_bytes`` is the cap of backward.
    """
    settings = fsdp2_settings(units, graphs, memory_cap_bytes=memory_cap_bytes)
    check_same_model(model, graphs["forward"][0])
    check_resharded(units, settings)
    return settings


def fsdp2_plan(model: nn.Module, *graphs: "nx.DiGraph | Problem") -> Plan:
    """Return the plan under which schedules of ``graphs`` can be set up on ``model``: a bucket for
    each unit of ``fully_shard``.

    ``apsched.solve_step`` takes that of both graphs (docs/accumulate.md). Or solve each graph under
    its own, with compute as captured::

        results = [
            apsched.solve(graph, plan=fsdp2_plan(model, graph), max_compute_move=0)
            for graph in (forward, backward)
        ]
        apply_fsdp2(model, results)
    """
    units = units_of(uncompiled(model))
    problems = [graph if isinstance(graph, Problem) else build_problem(graph) for graph in graphs]
    for problem in problems:
        check_names(units, problem)
    return ModuleBuckets(buckets={unit.name: unit.parameters for unit in units}).plan(problems)


def fsdp2_settings(
    units: Sequence[Unit],
    solved: Mapping[str, Solved],
    first: Problem | None = None,
    kept: Collection[str] | None = None,
    memory_cap_bytes: int | None = 0,
) -> Fsdp2Settings:
    """Return the settings of the units; ``solved`` are the schedules by graph: ``forward``,
    and ``backward`` where there is one.

    With several micro-batches ``first`` is the forward graph of the first one, which gathers all
    units, and ``kept`` has the parameters that are kept from forward to backward. Reductions in
    another order than that of FSDP2 are moved where memory stays within the peak of the schedule or
    ``memory_cap_bytes``.
    """
    by_parameter = {name: unit for unit in units for name in unit.parameters}
    problem, schedule = solved["forward"]
    whole = problem if first is None else first
    launches = launches_of(problem, schedule, CollectiveKind.ALL_GATHER, by_parameter)
    if not launches and whole is problem:
        raise InputError(
            "forward: expected gathers of parameters, found none; FSDP2 needs no settings"
        )
    refuse_apart(problem, launches)
    hooks = forward_hooks(units, needs_of(whole, by_parameter, problem))
    ahead = prefetch_lists(hooks, launches)
    names = [hook.unit for hook in hooks]
    ends = needs_of(whole, by_parameter, problem, last=True)
    behind: dict[str, tuple[str, ...]] | None = None
    gathered, skipped, buffers = set(names), set[str](), 1
    in_node: dict[str, int] = {}
    if "backward" in solved:
        order = backward_order(units, names, ends)
        behind, gathered = _backward(units, order, solved["backward"], by_parameter)
        reduced = _reduced_as_fsdp2(*solved["backward"], by_parameter, names, memory_cap_bytes)
        buffers = _reductions_in_flight(solved["backward"][0], reduced, by_parameter)
        _refuse_kept_in_part(whole, solved["backward"][0], units, kept)
        in_node = _resharded_units(whole, solved["backward"][0], units)
    saved = {unit.name for unit in units if unit.name not in gathered and _is_saved(whole, unit)}
    if behind is not None:
        unread = [unit for unit in units if unit.name not in gathered | saved]
        skipped = {unit.name for unit in unread if unit.only_embeddings}
        more = {u.name for u in unread if u.parameters and u.trained} - skipped
        behind = _with_next(behind, order, more)
        saved |= {u.name for u in unread if u.kept and u.name in more}
    return Fsdp2Settings(
        units=tuple(
            UnitSettings(
                name=name,
                forward_prefetch=ahead[name],
                backward_prefetch=behind[name] if behind is not None else None,
                reshard_after_forward=in_node.get(name, name not in saved),
                unshard_in_backward=name not in skipped,
            )
            for name in names
        ),
        reduce_scatter_buffers=buffers,
    )


def _backward(
    units: Sequence[Unit], order: Sequence[str], solved: Solved, by_parameter: Mapping[str, Unit]
) -> tuple[dict[str, tuple[str, ...]], set[str]]:
    """Return the prefetches of each unit in backward, and the units that are gathered there;
    ``order`` is that of their hooks.
    """
    problem, schedule = solved
    launches = launches_of(problem, schedule, CollectiveKind.ALL_GATHER, by_parameter)
    refuse_apart(problem, launches)
    needs = needs_of(problem, by_parameter)
    hooks = [
        Hook(unit=name, need=_backward_need(_named(units, name), units, needs)) for name in order
    ]
    known = [hook for hook in hooks if hook.need is not None]
    for before, after in pairwise(known):
        if (before.need or 0) > (after.need or 0):
            raise InputError(
                f"backward: expected to need {before.unit} before {after.unit}, as forward in"
                " reverse; found the opposite"
            )
    return prefetch_lists(hooks, launches), {launch.unit for launch in launches}


def _with_next(
    behind: Mapping[str, tuple[str, ...]], order: Sequence[str], more: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Return the prefetches ``behind`` with those of the units ``more``, each by the hook before
    its own, as FSDP2 does without settings.
    """
    found = dict(behind)
    for before, name in pairwise(order):
        if name in more:
            found[before] = (*found[before], name)
    return found


def _backward_need(unit: Unit, units: Sequence[Unit], needs: Mapping[str, int]) -> int | None:
    inside = [needs[u.name] for u in units if (u is unit or unit.holds(u)) and u.name in needs]
    if unit.name == ROOT and not unit.parameters:
        return -1
    return min(inside, default=None)


def _reduced_as_fsdp2(
    problem: Problem,
    schedule: Schedule,
    by_parameter: Mapping[str, Unit],
    forward: Sequence[str],
    memory_cap_bytes: int | None,
) -> Schedule:
    """Return ``schedule`` with the reductions in the order in which backward ends, as FSDP2 runs
    them.
    """
    launches: Sequence[Launch] = launches_of(
        problem, schedule, CollectiveKind.REDUCE_SCATTER, by_parameter
    )
    order = [launch.unit for launch in launches]
    expected = [name for name in reversed(forward) if name in order]
    if order == expected:
        return schedule
    units = {unit.name: unit.parameters for unit in by_parameter.values()}
    in_order = [units[name] for name in expected]
    moved = reduced_as_units_run(problem, schedule, in_order, memory_cap_bytes)
    if moved is None:
        order = [*dict.fromkeys(order)]  # a unit on several meshes is there several times
        pairs = zip(expected, order, strict=True)
        apart = next((f"{a} before {b}" for a, b in pairs if a != b), "once on each of its meshes")
        raise InputError(
            f"backward: FSDP2 reduces each unit when its backward has ended, {apart}, and the"
            " schedule does not; in the order of FSDP2 it needs more memory than it has; call"
            " tune_fsdp2, which solves in that order, or solve with a higher memory cap"
        )
    return moved


def _reductions_in_flight(
    problem: Problem, schedule: Schedule, by_parameter: Mapping[str, Unit]
) -> int:
    """Return the number of reduce-scatters that hold their input at once, with one of a unit on
    several meshes: FSDP2 waits for earlier ones before the first of a unit alone.
    """
    alone = {c.start: c for c in movable(problem, CollectiveKind.REDUCE_SCATTER)}
    starts = {c.wait: start for start, c in alone.items()}
    first = [problem.collectives[bucket.members[0]] for bucket in schedule.buckets]
    reduces = [problem.keys[c.key].kind == CollectiveKind.REDUCE_SCATTER for c in first]
    held: dict[int, str] = {}  # units of buckets; of nodes that start alone, by their complement
    most = 1
    for step in schedule.steps:
        launched: int | None = None
        if step.kind in (StepKind.COPY_IN, StepKind.START) and reduces[step.index]:
            launched = step.index  # a coalesced bucket has no copy-in
        elif step.kind is StepKind.WAIT:
            held.pop(step.index, None)
        elif step.kind is StepKind.NODE and step.index in alone:
            launched = ~step.index
        elif step.kind is StepKind.NODE and step.index in starts:
            held.pop(~starts[step.index], None)
        if launched is not None and launched not in held:
            one = first[launched] if launched >= 0 else alone[~launched]
            unit = by_parameter[one.module].name
            if unit not in held.values():
                most = max(most, len(held) + 1)
            held[launched] = unit
    return most


def _is_saved(forward: Problem, unit: Unit) -> bool:
    """Return whether the forward graph hands on gathered parameters of a unit: their storage is
    alive at its end.
    """
    gathers = [
        c for c in movable(forward, CollectiveKind.ALL_GATHER) if c.module in unit.parameters
    ]
    return any(
        forward.storages[c.output_storage].uses[-1] == forward.num_nodes - 1 for c in gathers
    )


def _refuse_kept_in_part(
    forward: Problem, backward: Problem, units: Sequence[Unit], kept: Collection[str] | None
) -> None:
    """Raise ``InputError`` for a unit of which backward gathers some parameters while others are
    kept: those of ``kept``, or where it is not stated those that forward hands on.
    """
    gathered = {c.module for c in movable(backward, CollectiveKind.ALL_GATHER)}
    for unit in units:
        again = [name for name in unit.parameters if name in gathered]
        saved = (
            _is_saved(forward, unit)
            if kept is None
            else any(name in kept for name in unit.parameters)
        )
        if again and saved:
            raise InputError(
                f"backward: FSDP2 keeps a unit or gathers it again, and of {unit.name} the schedule"
                f" gathers {again[0]} again and keeps others; keep all parameters of the unit or"
                " none (--keep with a file that says which); tune_fsdp2(model, inputs, keep=...)"
                " takes the faster of both, and reports the cost"
            )


def _resharded_units(forward: Problem, backward: Problem, units: Sequence[Unit]) -> dict[str, int]:
    """Return unit -> number of process ranks that it is resharded to: backward gathers it on
    another group than forward.
    """
    first, again = (
        {c.module: graph.keys[c.key] for c in movable(graph, CollectiveKind.ALL_GATHER)}
        for graph in (forward, backward)
    )
    return {
        unit.name: again[name].group_size
        for unit in units
        for name in unit.parameters
        if name in first and name in again and again[name].group != first[name].group
    }


def _named(units: Sequence[Unit], name: str) -> Unit:
    return next(unit for unit in units if unit.name == name)


def _memory_cap(solved: Sequence[Result] | str | PathLike[str]) -> int | None:
    """Return the memory cap that backward was solved under, in bytes: ``None`` without a cap, 0
    where a directory does not say it.
    """
    if not isinstance(solved, str | PathLike):
        caps = (one.caps.memory_cap_bytes for one in solved if one.problem.name == "backward")
        return next(caps, None)
    try:
        graphs = json.loads((Path(solved) / RESULT_FILE).read_text(encoding="utf-8"))["graphs"]
        cap = next(one["memory_cap_bytes"] for one in graphs if one["name"] == "backward")
        return None if cap is None else int(cap)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration):
        return 0


def solved_graphs(solved: Result | Iterable[Result] | str | PathLike[str]) -> dict[str, Solved]:
    """Return problem and schedule by name of the graph; ``InputError`` for graphs that FSDP2 does
    not run.
    """
    if isinstance(solved, str | PathLike):
        pairs = list(_from_directory(Path(solved)))
    else:
        results = [solved] if isinstance(solved, Result) else list(solved)
        without = next((result.problem.name for result in results if result.schedule is None), None)
        if without is not None:
            raise InputError(f"{without}: expected a schedule, found that none fits the caps")
        pairs = [
            (result.problem, result.schedule) for result in results if result.schedule is not None
        ]
    found = {problem.name: (problem, schedule) for problem, schedule in pairs}
    if (
        "forward" not in found
        or not set(found) <= {"forward", "backward"}
        or len(found) < len(pairs)
    ):
        names = ", ".join(problem.name for problem, _ in pairs) or "none"
        raise InputError(
            f"expected results of a forward and a backward graph, found {names}; FSDP2 runs them"
            " one after the other (several micro-batches: apply_fsdp2_micro_batches)"
        )
    for problem, schedule in pairs:
        refuse_moved_compute(problem, schedule)
    return found


def refuse_moved_compute(problem: Problem, schedule: Schedule) -> None:
    """Raise ``InputError`` for a schedule that moves compute."""
    if moved_compute(problem, schedule):
        raise InputError(
            f"{problem.name}: the schedule moves compute, and FSDP2 cannot; solve with"
            " caps=apsched.Caps(max_compute_move=0), on the command line --max-compute-move 0"
        )


def _from_directory(folder: Path) -> Iterable[Solved]:
    names = [
        name for name in ("forward", "backward") if (folder / f"{name}.schedule.json").is_file()
    ]
    if not names:
        raise InputError(
            f"{folder}: expected the files that `apsched solve -o` writes (forward.graph,"
            " forward.schedule.json, ...), found no schedule"
        )
    if micro_batches_of(folder):
        raise InputError(
            f"{folder}: expected the schedules of one micro-batch, found those of `apsched solve"
            " --accumulate`; call apply_fsdp2_micro_batches"
        )
    for name in names:
        yield read_solved(folder, name)


def micro_batches_of(folder: Path) -> list[tuple[int, list[str]]]:
    """Return the number of micro-batches with the graphs that they run, in order, of the answer of
    ``apsched solve --accumulate`` in ``folder``; none for another answer.
    """
    try:
        report = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
        listed = report.get("accumulate", {}).get("micro_batches", [])
        return [(int(one["count"]), list(one["graphs"])) for one in listed]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def read_solved(folder: Path, name: str) -> Solved:
    """Return problem and schedule of the graph ``name`` that ``apsched solve -o FOLDER`` wrote."""
    from apsched.graph.graph_file import load_graph

    problem = build_problem(load_graph(folder / f"{name}.graph"))
    return problem, replay(problem, load_schedule(folder / f"{name}.schedule.json")).schedule
