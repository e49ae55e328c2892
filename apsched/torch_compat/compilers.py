"""Private functions of torch around its compilers."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from apsched.torch_compat.version import check_torch_version

check_torch_version()

_KEY = re.compile(r"\.(?:_modules|_parameters)\['([^']+)'\]")
CHECKPOINTED = "_checkpoint_wrapped_module"
"""The module in a checkpoint wrapper
(torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py)."""
WRAPPERS = frozenset({"_orig_mod", CHECKPOINTED})
"""Names that wrappers put around a module; torch.distributed strips the same from names in
checkpoints."""
_PARAMETRIZED = re.compile(r"parametrizations\.(\w+)(?:\.original|(\.original\d+))$")


def aot_compiled(
    gm: Any, inputs: Sequence[Any], *, forward: Any, backward: Any, inference: Any, partition: Any
) -> Callable[..., Any]:
    """Return a callable that runs ``gm`` in the graphs of AOTAutograd, each made by its compiler
    (torch/_dynamo/backends/common.py, aot_autograd).
    """
    from torch._dynamo.backends.common import aot_autograd

    compiler: Any = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = compiler(gm, inputs)
    return compiled


def default_partition(joint: Any, joint_inputs: Any, **options: Any) -> tuple[Any, Any]:
    """Return forward and backward graph: backward gets the tensors that eager autograd would save
    (torch/_functorch/partitioners.py).

    torch removes collectives of forward that backward does not need, and leaves their inputs: with
    tensor parallelism backward would compute matrix products for nothing.
    """
    from torch._functorch.partitioners import default_partition as partition

    pair: tuple[Any, Any] = partition(joint, joint_inputs, **options)
    for module in pair:
        if module.graph.eliminate_dead_code():
            module.recompile()
    return pair


def inductor_partition(joint: Any, joint_inputs: Any, **options: Any) -> tuple[Any, Any]:
    """Return forward and backward graph as Inductor makes them (torch/_inductor/compile_fx.py,
    partition_fn).
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition as partition

    return partition(joint, joint_inputs, **options)


