"""Every private function of torch that apsched uses: one small function per use, each with the
torch file it comes from.
"""

import importlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from apsched.torch_compat.compilers import plain_parameter_name
from apsched.torch_compat.version import check_torch_version

check_torch_version()


def fake_store() -> Any:
    """Return the store of a fake process group, and register the ``fake`` backend
    (torch/testing/_internal/distributed/fake_pg.py).
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def strided_shard(dim: int, split_factor: int) -> Any:
    """Return the placement of a dim split over an inner mesh axis first
    (torch/distributed/tensor/placement_types.py, _StridedShard).
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def is_compiled_again() -> bool:
    """Whether Dynamo compiles code that it has compiled before, for other sizes
    (torch/_guards.py, CompileContext).
    """
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    return current is not None and bool(current.frame_compile_id)


def process_group_names() -> dict[str, tuple[int, ...]]:
    """Return group name -> process ranks, of the groups this process rank is in
    (torch/distributed/distributed_c10d.py, _world).
    """
    from torch.distributed.distributed_c10d import _world, get_process_group_ranks

    return {name: tuple(get_process_group_ranks(group)) for group, name in _world.pg_names.items()}


def ranks_of_group(name: str) -> tuple[int, ...]:
    """Return the process ranks of a group that torch knows by ``name``, also where only its
    registry does; empty where it knows none (torch/distributed/distributed_c10d.py,
    _resolve_process_group).

    Of a group that was registered by hand only the size is known: its ranks are taken as 0, 1, ...
    """
    import torch.distributed as dist

    if not dist.is_available():
        return ()
    from torch.distributed.distributed_c10d import GroupName, _resolve_process_group  # type: ignore[attr-defined]

    try:
        group = _resolve_process_group(GroupName(name))
    except (LookupError, RuntimeError, ValueError):
        return ()
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (LookupError, RuntimeError, ValueError):
        return tuple(range(group.size()))


def job_store() -> Any:
    """Return a connection of its own to the store that process ranks of this job share
    (distributed_c10d.py, _get_default_store).
    """
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    return store.clone()


def default_group() -> Any:
    """Return the process group of the whole job; another object after another start
    (distributed_c10d.py, _get_default_group).
    """
    from torch.distributed.distributed_c10d import _get_default_group

    return _get_default_group()


def ordered_group(ranks: list[int]) -> str:
    """Return the name of a group of these process ranks in this order, made where there is none
    (distributed_c10d.py, new_group).

    Only its members take part. Raises RuntimeError where this version of torch cannot keep an order
    that is not ascending.
    """
    import torch.distributed as dist

    for name, known in process_group_names().items():
        if known == tuple(ranks):
            return name
    options: dict[str, Any] = {"use_local_synchronization": True}
    if ranks != sorted(ranks):
        if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
            raise RuntimeError(
                f"torch {torch.__version__} sorts the process ranks of a group; 2.13 can keep"
                f" {ranks}"
            )
        options["sort_ranks"] = False
    return str(dist.new_group(ranks, **options).group_name)


_OP_LIBRARIES = {
    "_c10d_functional": "torch.distributed._functional_collectives",
    "_c10d_functional_autograd": "torch.distributed._functional_collectives",
    "_dtensor": "torch.distributed.tensor",
    "bucketing": "torch._inductor.fx_passes.bucketing",
    "cplib": "torch.distributed.tensor.experimental._context_parallel._cp_custom_ops",
    "fsdp": "torch.distributed.fsdp._fully_shard._fsdp_collectives",
    "higher_order": "torch._higher_order_ops",
    "prims": "torch._inductor.inductor_prims",
    "rngprims": "torch._prims.rng_prims",
    "symm_mem": "torch.distributed._symmetric_memory",
}


