"""From settings to graphs at their costs, each source captured once; a capture of an earlier run is
not repeated.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import networkx as nx

from apsched import __version__
from apsched.atomic_files import digest
from apsched.costs.clusters.cluster import Cluster
from apsched.errors import InputError
from apsched.graph.graph_file import from_bytes, to_bytes
from apsched.kinds import NodeKind
from apsched.pipeline.compile_ahead import begin_to_compile, wait_until_compiled
from apsched.pipeline.cost_choice import CostChoice, cluster_of_graphs, read_costs
from apsched.pipeline.device_memory import BesideGraph, MemoryAccount, beside_graphs
from apsched.pipeline.load import LoadedGraph, LoadedSource, loaded_at
from apsched.pipeline.solve_graph import under_plan
from apsched.pipeline.sources import (
    SourceKind,
    SourceRequest,
    checked_kind,
    classify,
    graph_file_set,
)
from apsched.problem.build import build_problem
from apsched.problem.plan.apply import check_matches
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.study.axes import MemoryAxis, MemoryRange
from apsched.study.chain import RangeEnds, Stated, cap_name, resolved
from apsched.study.rows import GRAPHS, GraphRow, InStep
from apsched.study.setting import Setting
from apsched.study.speeds import Speeds, at_speeds
from apsched.study.store import Store
from apsched.whole_step.accumulation.step import Accumulation
from apsched.whole_step.along_caps import answers_along_caps, range_ends_bytes
from apsched.whole_step.choices import NONE, Choice
from apsched.whole_step.joint_graph.step import JointStep
from apsched.whole_step.keep_request import AUTO
from apsched.whole_step.pair import Step, pair_of
from apsched.whole_step.solve import AnyStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A setting and one of its graphs."""

    setting: Setting
    graph: GraphRow
    beside: BesideGraph | None = None
    """The memory of the device outside of the graph; ``None`` if it is not known."""
    caps: tuple[Stated, ...] | None = None
    """The memory caps for which the graph was made; ``None``: all caps of the study."""

    @property
    def memory_bytes(self) -> int | None:
        """The memory of the device that is left for the graph; ``None`` where it is not known."""
        if self.beside is None:
            return self.graph.device_memory_bytes
        search = self.setting.search
        return MemoryAccount(
            beside=self.beside, optimizer=search.optimizer, reserve=search.reserve
        ).left_bytes


Key = tuple[SourceRequest, str, CostChoice]


def prepare(
    settings: Sequence[Setting], store: Store, progress: Progress, memory: MemoryAxis | None = None
) -> tuple[Prepared, ...]:
    """Return every setting with each of its graphs, in order; the graphs are in ``store``.

    If a setting requests the best parameters to keep, the choice is made here, under each cap of
    ``memory``: each cap has graphs of its own.
    """
    memory = memory or MemoryAxis()
    for setting in settings:
        read_costs(setting.costs)  # what cannot be used is refused before anything is captured
        checked_kind(setting.request)
        if setting.keep.mode == AUTO and setting.speeds != Speeds():
            raise InputError(
                "--vary network, compute: --keep auto chooses parameters at the costs of the"
                " cluster; state a cluster file with other speeds"
            )
    graphs: dict[Key, tuple[GraphRow, ...]] = {}
    missing: dict[tuple[SourceRequest, str], list[CostChoice]] = {}
    for setting in settings:
        key = _key(setting)
        name = _capture_id(setting)
        known = store.capture(name) if name is not None else None
        if known is not None:
            graphs[key] = known
        is_open = key not in graphs or _kept_known(setting, graphs[key], memory, store) is None
        if is_open and setting.costs not in missing.setdefault(key[:2], []):
            missing[key[:2]].append(setting.costs)
    if missing:
        begin_to_compile(progress)
    for (request, direction), choices in missing.items():
        with loaded_at(request, choices, direction, progress) as sources:
            for choice, source in zip(choices, sources, strict=True):
                key = request, direction, choice
                graphs[key] = _stored(source, source.graphs, store)
                for setting in settings:
                    if _key(setting) == key:
                        _keep_in(setting, source, graphs[key], memory, store, progress)
    prepared: list[Prepared] = []
    for setting in settings:
        rows = graphs[_key(setting)]
        if (name := _capture_id(setting)) is not None:
            store.add_capture(name, rows)
        if setting.search.plan.rules:
            check_matches(
                [build_problem(from_bytes(store.graph_content(row))) for row in rows],
                setting.search.plan,
            )
        for caps, kept_rows in _kept_known(setting, rows, memory, store) or ():
            at = tuple(_at_speeds(row, setting, store) for row in kept_rows)
            prepared += [replace(one, caps=caps) for one in _beside_each_other(at, setting, store)]
    if missing:
        wait_until_compiled(progress, with_orders=True)
    return tuple(prepared)


