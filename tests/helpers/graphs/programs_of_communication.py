"""Training steps whose communication is not all scheduled: no wait, a wait for several, waits of
views, point-to-point, collectives in subgraphs, storages that change their size, operators that
transfer inside.

Each is traced by make_fx, in the frame of ``programs_of_functions``.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed._symmetric_memory as symmetric_memory
import torch.distributed.tensor.experimental._context_parallel._cp_custom_ops  # registers cplib
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.torch_compat.graphs import add_control_deps
from tests.helpers.graphs.programs_of_functions import inputs_of

c10d = torch.ops._c10d_functional
NUM_LAYERS = 2
Tensors = Sequence[torch.Tensor]
Thing = Callable[[torch.Tensor, torch.Tensor, str, int], Tensors]
"""Takes activations, a state that it may write, the group and the other process rank of two."""


def summed(x: torch.Tensor, group: str) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", group))


def _wait_in_the_caller(x, state, group, peer):
    return [c10d.all_reduce(x.sin(), "sum", group), x.cos()]


def _nobody_waits(x, state, group, peer):
    c10d.all_reduce(x.sin(), "sum", group)
    return [x.cos()]


def _in_place_and_in_the_caller(x, state, group, peer):
    before = state * 2
    c10d.all_reduce_(state, "max", group)
    c10d.wait_tensor(state)
    mine = state.clone()
    return [before, c10d.all_reduce_(mine, "sum", group)]


def _wait_of_a_view(x, state, group, peer):
    whole = c10d.all_gather_into_tensor(x, 2, group)
    return [c10d.wait_tensor(whole.view(2, *x.shape)[0]).cos(), whole.sin()]


def _one_wait_for_two(x, state, group, peer):
    mine = torch.stack([x.sin(), x.cos()])
    c10d.all_reduce_(mine[0], "sum", group)
    c10d.all_reduce_(mine[1], "max", group)
    c10d.wait_tensor(mine)
    return [mine * 2, x.cos()]


def _several_results(x, state, group, peer):
    """Waits in another order than results, and reads of tensors that are summed in place."""
    first, second = c10d.reduce_scatter_tensor_coalesced([x.sin(), x.tan()], "sum", 2, group)
    second = c10d.wait_tensor(second)
    first = c10d.wait_tensor(first)
    mine, other = x.cos(), x.exp()
    for one in c10d.all_reduce_coalesced_([mine, other], "sum", group):
        c10d.wait_tensor(one)
    return [first, second, other * 3, mine * 2]


def _gathered_bytes(x, state, group, peer):
    """A cast whose result is sent as bytes, as in all-gathers of float8 parameters."""
    sent = state.to(torch.float8_e4m3fn).view(torch.uint8)
    whole = c10d.wait_tensor(c10d.all_gather_into_tensor(sent, 2, group))
    return [whole.view(torch.float8_e4m3fn).float(), x.cos()]


def _used_by_place(x, state, group, peer):
    """Sums of which a view takes an offset of its own, or elements that need an even offset."""
    odd = summed(x[0, :3].clone(), group)
    part = torch.as_strided(summed(x.sin(), group), (2, 8), (8, 1), 8)
    numbers = torch.view_as_complex(summed(x.cos().view(-1, 2), group))
    return [odd, part * 2, numbers, summed(x.tan(), group).view(torch.float64)]


def _parts_in_place(x, state, group, peer):
    """Sums that later transfers write, all of them under way at once."""
    sums = [summed(x.sin(), group), summed(x.cos(), group)]
    starts = [c10d.all_reduce_(one, "max", group) for one in sums]
    return [c10d.wait_tensor(start) * 2 for start in starts]


def _differentiable_and_complex(x, state, group, peer):
    """A gather that autograd knows, in no bucket, and sums of complex numbers."""
    whole = torch.ops._c10d_functional_autograd.all_gather_into_tensor(state, 2, group)
    return [c10d.wait_tensor(whole), summed(torch.complex(x, x.sin()), group)]


def _point_to_point(x, state, group, peer):
    before = state * 2
    sent = c10d.isend(x.sin(), peer, 0, group)
    received = c10d.irecv(x.new_zeros(x.shape), peer, 0, group)
    c10d.wait_tensor(sent)
    return [before, c10d.wait_tensor(received) * 2]


def _batch_point_to_point(x, state, group, peer):
    ops, tensors = ["isend", "irecv"], [x.sin(), x.new_zeros(x.shape)]
    sent, received = c10d.batch_p2p_ops(ops, [peer, peer], [0, 0], tensors, group)
    c10d.wait_tensor(sent)
    return [c10d.wait_tensor(received) * 2, x.cos()]


def _resized_storage(x, state, group, peer):
    buffer = x.sin()
    first = buffer * 2
    torch.ops.inductor.resize_storage_bytes_(buffer, 0)
    torch.ops.inductor.resize_storage_bytes_(buffer, x.numel() * 4)
    buffer.copy_(summed(x, group))
    return [first, buffer * 3]


def _resized_tensor(x, state, group, peer):
    buffer = x.new_zeros(2)
    before = buffer + 1
    buffer.resize_(x.shape).copy_(summed(x, group))
    return [before, buffer * 3]


def _another_storage(x, state, group, peer):
    buffer, other = x.sin(), x.cos()
    before = buffer.view(-1) * 2
    buffer.set_(other)
    seen = buffer.view(-1) * 3
    other.mul_(2)
    return [before, seen, buffer * 4]


def _cond(x, state, group, peer):
    def yes(x):
        return summed(x.sin(), group)

    def no(x):
        return x.cos()

    before = summed(x.tan(), group)
    chosen = torch.cond(before.sum() > 0, yes, no, (x,))
    return [before, chosen, summed(x.cos(), group)]


def _map(x, state, group, peer):
    from torch._higher_order_ops.map import map as mapped

    return [mapped(lambda row, state: summed(row * state[0], group), x, state), x.cos()]


def _scan(x, state, group, peer):
    from torch._higher_order_ops.scan import scan

    last, rows = scan(lambda carry, row: (carry + row, (carry * row).sin()), state[0].clone(), x)
    return [last, rows]


def _while(x, state, group, peer):
    from torch._higher_order_ops.while_loop import while_loop

    _, out = while_loop(
        lambda i, x: i < 3,
        lambda i, x: (i + 1, x.sin() + x),
        (torch.zeros((), dtype=torch.int64), x),
    )
    return [out, x.cos()]


def _keys_and_values(x, state, group, peer):
    whole = torch.ops.cplib.flex_cp_allgather(x.sin(), x.cos(), 0, group)
    keys, values = (tensor * 2 for tensor in whole)
    return [*whole, *torch.ops.cplib.flex_cp_allgather_backward(keys, values, 0, group)]


def _parted_products(x, state, group, peer):
    whole, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(x.sin(), [x.t()], 0, group)
    reduced = torch.ops.symm_mem.fused_matmul_reduce_scatter(product, x, "sum", 0, group)
    return [whole, reduced, x.cos()]


def run_parted_products_on_cpu() -> torch.library.Library:
    """Run the products of asynchronous tensor parallelism on CPU as torch's fallbacks do, as long
    as the result lives.
    """
    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, getattr(symmetric_memory, f"_{name}_fallback"), "CPU")
    return library


THINGS: dict[str, Thing] = {
    "a wait in the caller": _wait_in_the_caller,
    "nobody waits": _nobody_waits,
    "in place, and a wait in the caller": _in_place_and_in_the_caller,
    "a wait of a view": _wait_of_a_view,
    "one wait for two": _one_wait_for_two,
    "one start of several results": _several_results,
    "gathers of bytes": _gathered_bytes,
    "results used by their place": _used_by_place,
    "sums that are reduced again in place": _parts_in_place,
    "gathers of autograd, and complex sums": _differentiable_and_complex,
    "isend and irecv": _point_to_point,
    "batch_p2p_ops": _batch_point_to_point,
    "resize_storage_bytes_": _resized_storage,
    "resize_": _resized_tensor,
    "set_": _another_storage,
    "cond with a collective": _cond,
    "map with a collective": _map,
    "scan": _scan,
    "while_loop": _while,
    "keys and values of context parallelism": _keys_and_values,
    "products of asynchronous tensor parallelism": _parted_products,
}
if not hasattr(c10d, "isend"):  # torch 2.11
    del THINGS["isend and irecv"], THINGS["batch_p2p_ops"]
CONTROL_DEPS = "control_deps"
"""The step whose second gather is held behind the first product."""
NAMES = (*THINGS, CONTROL_DEPS)


def step_of(thing: Thing, group: str, peer: int) -> Callable[..., Tensors]:
    """Return the step with ``thing`` in each layer, on two process ranks."""

    def step(x, state, *shards):
        outputs = []
        for shard in shards:
            whole = c10d.wait_tensor(c10d.all_gather_into_tensor(shard, 2, group))
            x = torch.tanh(x @ whole)
            outputs += thing(x, state, group, peer)
            aside = whole.t() @ whole
            outputs.append(c10d.wait_tensor(c10d.reduce_scatter_tensor(aside, "sum", 2, group)))
        return (x, *outputs)

    return step


def inputs_of_steps(process_rank: int) -> list[torch.Tensor]:
    """Return what the steps take: activations, a state of two rows that they may write, and shards
    of the weights."""
    return inputs_of(2, process_rank)[: 2 + NUM_LAYERS]


def traced_step(name: str, group: str, peer: int) -> torch.fx.GraphModule:
    """Return the graph of the step with the thing of that name, as make_fx traces it."""
    thing = THINGS.get(name, lambda x, state, group, peer: [x.cos()])
    module = make_fx(step_of(thing, group, peer), tracing_mode="fake")(*inputs_of_steps(0))
    if name == CONTROL_DEPS:
        gathers = module.graph.find_nodes(
            op="call_function", target=c10d.all_gather_into_tensor.default
        )
        products = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        add_control_deps(module.graph, {gathers[1]: [products[0]]})
        module.recompile()
    return module
