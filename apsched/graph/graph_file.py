"""Graph files: the DAG as node-link JSON, compressed with gzip, read and written without torch."""

import gzip
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import networkx as nx
import orjson

from apsched.atomic_files import one_component, write_atomic
from apsched.costs.clusters.cluster import Cluster, cluster_of_content, content_of
from apsched.costs.price_curve import PriceCurve
from apsched.errors import InputError
from apsched.graph.check import check_graph
from apsched.graph.records import (
    Assumed,
    CollectiveRecord,
    NodeRecord,
    ParameterShard,
    StorageRecord,
)
from apsched.kinds import AssumedSize, KernelCut
from apsched.unpack import GZIP_MAGIC, read_within, unpacked

FORMAT = "apsched graph"
VERSION = 7
_ZIP_MAGIC = b"PK\x03\x04"

_Record = TypeVar(
    "_Record",
    NodeRecord,
    CollectiveRecord,
    StorageRecord,
    ParameterShard,
    AssumedSize,
    KernelCut,
    PriceCurve,
)


def save_graph(dag: nx.DiGraph, path: str | os.PathLike[str]) -> None:
    """Write ``dag`` to ``path``, whole or not at all; the same graph gives the same bytes."""
    write_atomic(path, to_bytes(dag))


def load_graph(path: str | os.PathLike[str]) -> nx.DiGraph:
    """Return the DAG in the file ``path``; InputError names the file and the error."""
    path = Path(path)
    try:
        return from_bytes(read_within(path))
    except OSError as error:
        raise InputError(
            f"{path}: expected a graph file, found: {error.strerror or error}"
        ) from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def to_bytes(dag: nx.DiGraph) -> bytes:
    """Return ``dag`` as the content of a graph file."""
    assumed: Assumed = dag.graph.get("assumed", Assumed())
    shards = {name: asdict(shard) for name, shard in dag.graph.get("shards", {}).items()}
    priced_by: Cluster | None = dag.graph.get("priced_by")
    if priced_by is not None and priced_by.name != dag.graph["cluster"]:
        priced_by = None  # the graph has the name of another cluster since
    content = {
        "format": FORMAT,
        "version": VERSION,
        "directed": True,
        "multigraph": False,
        "graph": {
            "name": one_component(dag.graph["name"], "name of the graph"),
            "cluster": dag.graph["cluster"],
            **({} if priced_by is None else {"priced_by": content_of(priced_by)}),
            "group_ranks": dag.graph["group_ranks"],
            "storages": [asdict(storage) for storage in dag.graph["storages"]],
            "curves": {name: asdict(curve) for name, curve in sorted(dag.graph["curves"].items())},
            "cuts": [asdict(cut) for cut in dag.graph.get("cuts", ())],
            **({"assumed": asdict(assumed)} if assumed.sizes else {}),
            **{
                key: dag.graph[key]
                for key in ("chains", "parameters", "gradients")
                if dag.graph.get(key)
            },
            **({"shards": shards} if shards else {}),
            **({} if dag.graph.get("has_backward", True) else {"has_backward": False}),
        },
        "nodes": [
            {"id": rank, **asdict(dag.nodes[rank]["record"])}
            for rank in range(dag.number_of_nodes())
        ],
        "edges": [
            {"source": u, "target": v, "kind": kind}
            for u, v, kind in sorted(dag.edges(data="kind"))
        ],
    }
    return gzip.compress(orjson.dumps(content), compresslevel=6, mtime=0)


