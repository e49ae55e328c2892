"""Contracts of the functions that capture and rewrite graphs."""

import importlib
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from apsched.names import second_name
from apsched.torch_compat import checkpoints as checkpoints
from apsched.torch_compat import effects as effects
from apsched.torch_compat import graphs as private
from apsched.torch_compat import partition as partition
from apsched.torch_compat import random_draws as random_draws
from apsched.torch_compat import repro as repro
from apsched.torch_compat import sizes as sizes
from apsched.torch_compat.contracts.registry import contract, expect, group

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def traced() -> GraphModule:
    """Return a graph of two products."""
    return make_fx(lambda x, y: torch.tanh(x @ y) @ y, tracing_mode="fake")(
        torch.ones(4, 4), torch.ones(4, 4)
    )


@contract("strided_shard")
def _strided_shard() -> None:
    placement = private.strided_shard(0, split_factor=2)
    expect(
        placement.dim == 0 and placement.split_factor == 2,
        "a _StridedShard has dim and split_factor",
    )


@contract("dtype_abbreviations")
def _dtype_abbreviations() -> None:
    text = traced().print_readable(print_output=False, include_stride=True, include_device=True)
    expect('x_1: "f32[4, 4][4, 1]cpu"' in text, "inputs are printed with type, shape and strides")
    expect(repro.dtype_abbreviations()["f32"] is torch.float32, "types have short names")


@contract("import_op_library")
def _import_op_library() -> None:
    for namespace in private._OP_LIBRARIES:
        expect(
            private.import_op_library(namespace),
            f"the module that defines the operators of {namespace} can be imported",
        )
    expect(not private.import_op_library("nowhere"), "an unknown namespace has no module")


