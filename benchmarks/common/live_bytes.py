"""An interpreter that counts the bytes of live storages at every node for real, and the live bytes
that a DAG predicts for the same graph.
"""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import networkx as nx
import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from apsched.fx.collectives import input_nodes
from apsched.kinds import NodeKind
from apsched.units import allocated_bytes

_MOMENTS = 200


def run_counting(
    module: GraphModule,
    boxed: list[Any],
    dag: nx.DiGraph,
    kept: frozenset[str] = frozenset(),
    *,
    expected: Sequence[int] = (),
    count: bool = True,
    ran: Callable[[int], None] | None = None,
) -> tuple[Any, list[int]]:
    """Run ``module`` on ``boxed`` (emptied, as a boxed call does) and return its outputs and the
    bytes live at each node.

    Values die as in the code that FX generates: after the node that uses them last, or at once
    without a use. The caller holds ``kept`` inputs. The input of a collective is held until its
    wait where the record says so. A real process group lets go of tensors in a thread of its own, a
    moment after the wait: where more is live than ``expected``, that moment is given. Without
    ``count`` the bytes are 0: a device counts them itself. ``ran`` is called with the rank of each
    node that ran, before its dead values go.
    """
    nodes = list(module.graph.nodes)
    dying = _dying(nodes)
    records = [dag.nodes[rank]["record"] for rank in range(len(nodes))]
    held_until: dict[int, list[Any]] = {}
    note = _note if count else _no_note
    seen: dict[int, tuple[StorageWeakRef, int]] = {}
    caller: list[Any] = []
    environment: dict[Node, Any] = {}
    live: list[int] = []
    placeholders = [n for n in nodes if n.op == "placeholder"]
    for node, value in zip(placeholders, boxed, strict=True):
        environment[node] = value
        note(value, seen)
        if node.name in kept:
            caller.append(value)
    for node in nodes:
        if node.op == "get_attr":
            note(Interpreter(module).fetch_attr(node.target), seen)
    boxed.clear()
    result = None
    value = None
    with torch.no_grad():
        for rank, node in enumerate(nodes):
            if node.op == "get_attr":
                environment[node] = Interpreter(module).fetch_attr(node.target)
            elif node.op == "output":
                result = map_arg(node.args[0], lambda n: environment[n])
            elif node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), lambda n: environment[n])
                environment[node] = node.target(*args, **kwargs)
                del args, kwargs
                note(environment[node], seen)
            collective = records[rank].collective
            if collective is not None and collective.holds_input:
                held_until.setdefault(collective.wait, []).extend(
                    environment[n] for n in input_nodes(node)
                )
            live.append(_count(seen))
            for _ in range(_MOMENTS):
                if not expected or live[-1] <= expected[rank]:
                    break
                time.sleep(0.001)
                live[-1] = _count(seen)
            if ran is not None:
                ran(rank)
            held_until.pop(rank, None)
            for dead in dying[rank]:
                environment.pop(dead)
    return result, live


def live_bytes_of(dag: nx.DiGraph) -> list[int]:
    """Return the bytes that ``dag`` says are live at each node, in the order as captured."""
    records = [dag.nodes[rank]["record"] for rank in range(dag.number_of_nodes())]
    sizes = [allocated_bytes(s.size_bytes) for s in dag.graph["storages"]]
    change = [0] * (len(records) + 1)
    for record in records:
        change[0 if record.kind is NodeKind.INPUT else record.rank] += sum(
            sizes[s] for s in record.allocates
        )
        change[record.rank + 1] -= sum(sizes[s] for s in record.frees)
    return list(accumulate(change[:-1]))


def _dying(nodes: list[Node]) -> list[list[Node]]:
    rank_of = {node: rank for rank, node in enumerate(nodes)}
    dying: list[list[Node]] = [[] for _ in nodes]
    for node in nodes:
        if node.op != "output":
            dying[max((rank_of[user] for user in node.users), default=rank_of[node])].append(node)
    return dying


def _note(value: object, seen: dict[int, tuple[StorageWeakRef, int]]) -> None:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            reference = StorageWeakRef(leaf.untyped_storage())  # type: ignore[no-untyped-call]
            seen[reference.cdata] = (reference, allocated_bytes(leaf.untyped_storage().nbytes()))


def _no_note(value: object, seen: dict[int, tuple[StorageWeakRef, int]]) -> None:
    """Note nothing."""


def _count(seen: dict[int, tuple[StorageWeakRef, int]]) -> int:
    for key in [key for key, (reference, _) in seen.items() if reference.expired()]:  # type: ignore[no-untyped-call]
        del seen[key]
    return sum(size for _, size in seen.values())