def from_bytes(data: bytes) -> nx.DiGraph:
    """Return the DAG in the content of a graph file."""
    content = _parse(data)
    graph = _get(content, "graph", dict)
    dag = nx.DiGraph(
        name=one_component(_get(graph, "name", str), "name of the graph"),
        cluster=_get(graph, "cluster", str),
        priced_by=_priced_by(graph),
        group_ranks={
            name: _ints(ranks, f"group_ranks of {name}")
            for name, ranks in _get(graph, "group_ranks", dict).items()
        },
        storages=tuple(
            _record(StorageRecord, s, f"storage {k}")
            for k, s in enumerate(_get(graph, "storages", list))
        ),
        curves={
            name: _record(PriceCurve, curve, f"curve {name}")
            for name, curve in _get(graph, "curves", dict).items()
        },
        cuts=tuple(
            _record(KernelCut, cut, f"cut {k}") for k, cut in enumerate(_get(graph, "cuts", list))
        ),
        assumed=_assumed(graph),
        chains=_ints(graph.get("chains", []), "chains"),
        parameters=_strings(graph.get("parameters", []), "parameters"),
        gradients=_strings(graph.get("gradients", []), "gradients"),
        shards=_shards(graph),
        has_backward=_has_backward(graph),
    )
    for k, node in enumerate(_get(content, "nodes", list)):
        record = _record(NodeRecord, _without_id(node), f"node {k}")
        dag.add_node(record.rank, record=record)
    for k, edge in enumerate(_get(content, "edges", list)):
        u, v, kind = (
            _get(edge, key, of, f"edge {k}")
            for key, of in (("source", int), ("target", int), ("kind", str))
        )
        if u not in dag or v not in dag:
            raise InputError(f"edge {k}: expected ranks of two nodes, found {u} and {v}")
        dag.add_edge(u, v, kind=kind)
    check_graph(dag)
    return dag


def _priced_by(graph: Any) -> Cluster | None:
    """Return the cluster that priced the graph; ``None`` where the file has its name only."""
    if "priced_by" not in graph:
        return None
    cluster = cluster_of_content(_get(graph, "priced_by", dict), "priced_by")
    if cluster.name != graph["cluster"]:
        raise InputError(
            f"expected the cluster {graph['cluster']!r} as priced_by, found {cluster.name!r}; write"
            " the file again"
        )
    return cluster


def _assumed(graph: Any) -> Assumed:
    """Return the assumed sizes in a file; most have none."""
    if "assumed" not in graph:
        return Assumed()
    stated = _get(graph, "assumed", dict)
    sizes = _get(stated, "sizes", list, "assumed")
    return Assumed(
        sizes=tuple(_record(AssumedSize, s, f"assumed size {k}") for k, s in enumerate(sizes)),
        nodes=_ints(stated.get("nodes"), "nodes of assumed sizes"),
        storages=_ints(stated.get("storages"), "storages of assumed sizes"),
    )


def _parse(data: bytes) -> Any:
    if data.startswith(_ZIP_MAGIC):
        raise InputError(
            "expected a graph file of apsched, found a zip archive; one of torch.export is read in"
            " Python: apsched.optimize(torch.export.load(FILE).graph_module)"
        )
    if not data.startswith(GZIP_MAGIC):
        raise InputError(
            "expected a graph file of apsched, found something else (not gzip); write one with"
            " `apsched capture`, which also reads the files of a job with TORCH_TRACE=DIR or"
            " TORCH_COMPILE_DEBUG=1"
        )
    try:
        content = orjson.loads(unpacked(data))
    except (OSError, EOFError, zlib.error):
        raise InputError("the graph file is broken or cut off; write it again") from None
    except orjson.JSONDecodeError as error:
        raise InputError(f"expected JSON inside, found: {error}; write the file again") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(
            f'expected {{"format": "{FORMAT}"}}, found {_shown(content)}; this is a file of'
            " something else"
        )
    version = content.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InputError(f"expected a version number, found {version!r}")
    if version > VERSION:
        raise InputError(
            f"written by a newer apsched (graph format {version}, this one reads up to {VERSION});"
            " upgrade apsched"
        )
    return _upgraded(content, version)


def _upgraded(content: Any, version: int) -> Any:
    """Return ``content`` with the fields of versions 2 (the bytes that a bucket casts while it
    copies in), 3 (places of gradients), 4 (kernels of several nodes), 5 (operations, sources of
    transfers), 6 (transfers launched together) and 7 (cuts of kernels) added.
    """
    if version < VERSION and isinstance(content.get("graph"), dict):
        content["graph"].setdefault("cuts", [])
    nodes = content.get("nodes")
    if version < VERSION and isinstance(nodes, list):
        for node in nodes:
            if isinstance(node, dict):
                node.setdefault("kernel", -1)
                node.setdefault("operation", "")
                if isinstance(node.get("collective"), dict):
                    node["collective"] = {
                        "cast_bytes": 0,
                        "output_place": -1,
                        "cost_source": "",
                        "num_coalesced": 0,
                    } | node["collective"]
    return content


