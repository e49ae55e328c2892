"""Held graphs run, also with torch 2.11, which has no kernels of ``control_deps``."""

import pytest
import torch
from torch._inductor.fx_passes.control_dependencies import control_deps
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.torch_compat.graphs import add_control_deps


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_held_graph_runs_where_torch_has_no_kernels_for_it(
    monkeypatch: pytest.MonkeyPatch, with_gradients: bool
) -> None:
    monkeypatch.setattr(control_deps, "py_kernels", {})
    monkeypatch.setattr(control_deps, "_dispatch_cache", {})
    x = torch.rand(4, 4, requires_grad=with_gradients)
    module = make_fx(lambda x: (x.sin(), x.cos()))(x.detach())
    sin, cos = (node for node in module.graph.nodes if node.op == "call_function")
    add_control_deps(module.graph, {cos: [sin]})
    module.recompile()
    assert any("control_deps" in str(node.target) for node in module.graph.nodes)
    with torch.no_grad():
        found = module(x)
    assert [*map(torch.equal, found, (x.sin(), x.cos()))] == [True, True]