@contract("DecidedDraws", "RandomBranchError")
def _draws() -> None:
    class Drops(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if torch.rand([]) < self.bias.numel() - 4 else super().forward(x)

    def traced(features: int) -> Any:
        step, x = Drops(4, features), torch.ones(2, 4)
        return partition.partitioned_graphs(
            step, (x,), lambda joint: joint, lambda node: False, lambda joint: []
        )[0]

    targets = {node.target for node in traced(4).graph.nodes}
    expect(aten.addmm.default in targets, "a branch that no draw takes is left out")
    expect(aten.rand.default not in targets, "its draw is, too")
    expect(aten.addmm.default not in {n.target for n in traced(5).graph.nodes}, "all draws agree")
    with random_draws.DecidedDraws():
        try:
            bool(torch.rand([]) < 0.5)
        except random_draws.RandomBranchError:
            return
    raise AssertionError("a branch that some draws take is refused")


@contract("symbolic_size")
def _symbolic_size() -> None:
    size = private.symbolic_size(ShapeEnv(), "s", 7)
    expect(
        isinstance(size, torch.SymInt) and sizes.size_hint(size) == 7,
        "a symbolic integer is made with a hint, and has it",
    )


@contract(
    "size_hint",
    "depends_on_data",
    "assume",
    "changes_of_assumed_sizes",
    "same_sizes",
    "unknown_size",
)
def _sizes_that_depend_on_data() -> None:
    expect(sizes.size_hint(3) == 3, "a plain integer is its own hint")
    env = ShapeEnv()
    first, second, third = (env.create_unbacked_symint() for _ in range(3))
    torch._check(first + second == 10)  # type: ignore[no-untyped-call]
    expect(sizes.depends_on_data(first), "an unbacked symbol has no hint")
    env.var_to_hint_override[third.node.expr] = 5  # what mark_unbacked does
    changes = sizes.changes_of_assumed_sizes()
    for _ in range(2):
        found = [size.value for size in sizes.assume([first, second, third], (), {})]
        expect(found == [5, 5, 5], "asserted sums are shared, and torch's own hints are found")
    expect(sizes.changes_of_assumed_sizes() == changes + 1, "the second time nothing changes")
    expect(sizes.size_hint(first * third + 1) == 26, "expressions have a value")
    expect(sizes.same_sizes([2 * (first + 1)], [2 * first + 2]), "equal sizes are known")
    expect(not sizes.same_sizes([first], [third]), "and those that are not")
    named = sizes.unknown_size(env, "u7")
    expect(str(named) == "u7" and sizes.depends_on_data(named), "new ones have names in order")
    expect(not env.guards, "and no guard is added")


@contract("compiling_context")
def _compiling_context() -> None:
    with private.compiling_context():
        expect(
            torch.compiler.is_compiling(),
            "torch.compiler.is_compiling() is true in a module that asks while it is traced",
        )
    expect(not torch.compiler.is_compiling(), "and afterwards not")


@contract("is_compiled_again")
def _is_compiled_again() -> None:
    found = []

    def backend(gm: GraphModule, _: object) -> GraphModule:
        found.append(private.is_compiled_again())
        return gm

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    for size in (2, 3):
        compiled(torch.ones(size))
    expect(found == [False, True], "Dynamo numbers the compilations of a piece of code")
    expect(not private.is_compiled_again(), "and has no number outside of a compilation")


@contract("is_composite")
def _is_composite() -> None:
    expect(private.is_composite(aten.linear.default), "aten.linear is made of other operators")
    expect(not private.is_composite(aten.mm.default), "aten.mm is not")


@contract("resolved_packet")
def _resolved_packet() -> None:
    x = torch.ones(2)
    expect(
        effects.resolved_packet(aten.add_, (x, 1.0), {}) is aten.add_.Tensor,
        "a number added is a tensor to aten.add_",
    )
    expect(
        effects.resolved_packet(aten.mul, (x, x), {"out": x}) is aten.mul.out,
        "an argument out= asks for the overload out",
    )
    expect(
        effects.resolved_packet(aten.mm, ("x",), {}) is None,
        "arguments that fit no overload resolve to none",
    )


@contract("is_torch_function")
def _is_torch_function() -> None:
    known = (torch.nn.functional.dropout, torch.rand_like, torch.rand, torch.mul, torch.Tensor.add_)
    expect(
        all(map(effects.is_torch_function, known)),
        "functions of torch that dispatch operators are known",
    )
    unknown = (torch.manual_seed, torch.set_num_threads, torch.Tensor.backward, print)
    expect(
        not any(map(effects.is_torch_function, unknown)),
        "those that do more than operators are not among them",
    )


@contract("solved")
def _solved() -> None:
    env = ShapeEnv()
    first, second, third = (env.create_unbacked_symint() for _ in range(3))
    found = sizes.solved([(first, 3), (2 * second, 10), (second + third, 12)])
    names = [str(size) for size in (first, second, third)]
    expect(found == dict(zip(names, (3, 5, 7), strict=True)), "sizes follow from those seen")


@contract("watched")
def _watched() -> None:
    from torch._subclasses import FakeTensorMode

    mode, seen = FakeTensorMode(shape_env=ShapeEnv()), []
    x = mode.from_tensor(torch.ones(2))
    result = effects.watched(
        mode,
        lambda: torch.nn.functional.dropout(x, 0.5),
        lambda operator, args, kwargs: seen.append(operator),
    )
    expect(aten.bernoulli_.float in seen, "dropout is seen to draw")
    expect(private.fake_mode_of([result]) is mode, "the watched function runs on fake tensors")


@contract("fake_mode_of")
def _fake_mode_of() -> None:
    from torch._subclasses import FakeTensorMode

    mode = FakeTensorMode()
    with mode:
        tensor = torch.ones(2)
    expect(private.fake_mode_of([torch.ones(1), tensor]) is mode, "a fake tensor knows its mode")
    expect(private.fake_mode_of([torch.ones(1)]) is None, "a real tensor has none")


@contract("set_traced_module_stack")
def _set_traced_module_stack() -> None:
    import torch.fx.traceback

    def run(x: torch.Tensor) -> torch.Tensor:
        private.set_traced_module_stack({"": ("layer", nn.Linear)})
        y = torch.sin(x)
        private.set_traced_module_stack(None)
        return torch.cos(y)

    with torch.fx.traceback.preserve_node_meta():
        graph = make_fx(run)(torch.ones(2)).graph
    stacks = {
        str(n.target): n.meta.get("nn_module_stack") for n in graph.nodes if n.op == "call_function"
    }
    expect(
        stacks["aten.sin.default"] == {"": ("layer", nn.Linear)},
        "nodes traced from here on have the stack",
    )
    expect(not stacks["aten.cos.default"], "and no more when it is cleared")


@contract("parameter_behind", "is_parameter_or_buffer", "gradient_of")
def _descriptors() -> None:
    from torch._functorch._aot_autograd.descriptors import (
        BufferAOTInput,
        GradAOTOutput,
        ParamAOTInput,
        PlainAOTInput,
    )

    weight, buffer, plain = ParamAOTInput("w"), BufferAOTInput("b"), PlainAOTInput(0)
    expect(
        private.parameter_behind(weight) == "w" and private.parameter_behind(plain) is None,
        "a parameter's descriptor has its name",
    )
    found = [private.is_parameter_or_buffer(d) for d in (weight, buffer, plain)]
    expect(found == [True, True, False], "parameters and buffers are known from other inputs")
    expect(
        private.gradient_of(GradAOTOutput(weight)) == "w",
        "a gradient's descriptor has that of its parameter",
    )


@contract("empty_graph_like")
def _empty_graph_like() -> None:
    class Doubled(torch.fx.graph.CodeGen):
        pass

    graph = Graph()
    graph.set_codegen(Doubled())
    new = private.empty_graph_like(graph)
    new.output(new.placeholder("x"))
    expect(
        type(new._codegen) is Doubled and new._codegen is not graph._codegen,
        "the calling convention is copied",
    )
    expect(GraphModule({}, new)(3) == 3, "the new graph runs")


@contract("node_source", "sources_of")
def _node_source() -> None:
    graph = Graph()
    node = graph.placeholder("x")
    source = private.node_source(node, "apsched")
    fields = source.to_dict()
    expect(
        (fields["name"], fields["pass_name"], fields["action"])
        == ("x", "apsched", "create+replace"),
        "a node source says where from",
    )
    made = graph.call_function(torch.sin, (node,))
    made.meta["from_node"] = [source]
    expect(
        list(private.sources_of(made)) == [("x", id(graph))],
        "it can be followed back to name and graph",
    )


@contract("storage_key")
def _storage_key() -> None:
    tensor = torch.ones(4)
    expect(private.storage_key(tensor) == private.storage_key(tensor[1:]), "views share a storage")
    expect(private.storage_key(tensor) != private.storage_key(tensor.clone()), "copies do not")


@contract("quiet_fake_tensors")
def _quiet_fake_tensors() -> None:
    from torch._subclasses import fake_tensor

    with private.quiet_fake_tensors():
        expect(fake_tensor.log.disabled, "the logger of fake tensors can be turned off")
    expect(not fake_tensor.log.disabled, "and is turned on again")


@contract("hold_stream")
def _hold_stream() -> None:
    expect(callable(torch.cuda._sleep), "torch.cuda._sleep is there")
    if torch.cuda.is_available():
        private.hold_stream(100.0)


@contract("graph_as_repro")
def _graph_as_repro() -> None:
    with group(2, fake=True):
        text = repro.graph_as_repro(traced())
    expect(
        "class Repro(torch.nn.Module)" in text and "def load_args(reader)" in text,
        "a repro has Repro and load_args",
    )
    expect(
        "command='get_args'" in text or 'command="get_args"' in text, "it hands out its arguments"
    )
    compile(text, "repro.py", "exec")
    with group(2, fake=True) as name:
        module = make_fx(lambda x: c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, name)))(
            torch.ones(2)
        )
        (gather,) = module.graph.find_nodes(
            op="call_function", target=c10d.all_gather_into_tensor.default
        )
        gather.args = (*gather.args[:-1], second_name(name))
        text = repro.graph_as_repro(module)
    expect(
        f"{{{second_name(name)!r}: {{'size': 2, " in text,
        "it sets up groups, and a second group that is not made yet",
    )


