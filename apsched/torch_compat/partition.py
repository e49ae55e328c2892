"""Private functions of torch that take a joint graph apart."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils.parametrize import is_parametrized

from apsched.fx.collectives import is_wait_tensor
from apsched.fx.effects.of_node import attribute_of
from apsched.torch_compat.checkpoints import checkpoints_as_tags
from apsched.torch_compat.compilers import functions_uncompiled
from apsched.torch_compat.random_draws import DecidedDraws
from apsched.torch_compat.version import check_torch_version

check_torch_version()

Context = contextlib.AbstractContextManager[Any]

_without_code = partial(_use_lazy_graph_module, True)
"""Has torch make the code of a graph at its first call: most are never run, and it is a fifth of
the time (torch/fx/_lazy_graph_module.py).
"""


def _random_only_with_dropout() -> Context:
    """Keep the partitioner from saving random state for recomputed attention that drops nothing.

    Attention is tagged as random whatever its dropout, and would be hidden in a higher-order
    operator (torch/_functorch/partitioners.py, has_recomputable_rng_ops).
    """
    partitioners: Any = importlib.import_module("torch._functorch.partitioners")
    original = partitioners.has_recomputable_rng_ops

    def draws(joint: Any) -> bool:
        recomputed = [
            node
            for node in joint.graph.nodes
            if partitioners.must_recompute(node) and _is_seeded(node)
        ]
        return any(_arguments(node).get("dropout_p") != 0 for node in recomputed) and original(
            joint
        )

    return patch.object(partitioners, "has_recomputable_rng_ops", draws)


def _states_as_tensors() -> Context:
    """Have dropout that is recomputed save the state of its generator as a tensor on any device,
    and not take a generator as a further input of the graphs (torch/_functorch/partitioners.py,
    functionalize_rng_ops).
    """
    from torch._functorch import config

    patched: Context = config.patch(graphsafe_rng_functionalization=False)
    return patched


def flex_attention_uncompiled() -> Context:
    """Have ``flex_attention`` call its operator, which fake tensors run, and not compile itself
    first (torch/nn/attention/flex_attention.py, _FLEX_ATTENTION_DISABLE_COMPILE_DEBUG): a later
    trace takes the compiled code, which has no gradients.
    """
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    return patch.object(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def _flex_attention_as_compiled() -> Context:
    """Have torch trace ``flex_attention`` as if it was compiled for a GPU
    (torch/nn/attention/flex_attention.py): with gradients on CPU, where no backward kernel exists,
    and without the warning that calls run unfused, since none runs.
    """
    flex = importlib.import_module("torch.nn.attention.flex_attention")

    environment = flex.setup_compilation_env

    def nothing(*_: object, **__: object) -> None:
        pass

    @contextlib.contextmanager
    def compiling() -> Iterator[Any]:  # its operator needs Dynamo, also among functions uncompiled
        with torch.compiler.set_stance("default"), environment() as backend:
            yield backend

    return patch.multiple(
        flex, _validate_device=nothing, _warn_once=nothing, setup_compilation_env=compiling
    )


def _parameters_by_name() -> Context:
    """Have ``get_parameter`` find the value that stands for a parameter while a module is traced,
    which is no parameter (torch/nn/modules/module.py, get_parameter).
    """
    original = torch.nn.Module.get_parameter

    def found(module: torch.nn.Module, target: str) -> Any:
        path, _, name = target.rpartition(".")
        owner = module.get_submodule(path)
        if name in owner._parameters or is_parametrized(owner, name):
            return getattr(owner, name)
        return original(module, target)

    return patch.object(torch.nn.Module, "get_parameter", found)


@contextlib.contextmanager
def _as_captured() -> Iterator[None]:
    """Have torch trace and recompute in the form that apsched captures."""
    with (
        checkpoints_as_tags(),
        _random_only_with_dropout(),
        _states_as_tensors(),
        _flex_attention_as_compiled(),
        functions_uncompiled(),
        _parameters_by_name(),
        DecidedDraws(),
    ):
        yield


def _is_seeded(node: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _arguments(node: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, with defaults."""
    schema = node.target._schema.arguments
    given: dict[str, Any] = {
        argument.name: value for argument, value in zip(schema, node.args, strict=False)
    }
    defaults: dict[str, Any] = {argument.name: argument.default_value for argument in schema}
    return {**defaults, **given, **node.kwargs}