def _key(setting: Setting) -> Key:
    return setting.request, setting.direction, setting.costs


def _beside_each_other(rows: Sequence[GraphRow], setting: Setting, store: Store) -> list[Prepared]:
    """Return the graphs of one setting with the memory that the device holds beside each."""
    dags = [from_bytes(store.graph_content(row)) for row in rows]
    cluster = cluster_of(dags, setting) if dags else None
    if cluster is None:
        return [Prepared(setting=setting, graph=row) for row in rows]
    found = beside_graphs(dags, cluster)
    return [
        Prepared(
            setting=setting,
            graph=row,
            beside=replace(beside, gradient_bytes=row.in_step.gradient_bytes),
        )
        for row, beside in zip(rows, found, strict=True)
    ]


def _capture_id(setting: Setting) -> str | None:
    """Return a name for all inputs of a capture; ``None`` if they are not known: code of the user's
    may do something else next time.
    """
    request, costs = setting.request, setting.costs
    kind = classify(request.source)
    if kind not in (SourceKind.PRESET, SourceKind.GRAPH_FILE):
        return None
    read = read_costs(costs)
    path = Path(request.source)
    files = () if kind is SourceKind.PRESET else (path,) if path.is_file() else graph_file_set(path)
    content: Mapping[str, Any] = {
        "versions": (__version__, version("torch") if kind is SourceKind.PRESET else ""),
        "kind": kind.value,
        "source": request.source
        if kind is SourceKind.PRESET
        else [digest(file.read_bytes()) for file in files],
        "request": {
            name: value
            for name, value in asdict(request).items()
            if name != "source" and (value or name != "hints")
        },
        "direction": setting.direction,
        "cluster": repr(read.cluster)
        if costs.cluster is not None or kind is not SourceKind.GRAPH_FILE
        else None,
        "costs": None if costs.costs is None else digest(Path(costs.costs).read_bytes()),
        "collectives": [digest(Path(name).read_bytes()) for name in costs.collectives],
        "fused": costs.fused,
    }
    return digest(content)


def _stored(
    source: LoadedSource, graphs: Iterable[LoadedGraph], store: Store
) -> tuple[GraphRow, ...]:
    """Save ``graphs``, of ``source``; return their rows."""
    described = {"source": source.label, **Speeds().described()}

    def stored(graph: LoadedGraph) -> GraphRow:
        content, size_bytes = to_bytes(graph.dag), graph.device_memory_bytes
        row = _added(content, described, size_bytes, source.notes, store)
        return replace(row, apart=tuple(map(stored, graph.apart)), places=graph.places)

    return tuple(map(stored, graphs))


