"""From settings to graphs at their costs, each source captured once; what an earlier run captured
is not captured again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from apsched import __version__
from apsched.atomic_files import digest
from apsched.costs.clusters.cluster import Cluster
from apsched.graph.graph_file import from_bytes, to_bytes
from apsched.kinds import NodeKind
from apsched.pipeline.cost_choice import CostChoice, cluster_named, read_costs
from apsched.pipeline.device_memory import BesideGraph, MemoryAccount, beside_graphs
from apsched.pipeline.load import LoadedSource, loaded_at
from apsched.pipeline.sources import SourceKind, SourceRequest, classify, graph_file_set
from apsched.problem.build import build_problem
from apsched.problem.plan.apply import check_matches
from apsched.progress import Progress
from apsched.study.setting import Setting
from apsched.study.speeds import Speeds, at_speeds
from apsched.study.store import GRAPHS, GraphRow, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A setting and one of its graphs."""

    setting: Setting
    graph: GraphRow
    beside: BesideGraph | None = None
    """What the device holds beside the graph; ``None`` where it is not known."""

    @property
    def memory_bytes(self) -> int | None:
        """The memory of the device that is left for the graph; ``None`` where it is not known."""
        if self.beside is None:
            return self.graph.device_memory_bytes
        search = self.setting.search
        return MemoryAccount(
            beside=self.beside, optimizer=search.optimizer, reserve=search.reserve
        ).left_bytes


def prepare(settings: Sequence[Setting], store: Store, progress: Progress) -> tuple[Prepared, ...]:
    """Return every setting with each of its graphs, in order; the graphs are in ``store``."""
    for setting in settings:
        read_costs(setting.costs)  # what cannot be used is refused before anything is captured
        classify(setting.request.source)
    graphs: dict[tuple[SourceRequest, str, CostChoice], tuple[GraphRow, ...]] = {}
    missing: dict[tuple[SourceRequest, str], list[CostChoice]] = {}
    for setting in settings:
        key = (setting.request, setting.direction, setting.costs)
        if key in graphs:
            continue
        name = _capture_id(setting)
        known = store.capture(name) if name is not None else None
        if known is not None:
            graphs[key] = known
        elif setting.costs not in missing.setdefault(key[:2], []):
            missing[key[:2]].append(setting.costs)
    for (request, direction), choices in missing.items():
        with loaded_at(request, choices, direction, progress) as sources:
            for choice, source in zip(choices, sources, strict=True):
                graphs[request, direction, choice] = _kept(source, store)
    prepared: list[Prepared] = []
    for setting in settings:
        rows = graphs[setting.request, setting.direction, setting.costs]
        if (name := _capture_id(setting)) is not None:
            store.add_capture(name, tuple(row.graph_id for row in rows))
        rows = tuple(_at_speeds(row, setting, store) for row in rows)
        if setting.search.plan.rules:
            check_matches(
                [build_problem(from_bytes(store.graph_content(row))) for row in rows],
                setting.search.plan,
            )
        prepared += _beside_each_other(rows, setting, store)
    return tuple(prepared)


def _beside_each_other(rows: Sequence[GraphRow], setting: Setting, store: Store) -> list[Prepared]:
    """Return the graphs of one setting with what the device holds beside each."""
    cluster = cluster_of(rows[0], setting) if rows else None
    if cluster is None:
        return [Prepared(setting=setting, graph=row) for row in rows]
    found = beside_graphs([from_bytes(store.graph_content(row)) for row in rows], cluster)
    return [
        Prepared(setting=setting, graph=row, beside=beside)
        for row, beside in zip(rows, found, strict=True)
    ]


def _capture_id(setting: Setting) -> str | None:
    """Return a name for what a capture depends on; ``None`` where that is not known: code of the
    user's may do something else next time.
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


def _kept(source: LoadedSource, store: Store) -> tuple[GraphRow, ...]:
    """Keep the graphs of a source; return their rows."""
    return tuple(
        _added(
            to_bytes(graph.dag),
            source.label,
            graph.device_memory_bytes,
            Speeds(),
            source.notes,
            store,
        )
        for graph in source.graphs
    )


def _added(
    content: bytes,
    label: str,
    device_memory_bytes: int | None,
    speeds: Speeds,
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
        described={"source": label, **speeds.described()},
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
    dag, notes = at_speeds(
        from_bytes(store.graph_content(row)), setting.speeds, cluster_of(row, setting)
    )
    return _added(
        to_bytes(dag),
        row.described["source"],
        row.device_memory_bytes,
        setting.speeds,
        (*row.notes, *notes),
        store,
    )


def cluster_of(row: GraphRow, setting: Setting) -> Cluster | None:
    """Return the cluster that the costs stand for; ``None`` where a graph file names one that does
    not ship.
    """
    if (
        classify(setting.request.source) is not SourceKind.GRAPH_FILE
        or setting.costs.cluster
        or setting.costs.costs
    ):
        return read_costs(setting.costs).cluster
    return cluster_named(setting.costs, row.cluster)
