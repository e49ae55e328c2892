"""Contracts of torch's compilers."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.torch_compat import compilers as private
from apsched.torch_compat.contracts.registry import contract, expect
from apsched.torch_compat.graphs import gradient_of


@contract("aot_compiled", "default_partition", "boxed", "dynamo_parameters", "name_parameters")
def _aot_compiled() -> None:
    kinds: list[str] = []
    names: list[dict[int, str]] = []
    described: list[str] = []

    def compiler(kind: str) -> Callable[[Any, Any], Any]:
        def compiled(gm: Any, inputs: Any) -> Any:
            kinds.append(kind)
            private.name_parameters(gm.graph, names[-1])
            described.extend(
                repr(node.meta.get("desc")) for node in gm.graph.find_nodes(op="placeholder")
            )
            return private.boxed(gm)

        return compiled

    def backend(gm: Any, inputs: Any) -> Any:
        names.append(private.dynamo_parameters(gm))
        made = {kind: compiler(kind) for kind in ("forward", "backward", "inference")}
        return private.aot_compiled(gm, inputs, **made, partition=private.default_partition)

    torch._dynamo.reset()
    module = nn.Linear(3, 2)
    x = torch.ones(4, 3)
    compiled = torch.compile(module, backend=backend)
    loss = compiled(x)
    expect(torch.allclose(loss, module(x)), "forward computes the result of the module")
    loss.sum().backward()
    expect(
        kinds == ["forward", "backward"],
        f"forward and backward each have a compiler, found {kinds}",
    )
    expect(
        sorted(names[0].values()) == ["bias", "weight"],
        f"Dynamo says which inputs are parameters, found {names[0]}",
    )
    expect(any("weight" in text for text in described), "descriptors on inputs can be given names")
    with torch.no_grad():
        compiled(x)
    expect(kinds[2:] == ["inference"], "inference has a compiler of its own")
    torch._dynamo.reset()


@contract("inductor_compiled")
def _inductor_compiled() -> None:
    from torch._inductor.compile_fx import compile_fx

    expect(
        "config_patches" in inspect.signature(compile_fx).parameters,
        "compile_fx takes config_patches, which backward gets, too",
    )


@contract("note_in_code", "notes_in_code", "forget_code")
def _notes() -> None:
    """Notes made during compilation come back where the code is found; forgotten code is compiled
    again.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.utils import fresh_cache

    made: list[str] = []

    class Noting(CustomGraphPass):
        def __call__(self, graph: Any) -> None:
            made.append("")
            private.note_in_code("contract")

        def uuid(self) -> str:
            return "apsched contract"

    found: list[Any] = []

    def around(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
        def compiled(*arguments: Any, **options: Any) -> Any:
            private.notes_in_code()
            code = compile_graph(*arguments, **options)
            found.append(private.notes_in_code())
            if len(found) == 2:
                private.forget_code(code)
                code = compile_graph(*arguments, **options)
            return code

        return compiled

    def backend(gm: Any, inputs: Any) -> Any:
        return private.inductor_compiled(
            gm, inputs, {"post_grad_custom_post_pass": Noting()}, around, joint_cache=False
        )

    with fresh_cache(), torch.no_grad():
        for _ in range(2):
            torch._dynamo.reset()
            torch.compile(torch.matmul, backend=backend)(torch.ones(2, 2), torch.ones(2, 2))
    torch._dynamo.reset()
    expect(found == [["contract"]] * 2, f"notes in code come with it, found {found}")
    expect(
        len(made) == 2,
        f"code is made, found, and made again once it was forgotten; made {len(made)} times",
    )


@contract("forget_hashes")
def _forget_hashes() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", torch.arange(1), _init_backend=False, _rank=0)
    before = hash(mesh)
    expect(mesh._hash == before, "a mesh keeps its hash")
    private.forget_hashes([mesh])
    expect(mesh._hash is None and hash(mesh) == before, "and computes it again")


@contract("replace_graph")
def _replace_graph() -> None:
    old, new = (
        make_fx(f, tracing_mode="fake")(torch.ones(2))
        for f in (torch.sin, lambda x: torch.cos(torch.cos(x)))
    )
    private.replace_graph(old.graph, new)
    old.graph.lint()
    expect(
        [n.name for n in old.graph.nodes] == [n.name for n in new.graph.nodes],
        "names of nodes are free again",
    )
    expect(
        torch.equal(
            GraphModule(old, old.graph)(torch.ones(2)), torch.cos(torch.cos(torch.ones(2)))
        ),
        "the graph is the other's",
    )


@contract("inductor_partition")
def _inductor_partition() -> None:
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    seen: list[tuple[bool, ...]] = []

    class Seen(CustomPartitionerFn):
        def __call__(self, gm: GraphModule, joint_inputs: Any, **options: Any) -> Any:
            pair = private.inductor_partition(gm, joint_inputs, **options)
            seen.append(tuple(isinstance(graph, GraphModule) for graph in pair))
            return pair

        def uuid(self) -> None:
            return None

    torch._dynamo.reset()
    module, x = nn.Linear(3, 2), torch.ones(4, 3)
    with config.patch(custom_partitioner_fn=Seen()):
        loss = torch.compile(module, backend="inductor")(x).sum()
        loss.backward()
    expect(seen == [(True, True)], f"Inductor calls a partitioner that is set, found {seen}")
    torch._dynamo.reset()


@contract("sort_nodes")
def _sort_nodes() -> None:
    def summed(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + x.cos()

    graph = make_fx(summed)(torch.ones(2)).graph
    _, sine, cosine, *_ = nodes = list(graph.nodes)
    cosine.append(sine)
    last = nodes[-1].prev
    nodes[0].append(last)
    private.sort_nodes(graph)
    expect(
        list(graph.nodes) == [nodes[0], cosine, sine, *nodes[3:]],
        "a node moves behind its inputs, and the others keep their order",
    )


@contract("custom_passes", "inductor_setting", "passes_in_a_row", "with_custom_pass")
def _settings() -> None:
    for name in (
        "post_grad_custom_post_pass",
        "joint_custom_pre_pass",
        "reorder_for_compute_comm_overlap",
        "_fuse_ddp_communication",
        "allow_buffer_reuse",
    ):
        from torch._inductor import config

        expect(hasattr(config, name), f"torch._inductor.config.{name} is there")
    expect(
        private.inductor_setting("aten_distributed_optimizations.enable_overlap_scheduling")
        in (True, False, None),
        "nested settings",
    )
    expect(private.inductor_setting("no.such.setting") is None, "a missing setting is None")
    expect(
        private.custom_passes(None) == [] and private.custom_passes(len) == [len],
        "a hook has none, one or several passes",
    )
    ran: list[str] = []
    hook = private.with_custom_pass(lambda _: ran.append("first"), ran.append)
    for one in private.custom_passes(hook):
        one("second")
    expect(ran == ["first", "second"], f"a pass runs behind that of the hook, found {ran}")


@contract("describe_gradients")
def _describe_gradients() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((x, x))
    private.describe_gradients(graph, {1: "w"})
    expect(
        [gradient_of(d) for d in graph.output_node().meta["desc"]] == [None, "w"],
        "an output is marked as a gradient of a parameter",
    )


@contract("plain_parameter_name")
def _plain_parameter_name() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    nn.utils.parametrize.register_parametrization(module[0], "weight", nn.Identity())
    wrapped: Any = torch.compile(checkpoint_wrapper(module))
    names = {private.plain_parameter_name(name) for name, _ in wrapped.named_parameters()}
    expect(
        names == {"0.weight", "0.bias"},
        "the parts that torch.compile, checkpoint_wrapper and parametrize add to names are known,"
        f" found {names}",
    )


@contract("functions_uncompiled")
def _functions_uncompiled() -> None:
    def refuse(*_: object) -> Any:
        raise RuntimeError("compiled")

    compiled: Any = torch.compile(torch.neg, backend=refuse)
    with private.functions_uncompiled():
        found = compiled(torch.ones(2))
    expect(torch.equal(found, -torch.ones(2)), "a compiled function runs as it was before")


@contract("outside_of_transforms")
def _outside_of_transforms() -> None:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    weight = torch.ones(2, requires_grad=True)

    def product(row: torch.Tensor) -> torch.Tensor:
        with private.outside_of_transforms(weight):
            same: torch.Tensor = Same.apply(weight)  # type: ignore[no-untyped-call]
        return (same * row).sum()

    torch.func.vmap(torch.func.grad(product))(torch.ones(3, 2)).sum().backward()
    expect(
        weight.grad is not None and weight.grad.tolist() == [6.0, 6.0],
        "an autograd function without setup_context runs outside of vmap and grad",
    )


@contract("uncompiled", "uncompiled_class", "UncompiledModule")
def _uncompiled() -> None:
    module = nn.Linear(2, 2)
    compiled = torch.compile(module, backend="eager")
    expect(private.uncompiled(compiled) is module, "the module that was compiled is known")
    expect(private.uncompiled(module) is module, "also where it was not compiled")
    made: Any = private.uncompiled_class(type(compiled))()
    made._orig_mod = module
    x = torch.ones(1, 2)
    expect(torch.equal(made(x), module(x)), "a copy runs the module that was compiled")
    expect(made.in_features == 2, "and has its attributes")
    expect(private.uncompiled_class(nn.Linear) is nn.Linear, "other classes stay")
