"""Reductions whose results are only added: the sum goes first, and one reduction is left."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from apsched.fx.collectives import (
    group_name,
    input_nodes,
    is_reduce_scatter,
    is_wait_tensor,
    reduce_op,
)
from apsched.fx.graph_copies import copied, finished
from apsched.fx.passes.parameters import serves_alone
from apsched.fx.passes.run_passes import Pass
from apsched.torch_compat.sizes import same_sizes

_aten = torch.ops.aten


def fuse_summed_scatters() -> Pass:
    """Return the pass that makes ``RS(a + b)`` of ``RS(a) + RS(b)`` on one group: half the bytes.

    Sums are rounded in another order, so this has no place where gradients must be bit for bit
    those of eager FSDP2.
    """
    return Pass(name="fuse_summed_scatters", run=_with_sums_first)


def put_sums_first(graph: torch.fx.Graph) -> None:
    """Change ``graph`` in place, as :func:`fuse_summed_scatters`."""
    found = True
    while found:  # a sum of three is two sums
        found = False
        for node in list(graph.nodes):
            chains = _summed_chains(node)
            if chains is not None:
                _fuse(node, *chains)
                found = True


def _with_sums_first(module: GraphModule) -> GraphModule:
    result = copied(module)
    put_sums_first(result.graph)
    return finished(result)


def _summed_chains(node: Node) -> tuple[Sequence[Node], Sequence[Node]] | None:
    """Return the two equal chains, each from its reduce-scatter on, whose results ``node`` adds and
    no other node uses.
    """
    if (
        node.target is not _aten.add.Tensor
        or node.kwargs
        or len(node.all_input_nodes) != 2
        or not node.users
    ):
        return None
    first, second = (_chain_before(source) for source in node.all_input_nodes)
    if not first or not second or [_step(n) for n in first] != [_step(n) for n in second]:
        return None
    values = [input_nodes(chain[0])[0].meta["val"] for chain in (first, second)]
    same = same_sizes(values[0].shape, values[1].shape) and values[0].dtype == values[1].dtype
    return (first, second) if same and reduce_op(first[0]) in ("sum", "avg") else None


def _chain_before(node: Node) -> list[Node]:
    """Return the nodes from a reduce-scatter to ``node``, where each has one user; empty where
    there is no such chain.
    """
    chain = [node]
    while len(chain[0].users) == 1 and not is_reduce_scatter(chain[0]):
        if not serves_alone(chain[0]) or len(chain[0].all_input_nodes) != 1:
            return []
        chain.insert(0, chain[0].all_input_nodes[0])
    return (
        chain
        if is_reduce_scatter(chain[0])
        and len(chain[0].users) == 1
        and any(map(is_wait_tensor, chain))
        else []
    )


def _step(node: Node) -> tuple[Any, ...]:
    """Return the identity of a step of a chain: its operation without its input."""
    rest = tuple(str(a) for a in node.args if not isinstance(a, Node))
    return (
        node.target,
        rest,
        str(sorted(node.kwargs.items())),
        group_name(node) if is_reduce_scatter(node) else "",
    )


def _fuse(total: Node, first: Sequence[Node], second: Sequence[Node]) -> None:
    """Put the sum before the scatter: a new chain in front of ``total``, whose users take its
    result.
    """
    graph = total.graph
    one, other = (input_nodes(chain[0])[0] for chain in (first, second))
    with graph.inserting_before(total):
        node = graph.call_function(_aten.add.Tensor, (one, other))
        node.meta = {**total.meta, "val": one.meta["val"].new_empty(one.meta["val"].shape)}
        before = one
        for step in first:
            new = graph.node_copy(
                step,
                lambda n, before=before, node=node: node if n is before else n,  # type: ignore[misc]
            )
            before, node = step, new
    total.replace_all_uses_with(node)
    for old in (total, *reversed(first), *reversed(second)):
        graph.erase_node(old)  # torch's elimination of dead code keeps each wait