@contract("add_control_deps")
def _add_control_deps() -> None:
    module = traced()
    first, tanh, last = (n for n in module.graph.nodes if n.op == "call_function")
    private.add_control_deps(module.graph, {last: [tanh]})
    module.graph.lint()
    (wrapped,) = (n for n in module.graph.nodes if "control_deps" in str(n.target))
    expect(
        tanh in wrapped.all_input_nodes and first not in wrapped.all_input_nodes,
        "the node is wrapped behind the other",
    )
    expect(
        not [n for n in module.graph.nodes if n.target is aten.mm.default and n is last],
        "and stands no more by itself",
    )
    from torch._inductor.lowering import lowerings

    expect(wrapped.target in lowerings, "Inductor can lower it")
    module.recompile()
    values = torch.rand(4, 4), torch.rand(4, 4)
    expect(torch.equal(module(*values), traced()(*values)), "it runs, and computes the same")


@contract("graph_module_like")
def _graph_module_like() -> None:
    graph = torch.fx.symbolic_trace(nn.Tanh()).graph
    with _use_lazy_graph_module(True):
        lazy = _make_graph_module({}, graph)
    for module, is_lazy in ((GraphModule({}, graph), False), (lazy, True)):
        copy = private.graph_module_like(module)({}, graph)
        expect("forward" in vars(type(copy)), "a copy has a forward of its own")
        ran = type(copy).forward is not type(copy)._lazy_forward if is_lazy else True
        expect(ran is not is_lazy, "its code is made at the first call, where the other's is")
        expect(bool(torch.equal(copy(torch.ones(2)), torch.ones(2).tanh())), "it runs")