def _added(
    content: bytes,
    described: Mapping[str, Any],
    device_memory_bytes: int | None,
    notes: tuple[str, ...],
    store: Store,
) -> GraphRow:
    dag = from_bytes(content)
    graph_id = digest(content)
    name = dag.graph["name"]
    row = GraphRow(
        graph_id=graph_id,
        name=name,
        graph_hash=build_problem(dag).graph_hash,
        cluster=dag.graph["cluster"],
        described=described,
        num_nodes=dag.number_of_nodes(),
        num_collectives=sum(
            dag.nodes[rank]["record"].kind is NodeKind.START
            for rank in range(dag.number_of_nodes())
        ),
        device_memory_bytes=device_memory_bytes,
        notes=notes,
        file=f"{GRAPHS}/{graph_id}.{name}.graph",
    )
    store.add_graph(row, content)
    return row


def _at_speeds(row: GraphRow, setting: Setting, store: Store) -> GraphRow:
    """Return the row of the graph at the speeds of ``setting``, which is kept, too."""
    if setting.speeds == Speeds():
        return row
    dag = from_bytes(store.graph_content(row))
    dag, notes = at_speeds(dag, setting.speeds, cluster_of([dag], setting))
    added = _added(
        to_bytes(dag),
        {**row.described, **setting.speeds.described()},
        row.device_memory_bytes,
        (*row.notes, *notes),
        store,
    )
    apart = tuple(_at_speeds(half, setting, store) for half in row.apart)
    return replace(added, in_step=row.in_step, apart=apart, places=row.places)


# graphs under a choice of kept parameters

WithCaps = list[tuple[tuple[Stated, ...] | None, tuple[GraphRow, ...]]]


def _kept_known(
    setting: Setting, again: Sequence[GraphRow], memory: MemoryAxis, store: Store
) -> WithCaps | None:
    """Return the graphs of ``setting`` with their kept parameters, and the caps for which they were
    made; ``None`` if some are not in ``store``. ``again``: with every parameter gathered again.
    """
    if setting.keep.mode == NONE:
        return [(None, tuple(again))]
    if setting.keep.mode != AUTO:
        rows = store.capture(_kept_id(setting, again, None))
        return None if rows is None else [(None, rows)]
    ends = store.step_range(_kept_id(setting, again, None)) if _has_range(memory) else (0, 0)
    if ends is None:
        return None
    found: WithCaps = []
    for cap in _caps(memory, ends):
        rows = store.capture(_kept_id(setting, again, cap_name(cap)))
        if rows is None:
            return None
        found.append(((cap,), rows))
    return found


def _keep_in(
    setting: Setting,
    source: LoadedSource,
    again: Sequence[GraphRow],
    memory: MemoryAxis,
    store: Store,
    progress: Progress,
) -> None:
    """Add to ``store`` the graphs of ``setting`` with their kept parameters."""
    if setting.keep.mode == NONE or _kept_known(setting, again, memory, store) is not None:
        return
    step = _step_of(setting, source.graphs, progress)
    if setting.keep.mode != AUTO:
        chosen = setting.keep.chosen(step.entries)
        rows = _rows_under(chosen, source, step, store)
        store.add_capture(_kept_id(setting, again, None), rows)
        return
    ends = (0, 0)
    if _has_range(memory):
        name = _kept_id(setting, again, None)
        ends = store.step_range(name) or range_ends_bytes(step)
        store.add_step_range(name, *ends)
    names = {_kept_id(setting, again, cap_name(cap)): cap for cap in _caps(memory, ends)}
    missing = {name: cap for name, cap in names.items() if store.capture(name) is None}
    answers = answers_along_caps(step, list(missing.values()))
    for name, answer in zip(missing, answers, strict=True):
        store.add_capture(name, _rows_under(answer.best.kept, source, step, store))


def _step_of(setting: Setting, graphs: Sequence[LoadedGraph], progress: Progress) -> AnyStep:
    """Return the step that ``graphs`` are, without a memory cap."""
    request = replace(setting.search, memory_cap=MemoryCap())
    if len(graphs) == 1 and graphs[0].apart:
        (joint,) = under_plan(graphs, request)
        return JointStep.of(joint, request, progress)
    several = setting.num_micro_batches > 1
    pair = pair_of(graphs, "--accumulate" if several else "--keep")
    step = Step.of(under_plan(pair, request), request, progress)
    return Accumulation.of(step, setting.num_micro_batches) if several else step


