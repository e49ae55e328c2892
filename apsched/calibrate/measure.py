"""Run the operations of graphs on this device, each distinct one once, and record their times."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, cast

import networkx as nx
import torch
from torch.fx import GraphModule, Node

from apsched.calibrate.arguments import real_call
from apsched.calibrate.stopwatch import duration_us
from apsched.costs.compute.node_operation import node_operation
from apsched.costs.measured import MeasuredCosts, Price, rising
from apsched.fx.subgraphs import communicates
from apsched.graph.export.whole_nodes import priced_calls
from apsched.kinds import NodeKind

SOURCE = "measured"
_aten: Any = torch.ops.aten
_COPY_BYTES = tuple(4**k for k in range(6, 14))  # 4 KiB to 64 MiB
_POOL_BYTES = 256 * 2**20
"""More than any cache holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured operations, and those that could not be measured."""

    costs: MeasuredCosts
    num_measured: int
    """Operations that ran here."""
    num_known: int
    """Operations whose price was known from before."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Operation -> why it cannot run here."""


def device_at_hand() -> torch.device:
    """Return the GPU of this process, or the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def device_name(device: torch.device) -> str:
    """Return the device name of costs: the GPU's name, or the CPU with its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"


def measure_compute(
    graphs: Sequence[tuple[GraphModule, nx.DiGraph]],
    device: torch.device,
    cluster_name: str,
    known: MeasuredCosts | None = None,
    *,
    fused: bool = True,
) -> Measured:
    """Return the times of the compute nodes of ``graphs`` (each with its DAG) on ``device``, and of
    copies.

    Times that ``known`` has for the same device stay. Operators run one by one, so ``fused`` leaves
    out the operators that a compiler fuses with others: one kernel of them takes less time.
    """
    name = device_name(device)
    kept = dict(known.compute) if known is not None and known.device == name else {}
    distinct = distinct_operations(graphs, fused=fused)
    prices = {operation: kept[operation] for operation in distinct if operation in kept}
    failed: dict[str, str] = {}
    todo = [(operation, node) for operation, node in distinct.items() if operation not in prices]
    with torch.no_grad():
        for operation, node in todo:
            try:
                prices[operation] = Price(time_us=_node_us(node, device), source=SOURCE)
            except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
                failed[operation] = (str(error).strip().splitlines() or [type(error).__name__])[0][
                    :200
                ]
        copies = (
            known.copies
            if known is not None and known.device == name and known.copies
            else _copies(device)
        )
    costs = MeasuredCosts(device=name, cluster=cluster_name, compute=prices, copies=copies)
    return Measured(
        costs=costs,
        num_measured=len(todo) - len(failed),
        num_known=len(distinct) - len(todo),
        failed=failed,
    )


def distinct_operations(
    graphs: Sequence[tuple[GraphModule, nx.DiGraph]], *, fused: bool
) -> dict[str, Node]:
    """Return a node for each operation of compute nodes, in the order in which they first stand;
    with ``fused`` none that is ever fused.
    """
    found: dict[str, Node] = {}
    in_kernels: set[str] = set()
    for module, dag in graphs:
        for rank, node in enumerate(module.graph.nodes):
            record = dag.nodes[rank]["record"]
            if record.kind is not NodeKind.COMPUTE:
                continue
            for call in priced_calls(node):
                operation = node_operation(call)
                if not operation or communicates(call):  # no other process rank would take part
                    continue
                found.setdefault(operation, call)
                if record.kernel >= 0:
                    in_kernels.add(operation)
    return {
        operation: node
        for operation, node in found.items()
        if not fused or operation not in in_kernels
    }


def _node_us(node: Node, device: torch.device) -> float:
    target, args, kwargs = real_call(node, device)
    return duration_us(lambda: target(*args, **kwargs), device)


def _copies(device: torch.device) -> tuple[tuple[int, float], ...]:
    """Return the time of a copy for each size, made to rise with size.

    Each call copies another part of a pool, as copy-out does, views included: the content of a
    bucket came from the network, or was computed long before, and no cache has it. Repeated copies
    of the same bytes take a third of that time on a CPU.
    """
    pool = torch.ones(_POOL_BYTES, dtype=torch.uint8, device=device)
    points = []
    for size_bytes in _COPY_BYTES:
        begins = cycle(range(0, _POOL_BYTES, size_bytes))

        def copy(size_bytes: int = size_bytes, begins: Iterator[int] = begins) -> torch.Tensor:
            begin = next(begins)
            part: torch.Tensor = _aten.slice.Tensor(pool, 0, begin, begin + size_bytes)
            return cast("torch.Tensor", _aten.view.default(_aten.clone.default(part), [-1]))

        points.append((size_bytes, duration_us(copy, device)))
    return rising(points, [1.0] * len(points))
