"""The operation of a node, in the words of a graph and in those of a profiler."""

import pytest
import torch

from apsched.costs.compute.node_operation import node_operation
from apsched.costs.compute.operation import as_traced, operation_text, operator_of, tensor_text

MM = "aten::mm(float32[128,64], float32[64,192]{1,64}) -> float32[128,192]"


def _node(target, *values, result):
    graph = torch.fx.Graph()
    args = []
    for value in values:
        if isinstance(value, torch.Tensor):
            args.append(graph.placeholder("x"))
            args[-1].meta["val"] = value
        elif isinstance(value, list):
            args.append([graph.placeholder("x") for _ in value])
            for node, tensor in zip(args[-1], value, strict=True):
                node.meta["val"] = tensor
        else:
            args.append(value)
    node = graph.call_function(target, tuple(args))
    node.meta["val"] = result
    return node


def test_strides_show_where_a_tensor_is_not_contiguous():
    node = _node(
        torch.ops.aten.mm.default,
        torch.empty(128, 64),
        torch.empty(192, 64).t(),
        result=torch.empty(128, 192),
    )
    assert node_operation(node) == MM
    assert (
        tensor_text("float32", (1, 4), (99, 1)) == "float32[1,4]"
    )  # a dimension of one element may have any stride


def test_numbers_are_left_out_and_lists_stand_in_parentheses():
    x, y = torch.empty(2, 3), torch.empty(2, 3, dtype=torch.bfloat16)
    assert (
        node_operation(_node(torch.ops.aten.add.Tensor, x, 1, result=x))
        == "aten::add(float32[2,3]) -> float32[2,3]"
    )
    assert (
        node_operation(_node(torch.ops.aten.cat.default, [x, y], result=x))
        == "aten::cat((float32[2,3], bfloat16[2,3])) -> float32[2,3]"
    )


def test_inputs_and_outputs_compute_nothing():
    graph = torch.fx.Graph()
    assert node_operation(graph.placeholder("x")) == ""


@pytest.mark.parametrize(
    ("operation", "traced"),
    [
        (MM, "aten::mm(float32[128,64], float32[64,192])"),
        (
            "aten::add(float32[2,3], float32[]) -> float32[2,3]",
            "aten::add(float32[2,3])",
        ),  # a number is a tensor of no dimension
        ("aten::cat((float32[2,3]{1,2}, int64[])) -> float32[5]", "aten::cat(([2,3], []))"),
        (
            "aten::f(bool[1], (int8[2], int8[3]), float16[4])",
            "aten::f(bool[1], ([2], [3]), float16[4])",
        ),
        ("aten::f()", "aten::f()"),
    ],
)
def test_a_profiler_sees_less(operation, traced):
    assert as_traced(operation) == traced
    assert as_traced(traced) == traced
    assert operator_of(operation) == operation.partition("(")[0]


def test_text_is_put_together_as_it_is_read():
    assert (
        operation_text("aten::cat", [["a[1]", "b[2]"], "c[3]"], ["d[4]"])
        == "aten::cat((a[1], b[2]), c[3]) -> d[4]"
    )