def _shown(content: Any) -> str:
    return repr(content.get("format")) if isinstance(content, dict) else type(content).__name__


def _get(content: Any, key: str, of: type, where: str = "graph file") -> Any:
    value = content.get(key) if isinstance(content, dict) else None
    if not isinstance(value, of) or isinstance(value, bool):
        raise InputError(f"{where}: expected {key!r} to be a {of.__name__}, found {_brief(value)}")
    return value


def _shards(graph: dict[str, Any]) -> dict[str, ParameterShard]:
    if "shards" not in graph:
        return {}
    shards = {
        name: _record(ParameterShard, shard, f"shard of {name}")
        for name, shard in _get(graph, "shards", dict).items()
    }
    for name, shard in shards.items():
        if shard.size_bytes < 0 or shard.element_bytes < 1:
            raise InputError(
                f"shard of {name}: expected size_bytes >= 0 and element_bytes >= 1, found"
                f" {shard.size_bytes} and {shard.element_bytes}"
            )
    return shards


def _has_backward(graph: dict[str, Any]) -> bool:
    value = graph.get("has_backward", True)
    if not isinstance(value, bool):
        raise InputError(f"has_backward: expected true or false, found {_brief(value)}")
    return value


def _without_id(node: Any) -> Any:
    return (
        {key: value for key, value in node.items() if key != "id"}
        if isinstance(node, dict)
        else node
    )


def _record(of: type[_Record], values: Any, where: str) -> _Record:
    """Return a record made of JSON values, each checked against the type that its field
    declares.
    """
    expected = _FIELDS[of]
    if not isinstance(values, dict) or values.keys() != expected.keys():
        found = sorted(values) if isinstance(values, dict) else _brief(values)
        raise InputError(f"{where}: expected the fields {sorted(expected)}, found {found}")
    return of(**{name: read(values[name], f"{where}, {name}") for name, read in expected.items()})


def _ints(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise InputError(f"{where}: expected a list of whole numbers, found {_brief(value)}")
    return tuple(value)


def _strings(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(type(item) is str for item in value):
        raise InputError(f"{where}: expected a list of strings, found {_brief(value)}")
    return tuple(value)


def _plain(of: type) -> Callable[[Any, str], Any]:
    def read(value: Any, where: str) -> Any:
        if type(value) is int and of is float:
            return float(value)
        if type(value) is not of:
            raise InputError(f"{where}: expected {of.__name__}, found {_brief(value)}")
        return value

    return read


def _member(of: type[StrEnum]) -> Callable[[Any, str], StrEnum]:
    def read(value: Any, where: str) -> StrEnum:
        if value not in tuple(of):
            raise InputError(f"{where}: expected one of {', '.join(of)}, found {_brief(value)}")
        return of(value)

    return read


def _collective(value: Any, where: str) -> CollectiveRecord | None:
    return None if value is None else _record(CollectiveRecord, value, where)


def _reader(of: Any) -> Callable[[Any, str], Any]:
    """Return the function that reads a JSON value of the declared type ``of``."""
    if get_origin(of) is tuple:
        return _ints
    if isinstance(of, UnionType) and CollectiveRecord in get_args(of):
        return _collective
    return _member(of) if issubclass(of, StrEnum) else _plain(of)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


_FIELDS: Mapping[type, dict[str, Callable[[Any, str], Any]]] = {
    of: {f.name: _reader(get_type_hints(of)[f.name]) for f in fields(of)}
    for of in (
        *(NodeRecord, CollectiveRecord, StorageRecord, ParameterShard),
        *(AssumedSize, KernelCut, PriceCurve),
    )
}