@contract("partitioned_graphs")
def _partitioned_graphs() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    seen: list[GraphModule] = []

    def prepare(joint: GraphModule) -> GraphModule:
        seen.append(joint)
        return joint

    inputs = (torch.ones(2, 4),)
    forward, backward, num_outputs = partition.partitioned_graphs(
        module, inputs, prepare, lambda node: False, lambda joint: []
    )
    expect(
        len(seen) == 1 and num_outputs == 1, "the joint graph is handed over before it is parted"
    )
    assert backward is not None
    expect(
        any("mm" in str(n.target) for n in backward.graph.nodes), "backward is a graph of its own"
    )
    outputs = forward.graph.output_node().args[0]
    expect(len(outputs) > 1, "forward hands over its saved values")
    again = partition.partitioned_graphs(module, inputs, prepare, lambda node: False, _tanh_of)
    saved = [n for n in again[0].graph.output_node().args[0][1:] if n.op == "call_function"]
    expect(
        ["tanh" in str(n.target) for n in saved] == [True],
        "it saves the values that it is given, and inputs",
    )


@contract("flex_attention_uncompiled")
def _flex_attention() -> None:
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.weight
            return torch.as_tensor(flex.flex_attention(x, x, x)).sum()

    before = flex._validate_device, flex._warn_once
    x, module = torch.ones(1, 2, 16, 16), Attention()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad(), partition.flex_attention_uncompiled():
        expect(module(x).shape == (), "flex_attention runs on fake tensors")
    _, backward, _ = partition.partitioned_graphs(
        module, (x,), lambda joint: joint, lambda _: False, lambda _: []
    )
    assert backward is not None
    calls = [str(node.target) for node in backward.graph.nodes]
    expect("flex_attention_backward" in calls, "its gradients are traced on CPU afterwards")
    expect((flex._validate_device, flex._warn_once) == before, "and then it is as before")


@contract("checkpoints_as_tags")
def _checkpoints_as_tags() -> None:
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    def selective() -> Any:
        return create_selective_checkpoint_contexts([aten.sin.default])  # type: ignore[no-untyped-call]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(lambda y: (y * self.scale).tanh().exp(), x, use_reentrant=False)
            x = checkpoint(lambda y: y.sin().cos(), x, use_reentrant=False, context_fn=selective)
            return (x * self.scale).sum()

    tags: list[tuple[str, object, object]] = []

    def prepare(joint: GraphModule) -> GraphModule:
        tags.extend(
            (node.target.name(), node.meta.get("ac_graph_id"), node.meta.get("recompute"))
            for node in joint.graph.nodes
            if node.op == "call_function"
        )
        return joint

    before = dict(vars(torch.utils.checkpoint))
    partition.partitioned_graphs(Model(), (torch.ones(4),), prepare, lambda _: False, lambda _: [])
    policy = torch.utils.checkpoint.CheckpointPolicy
    expect(
        [tag for tag in tags if tag[1] is not None and tag[0] != "aten::detach"]
        == [
            ("aten::mul.Tensor", 0, policy.PREFER_RECOMPUTE),
            ("aten::tanh", 0, policy.PREFER_RECOMPUTE),
            ("aten::exp", 0, policy.PREFER_RECOMPUTE),
            ("aten::sin", 1, policy.MUST_SAVE),
            ("aten::cos", 1, policy.PREFER_RECOMPUTE),
        ],
        "nodes of a region are tagged once, by number and by policy, and no others",
    )
    expect(
        dict(vars(torch.utils.checkpoint)) == before,
        "and afterwards torch checkpoints as before",
    )


def _tanh_of(joint: GraphModule) -> list[torch.fx.Node]:
    return [node for node in joint.graph.nodes if node.target is aten.tanh.default]
