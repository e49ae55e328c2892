"""Where the costs of a command come from, as chosen and as read. No torch here."""

from dataclasses import dataclass, field

from apsched.costs.clusters.cluster import (
    DEFAULT_CLUSTER,
    Cluster,
    cluster_names,
    cluster_of_file,
    load_cluster,
)
from apsched.costs.measured import MeasuredCosts
from apsched.costs.measured_file import load_costs
from apsched.costs.network.table import CollectiveTable, load_table
from apsched.problem.contention_spec import ContentionChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class CostChoice:
    """Where costs come from: a cluster by name or TOML file, measured tables of collectives,
    measured costs.
    """

    cluster: str | None = None
    """``None``: that of the measured costs, else the default."""
    costs: str | None = None
    """File of measured costs, which go before the cluster's formulas."""
    collectives: tuple[str, ...] = ()
    fused: bool = True
    """Pointwise chains are priced as Inductor fuses them; otherwise every node as a kernel of its
    own.
    """
    contention: ContentionChoice = field(default_factory=ContentionChoice)
    """How streams slow each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCosts:
    """What a :class:`CostChoice` names."""

    cluster: Cluster
    table: CollectiveTable | None = None
    measured: MeasuredCosts | None = None


def read_costs(costs: CostChoice) -> ReadCosts:
    """Return what was chosen; ``InputError`` names a file that cannot be used."""
    measured = load_costs(costs.costs) if costs.costs is not None else None
    if costs.cluster is None and measured is not None:
        cluster = cluster_of_file(measured.cluster, str(costs.costs))
    else:
        cluster = load_cluster(costs.cluster or DEFAULT_CLUSTER)
    return ReadCosts(
        cluster=cluster,
        table=load_table(*costs.collectives) if costs.collectives else None,
        measured=measured,
    )


def cluster_named(costs: CostChoice, name: str) -> Cluster | None:
    """Return the cluster that was chosen, else the one called ``name``, as a graph file has it;
    ``None`` where that does not ship.
    """
    stated = costs.cluster or (name if name in cluster_names() else None)
    return load_cluster(stated) if stated else None
