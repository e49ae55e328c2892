"""The networkx DAG that stands between torch and the solver: one typed record per FX node.

``dag.nodes[rank]["record"]`` is a :class:`NodeRecord`; the key of a node is its rank.
``dag.edges[u, v]["kind"]`` is ``"data"`` (v takes a value of u) or ``"order"`` (mutation, aliasing,
random state or effects keep u before v). ``dag.graph["storages"]`` is a tuple of
:class:`StorageRecord`, indexed by the storage ids that records hold; ``dag.graph["curves"]`` maps a
curve name to a :class:`apsched.costs.price_curve.PriceCurve` (time against bytes);
``dag.graph["cuts"]`` is a tuple of :class:`apsched.kinds.KernelCut`; ``dag.graph["assumed"]`` is an
:class:`Assumed`, where sizes depend on data; ``dag.graph["chains"]`` has the chain of each node,
where there are several (:mod:`apsched.fx.chains`); ``dag.graph["parameters"]`` has the names of
those among its inputs, ``["gradients"]`` of those whose gradients it returns (or of inputs, where
parameters have no names), as far as they are known; ``["shards"]`` maps the name of each parameter
of the step to a :class:`ParameterShard`, where a compiler states them; ``["has_backward"]`` is
false where the step has no gradients; ``dag.graph["name"]``, ``["cluster"]``, ``["group_ranks"]``
say where the graph comes from, and ``["priced_by"]`` is the
:class:`apsched.costs.clusters.cluster.Cluster` called ``["cluster"]``, ``None`` where it is not
known.
"""

from dataclasses import dataclass

from apsched.kinds import AssumedSize, CollectiveKind, NodeKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShard:
    """A parameter of the step on this process rank, whether the graph takes it or not."""

    size_bytes: int
    element_bytes: int
    trained: bool
    """Whether it gets a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageRecord:
    """One piece of memory; views of it and writes into it share it."""

    size_bytes: int
    """Size in the graph, before the allocator rounds it."""
    kept: bool
    """The caller holds it before, during and after the graph (parameters, buffers)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """Assumed sizes that depend on data, and the shares that rest on them."""

    sizes: tuple[AssumedSize, ...] = ()
    nodes: tuple[int, ...] = ()
    """Ranks of the nodes that take or give a tensor of such a size."""
    storages: tuple[int, ...] = ()
    """Ids of the storages of such a size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRecord:
    """The launch of a start node."""

    kind: CollectiveKind
    group: str
    group_size: int
    reduce_op: str
    """Empty where nothing is reduced."""
    dtype: str
    device: str
    input_bytes: int
    output_bytes: int
    size_bytes: int
    """Counted once: an all-gather by its output, a reduce-scatter by its input, the others by their
    size.
    """
    wait: int
    """Rank of the wait node."""
    on_path: bool
    """Between two compute nodes; otherwise an FSDP collective, which can move."""
    bucketable: bool
    """May share a launch: FSDP, one wait, contiguous input and output, no bucket already."""
    holds_input: bool
    """The input stays alive until the wait (functional collectives that copy their input do not
    hold it).
    """
    num_members: int
    """1 as captured; the number of members after write-back."""
    cast_bytes: int = 0
    """Bytes of its input before a cast that serves nothing else, which a bucket does while it
    copies in; 0 for none.
    """
    output_place: int = -1
    """Where the parameter that it serves is known: place among the graph's outputs of the first
    that its result is part of, since gradients come out in the order in which parameters were
    registered; else -1.
    """
    cost_source: str = ""
    """Source of its duration, as :attr:`NodeRecord.cost_source`; empty if unknown."""
    num_coalesced: int = 0
    """Transfers that it launches together, each with memory of its own; 0 where it is no coalesced
    operator.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One FX node: its costs, its storages, its origin."""

    name: str
    rank: int
    op: str
    target: str
    kind: NodeKind
    duration_us: float
    """Time on the compute stream; of a start node, the price of its launch."""
    cost_source: str
    """Source of the duration: ``formula``, ``table``, ``profile``, ``measured``, ``copy`` or
    ``free``.
    """
    allocates: tuple[int, ...]
    """Storages that come to life at this node (inputs of the graph: at their placeholder)."""
    reads: tuple[int, ...]
    """Storages behind its tensor arguments (all of a tuple, where it takes a tuple); of a start
    node those that it sends.
    """
    writes: tuple[int, ...]
    """Storages it mutates."""
    aliases: tuple[int, ...]
    """Storages of others that its result shares (views, waits, in-place and ``out=`` results)."""
    frees: tuple[int, ...]
    """Storages whose last use this node is, in the order as captured."""
    module: str
    """Fully qualified name of the module it comes from, or of the parameter that a collective
    serves; may be empty.
    """
    direction: str
    """``forward`` or ``backward``."""
    dtype: str
    """Of its (first) result; empty where it has none."""
    role: str
    """Empty as captured; for nodes that write-back adds ``copy_in``, ``copy_out``, ``start``,
    ``wait``, ``buffer`` or ``view``.
    """
    signature: str
    """Digest of its computation: target, structure of its arguments, shapes, dtypes and group size;
    equal on all process ranks.
    """
    collective: CollectiveRecord | None
    kernel: int = -1
    """Rank of the first node of the kernel that a compiler makes of it and others; -1 where it is a
    kernel of its own.
    """
    operation: str = ""
    """Its operation in one line, with shapes and dtypes (:mod:`apsched.costs.compute.operation`):
    the key of measured costs.
    """


COPY = "copy"


def collective_curve_name(kind: str, group: str) -> str:
    """Return the name of the curve of ``kind`` on ``group``."""
    return f"{kind}:{group}"


def launch_curve_name(kind: str, group: str) -> str:
    """Return the name of the curve of launching a bucket of ``kind`` on ``group``; it is flat."""
    return f"launch:{kind}:{group}"


def coalesced_curve_name(kind: str, group: str) -> str:
    """Return the name of the curve of the time that each member adds to a coalesced launch of
    ``kind`` on ``group``; it is flat.
    """
    return f"coalesced:{kind}:{group}"


def priced_kind(kind: CollectiveKind) -> CollectiveKind:
    """Return the kind for a cost model: a broadcast is priced as an all-gather, since each link
    carries as much.
    """
    return CollectiveKind.ALL_GATHER if kind == CollectiveKind.BROADCAST else kind