def import_op_library(namespace: str) -> bool:
    """Import the part of torch that defines the operators of ``namespace``; return whether there is
    one.
    """
    module = _OP_LIBRARIES.get(namespace)
    if module is None:
        return False
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def symbolic_size(shape_env: ShapeEnv, name: str, hint: int) -> torch.SymInt:
    """Return a new symbolic integer with the value ``hint``
    (torch/fx/experimental/symbolic_shapes.py, ShapeEnv.create_symbol).
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    symbol = shape_env.create_symbol(
        hint, source, dynamic_dim=DimDynamic.DYNAMIC, positive=None, do_not_specialize_zero_one=True
    )
    return shape_env.create_symintnode(symbol, hint=hint, source=source)  # type: ignore[return-value]


@contextmanager
def registered_groups(sizes: Mapping[str, int]) -> Iterator[None]:
    """Run the body with a process group of each name, of the first process ranks
    (torch/csrc/distributed/c10d/GroupRegistry.cpp).
    """
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    known = process_group_names()
    added = [name for name in sizes if name not in known]
    try:
        for name in added:
            group = dist.new_group(list(range(sizes[name])))
            if (
                group.group_name in added
            ):  # the name that new_group chose is one of those asked for, maybe of another size
                c10d._unregister_process_group(group.group_name)
            c10d._register_process_group(name, group)  # type: ignore[arg-type]
        yield
    finally:
        for name in added:
            c10d._unregister_process_group(name)  # type: ignore[arg-type]


def is_composite(operator: Any) -> bool:
    """Return whether ``operator`` is made of other operators (torch/_C/__init__.pyi,
    _dispatch_has_kernel_for_dispatch_key).
    """
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(
            operator.name(), torch._C.DispatchKey.CompositeImplicitAutograd
        )
    )


def compiling_context() -> AbstractContextManager[Any]:
    """Return a context in which ``torch.compiler.is_compiling()`` is true: modules check it before
    they look at values (torch/compiler/__init__.py; 2.11 and 2.12 have the flag without a context).
    """
    return patch.object(torch.compiler, "_is_compiling_flag", True)


def fake_mode_of(tensors: Any) -> Any:
    """Return the fake mode of the first fake tensor among ``tensors``, or None
    (torch/_subclasses/fake_tensor.py).
    """
    from torch._subclasses.fake_tensor import FakeTensor

    return next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)


def set_traced_module_stack(stack: dict[str, tuple[str, type]] | None) -> None:
    """Set or clear ``nn_module_stack`` of the nodes traced from here on (torch/fx/traceback.py,
    current_meta).
    """
    import torch.fx.traceback

    if stack:
        torch.fx.traceback.current_meta["nn_module_stack"] = stack
    else:
        torch.fx.traceback.current_meta.pop("nn_module_stack", None)


def parameter_behind(descriptor: object) -> str | None:
    """Return the name of the parameter behind a joint input, by ``meta["desc"]``: the name in the
    module, without the parts that wrappers add (torch/_functorch/_aot_autograd/descriptors.py).
    """
    from torch._functorch._aot_autograd.descriptors import ParamAOTInput, SubclassGetAttrAOTInput

    while isinstance(descriptor, SubclassGetAttrAOTInput):
        descriptor = descriptor.base
    if not isinstance(descriptor, ParamAOTInput):
        return None
    return plain_parameter_name(str(descriptor.target))


def is_parameter_or_buffer(descriptor: object) -> bool:
    """Return whether a joint input belongs to the module's state
    (torch/_functorch/_aot_autograd/descriptors.py).
    """
    from torch._functorch._aot_autograd.descriptors import (
        BufferAOTInput,
        ParamAOTInput,
        SubclassGetAttrAOTInput,
    )

    while isinstance(descriptor, SubclassGetAttrAOTInput):
        descriptor = descriptor.base
    return isinstance(descriptor, BufferAOTInput | ParamAOTInput)


def gradient_of(descriptor: object) -> str | None:
    """Return the name of the parameter whose gradient a joint output is
    (torch/_functorch/_aot_autograd/descriptors.py).
    """
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, SubclassGetAttrAOTOutput

    while isinstance(descriptor, SubclassGetAttrAOTOutput):
        descriptor = descriptor.base
    return parameter_behind(descriptor.grad_of) if isinstance(descriptor, GradAOTOutput) else None


def process_rank_in_group(group_name: str) -> int:
    """Return this process rank's rank within a group known by name.

    Raises LookupError where no process group runs, or none of that name.
    """
    import torch.distributed as dist

    try:
        return dist.get_rank(group_of_name(group_name))
    except (RuntimeError, ValueError) as error:
        raise LookupError(f"no process group named {group_name!r} runs") from error


def empty_graph_like(graph: Any) -> Any:
    """Return an empty FX graph with the tracer and the calling convention of ``graph``
    (torch/fx/graph.py, _tracer_cls and _codegen).
    """
    import copy

    from torch.fx import Graph

    new = Graph(tracer_cls=graph._tracer_cls, tracer_extras=graph._tracer_extras)
    new.set_codegen(copy.copy(graph._codegen))
    return new


def graph_module_like(module: Any) -> Any:
    """Return the class for a copy of ``module``: one whose code is made at the first call, where
    that of ``module`` is, too (torch/fx/_lazy_graph_module.py, _LazyGraphModule).
    """
    from torch.fx import GraphModule
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule if isinstance(module, _LazyGraphModule) else GraphModule


def node_source(node: Any, pass_name: str) -> Any:
    """Return the provenance record that ``meta["from_node"]`` holds for a node made from ``node``
    (torch/fx/traceback.py, NodeSource).
    """
    from torch.fx.traceback import NodeSource, NodeSourceAction

    return NodeSource(node, pass_name, [NodeSourceAction.CREATE, NodeSourceAction.REPLACE])


def storage_key(tensor: Any) -> int:
    """Return the identity of a tensor's storage while it lives (torch/storage.py,
    UntypedStorage._cdata).
    """
    return int(tensor.untyped_storage()._cdata)


def quiet_fake_tensors() -> AbstractContextManager[Any]:
    """Return a context without the traceback that torch logs before it refuses a shape
    (torch/_subclasses/fake_tensor.py, log).
    """
    return patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


def hold_stream(duration_us: float) -> None:
    """Keep the current CUDA stream busy for at least about ``duration_us``, while the host gets
    ahead (torch/cuda/__init__.py, _sleep, which counts cycles; no GPU has more than 2,500 of them
    in a microsecond).
    """
    torch.cuda._sleep(round(2_500 * duration_us))  # type: ignore[no-untyped-call]


def group_of_name(group_name: str) -> Any:
    """Return the process group of that name (torch/distributed/distributed_c10d.py,
    _resolve_process_group).
    """
    from torch.distributed.distributed_c10d import GroupName, _resolve_process_group  # type: ignore[attr-defined]

    return _resolve_process_group(GroupName(group_name))


def import_schedulers() -> Any:
    """Import torch's schedulers, which takes seconds the first time; return the module of the
    greedy one (torch/_inductor/fx_passes).
    """
    importlib.import_module("torch._inductor.fx_passes.overlap_manual_scheduling")
    return importlib.import_module("torch._inductor.fx_passes.overlap_scheduling")


@contextmanager
def _scheduling_without_a_gpu() -> Iterator[None]:
    """Run the body with replacements for the device queries of torch's schedulers, and restore
    everything afterwards.

    Their rooflines ask triton for the bandwidth of the memory (torch/utils/_runtime_estimation.py),
    although custom estimates overrule the result; a table for tlparse asks nvidia-smi for the GPU
    (torch/_inductor/fx_passes/node_runtime_estimation.py); and so does the size of the first
    buckets, which is that of an H100 here, 8 process ranks a node
    (torch/_inductor/comm_analysis.py). One of their caches holds nodes, and so whole graphs
    (torch/_inductor/fx_passes/overlap_scheduling.py, get_group_name).
    """
    scheduling = import_schedulers()
    estimation: Any = importlib.import_module("torch.utils._runtime_estimation")
    analysis: Any = importlib.import_module("torch._inductor.comm_analysis")
    links = getattr(
        analysis, "InterconnectType", None
    )  # torch 2.13 asks which links there are; before, sizes of first buckets are fixed
    replaced: list[tuple[Any, str, Any]] = [
        (estimation, "get_compute_time", lambda *args, **kwargs: 0.0),
        (estimation, "get_transfer_time", lambda *args: 0.0),
        (
            importlib.import_module("torch._inductor.fx_passes.node_runtime_estimation"),
            "_log_collective_benchmarks",
            lambda *a, **k: None,
        ),
        (logging.getLogger("torch._inductor.fx_passes.fsdp"), "disabled", True),
    ]
    if hasattr(
        scheduling, "estimate_runtime_analytical"
    ):  # torch 2.11 compares estimates with a roofline that asks for CUDA
        replaced.append((scheduling, "estimate_runtime_analytical", lambda node: 0.0))
    if links is not None:
        replaced.append(
            (
                analysis,
                "detect_interconnect",
                lambda size: links.NVLINK_H100 if size <= 8 else links.IB_NDR,
            )
        )
    forget = getattr(scheduling.get_group_name, "cache_clear", lambda: None)  # torch 2.13 has it
    with ExitStack() as stack:
        stack.callback(forget)
        for owner, name, value in replaced:
            stack.enter_context(patch.object(owner, name, value))
        yield


def schedule_overlap(
    module: Any, estimate_ms: Callable[[Any, int | None], float], *, held: bool = False
) -> None:
    """Reorder and bucket the graph of ``module`` in place with torch's greedy scheduler, by its
    defaults, and with bucketing; ``held`` by control dependencies, as within Inductor.

    ``estimate_ms(node, size_bytes)`` is the time of a node; of a collective that of its own size
    where ``size_bytes`` is None (torch/_inductor/fx_passes/overlap_scheduling.py,
    schedule_overlap_bucketing).
    """
    from torch._inductor import config

    break_cycles = {
        "aten_distributed_optimizations.overlap_scheduling_autofix_cycles": True
    }  # as its error message advises
    if not hasattr(config.aten_distributed_optimizations, "overlap_scheduling_autofix_cycles"):
        break_cycles = {}  # torch 2.11 has none to break
    with _scheduling_without_a_gpu(), torch.no_grad(), config.patch(break_cycles):
        schedule = import_schedulers().schedule_overlap_bucketing
        newer = {
            "compute_estimator": "analytical",
            "bucket_mode": "default",
        }  # no benchmarks; custom estimates overrule it
        schedule(
            module,
            collective_bucketing=True,
            insert_overlap_deps=held,
            custom_runtime_estimation=estimate_ms,
            **{
                name: value
                for name, value in newer.items()
                if name in inspect.signature(schedule).parameters
            },  # torch 2.11 has neither
        )


def schedule_overlap_by_module(
    module: Any, plan: list[list[str] | str], module_of: Callable[[Any], str]
) -> None:
    """Bucket FSDP collectives in place by ``plan`` (names of modules), and launch each bucket one
    ahead, as torch's manual scheduler does.

    ``module_of(node)`` is the name of a node's module, empty where it has none
    (torch/_inductor/fx_passes/overlap_manual_scheduling.py).
    """
    with _scheduling_without_a_gpu(), torch.no_grad():
        from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing

        def stack(node: Any) -> list[tuple[str, type[Any]]]:
            return [(name, torch.nn.Module)] if (name := module_of(node)) else []

        manual_overlap_bucketing(module, plan, insert_overlap_deps=False, module_stack_fn=stack)


def add_control_deps(graph: Any, behind: Mapping[Any, Iterable[Any]]) -> None:
    """Wrap nodes of ``graph``, given in its order, so that Inductor runs each behind others beside
    its arguments.

    torch/_inductor/fx_passes/control_dependencies.py, preserve_node_ordering; lowered in
    torch/_inductor/lowering.py.
    """
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    _run_control_deps()
    preserve_node_ordering(graph, {node: OrderedSet(before) for node, before in behind.items()})


def _run_control_deps() -> None:
    """Let ``control_deps`` run outside of fake tensors, which torch 2.11 has no kernels for:
    compilers trace a graph that is held already (later versions have these in
    torch/_inductor/fx_passes/control_dependencies.py).
    """
    from torch._inductor.fx_passes.control_dependencies import control_deps

    for key in (torch._C.DispatchKey.CompositeExplicitAutograd, torch._C.DispatchKey.Autograd):
        if key not in control_deps.py_kernels:
            control_deps.py_impl(key)(lambda before, call, *args, **kwargs: call(*args, **kwargs))


def sources_of(node: Any) -> Iterator[tuple[str, int]]:
    """Yield name and graph (its ``id``) of every node that ``node`` was made from, nearest first
    (torch/fx/traceback.py, NodeSource).
    """
    waiting = list(node.meta.get("from_node") or ())
    while waiting:
        source = waiting.pop(0)
        yield source.name, source.graph_id
        waiting += source.from_node
