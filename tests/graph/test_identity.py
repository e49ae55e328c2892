"""The hash of a graph: equal where the same schedule applies, different where anything that matters differs."""

import pytest
import torch
from instrumented import UnitCosts, capture_of, traced

from apsched.graph.export import export
from apsched.graph.identity import graph_hash

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def step(rank=0, group="dp", op="sum", size=4, act=aten.sin.default, width=8, swap=False, extra=False):
    def function(x, shard):
        part = aten.slice.Tensor(x, 0, 2 * rank, 2 * rank + 2)
        whole = c10d.wait_tensor.default(c10d.all_gather_into_tensor.default(shard, size, group))
        y = act(aten.mm.default(whole, aten.t.default(x)))
        total = c10d.wait_tensor.default(c10d.all_reduce.default(y, op, group))
        z = aten.sub.Tensor(y, total) if swap else aten.sub.Tensor(total, y)
        if extra:
            aten.add_.Tensor(x, 1.0)
        return z, part

    return function, [torch.randn(8, width), torch.randn(8 // size, width)]


def hash_of(kept=(), durations=1.0, rename=False, **change):
    function, inputs = step(**change)
    module = traced(function, inputs)
    if rename:
        for k, node in enumerate(module.graph.nodes):
            if node.op == "call_function":
                node.name = f"renamed_{k}"

    class Costs(UnitCosts):
        def compute_us(self, node):
            return durations

    ranks = {name: tuple(range(change.get("size", 4))) for name in ("dp", "17")}
    return graph_hash(export(capture_of(module, kept), Costs(), group_ranks=ranks))


@pytest.mark.parametrize(
    "change",
    [{"rank": 3}, {"group": "17"}, {"durations": 2.0}, {"rename": True}],
    ids=lambda change: next(iter(change)),
)
def test_the_same_on_every_process_rank_and_whatever_the_names_and_prices(change):
    assert hash_of(**change) == hash_of()


@pytest.mark.parametrize(
    "change",
    [
        {"op": "avg"},
        {"size": 2},
        {"act": aten.cos.default},
        {"width": 16},
        {"swap": True},
        {"extra": True},
        {"kept": ("shard",)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_different_where_it_matters(change):
    assert hash_of(**change) != hash_of()
