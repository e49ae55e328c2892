"""Have Inductor keep the payload that a collective in flight still reads.

Inductor keeps the input of a functional collective until its wait: the wait counts as a reader
(torch/_inductor/ir.py, "Out-of-Place Collective Safety"). If a collective writes into ``out``, the
wait reads ``out`` alone, and the payload counts as unused after the launch. A kernel between launch
and wait then gets the memory of the payload, and the data that other process ranks receive depend
on a race (torchtitan trained into NaN until ``allow_buffer_reuse`` was off). Control dependencies
do not help: they hold orders, not memory.
"""

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from apsched.errors import InputError
from apsched.torch_compat.compilers import inductor_setting
from apsched.torch_compat.graphs import empty_graph_like

_c10d = torch.ops._c10d_functional
_FUNCTIONAL: dict[Any, Any] = {
    _c10d.all_gather_into_tensor_out.default: _c10d.all_gather_into_tensor.default,
    _c10d.reduce_scatter_tensor_out.default: _c10d.reduce_scatter_tensor.default,
}
_FRESH = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
)


def keep_what_is_sent(gm: GraphModule) -> GraphModule:
    """Return ``gm`` in a form in which Inductor keeps the payload until the wait; ``gm`` itself if
    it does so anyway.

    A collective into a new buffer of its own becomes the functional one, which makes that buffer.
    Gathers whose input is a part of ``out``, as in buckets, need nothing: the wait keeps ``out``.

    Raises
    ------
    InputError
        where ``out`` is memory of another node, and Inductor reuses buffers.
    """
    exposed = [
        node
        for node in gm.graph.nodes
        if node.target in _FUNCTIONAL and _base(node.args[0]) is not _base(_out(node))
    ]
    if not exposed:
        return gm
    own = [
        node
        for node in exposed
        if _out(node).target in _FRESH and tuple(_out(node).users) == (node,)
    ]
    rest = [node for node in exposed if node not in own]
    if rest and _reuses_buffers():
        raise InputError(
            f"node {rest[0].name}: expected a collective into a new buffer, found"
            f" out={_out(rest[0]).name}, which has other uses; Inductor would overwrite its"
            " payload in flight: use the functional collective, or set"
            " allow_buffer_reuse, inplace_buffers and memory_planning of torch._inductor.config to"
            " False"
        )
    return _with_functional(gm, frozenset(own))


def _with_functional(gm: GraphModule, launches: frozenset[Node]) -> GraphModule:
    graph: Graph = empty_graph_like(gm.graph)
    values: dict[Node, Node] = {}
    buffers = {_out(node) for node in launches}
    for node in gm.graph.nodes:
        if node in buffers:
            continue
        if node in launches:
            arguments = tuple(values[a] if isinstance(a, Node) else a for a in node.args)
            values[node] = graph.create_node(
                "call_function", _FUNCTIONAL[node.target], arguments, name=node.name
            )
            values[node].meta = dict(node.meta)
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
    result = GraphModule(gm, graph, class_name=type(gm).__name__)
    result.meta, result.shape_env = dict(gm.meta), gm.shape_env
    return result


def _out(node: Node) -> Node:
    out = node.kwargs["out"]
    assert isinstance(out, Node)
    return out


def _base(node: Any) -> Any:
    """Return the node that made the memory of ``node``."""
    while (
        isinstance(node, Node)
        and isinstance(node.target, torch._ops.OpOverload)
        and node.target.is_view
    ):
        node = node.args[0]
    return node


def _reuses_buffers() -> bool:
    return any(
        inductor_setting(name)
        for name in ("allow_buffer_reuse", "inplace_buffers", "memory_planning")
    )
