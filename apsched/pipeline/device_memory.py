"""Memory of a device outside of a graph, line by line: the memory that no schedule can use.

The peak of a schedule counts the memory that the graph holds: its inputs (parameters and buffers as
far as the graph takes them), activations, gathered weights, and gradients up to the end of
backward. All gradients are in the peak of backward, and none is alive in forward
(``zero_grad(set_to_none=True)``, an assumption that docs/memory.md states), so that they have no
line of their own here, but for those of micro-batches before.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import networkx as nx

from apsched.config import DEFAULT_OPTIMIZER, DEFAULT_RESERVE, RESERVE_OF_FIXED_SEGMENTS
from apsched.costs.clusters.cluster import Cluster
from apsched.costs.optimizer_step import CountedOptimizer, Shards, state_bytes, step_us
from apsched.graph.records import NodeRecord, ParameterShard
from apsched.kinds import NodeKind

CONTEXT_BYTES = 512 * 2**20
"""CUDA context with the kernels that are loaded: an assumption."""
COMMUNICATOR_BYTES = 296 * 2**20
"""Buffers of one NCCL communicator: 16 channels with two connections of 4 MiB (Simple), 0.5 MiB
(LL) and 4.7 MiB (LL128), the default sizes in NCCL's src/init.cc; the number of channels is an
assumption.
"""
_STATED = ("optimizer", "reserve", "more_communicators")
BYTES_OF_DTYPE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideGraph:
    """Memory of the device outside of one graph of a training step, for any optimizer."""

    device_bytes: int
    """Memory of the device."""
    context_bytes: int
    num_communicators: int
    communicator_bytes: int
    """Of all communicators."""
    parameter_bytes: int
    """Shards of all parameters of the step, whether this graph takes them or not."""
    bf16_parameter_bytes: int
    """The same, if each were bf16."""
    other_parameter_bytes: int
    """Shards of parameters that this graph does not take, so that its peak does not count them."""
    frozen_bytes: int = 0
    """Shards of the parameters of the step that get no gradient."""
    bf16_frozen_bytes: int = 0
    """The same, if each were bf16."""
    memory_bytes_per_us: float = 0.0
    """Memory bandwidth of the device as achieved; 0 where it is not known (older files)."""
    other_bytes: int = 0
    """Anything else on the device, as measured in a job."""
    gradient_bytes: int = 0
    """Gradients of the micro-batches before, beside those that the graph takes."""

    @property
    def shards(self) -> Shards:
        """The parameters that the optimizer updates."""
        return Shards(
            size_bytes=self.parameter_bytes - self.frozen_bytes,
            bf16_bytes=self.bf16_parameter_bytes - self.bf16_frozen_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """One line of an account."""

    what: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAccount:
    """The memory of a device, and the part of it that the graph cannot use."""

    beside: BesideGraph
    optimizer: str | CountedOptimizer = DEFAULT_OPTIMIZER
    """Whose state the device holds: of :data:`apsched.config.OPTIMIZERS`, or those of a job."""
    reserve: float = DEFAULT_RESERVE
    """Share of the device that fragmentation may take."""
    more_communicators: int = 0
    """Of second groups, which the graph does not have yet."""

    @property
    def lines(self) -> tuple[MemoryLine, ...]:
        """The memory that the graph cannot have, without lines of no bytes; ``InputError`` if there
        is no such optimizer.
        """
        beside = self.beside
        num_communicators = beside.num_communicators + self.more_communicators
        communicators = f"{num_communicators} communicator{'s' if num_communicators != 1 else ''}"
        lines = (
            ("parameters that this graph does not take", beside.other_parameter_bytes),
            (f"optimizer state ({self.optimizer})", state_bytes(self.optimizer, beside.shards)),
            (
                f"buffers of {communicators} (NCCL, assumed)",
                beside.communicator_bytes + self.more_communicators * COMMUNICATOR_BYTES,
            ),
            ("CUDA context (assumed)", beside.context_bytes),
            ("other memory of the device (measured)", beside.other_bytes),
            ("gradients of the micro-batches before", beside.gradient_bytes),
            (
                f"reserve for fragmentation ({100 * self.reserve:g} %{_allocator(self.reserve)})",
                round(self.reserve * beside.device_bytes),
            ),
        )
        return tuple(MemoryLine(what=what, size_bytes=size) for what, size in lines if size)

    @property
    def optimizer_us(self) -> float:
        """Time of the optimizer behind backward, in microseconds; 0 where it is not known."""
        return step_us(self.optimizer, self.beside.shards, self.beside.memory_bytes_per_us)

    @property
    def left_bytes(self) -> int:
        """The memory left for the graph: the default memory cap; 0 if none is left."""
        return max(self.beside.device_bytes - sum(line.size_bytes for line in self.lines), 0)


def _allocator(reserve: float) -> str:
    """Return the allocator that ``reserve`` is enough for, in words, as far as it was measured."""
    if DEFAULT_RESERVE <= reserve < RESERVE_OF_FIXED_SEGMENTS:
        return ", with expandable segments"
    return ""


def beside_graphs(dags: Sequence[nx.DiGraph], cluster: Cluster) -> tuple[BesideGraph, ...]:
    """Return for each graph of a training step the memory that a device of ``cluster`` holds beside
    it.

    A parameter is an input of a floating dtype that the caller keeps, or one of the shards that a
    graph states; a parameter that several graphs take is recognized by its name and counts once.
    Those without a gradient have no optimizer state, where a graph says which have one, or that
    the step has none. Communicators are those that any of the graphs uses.
    """
    held = [_parameters(dag, dags) for dag in dags]
    shards: dict[str, ParameterShard] = {}
    for dag in dags:
        shards.update(dag.graph.get("shards", {}))
    all_held = {name: (one.size_bytes, one.element_bytes) for name, one in shards.items()}
    all_held.update((name, found) for parameters in held for name, found in parameters.items())
    total_bytes, bf16_bytes = _both_bytes(all_held.values())
    trained = all_held.keys() & {n for dag in dags for n in dag.graph.get("gradients", ())}
    trained |= {name for name, one in shards.items() if one.trained}
    known = trained or shards or not _has_backward(dags)
    frozen = all_held.keys() - trained if known else ()
    frozen_bytes, bf16_frozen_bytes = _both_bytes(all_held[name] for name in frozen)
    is_gpu = cluster.library == "nccl"
    num_communicators = _num_groups(dags) if is_gpu else 0
    return tuple(
        BesideGraph(
            device_bytes=cluster.device.memory_bytes,
            context_bytes=CONTEXT_BYTES if is_gpu else 0,
            num_communicators=num_communicators,
            communicator_bytes=num_communicators * COMMUNICATOR_BYTES,
            parameter_bytes=total_bytes,
            bf16_parameter_bytes=bf16_bytes,
            other_parameter_bytes=total_bytes - sum(size for size, _ in parameters.values()),
            frozen_bytes=frozen_bytes,
            bf16_frozen_bytes=bf16_frozen_bytes,
            memory_bytes_per_us=cluster.device.memory_bytes_per_us,
        )
        for parameters in held
    )


def beside_graph(beside: BesideGraph, dag: nx.DiGraph, dags: Sequence[nx.DiGraph]) -> BesideGraph:
    """Return the memory of the device outside of ``dag``, another form of the graph of ``beside``:
    it may take fewer parameters. ``dags`` are all graphs of its step, which may use other process
    groups.
    """
    held = sum(size_bytes for size_bytes, _ in _parameters(dag, dags).values())
    num_communicators = _num_groups(dags) if beside.num_communicators else 0
    return replace(
        beside,
        other_parameter_bytes=max(beside.parameter_bytes - held, 0),
        num_communicators=num_communicators,
        communicator_bytes=num_communicators * COMMUNICATOR_BYTES,
    )


def account_json(account: MemoryAccount) -> dict[str, Any]:
    """Return the account for programs, and for :func:`account_of_json`."""
    return {
        "device_bytes": account.beside.device_bytes,
        "beside": [{"what": line.what, "bytes": line.size_bytes} for line in account.lines],
        "left_bytes": account.left_bytes,
        "optimizer_us": account.optimizer_us,
        "gradient_bytes": account.beside.gradient_bytes,
        **{name: getattr(account, name) for name in _STATED},
        "optimizer": _optimizer_json(account.optimizer),
        "counted": asdict(account.beside),
    }


def account_of_json(says: Mapping[str, Any]) -> MemoryAccount:
    """Return the account that :func:`account_json` wrote."""
    stated = {name: says[name] for name in _STATED if name in says}  # older files have fewer
    if isinstance(stated.get("optimizer"), Mapping):
        stated["optimizer"] = CountedOptimizer(**stated["optimizer"])
    counted = {"gradient_bytes": says.get("gradient_bytes", 0), **says["counted"]}
    return MemoryAccount(beside=BesideGraph(**counted), **stated)


def _optimizer_json(optimizer: str | CountedOptimizer) -> str | dict[str, Any]:
    return asdict(optimizer) if isinstance(optimizer, CountedOptimizer) else optimizer


def _parameters(dag: nx.DiGraph, dags: Sequence[nx.DiGraph]) -> Mapping[str, tuple[int, int]]:
    """Return name -> (bytes of the shard, bytes of an element) of the parameters that ``dag``
    takes, one of the graphs ``dags`` of a step: inputs with the name of a parameter. Where no graph
    names its parameters (older files do not) it is any name, that of a module, too, or all kept
    inputs if none has one; but a step that is known to have no gradients names all that it has.
    """
    names = {name for one in dags for name in one.graph.get("parameters", ())}
    inputs = [
        record
        for record in _records(dag)
        if record.kind is NodeKind.INPUT and record.dtype in BYTES_OF_DTYPE
    ]
    kept = [record for record in inputs if _kept_bytes(dag, record)]
    if names or not _has_backward(dags):
        taken = [record for record in kept if record.module in names]
    else:
        taken = [record for record in kept if record.module] or kept
    return {
        record.module or record.name: (_kept_bytes(dag, record), BYTES_OF_DTYPE[record.dtype])
        for record in taken
    }


def _has_backward(dags: Sequence[nx.DiGraph]) -> bool:
    """Return whether the step of ``dags`` may have gradients."""
    return all(dag.graph.get("has_backward", True) for dag in dags)


def _both_bytes(parameters: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the bytes of ``parameters``, and those if each were bf16."""
    found = list(parameters)
    return sum(size for size, _ in found), sum(2 * size // itemsize for size, itemsize in found)


def _kept_bytes(dag: nx.DiGraph, record: NodeRecord) -> int:
    storages = dag.graph["storages"]
    return sum(storages[s].size_bytes for s in record.allocates if storages[s].kept)


def _num_groups(dags: Sequence[nx.DiGraph]) -> int:
    """Return the number of process groups of more than one rank on which collectives run."""
    found = (record.collective for dag in dags for record in _records(dag))
    return len({one.group for one in found if one is not None and one.group_size > 1})


def _records(dag: nx.DiGraph) -> list[NodeRecord]:
    return [dag.nodes[rank]["record"] for rank in range(dag.number_of_nodes())]
