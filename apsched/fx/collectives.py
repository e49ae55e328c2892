"""Communication of an FX node: whether it starts a collective or waits for one, on which group, of
how many bytes.

The operators are those of torch/csrc/distributed/c10d/Functional.cpp. A start returns at once, and
registers its work under the storages of its outputs; ``wait_tensor`` of any view of such a storage
waits for that work.

Communication that is none of these (point-to-point, ``c10d`` operators, whatever torch adds) is
*unknown*: it stays where it is.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from apsched.errors import InputError
from apsched.kinds import CollectiveKind
from apsched.torch_compat import graphs as torch_private
from apsched.torch_compat.sizes import size_hint

SENT_AS_KEY = "apsched_sent_as"
"""``node.meta["custom"][SENT_AS_KEY]`` is the dtype in which a start shares a launch, where that is
not its own: a framework that gathers parameters of several dtypes at once sends bytes.
"""
BYTES = "uint8"
ANY_GROUP = "*"
"""Stands for the process groups of communication that does not name its group."""
_FUNCTIONAL_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")
_KIND_OF_OPERATOR = {
    "all_gather_into_tensor": CollectiveKind.ALL_GATHER,
    "all_gather_into_tensor_out": CollectiveKind.ALL_GATHER,
    "all_gather_into_tensor_coalesced": CollectiveKind.ALL_GATHER,
    "reduce_scatter_tensor": CollectiveKind.REDUCE_SCATTER,
    "reduce_scatter_tensor_out": CollectiveKind.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": CollectiveKind.REDUCE_SCATTER,
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "all_reduce_": CollectiveKind.ALL_REDUCE,
    "all_reduce_coalesced": CollectiveKind.ALL_REDUCE,
    "all_reduce_coalesced_": CollectiveKind.ALL_REDUCE,
    "all_to_all_single": CollectiveKind.ALL_TO_ALL,
    "broadcast": CollectiveKind.BROADCAST,
    "broadcast_": CollectiveKind.BROADCAST,
}
_CLONES_INPUT = (
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
)  # Functional.cpp: these run in place on a clone

_KIND_INSIDE = {
    ("cplib", "flex_cp_allgather"): CollectiveKind.ALL_GATHER,
    ("cplib", "flex_cp_allgather_backward"): CollectiveKind.REDUCE_SCATTER,
    ("symm_mem", "fused_all_gather_matmul"): CollectiveKind.ALL_GATHER,
    ("symm_mem", "fused_all_gather_scaled_matmul"): CollectiveKind.ALL_GATHER,
    ("symm_mem", "fused_matmul_reduce_scatter"): CollectiveKind.REDUCE_SCATTER,
    ("symm_mem", "fused_scaled_matmul_reduce_scatter"): CollectiveKind.REDUCE_SCATTER,
}
"""Operators that wait for their own transfers: context parallelism of ``flex_attention``, and
asynchronous tensor parallelism.
"""

STATE_GROUP_RANKS = (
    "state its process ranks: group_ranks={name: ranks} in Python, --group-ranks NAME=0-7 on the"
    " command line"
)
"""The remedy if no source has the size of a process group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """The launch of a start node, from its arguments."""

    kind: CollectiveKind
    group: str
    group_size: int
    reduce_op: str
    """Empty where nothing is reduced."""
    input_bytes: int
    output_bytes: int
    holds_input: bool
    """The input must stay alive until the wait; false where the operator works on a clone of it."""
    coalesced: bool
    """One launch of several transfers."""
    in_place: bool
    """The result goes to a tensor that was there before."""

    @property
    def size_bytes(self) -> int:
        """Bytes counted once, as NCCL does: an all-gather by its output, a reduce-scatter by its
        input, the others by their size.
        """
        return self.output_bytes if self.kind == CollectiveKind.ALL_GATHER else self.input_bytes


def is_collective(node: torch.fx.Node) -> bool:
    """Whether ``node`` starts a collective."""
    return collective_kind(node) is not None


