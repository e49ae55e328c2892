"""Functions that random programs call as nodes: some stay python functions, of which nothing is
known, others become subgraphs."""

import torch
import torch.distributed as dist

from tests.helpers.graphs.instrumented import traced


def scaled_by_hand(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5


def part_by_hand(x: torch.Tensor) -> torch.Tensor:
    """A view."""
    return x[: x.shape[0] // 2]


def updated_by_hand(x: torch.Tensor) -> torch.Tensor:
    """A write, a draw and a result of its own."""
    x.mul_(0.5)
    return x + torch.rand_like(x)


def noisy_body(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (torch.ops.aten.add.Tensor(x, torch.ops.aten.rand_like.default(x)),)


def writing_body(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (torch.ops.aten.neg.default(torch.ops.aten.add_.Tensor(x, 1.0)),)


def pure_body(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (torch.ops.aten.sin.default(x),)


def summing_body(x: torch.Tensor) -> tuple[torch.Tensor]:
    """A collective that nothing schedules."""
    mine = torch.ops.aten.clone.default(x, memory_format=torch.contiguous_format)
    c10d = torch.ops._c10d_functional
    work = c10d.all_reduce.default(mine, "sum", dist.group.WORLD.group_name)
    return (c10d.wait_tensor.default(work),)


BY_HAND = (scaled_by_hand, part_by_hand, updated_by_hand)
BODIES = (noisy_body, writing_body, pure_body, summing_body)


def with_subgraphs(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return ``module`` with ``invoke_subgraph`` or ``cond`` in place of each call of one of
    :data:`BODIES`."""
    higher_order = torch.ops.higher_order
    for k, node in enumerate([n for n in module.graph.nodes if n.target in BODIES]):
        (x,) = node.args
        setattr(module, f"body_{k}", traced(node.target, [torch.ones(2, 2)]))
        with module.graph.inserting_before(node):
            body = module.graph.get_attr(f"body_{k}")
            if k % 2:
                call = module.graph.call_function(higher_order.cond, (True, body, body, (x,)))
            else:
                call = module.graph.call_function(
                    higher_order.invoke_subgraph, (body, f"body_{k}", x)
                )
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        module.graph.erase_node(node)
    module.recompile()
    return module