def boxed(gm: Any) -> Callable[[list[Any]], Any]:
    """Return a callable that runs ``gm`` node by node and frees its inputs at their last use
    (torch/fx/graph.py, _BoxedCodeGen).
    """
    from torch.fx.graph import _BoxedCodeGen

    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    forward = gm.forward

    def run(arguments: list[Any]) -> Any:
        return forward(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def inductor_compiled(
    gm: Any,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
    around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda compile_graph: (
        compile_graph
    ),
    *,
    joint_cache: bool = True,
) -> Callable[..., Any]:
    """Return ``gm`` compiled by Inductor, with ``patches`` of its settings, which also hold when
    backward is compiled later.

    ``around`` takes the function that compiles one graph of AOTAutograd or finds it in Inductor's
    cache, and returns the function to call in its place. Without ``joint_cache`` forward and
    backward are not looked up as one entry; a hit on such an entry would call neither function
    (torch/_inductor/compile_fx.py, compile_fx and compile_fx_inner; torch/_functorch/config.py,
    enable_autograd_cache).
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    off = {} if joint_cache else {"enable_autograd_cache": False}
    with config.patch(off):
        compiled: Any = compile_fx(
            gm, inputs, inner_compile=around(compile_fx_inner), config_patches=dict(patches)
        )
    notes_in_code()  # what came from a cache of both left its own
    return compiled  # type: ignore[no-any-return]


def forget_hashes(inputs: Sequence[Any]) -> None:
    """Have device meshes among the inputs of a graph compute their hash again when it is used.

    They keep the hash of their strings, which is another one in each process, and Inductor makes it
    part of the key of its cache, in which a second process then finds nothing
    (torch/distributed/device_mesh.py, DeviceMesh._hash; 2.13).
    """
    from torch.distributed.device_mesh import DeviceMesh

    meshes, seen = [getattr(value, "real_obj", value) for value in inputs], set()
    while meshes:
        mesh = meshes.pop()
        if isinstance(mesh, DeviceMesh) and id(mesh) not in seen:
            seen.add(id(mesh))
            mesh._hash = None
            meshes += [
                getattr(mesh, "_root_mesh", None),
                *getattr(mesh, "_flatten_mapping", {}).values(),
            ]


_NOTE = "apsched: "


def note_in_code(text: str) -> None:
    """Have the code that Inductor is about to make keep ``text``, in its cache, too.

    Counts made during compilation are saved with the code, and added again when it is found
    (torch/_inductor/output_code.py, CompiledFxGraph.counter_deltas).
    """
    from torch._dynamo.utils import counters

    counters["inductor"][_NOTE + text] += 1


def notes_in_code() -> list[str]:
    """Return the notes in the code that Inductor made or found since the last call."""
    from torch._dynamo.utils import counters

    counts = counters["inductor"]
    keys = [key for key in counts if str(key).startswith(_NOTE)]
    for key in keys:
        del counts[key]
    return [key.removeprefix(_NOTE) for key in keys]


def forget_code(compiled: Any) -> None:
    """Take ``compiled``, which Inductor found in its cache, out of that, so that its graph can be
    compiled again.

    torch/_inductor/codecache.py, FxGraphCache; and the strides that it reported to AOTAutograd
    (torch/_guards.py, report_output_strides).
    """
    from torch._guards import TracingContext
    from torch._inductor.codecache import FxGraphCache

    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        context.output_strides.clear()

    key = getattr(compiled, "_fx_graph_cache_key", None)
    folder = Path(FxGraphCache._get_tmp_dir_for_key(key)) if key else None
    for path in sorted(folder.glob("*")) if folder is not None else ():
        with suppress(OSError):  # another process may have done it
            path.unlink()


def dynamo_parameters(gm: Any) -> dict[int, str]:
    """Return position among the inputs -> name, of the inputs of a graph of Dynamo that are
    parameters or buffers.

    By the source that Dynamo notes on each placeholder (torch/_dynamo/variables/builder.py,
    GraphArg).
    """
    names = {}
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        source = getattr(node.meta.get("grapharg"), "source", None)
        text = (
            str(source.name)
            if source is not None and isinstance(node.meta.get("example_value"), torch.Tensor)
            else ""
        )
        keys = _KEY.findall(text)
        if keys and text.endswith(f"._parameters['{keys[-1]}']"):
            names[position] = plain_parameter_name(".".join(keys))
    return names


def uncompiled(module: Any) -> Any:
    """Return the module that was passed to ``torch.compile``; ``module`` itself where it is not the
    result of it, or ``fully_shard`` was called on the result (torch/_dynamo/eval_frame.py,
    OptimizedModule).
    """
    from torch._dynamo import OptimizedModule

    while type(module) is OptimizedModule:
        module = module._orig_mod
    return module


class UncompiledModule(torch.nn.Module):
    """Stands for a result of ``torch.compile`` in a copy: runs the module in it as it is."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self._orig_mod(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module, as the result of ``torch.compile`` does."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["_orig_mod"], name)


