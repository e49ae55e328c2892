"""Graphs as ``torch.compile`` hands them to a backend, with nothing of apsched in between."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from apsched.capture.captured import CapturedGraph
from apsched.capture.graph_module import kept_by_name
from apsched.fx.graph_copies import copied


def as_captured(module: GraphModule, name: str) -> CapturedGraph:
    """Return ``module`` without any check: a case asks whether apsched takes it."""
    placeholders = [node.name for node in module.graph.find_nodes(op="placeholder")]
    return CapturedGraph(
        name=name,
        module=module,
        kept_inputs=frozenset(kept_by_name(placeholders)),
        parameter_names={},
    )


def compiled_graphs(
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    *,
    dynamic: bool | None = None,
    backward: bool = True,
    fullgraph: bool = True,
    joint: bool = False,
    seen: Callable[[GraphModule, Any], None] | None = None,
) -> tuple[CapturedGraph, ...]:
    """Return the graphs of one step of ``function``, in the order in which they are compiled, with
    ``joint`` those before they are parted into forward and backward; ``seen`` is given each graph
    with its inputs.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs: list[CapturedGraph] = []
    whole: list[CapturedGraph] = []

    def parted(module: GraphModule, *args: Any, **kwargs: Any) -> Any:
        whole.append(as_captured(copied(module), f"joint{len(whole) or ''}"))
        return min_cut_rematerialization_partition(module, *args, **kwargs)

    def keep(name: str) -> Callable[[GraphModule, Any], Any]:
        def compiler(module: GraphModule, example_inputs: Any) -> Any:
            if seen is not None:
                seen(module, example_inputs)
            graphs.append(as_captured(copied(module), f"{name}{len(graphs) or ''}"))
            return make_boxed_func(module.forward)

        return compiler

    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    backend = aot_autograd(
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        partition_fn=parted,
    )
    try:
        step = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=fullgraph)
        result = step(*inputs)
    except NotImplementedError:  # an operator that no CPU has; its graph is there
        if not graphs:
            raise
        return tuple(whole if joint else graphs)
    if backward:
        leaves = [
            leaf
            for leaf in torch.utils._pytree.tree_leaves(result)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        torch.stack([leaf.float().sum() for leaf in leaves]).sum().backward()
    return tuple(whole if joint else graphs)