def is_unknown_communication(operator: Any) -> bool:
    """Whether ``operator`` talks to other process ranks, and is neither a collective nor a wait
    that is known here.
    """
    namespace, name = _qualified_name(operator)
    if namespace in _FUNCTIONAL_NAMESPACES:
        return name not in (*_KIND_OF_OPERATOR, "wait_tensor", "_wrap_tensor_autograd")
    if namespace == "symm_mem":
        return (namespace, name) not in _KIND_INSIDE
    return namespace in ("c10d_functional", "c10d") and name != "wait_tensor"


def is_wait_tensor(node: torch.fx.Node) -> bool:
    """Whether ``node`` waits for a collective."""
    return _operator(node)[1] == "wait_tensor" and _operator(node)[0] in (
        *_FUNCTIONAL_NAMESPACES,
        "c10d_functional",
    )


def is_communication(operator: Any) -> bool:
    """Whether ``operator`` talks to other process ranks, or waits for them."""
    return _qualified_name(operator)[0] in (
        *_FUNCTIONAL_NAMESPACES,
        "c10d_functional",
        "c10d",
        "_dtensor",
        "symm_mem",
        "cplib",
    )


def is_all_gather(node: torch.fx.Node) -> bool:
    """Whether ``node`` starts an all-gather."""
    return collective_kind(node) == CollectiveKind.ALL_GATHER


def is_reduce_scatter(node: torch.fx.Node) -> bool:
    """Whether ``node`` starts a reduce-scatter."""
    return collective_kind(node) == CollectiveKind.REDUCE_SCATTER


def is_blocking_collective(node: torch.fx.Node) -> bool:
    """Whether ``node`` runs a collective and waits for it (``_dtensor::shard_dim_alltoall``)."""
    return _operator(node) == ("_dtensor", "shard_dim_alltoall")


def kind_inside(operator: Any) -> CollectiveKind | None:
    """Return the kind of the transfers that ``operator`` starts and waits for, besides those of
    :func:`is_blocking_collective`; None of one that does not.
    """
    return _KIND_INSIDE.get(_qualified_name(operator))


def collective_kind(node: torch.fx.Node) -> CollectiveKind | None:
    """Return the kind of collective that ``node`` starts, or None."""
    namespace, name = _operator(node)
    return _KIND_OF_OPERATOR.get(name) if namespace in _FUNCTIONAL_NAMESPACES else None


def has_gradient(node: torch.fx.Node) -> bool:
    """Whether ``node`` starts a collective that autograd differentiates."""
    return is_collective(node) and _operator(node)[0] == "_c10d_functional_autograd"


def reduce_op(node: torch.fx.Node) -> str:
    """Return the reduction of a start node in lower case (``sum``, ``avg``, ...), or an empty
    string.
    """
    return str(argument(node, "reduce_op", "")).lower()


def group_name(node: torch.fx.Node) -> str:
    """Return the name of the process group of a node that communicates; of a node argument (one
    graph for all process ranks) its value or name.
    """
    group = group_argument(node) or ""
    if isinstance(group, torch.fx.Node):
        value = group.meta.get("val")
        group = value if isinstance(value, str) else getattr(value, "group_name", group.name)
    return str(getattr(group, "group_name", group))


def group_argument(node: torch.fx.Node) -> Any:
    """Return the argument of ``node`` that says its process group; None if there is none."""
    return argument(node, "group_name", argument(node, "pg_name", None))


def stated_group(node: torch.fx.Node) -> str:
    """Return the name of the process group that ``node`` communicates on, in a subgraph or by an
    operator that is not known; :data:`ANY_GROUP` if it does not name one.
    """
    stated = group_argument(node)
    return ANY_GROUP if stated is None or isinstance(stated, torch.fx.Node) else group_name(node)