def partitioned_graphs(
    module: Any,
    inputs: tuple[Any, ...],
    prepare: Callable[[Any], Any],
    is_static: Callable[[Any], bool],
    saves: Callable[[Any], list[Any]],
    beside: tuple[Callable[[Any], Any], Callable[[Any], None]] | None = None,
) -> tuple[Any, Any | None, int]:
    """Return forward and backward graph of ``module(*inputs)`` as AOTAutograd hands them to a
    compiler, and the number of outputs proper.

    Without gradients backward is None. ``saves`` says which nodes are saved, where that is decided
    already (else an empty list). ``prepare`` returns the joint graph as the min-cut partitioner
    gets it; ``is_static`` says of a joint input whether it lives anyway; ``beside`` prepares the
    joint graph in another way, and is given the forward graph that the partitioner would make of
    that (torch/_functorch/aot_autograd.py, aot_export_joint_with_descriptors;
    torch/_functorch/partitioners.py).
    """
    from torch._functorch.aot_autograd import (
        aot_compile_joint_with_descriptors,
        aot_export_joint_with_descriptors,
    )
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs: dict[str, Any] = {}
    num_outputs = 0

    def partition(joint: Any, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        nonlocal num_outputs
        num_outputs = num_fwd_outputs

        def parted(joint: Any) -> Any:
            options["static_lifetime_input_indices"] = _static_inputs(joint, is_static)
            return min_cut_rematerialization_partition(
                joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options
            )

        if beside is not None:
            otherwise, seen = beside
            seen(parted(_without_duplicates(otherwise(joint)))[0])
        joint = _without_duplicates(prepare(joint))
        saved = saves(joint)
        pair = _partition_saving(joint, saved, num_fwd_outputs) if saved else parted(joint)
        return pair[0], _not_copied(pair[1])

    def keep(name: str) -> Any:
        def compiler(graph: Any, _: Any) -> Callable[..., None]:
            vars(graph).pop("__deepcopy__", None)
            graphs[name] = graph
            return lambda *arguments: None

        return compiler

    def trace(**options: Any) -> None:
        with contextlib.ExitStack() as stack, _as_captured(), _without_code():
            joint = aot_export_joint_with_descriptors(
                stack, module, inputs, decompositions={}, **options
            )
            _log_no_graphs(joint)
            aot_compile_joint_with_descriptors(
                joint,
                partition_fn=partition,
                fw_compiler=keep("forward"),
                bw_compiler=keep("backward"),
            )

    _traced_in_some_way(trace, graphs)
    return graphs["forward"], graphs.get("backward"), num_outputs


def _not_copied(backward: Any) -> Any:
    """Return ``backward``, of which ``copy.deepcopy`` returns the graph itself: AOTAutograd copies
    it before it compiles it, and a process group that it holds has no copy
    (torch/_functorch/_aot_autograd/graph_compile.py, _aot_stage2b_bw_compile).
    """
    vars(backward)["__deepcopy__"] = lambda memo: backward
    return backward


_NEEDS_SYMBOLS = "ignore_fresh_unbacked_symbols"
"""The method that ``while_loop`` calls on the symbols of its fake mode, also where that has none
(torch/_higher_order_ops/while_loop.py, while_loop_fake_tensor_mode).
"""


def _traced_in_some_way(trace: Callable[..., None], graphs: dict[str, Any]) -> None:
    """Call ``trace``, which fills ``graphs``; with symbols where sizes depend on data, and with
    constants where the model holds tensors besides its parameters and buffers, such as the block
    mask of attention. A constant gets no gradient: one that needs one is refused.
    """
    try:
        trace()
    except (DataDependentOutputException, DynamicOutputShapeException, AttributeError) as error:
        if isinstance(error, AttributeError) and _NEEDS_SYMBOLS not in str(error):
            raise
        with _symbols_for_data():
            trace(ignore_shape_env=True)  # sizes of inputs are as they are
    except AssertionError as error:
        if "allow_non_fake_inputs" not in str(error):
            raise
        with _symbols_for_data(allow_non_fake_inputs=True):
            trace(ignore_shape_env=True)
        constants = graphs["forward"].graph.find_nodes(op="get_attr")
        if any(getattr(attribute_of(node), "requires_grad", False) for node in constants):
            raise


def _log_no_graphs(joint: Any) -> None:
    """Have AOTAutograd make no text of each graph for its log
    (torch/_functorch/_aot_autograd/schemas.py, AOTConfig).
    """
    state = joint._aot_state
    state.aot_config = replace(state.aot_config, enable_log=False)


def _static_inputs(joint: Any, is_static: Callable[[Any], bool]) -> list[int]:
    """Return the places of the primals that live anyway."""
    placeholders = joint.graph.find_nodes(op="placeholder")
    primals = [node for node in placeholders if node.name.startswith("primals")]
    return [i for i, node in enumerate(primals) if is_static(node)]


@contextlib.contextmanager
def _symbols_for_data(**options: bool) -> Iterator[None]:
    """Have AOTAutograd trace with symbols for sizes that depend on data, and with ``options`` of
    its fake mode (torch/_guards.py, TracingContext).
    """
    from torch._guards import TracingContext, tracing

    mode = FakeTensorMode(shape_env=ShapeEnv(), **options)
    with tracing(TracingContext(mode)):
        yield


def _equal_waits_are_one() -> Context:
    """Have torch merge equal waits, as it did up to 2.13; later versions merge no node with an
    effect (torch/_functorch/compile_utils.py, fx_graph_cse).
    """
    original: Any = torch.fx.Node.is_impure

    def is_impure(node: Any, *arguments: Any, **options: Any) -> bool:
        return not is_wait_tensor(node) and original(node, *arguments, **options)

    return patch.object(torch.fx.Node, "is_impure", is_impure)


def _without_duplicates(joint: Any) -> Any:
    """Return ``joint`` with equal nodes merged, waits, too, as the min-cut partitioner does it
    first (torch/_functorch/compile_utils.py).
    """
    from torch._functorch import config
    from torch._functorch.compile_utils import fx_graph_cse

    joint.graph.eliminate_dead_code()
    if config.cse:
        with _equal_waits_are_one():
            joint.graph = fx_graph_cse(joint.graph)
    joint.recompile()
    return joint


def _partition_saving(joint: Any, saved: list[Any], num_fwd_outputs: int) -> tuple[Any, Any]:
    """Return forward and backward graph of ``joint`` that hand over ``saved`` and nothing else but
    inputs and sizes.

    Values that backward does not need are left out (torch/_functorch/partitioners.py, the end of
    min_cut_rematerialization_partition).
    """
    partitioners: Any = importlib.import_module("torch._functorch.partitioners")
    nodes = partitioners.classify_nodes(joint, [], num_fwd_outputs)
    values = [*nodes.inputs, *saved]
    sizes = [node for node in nodes.required_fw_nodes if partitioners.is_sym_node(node)]
    opaque = (
        [node for node in values if partitioners.is_opaque_node(node)]
        if hasattr(partitioners, "is_opaque_node")
        else []
    )
    forward, backward = partitioners._extract_fwd_bwd_modules(
        joint,
        [node for node in values if node not in opaque and node not in sizes],
        saved_sym_nodes=sizes,
        **({"saved_opaque_nodes": opaque} if opaque else {}),  # torch 2.11 knows of none
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_nodes=nodes.static_lifetime_input_nodes,
    )
    backward = partitioners.reordering_to_mimic_autograd_engine(backward)
    return partitioners.raise_getitems(forward), partitioners.raise_getitems(backward)
