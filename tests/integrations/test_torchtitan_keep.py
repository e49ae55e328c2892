"""A traced step in two halves computes what it computes as one graph."""

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.integrations.torchtitan_keep import halves

SCALES = torch.tensor([1.0, -2.0, 0.5, 3.0])


def traced_step() -> tuple[GraphModule, tuple[torch.Tensor, ...]]:
    """Return a loss and the gradients of two parameters; forward and backward read a constant."""

    def step(first, second, x):
        hidden = (x @ first * SCALES).relu()
        loss = (hidden @ second).square().mean()
        return [loss, hidden.sum(), *torch.autograd.grad(loss, (first, second))]

    inputs = tuple(torch.randn(4, 4, requires_grad=k < 2) for k in range(3))
    joint = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    nodes = list(joint.graph.nodes)
    total = joint.graph.output_node().args[0][1]
    for node in nodes[nodes.index(total) + 1 : -1]:
        node.meta["autograd_backward"] = True  # as TorchTitan's tracer marks it
    return joint, inputs


def test_both_halves_compute_what_the_joint_graph_does():
    torch.manual_seed(0)
    joint, inputs = traced_step()
    names = [node.name for node in joint.graph.find_nodes(op="placeholder")]
    parameters = dict(zip(names[:2], ("first", "second"), strict=True))
    forward, backward = halves(joint, parameters)
    assert (forward.name, backward.name) == ("forward", "backward")
    with torch.no_grad():
        wanted = joint(*inputs)
        loss, total, *saved = forward.module(*inputs)
        found = [loss, total, *backward.module(*saved)]
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    assert forward.kept_inputs == set(names)
    passed = {node.name for node in backward.module.graph.find_nodes(op="placeholder")}
    assert passed & set(names) <= backward.kept_inputs < passed, "activations are freed"
    assert forward.parameter_names == parameters
    assert set(backward.parameter_names) == set(parameters) & passed
