"""Private functions of torch that the surfaces of torch.compile use."""

import weakref

import torch
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    SubclassGetAttrAOTInput,
)
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.torch_compat.compilers import (
    aot_compiled,
    boxed,
    custom_passes,
    default_partition,
    dynamo_parameters,
    inductor_compiled,
    inductor_setting,
    name_parameters,
    passes_in_a_row,
    replace_graph,
    with_custom_pass,
)
from apsched.torch_compat.graphs import gradient_of, parameter_behind


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        return self.blocks[0](x) * self.scale


def graphs_of(function, *inputs, backward=False) -> tuple[dict[int, str], list[GraphModule]]:
    """Return the parameters that Dynamo made inputs, and the graphs of AOTAutograd with them
    named.
    """
    seen, made = [], []

    def backend(gm, example_inputs):
        seen.append(names := dynamo_parameters(gm))

        def keep(graph, _):
            name_parameters(graph.graph, names)
            made.append(graph)
            return boxed(graph)

        return aot_compiled(
            gm,
            example_inputs,
            forward=keep,
            backward=keep,
            inference=keep,
            partition=default_partition,
        )

    torch._dynamo.reset()
    result = torch.compile(function, backend=backend)(*inputs)
    if backward:
        result.sum().backward()
    return seen[0], made


def test_dynamo_says_which_inputs_are_parameters():
    names, _ = graphs_of(Model(), torch.ones(3, 2))
    assert sorted(names.values()) == ["blocks.0.bias", "blocks.0.weight"]


def test_descriptors_name_parameters_and_gradients():
    _, (forward, backward) = graphs_of(Model(), torch.ones(3, 2), backward=True)
    names = [
        parameter_behind(node.meta["desc"]) for node in forward.graph.find_nodes(op="placeholder")
    ]
    assert {"blocks.0.weight", "blocks.0.bias"} <= set(names)
    gradients = [
        gradient_of(descriptor) for descriptor in backward.graph.output_node().meta["desc"]
    ]
    assert {"blocks.0.weight", "blocks.0.bias"} <= set(gradients)


def test_a_descriptor_inside_of_others_is_found():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["desc"] = SubclassGetAttrAOTInput(base=PlainAOTInput(idx=1), attr="_local_tensor")
    graph.output((x,))
    graph.output_node().meta["desc"] = [GradAOTOutput(grad_of=PlainAOTInput(idx=1))]
    name_parameters(graph, {1: "weight"})
    assert x.meta["desc"] == SubclassGetAttrAOTInput(
        base=ParamAOTInput("weight"), attr="_local_tensor"
    )
    assert gradient_of(graph.output_node().meta["desc"][0]) == "weight"


def test_a_boxed_graph_frees_its_inputs_at_their_last_use():
    def function(x, y):
        return (torch.sin(x) + y,)

    gm = make_fx(function)(torch.ones(2), torch.ones(2))
    run = boxed(gm)
    assert run._boxed_call
    arguments = [torch.ones(2), torch.ones(2)]
    watched = weakref.ref(arguments[0])
    (result,) = run(arguments)
    assert result.tolist() == function(torch.ones(2), torch.ones(2))[0].tolist()
    assert arguments == []
    assert watched() is None


def test_a_graph_is_replaced_in_place():
    old = make_fx(lambda x: torch.sin(x))(torch.ones(2))
    new = make_fx(lambda x: torch.cos(x) + torch.ones(2))(torch.ones(2))
    graph = old.graph
    replace_graph(graph, new)
    graph.lint()
    old.recompile()
    assert old.graph is graph
    assert [node.name for node in graph.nodes] == [node.name for node in new.graph.nodes]
    assert old(torch.zeros(2)).tolist() == new(torch.zeros(2)).tolist()


def test_settings_of_inductor_reach_the_backward_that_is_compiled_later():
    seen = []

    def note(graph):
        seen.append(graph)

    def backend(gm, inputs):
        return inductor_compiled(
            gm, inputs, {"post_grad_custom_post_pass": note, "fx_graph_cache": False}
        )

    torch._dynamo.reset()
    x = torch.ones(2, requires_grad=True)
    loss = torch.compile(lambda x: torch.sin(x).sum(), backend=backend)(x)
    assert len(seen) == 1
    loss.backward()
    assert len(seen) == 2


def test_settings_of_inductor_are_read():
    assert inductor_setting("bucket_all_gathers_fx") == "none"
    assert inductor_setting("aten_distributed_optimizations.enable_overlap_scheduling") is False
    assert inductor_setting("no_such_setting") is None


def test_hooks_hold_one_pass_or_several():
    first, second = object(), object()
    assert custom_passes(None) == []
    assert custom_passes(first) == [first]
    assert custom_passes((first, second)) == [first, second]


class Pass(CustomGraphPass):
    """Notes that it ran."""

    def __init__(self, name, ran):
        self.name, self.ran = name, ran

    def __call__(self, graph):
        self.ran.append((self.name, graph))

    def uuid(self):
        return self.name


def test_a_pass_goes_behind_those_of_a_hook(monkeypatch):
    monkeypatch.setattr(custom_graph_pass, "get_custom_graph_passes", None, raising=False)
    ran = []
    first, second = Pass("first", ran), Pass("second", ran)
    assert with_custom_pass(first, second) == [first, second]
    row = passes_in_a_row([first, second])
    assert row("graph") is None
    assert ran == [("first", "graph"), ("second", "graph")]
    assert row.uuid() == ("first", "second")
    assert passes_in_a_row([first, ran.append]).uuid() is None, "a function has no key"


def test_a_hook_that_takes_one_pass_gets_one(monkeypatch):
    monkeypatch.delattr(custom_graph_pass, "get_custom_graph_passes", raising=False)
    ran = []
    first, second = Pass("first", ran), Pass("second", ran)
    assert with_custom_pass(None, second) is second
    with_custom_pass(first, second)("graph")
    assert [name for name, _ in ran] == ["first", "second"]
