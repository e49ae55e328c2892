"""Private functions of torch around its compilers; with ``torch_private`` and ``torch_private_partition`` the only place that knows any."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import torch

from apsched.torch_version import check_torch_version

check_torch_version()

_KEY = re.compile(r"\.(?:_modules|_parameters)\['([^']+)'\]")
_PARAMETRIZED = re.compile(r"parametrizations\.(\w+)\.original\d*$")


def aot_compiled(gm: Any, inputs: Sequence[Any], *, forward: Any, backward: Any, inference: Any, partition: Any) -> Callable[..., Any]:
    """Return what runs ``gm`` in the graphs of AOTAutograd, each made by its compiler (torch/_dynamo/backends/common.py, aot_autograd)."""
    from torch._dynamo.backends.common import aot_autograd

    compiler: Any = aot_autograd(
        fw_compiler=forward, bw_compiler=backward, inference_compiler=inference, partition_fn=partition, keep_inference_input_mutations=True
    )
    compiled: Callable[..., Any] = compiler(gm, inputs)
    return compiled


def default_partition(joint: Any, joint_inputs: Any, **options: Any) -> tuple[Any, Any]:
    """Return forward and backward graph: backward gets what eager autograd would save (torch/_functorch/partitioners.py)."""
    from torch._functorch.partitioners import default_partition as partition

    return partition(joint, joint_inputs, **options)


def boxed(gm: Any) -> Callable[[list[Any]], Any]:
    """Return what runs ``gm`` node by node and frees its inputs at their last use (torch/fx/graph.py, _BoxedCodeGen)."""
    from torch.fx.graph import _BoxedCodeGen

    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    forward = gm.forward

    def run(arguments: list[Any]) -> Any:
        return forward(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def inductor_compiled(gm: Any, inputs: Sequence[Any], patches: Mapping[str, Any]) -> Callable[..., Any]:
    """Return ``gm`` compiled by Inductor, with ``patches`` of its settings also where backward is compiled, which is later.

    torch/_inductor/compile_fx.py, compile_fx.
    """
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(gm, inputs, config_patches=dict(patches))
    return compiled  # type: ignore[no-any-return]


def dynamo_parameters(gm: Any) -> dict[int, str]:
    """Return position among the inputs -> name, of the inputs of a graph of Dynamo that are parameters or buffers.

    By the source that Dynamo notes on each placeholder (torch/_dynamo/variables/builder.py, GraphArg).
    """
    names = {}
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        source = getattr(node.meta.get("grapharg"), "source", None)
        text = str(source.name) if source is not None and isinstance(node.meta.get("example_value"), torch.Tensor) else ""
        keys = _KEY.findall(text)
        if keys and text.endswith(f"._parameters['{keys[-1]}']"):
            names[position] = plain_parameter_name(".".join(keys))
    return names


def plain_parameter_name(name: str) -> str:
    """Return the name of a parameter without what torch.compile (``_orig_mod``) and torch/nn/utils/parametrize.py add to it."""
    return _PARAMETRIZED.sub(r"\1", ".".join(part for part in name.split(".") if part != "_orig_mod"))


def name_parameters(graph: Any, names: Mapping[int, str]) -> None:
    """Have the descriptors on inputs and outputs of ``graph`` say which are parameters and their gradients.

    Where Dynamo made parameters inputs, AOTAutograd knows only their positions (torch/_functorch/_aot_autograd/descriptors.py).
    """
    for node in graph.find_nodes(op="placeholder"):
        if (descriptor := node.meta.get("desc")) is not None:
            node.meta["desc"] = _named(descriptor, names)
    output = graph.output_node()
    if isinstance(described := output.meta.get("desc"), list | tuple):
        output.meta["desc"] = [_named(descriptor, names) for descriptor in described]


def _named(descriptor: Any, names: Mapping[int, str]) -> Any:
    from torch._functorch._aot_autograd.descriptors import ParamAOTInput, PlainAOTInput

    if isinstance(descriptor, PlainAOTInput):
        return ParamAOTInput(names[descriptor.idx]) if descriptor.idx in names else descriptor
    if is_dataclass(descriptor) and not isinstance(descriptor, type):
        for attribute in ("base", "grad_of"):
            inner = getattr(descriptor, attribute, None)
            if inner is not None and (named := _named(inner, names)) is not inner:
                return replace(descriptor, **{attribute: named})
    return descriptor


def describe_gradients(graph: Any, names: Mapping[int, str]) -> None:
    """Have ``graph`` say which of its outputs, by position, are gradients of which parameters, as AOTAutograd's graphs do.

    (torch/_functorch/_aot_autograd/descriptors.py, GradAOTOutput and PlainAOTOutput)
    """
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, ParamAOTInput, PlainAOTOutput

    output = graph.output_node()
    places = range(len(output.args[0]))
    output.meta["desc"] = [GradAOTOutput(ParamAOTInput(names[k])) if k in names else PlainAOTOutput(k) for k in places]


def replace_graph(graph: Any, module: Any) -> None:
    """Make ``graph`` that of ``module`` in place: its nodes by name, in its order, and what they take from the module.

    Names of nodes are given anew (torch/fx/graph.py, Graph._graph_namespace).
    """
    from torch.fx.graph import _Namespace

    owner = graph.owning_module
    for node in reversed(graph.nodes):
        graph.erase_node(node)
    graph._graph_namespace = _Namespace()
    values: dict[Any, Any] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr" and not hasattr(owner, node.target):
            setattr(owner, node.target, getattr(module, node.target))
        values[node] = graph.node_copy(node, values.__getitem__)


def custom_passes(setting: Any) -> list[Any]:
    """Return the passes of one of Inductor's hooks as a list (torch/_inductor/custom_graph_pass.py, CustomGraphPassType)."""
    if setting is None:
        return []
    return list(setting) if isinstance(setting, list | tuple) else [setting]


def inductor_setting(name: str) -> Any:
    """Return one of Inductor's settings; ``None`` where this version has none of that name (torch/_inductor/config.py)."""
    from torch._inductor import config

    found: Any = config
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
