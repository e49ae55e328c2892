"""Sources of the costs of a command, as chosen and as read. No torch here."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import networkx as nx

from apsched.costs.clusters.cluster import (
    DEFAULT_CLUSTER,
    Cluster,
    cluster_names,
    cluster_of_file,
    differing_key,
    load_cluster,
)
from apsched.costs.measured import MeasuredCosts
from apsched.costs.measured_file import load_costs
from apsched.costs.network.table import CollectiveTable, load_table
from apsched.errors import InputError
from apsched.kinds import NodeKind
from apsched.problem.contention_spec import ContentionChoice

_DEVICES = ("cpu", "a100", "h100", "h200", "b200", "gb200", "mi300x")
"""As clusters and drivers name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostChoice:
    """Sources of costs: a cluster by name or TOML file, measured tables of collectives, measured
    costs.
    """

    cluster: str | None = None
    """``None``: that of the measured costs, else the default."""
    costs: str | None = None
    """File of measured costs, which have priority over the cluster's formulas."""
    collectives: tuple[str, ...] = ()
    fused: bool = True
    """Pointwise chains are priced as Inductor fuses them; otherwise every node as a kernel of its
    own.
    """
    contention: ContentionChoice = field(default_factory=ContentionChoice)
    """The contention of streams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCosts:
    """The content of a :class:`CostChoice`, read."""

    cluster: Cluster
    table: CollectiveTable | None = None
    measured: MeasuredCosts | None = None
    path: str = ""
    """The file of ``measured``."""


def read_costs(costs: CostChoice) -> ReadCosts:
    """Return the chosen costs; ``InputError`` names a file that cannot be used."""
    measured = load_costs(costs.costs) if costs.costs is not None else None
    if costs.cluster is None and measured is not None:
        cluster = cluster_of_file(measured.cluster, str(costs.costs))
    else:
        cluster = load_cluster(DEFAULT_CLUSTER if costs.cluster is None else costs.cluster)
    return ReadCosts(
        cluster=cluster,
        table=load_table(*costs.collectives) if costs.collectives else None,
        measured=measured,
        path=costs.costs or "",
    )


def other_device(read: ReadCosts) -> tuple[str, ...]:
    """Return a warning if costs were measured on another device than the one that prices the rest,
    by their names; empty if all are of one device or the names are not known.
    """
    if read.measured is None:
        return ()
    stated, priced = read.measured.cluster, read.cluster
    if stated in cluster_names() and load_cluster(stated).device != priced.device:
        expected = f"cluster {stated}"
    else:
        device = _device_in(read.measured.device)
        if device is None or _device_in(priced.name) in (None, device):
            return ()
        expected = f"a cluster of {device}"
    return (
        f"the costs were measured on {read.measured.device!r} for {expected}, but cluster"
        f" {priced.name!r} prices all other nodes: step times mix two devices; choose --cluster, or"
        " measure again",
    )


def compute_from_profile(dags: Sequence[nx.DiGraph]) -> bool:
    """Whether a profile prices compute of ``dags``. Its times contain the contention of that
    job.
    """
    records = (record for dag in dags for _, record in dag.nodes(data="record"))
    return any(
        record.kind is NodeKind.COMPUTE and record.cost_source == "profile" for record in records
    )


def counted_twice(contention: ContentionChoice, dags: Sequence[nx.DiGraph]) -> tuple[str, ...]:
    """Return a warning where ``contention`` slows compute whose times come from a profile; empty
    otherwise.
    """
    if not (contention.compute and compute_from_profile(dags)):
        return ()
    return (
        "--contention compute counts contention twice: the compute times come from a profile, and"
        " contain the contention of that job; leave compute out of --contention",
    )


def _device_in(text: str) -> str | None:
    """Return the device of a shipped cluster that ``text`` names; ``None`` for none."""
    words = re.split(r"[^a-z0-9]+", text.lower())
    return next((device for device in _DEVICES if device in words), None)


def cluster_of_graphs(stated: str | None, dags: Sequence[nx.DiGraph]) -> Cluster | None:
    """Return the cluster that priced ``dags``, as they hold it. Graph files of earlier versions
    have its name only: of those the cluster ``stated`` (``--cluster``), else the one that ships
    under that name. ``None`` where it is not known, or not one.
    """
    found = {(dag.graph["cluster"], dag.graph.get("priced_by")) for dag in dags}
    if len(found) != 1:
        return None
    name: str
    priced_by: Cluster | None
    ((name, priced_by),) = found
    if priced_by is not None:
        return priced_by
    by_name = stated or (name if name in cluster_names() else None)
    return load_cluster(by_name) if by_name else None


def check_same_cluster(stated: str, dags: Sequence[nx.DiGraph], label: str) -> None:
    """Raise ``InputError`` if the cluster ``stated`` is not the one that priced ``dags``, those of
    the graph file ``label``.
    """
    cluster = load_cluster(stated)
    names = sorted({dag.graph["cluster"] for dag in dags})
    if names != [cluster.name]:
        raise InputError(
            f"--cluster cannot change {label}: its costs are those of {', '.join(names)!r}; capture"
            f" it again for {stated!r}"
        )
    for dag in dags:
        priced_by: Cluster | None = dag.graph.get("priced_by")
        differs = None if priced_by is None else differing_key(priced_by, cluster)
        if differs is not None:
            key, in_graph, in_file = differs
            raise InputError(
                f"--cluster cannot change {label}: its costs are those of a cluster"
                f" {cluster.name!r} with {_entry(key, in_graph)}, and {stated} has"
                f" {_entry(key, in_file)}; leave --cluster out, or capture it again with --cluster"
                f" {stated}"
            )


def _entry(key: str, value: object) -> str:
    return f"no {key}" if value is None else f"{key} = {value!r}"