def group_sizes(
    nodes: Iterable[torch.fx.Node], group_ranks: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """Return the number of process ranks of each group that the collectives among ``nodes`` use.

    The sources are the arguments of any of them, ``group_ranks``, and the process groups that torch
    knows by name, in this order: a graph computes with the size that it states. Groups of unknown
    communication may be missing.
    """
    sizes: dict[str, int] = {}
    unknown: dict[str, torch.fx.Node] = {}
    optional: set[str] = set()
    for node in nodes:
        if is_collective(node) or is_blocking_collective(node):
            stated = argument(node, "group_size", None)
            if isinstance(stated, int | torch.SymInt):
                sizes.setdefault(group_name(node), size_hint(stated))
            else:
                unknown.setdefault(group_name(node), node)
        elif is_unknown_communication(node.target):
            optional.add(stated_group(node))
    for name in (optional | unknown.keys()) - sizes.keys():
        found = len(group_ranks.get(name, ())) or len(torch_private.ranks_of_group(name))
        sizes |= {name: found} if found else {}
    for name, node in unknown.items():
        if name not in sizes:
            raise InputError(
                f"node {node.name}: expected the size of process group {name!r}, found it neither"
                " in the graph, nor in group_ranks, nor among the process groups of this process;"
                f" {STATE_GROUP_RANKS}"
            )
    return sizes


def ranks_of_groups(
    nodes: Iterable[torch.fx.Node], group_ranks: Mapping[str, Iterable[int]]
) -> dict[str, tuple[int, ...]]:
    """Return ``group_ranks``, and the process ranks of each further group that a collective among
    ``nodes`` names and torch knows, also where it only resolves the name.
    """
    found = {name: tuple(ranks) for name, ranks in group_ranks.items()}
    for node in nodes:
        if is_collective(node) or is_blocking_collective(node) or kind_inside(node.target):
            name = group_name(node)
            if name not in found and (ranks := torch_private.ranks_of_group(name)):
                found[name] = ranks
    return found


def describe(node: torch.fx.Node, sizes: Mapping[str, int]) -> CollectiveCall:
    """Return the launch of the start node (or blocking collective) ``node``; ``sizes`` as
    :func:`group_sizes` returns them.
    """
    name = _operator(node)[1]
    kind = CollectiveKind.ALL_TO_ALL if is_blocking_collective(node) else collective_kind(node)
    if kind is None:
        raise InputError(
            f"node {node.name}: expected a node that starts a collective, found {node.target}"
        )
    return CollectiveCall(
        kind=kind,
        group=group_name(node),
        group_size=sizes[group_name(node)],
        reduce_op=reduce_op(node),
        input_bytes=sum(
            tensor_bytes(t) for source in input_nodes(node) for t in tensors_of(source)
        ),
        output_bytes=sum(tensor_bytes(t) for t in tensors_of(node)),
        holds_input=name not in _CLONES_INPUT,
        coalesced=name.endswith(("_coalesced", "_coalesced_")),
        in_place=name.endswith(("_out", "reduce_", "coalesced_", "broadcast_")),
    )


def input_nodes(node: torch.fx.Node) -> tuple[torch.fx.Node, ...]:
    """Return the nodes whose tensors a start node sends."""
    value = (
        node.args[0]
        if node.args
        else next((node.kwargs[k] for k in ("input", "inputs", "tensor") if k in node.kwargs), None)
    )
    return tuple(
        leaf
        for leaf in (value if isinstance(value, list | tuple) else (value,))
        if isinstance(leaf, torch.fx.Node)
    )


def tensors_of(node: torch.fx.Node) -> Iterator[torch.Tensor]:
    """Yield the tensors of ``meta["val"]``."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        yield value
    else:
        yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements of ``tensor``."""
    return size_hint(tensor.numel()) * tensor.element_size()


def argument(node: torch.fx.Node, name: str, default: Any) -> Any:
    """Return the argument ``name`` of an operator call, wherever it was passed."""
    if name in node.kwargs:
        return node.kwargs[name]
    if isinstance(node.target, torch._ops.OpOverload):
        position = _positions(node.target).get(name)
        if position is not None and position < len(node.args):
            return node.args[position]
    return default


@lru_cache(maxsize=4096)
def _positions(operator: torch._ops.OpOverload) -> dict[str, int]:
    return {argument.name: position for position, argument in enumerate(operator._schema.arguments)}


def _operator(node: torch.fx.Node) -> tuple[str, str]:
    """Return namespace and name of the operator that ``node`` calls; empty where it calls none."""
    if node.op != "call_function":
        return "", ""
    return _qualified_name(node.target)


@lru_cache(maxsize=4096)
def _qualified_name(target: Any) -> tuple[str, str]:
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return namespace, name
    if isinstance(target, torch._ops.OpOverloadPacket):
        namespace, _, name = target._qualified_op_name.partition("::")
        return namespace, name
    return "", ""
