"""Equal nodes between a parameter and its uses become one; others stay."""

import torch
from torch._functorch._aot_autograd.descriptors import ParamAOTInput
from torch.fx import Graph, GraphModule

from apsched.fx.passes.merged_gathers import merge_gathers
from apsched.fx.passes.run_passes import run_passes

_aten = torch.ops.aten


def test_casts_of_a_parameter_become_one_and_values_stay() -> None:
    """Not those of an input, with other arguments, or in backward."""
    graph, made = Graph(), {}

    def node(name: str, target, *args, **kwargs) -> torch.fx.Node:
        made[name] = graph.create_node("call_function", target, args, kwargs, name)
        made[name].meta["val"] = torch.empty(3, 3)
        return made[name]

    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    for given in (weight, x):
        given.meta["val"] = torch.empty(3, 3)
    weight.meta["desc"] = ParamAOTInput("weight")
    for k in (1, 2):
        cast = node(f"cast_{k}", _aten._to_copy.default, weight, dtype=torch.float64)
        turned = node(f"turned_{k}", _aten.t.default, cast)
        node(f"own_{k}", _aten._to_copy.default, x, dtype=torch.float64)
        node(f"product_{k}", _aten.mm.default, made[f"own_{k}"], turned)
    other = node("other", _aten._to_copy.default, weight, dtype=torch.float32)
    back = node("back", _aten._to_copy.default, weight, dtype=torch.float64)
    back.meta["partitioner_tag"] = "is_backward"
    graph.output((made["product_1"], made["product_2"], other, back))
    module = GraphModule(torch.nn.Module(), graph)
    result = run_passes(module, (merge_gathers(),)).module
    names = [n.name for n in result.graph.nodes if n.op == "call_function"]
    assert names == [n for n in made if n not in ("cast_2", "turned_2")]
    given = torch.randn(3, 3), torch.randn(3, 3)
    for one, same in zip(module(*given), result(*given), strict=True):
        assert torch.equal(one, same)