def functions_uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which functions of ``torch.compile`` run as they were before: a tracer
    cannot look into their compiled code (torch/_dynamo/decorators.py, set_stance).
    """
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def outside_of_transforms(value: torch.Tensor) -> AbstractContextManager[Any]:
    """Leave the transforms of ``torch.func`` that run (``vmap``, ``grad``) for a function of
    ``value``, a tensor of none of them (torch/_functorch/pyfunctorch.py).

    DTensor's autograd functions run in no transform (torch/autograd/function.py, setup_context).
    """
    from torch._C import _functorch
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    runs = _functorch.peek_interpreter_stack() is not None
    if not runs or _functorch.is_functorch_wrapped_tensor(value):
        return nullcontext()
    cleared: AbstractContextManager[Any] = temporarily_clear_interpreter_stack()
    return cleared


def uncompiled_class(of: Any) -> Any:
    """Return :class:`UncompiledModule` for the class of results of ``torch.compile``; else ``of``
    itself.
    """
    from torch._dynamo import OptimizedModule

    return UncompiledModule if issubclass(of, OptimizedModule) else of


def plain_parameter_name(name: str) -> str:
    """Return the name of a parameter or a module without the parts that torch.compile
    (``_orig_mod``), checkpoint wrappers and torch/nn/utils/parametrize.py add to it. Of several
    originals of one parameter (weight normalisation) each keeps its number.
    """
    return _PARAMETRIZED.sub(
        r"\1\2", ".".join(part for part in name.split(".") if part not in WRAPPERS)
    )


def name_parameters(graph: Any, names: Mapping[int, str]) -> None:
    """Mark parameters and their gradients in the descriptors on inputs and outputs of ``graph``.

    Where Dynamo made parameters inputs, AOTAutograd knows only their positions
    (torch/_functorch/_aot_autograd/descriptors.py).
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
    """Mark the outputs of ``graph``, by position, that are gradients, with their parameters, as
    AOTAutograd's graphs do.

    (torch/_functorch/_aot_autograd/descriptors.py, GradAOTOutput and PlainAOTOutput)
    """
    from torch._functorch._aot_autograd.descriptors import (
        GradAOTOutput,
        ParamAOTInput,
        PlainAOTOutput,
    )

    output = graph.output_node()
    places = range(len(output.args[0]))
    output.meta["desc"] = [
        GradAOTOutput(ParamAOTInput(names[k])) if k in names else PlainAOTOutput(k) for k in places
    ]


def replace_graph(graph: Any, module: Any) -> None:
    """Replace ``graph`` in place by the graph of ``module``: its nodes, in its order, and the
    attributes that they take from the module.

    Nodes get new names (torch/fx/graph.py, Graph._graph_namespace).
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


def sort_nodes(graph: Any) -> None:
    """Put each node of ``graph`` behind its inputs, else in the order that they have.

    Inductor does so behind the passes of its hooks (torch/_inductor/fx_passes/post_grad.py,
    post_grad_passes; pattern_matcher.py, stable_topological_sort), so a pass before may leave them
    in any order.
    """
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


def custom_passes(setting: Any) -> list[Any]:
    """Return the passes of one of Inductor's hooks as a list (torch/_inductor/custom_graph_pass.py,
    CustomGraphPassType).
    """
    if setting is None:
        return []
    return list(setting) if isinstance(setting, list | tuple) else [setting]


def with_custom_pass(setting: Any, own: Any) -> Any:
    """Return the value of one of Inductor's hooks with the pass ``own`` behind those of
    ``setting``: a list, or one pass that runs all of them, since torch 2.11 takes no list
    (torch/_inductor/custom_graph_pass.py, get_custom_graph_passes).
    """
    from torch._inductor import custom_graph_pass

    passes = [*custom_passes(setting), own]
    if hasattr(custom_graph_pass, "get_custom_graph_passes"):
        return passes
    return own if len(passes) == 1 else passes_in_a_row(passes)


def passes_in_a_row(passes: Sequence[Any]) -> Any:
    """Return one pass that runs ``passes``; its key is theirs, and none where one of them has none
    (torch/_inductor/custom_graph_pass.py, CustomGraphPass).
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class InARow(CustomGraphPass):
        def __call__(self, graph: Any) -> None:
            for each in passes:
                each(graph)

        def uuid(self) -> Any:
            keys = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in passes]
            return None if None in keys else tuple(keys)

    return InARow()


def inductor_setting(name: str) -> Any:
    """Return one of Inductor's settings; ``None`` where this version has none of that name
    (torch/_inductor/config.py).
    """
    from torch._inductor import config

    found: Any = config
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
