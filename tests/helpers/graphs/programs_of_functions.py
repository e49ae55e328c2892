"""Training steps whose nodes are no aten overloads: python functions, overload packets and
higher-order operators, beside collectives.

Each step has the same frame: layers that gather a weight, multiply, do the thing in question and
reduce what does not depend on it. An order that ignores what the thing draws or writes gives other
numbers.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tests.helpers.graphs.instrumented import call, traced

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
higher_order = torch.ops.higher_order
NUM_LAYERS = 4
WIDTH = 8


def read_by_hand(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """A function unknown to apsched: it writes its second argument and draws."""
    state.mul_(0.5)
    return x * state[0] + torch.rand_like(x)


def view_by_hand(x: torch.Tensor) -> torch.Tensor:
    """A function unknown to apsched: it returns a view of its argument."""
    return x[1:]


def _dropout(x: Any, state: Any) -> Sequence[Any]:
    return [F.dropout(x, 0.5), torch.rand_like(x)]


def _mixed_draws(x: Any, state: Any) -> Sequence[Any]:
    return [torch.bernoulli(aten.sigmoid.default(x)), F.dropout(x, 0.5, True, False)]


def _iadd(x: Any, state: Any) -> Sequence[Any]:
    before = aten.mul.Tensor(state, 2.0)
    return [
        before,
        call(operator.iadd, state, aten.sum.dim_IntList(x, [0], True)),
        aten.mul.Tensor(state, 3.0),
    ]


def _relu_in_place(x: Any, state: Any) -> Sequence[Any]:
    negative = aten.neg.default(x)
    before = aten.mul.Tensor(negative, 2.0)
    F.relu(negative, inplace=True)
    return [before, aten.mul.Tensor(negative, 3.0)]


def _out(x: Any, state: Any) -> Sequence[Any]:
    before = aten.mul.Tensor(state, 2.0)
    torch.mul(aten.slice.Tensor(x, 0, 0, 2), 0.5, out=state)
    return [before, aten.mul.Tensor(state, 3.0)]


def _packets(x: Any, state: Any) -> Sequence[Any]:
    before = aten.mul.Tensor(state, 2.0)
    call(aten.add_, state, call(aten.rand_like, state))
    return [before, call(aten.mul, state, 3.0), call(aten.rand_like, x)]


def _opaque(x: Any, state: Any) -> Sequence[Any]:
    before, drawn = aten.mul.Tensor(state, 2.0), aten.rand_like.default(x)
    return [before, drawn, call(read_by_hand, x, state), aten.mul.Tensor(state, 3.0)]


def _opaque_view(x: Any, state: Any) -> Sequence[Any]:
    row = call(view_by_hand, state)
    before = aten.mul.Tensor(state, 2.0)
    aten.add_.Tensor(row, 1.0)
    return [before, aten.mul.Tensor(state, 3.0)]


def _items(x: Any, state: Any) -> Sequence[Any]:
    picked = call(operator.getitem, state, torch.tensor([1, 0]))
    call(operator.setitem, state, 0, aten.select.int(x, 0, 0))
    return [picked, aten.mul.Tensor(state, 3.0), call(operator.getitem, state, 1)]


def _statistics(x: Any, state: Any) -> Sequence[Any]:
    mean, variance = aten.select.int(state, 0, 0), aten.select.int(state, 0, 1)
    before = aten.mul.Tensor(state, 2.0)
    normal = F.batch_norm(x, mean, variance, training=True)
    other = aten.batch_norm.default(x, None, None, mean, variance, True, 0.1, 1e-5, False)
    return [before, normal, aten.mul.Tensor(state, 3.0), other, aten.mul.Tensor(state, 4.0)]


def _alias_of_composite(x: Any, state: Any) -> Sequence[Any]:
    same = aten.dropout.default(state, 0.5, False)
    before = aten.mul.Tensor(state, 2.0)
    aten.add_.Tensor(same, 1.0)
    return [before, aten.mul.Tensor(state, 3.0)]


def _saved_generator(x: Any, state: Any) -> Sequence[Any]:
    pair = call(higher_order.run_and_save_rng_state, aten.rand_like.default, x)
    saved, drawn = call(operator.getitem, pair, 0), call(operator.getitem, pair, 1)
    later = aten.rand_like.default(x)
    again = call(higher_order.run_with_rng_state, saved, aten.rand_like.default, x)
    return [drawn, later, again]


def _written_in_higher_order(x: Any, state: Any) -> Sequence[Any]:
    before = aten.mul.Tensor(state, 2.0)
    call(higher_order.run_and_save_rng_state, aten.bernoulli_.float, state, 0.5)
    return [before, aten.mul.Tensor(state, 3.0)]


def _autocast(x: Any, state: Any) -> Sequence[Any]:
    before = torch.matmul(x, aten.t.default(x))
    context = x.tracer.create_proxy(
        "call_function",
        torch.amp.autocast_mode._enter_autocast,
        ("cpu", torch.bfloat16, True, None),
        {},
    )
    inside = torch.matmul(x, aten.t.default(x))
    call(torch.amp.autocast_mode._exit_autocast, context)
    return [before, inside, torch.matmul(aten.t.default(x), x)]


THINGS: dict[str, Callable[[Any, Any], Sequence[Any]]] = {
    "F.dropout and rand_like": _dropout,
    "bernoulli and dropout by position": _mixed_draws,
    "operator.iadd": _iadd,
    "F.relu(inplace=True)": _relu_in_place,
    "torch.mul(out=)": _out,
    "overload packets": _packets,
    "a function of the user's": _opaque,
    "a view of the user's": _opaque_view,
    "items of a tensor": _items,
    "F.batch_norm in training": _statistics,
    "aten.dropout that returns its argument": _alias_of_composite,
    "run_and_save_rng_state": _saved_generator,
    "a write in run_and_save_rng_state": _written_in_higher_order,
    "autocast": _autocast,
}


def step_of(
    thing: Callable[[Any, Any], Sequence[Any]], group: str, world_size: int
) -> Callable[..., Any]:
    """Return the step with ``thing`` in each layer."""

    def step(x, state, shard0, shard1, shard2, shard3):
        outputs = []
        for shard in (shard0, shard1, shard2, shard3):
            whole = c10d.wait_tensor.default(
                c10d.all_gather_into_tensor.default(shard, world_size, group)
            )
            x = aten.tanh.default(aten.mm.default(x, whole))
            outputs += thing(x, state)
            aside = aten.mm.default(aten.t.default(whole), whole)
            outputs.append(
                c10d.wait_tensor.default(
                    c10d.reduce_scatter_tensor.default(aside, "sum", world_size, group)
                )
            )
        return (x, *outputs)

    return step


def inputs_of(world_size: int, process_rank: int) -> list[torch.Tensor]:
    """Return what the steps take: activations, a state of two rows that they may write, and shards
    of the weights."""
    generator = torch.Generator().manual_seed(process_rank)
    shapes = ((4, WIDTH), (2, WIDTH), *(((WIDTH // world_size, WIDTH),) * NUM_LAYERS))
    x, state, *shards = (torch.randn(*shape, generator=generator) for shape in shapes)
    return [x, state.abs(), *shards]


def traced_step(name: str, group: str, world_size: int) -> torch.fx.GraphModule:
    """Return the graph of the step with the thing of that name, as ``symbolic_trace`` and
    ``FakeTensorProp`` give it."""
    return traced(step_of(THINGS[name], group, world_size), inputs_of(world_size, 0))
