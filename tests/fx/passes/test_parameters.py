"""Which nodes scale a gradient: a product with a number does, a square does not."""

import torch
from torch.fx import Graph

from apsched.fx.passes.parameters import is_scaling


def test_a_square_is_no_scaling() -> None:
    graph, mul = Graph(), torch.ops.aten.mul.Tensor
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert is_scaling(graph.call_function(mul, (x, 0.5)))
    assert is_scaling(graph.call_function(mul, (2.0, x)))
    assert not is_scaling(graph.call_function(mul, (x, x)))
    assert not is_scaling(graph.call_function(mul, (x, y)))