def _rows_under(
    choice: Choice, source: LoadedSource, step: AnyStep, store: Store
) -> tuple[GraphRow, ...]:
    """Save the graphs of ``step`` under ``choice``; return their rows, each with its part in the
    step.
    """
    known = _in_step(choice, step)
    rows = _stored(source, (graph for graph, _ in known.values()), store)
    return tuple(
        replace(row, in_step=in_step)
        for row, (_, in_step) in zip(rows, known.values(), strict=True)
    )


def _in_step(choice: Choice, step: AnyStep) -> dict[str, tuple[LoadedGraph, InStep]]:
    """Return the graphs of ``step`` under ``choice`` by name, each with its part in the step."""
    kept, kept_bytes = tuple(sorted(choice)), sum(step.entry_bytes.get(e, 0) for e in choice)
    known: dict[str, tuple[LoadedGraph, InStep]] = {}
    if isinstance(step, JointStep):
        graph = step.under(choice)
        return {graph.problem.name: (graph, InStep(kept=kept, kept_bytes=kept_bytes))}
    for pair in step.pairs_of(choice):
        shards = 0, pair.shard_bytes
        for graph, gradient_bytes, shard_bytes in zip(
            pair.graphs, pair.gradient_bytes, shards, strict=True
        ):
            name = graph.problem.name
            before = known[name][1].num_micro_batches if name in known else 0
            in_step = InStep(
                num_micro_batches=before + pair.count,
                kept=kept,
                kept_bytes=kept_bytes,
                shard_bytes=shard_bytes,
                gradient_bytes=gradient_bytes,
            )
            known[name] = graph, in_step
    return known


def _kept_id(setting: Setting, again: Sequence[GraphRow], cap: str | None) -> str:
    """Return a name for all inputs of the choice of kept parameters."""
    described = setting.described()
    choices = {"choices": ["again", "kept", "in node"]}  # a store may have older answers
    stated = {name: described[name] for name in ("keep", "accumulate") if name in described}
    identity = {**described, **choices} if setting.keep.mode == AUTO else stated
    ids = [row.graph_id for row in again]
    return digest({"graphs": ids, "memory_cap": cap, "version": __version__, "asked": identity})


def _has_range(memory: MemoryAxis) -> bool:
    """Return whether some cap depends on the least memory of the step."""
    return any(
        isinstance(cap, MemoryRange) or (cap is not None and cap.above_floor) for cap in memory.caps
    )


def _caps(memory: MemoryAxis, ends: tuple[int, int]) -> list[MemoryCap | None]:
    """Return the caps of ``memory`` on a step, ascending, the device's memory after those in bytes;
    ``ends``: its least memory and highest peak.
    """
    known = RangeEnds(solved_floor_bytes=ends[0], solved_peak_bytes=ends[1])
    stated = [cap for cap in memory.caps if cap is not None]
    found = {size for cap in stated for size in resolved(cap, known)}
    caps: list[MemoryCap | None] = [
        MemoryCap(size_bytes=size) for size in sorted(size for size in found if size is not None)
    ]
    caps += [None] if None in memory.caps else []
    return caps + ([MemoryCap()] if None in found else [])


def cluster_of(dags: Sequence[nx.DiGraph], setting: Setting) -> Cluster | None:
    """Return the cluster that the costs of ``dags``, graphs of ``setting``, stand for; ``None``
    where graph files name one that does not ship and do not hold it.
    """
    if any(dag.graph.get("priced_by") is not None for dag in dags):
        return cluster_of_graphs(setting.costs.cluster, dags)
    if (
        classify(setting.request.source) is not SourceKind.GRAPH_FILE
        or setting.costs.cluster
        or setting.costs.costs
    ):
        return read_costs(setting.costs).cluster
    return cluster_of_graphs(None, dags)
