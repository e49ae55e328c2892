"""Work that a graph does twice: gathers of one parameter, and reductions whose results are only
added.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from apsched.errors import InputError
from apsched.fx.collectives import (
    group_name,
    input_nodes,
    is_all_gather,
    is_reduce_scatter,
    is_wait_tensor,
    reduce_op,
)
from apsched.fx.effects.of_node import effects_of
from apsched.fx.graph_copies import copied, finished
from apsched.fx.passes.parameters import is_backward, serves_alone
from apsched.fx.passes.run_passes import Pass
from apsched.torch_compat.sizes import same_sizes

_aten = torch.ops.aten


def deduplicate_gathers() -> Pass:
    """Return the pass that leaves one chain (cast, gather, wait, views) of each kind from each
    input and direction.

    A parameter that is read twice is gathered twice by SimpleFSDP and by DTensor; AOTAutograd's
    partitioner merges equal chains, tracers of whole steps don't (TorchTitan's
    ``deduplicate_fsdp_unshard_chains_pass``). Backward keeps its own chain: merged with forward's,
    the gathered parameter would live from one to the other.
    """
    return Pass(name="deduplicate_gathers", run=_deduplicated, spec=_check_no_duplicates)


def fuse_summed_scatters() -> Pass:
    """Return the pass that makes ``RS(a + b)`` of ``RS(a) + RS(b)`` on one group: half the bytes.

    Sums are rounded in another order, so this has no place where gradients must be bit for bit
    those of eager FSDP2.
    """
    return Pass(name="fuse_summed_scatters", run=_with_sums_first)


def _deduplicated(module: GraphModule) -> GraphModule:
    result = copied(module)
    for node, same in _duplicates(result):
        node.replace_all_uses_with(same)
    return finished(result)


def _duplicates(module: GraphModule) -> list[tuple[Node, Node]]:
    """Return each node of a chain that an earlier one equals, with that one."""
    written = _written(module)
    first: dict[Hashable, Node] = {}
    stands_for: dict[Node, Node] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder" and node not in written:
            stands_for[node] = node
        elif (
            serves_alone(node)
            and node not in written
            and all(source in stands_for for source in node.all_input_nodes)
        ):
            stands_for[node] = first.setdefault(_key(node, stands_for), node)
    gathers = {node for node in stands_for if is_all_gather(node)}
    chains = {
        node
        for node in stands_for
        if node in gathers or any(n in gathers for n in _ancestors(node, stands_for))
    }
    return [
        (node, same) for node, same in stands_for.items() if node is not same and node in chains
    ]


def _key(node: Node, stands_for: dict[Node, Node]) -> Hashable:
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: stands_for[source])
    return str(node.target), is_backward(node), repr(args), repr(sorted(kwargs.items()))


def _ancestors(node: Node, known: dict[Node, Node]) -> set[Node]:
    """Return what ``node`` derives from, within chains."""
    seen: set[Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        if source in known and source not in seen:
            seen.add(source)
            stack += source.all_input_nodes
    return seen


def _written(module: GraphModule) -> set[Node]:
    """Return the nodes with tensors that another node may write into."""
    written: set[Node] = set()
    for node in module.graph.nodes:
        if effects_of(node).writes:
            written.update(node.all_input_nodes)
    return written


def _check_no_duplicates(module: GraphModule) -> None:
    left = [node for node, _ in _duplicates(module) if is_all_gather(node)]
    if left:
        raise InputError(
            f"node {left[0].name}: expected one gather of each input and direction, found a"
            " second one"
        )


def _with_sums_first(module: GraphModule) -> GraphModule:
    result = copied(module)
    found = True
    while found:  # a sum of three is two sums
        found = False
        for node in list(result.graph.nodes):
            chains = _summed_chains(node)
            if chains is not None:
                _fuse(node, *chains)
                finished(result)
                found = True
    return result


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
    """Return what tells a step of a chain from another: what it does, but not on what."""
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
