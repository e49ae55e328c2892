"""The graphs of a training step of a model on which ``fully_shard`` was called: each parameter is
gathered, cast and reduced with the settings of its unit.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map

from apsched.capture.captured import Capture, CapturedGraph
from apsched.capture.fake_copy import Inputs, fake_call, fake_copy, traced
from apsched.capture.joint import capture_module
from apsched.capture.keep import keep, keepable
from apsched.errors import InputError
from apsched.fx.collectives import (
    BYTES,
    SENT_AS_KEY,
    collective_kind,
    group_name,
    is_collective,
)
from apsched.fx.node_shards import NodeGroup
from apsched.fx.passes.checkpointing import save_regions_of_several_units
from apsched.fx.passes.parameters import PARAMETER_KEY, serves_alone
from apsched.fx.passes.saved_as_eager import save_as_eager
from apsched.graph.export.provenance import innermost_module
from apsched.kinds import CollectiveKind
from apsched.models.collectives import gather_shards, sum_gradient
from apsched.models.mesh import ALONE, Group
from apsched.models.own_modules import Read, gather_once, gather_when_read
from apsched.names import in_node
from apsched.torch_compat.compilers import plain_parameter_name
from apsched.torch_compat.fsdp import (
    HOOKS_OF_FSDP,
    CastModule,
    GatheredParameter,
    as_dtensor,
    class_before_fsdp,
    fsdp_policies,
    fsdp_unit_of,
    local_part,
    offloaded_parameter,
)
from apsched.torch_compat.graphs import gradient_of


def has_units(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on ``model`` or a part of it."""
    return any(isinstance(child, FSDPModule) for child in model.modules())


def capture_fsdp2(model: nn.Module, inputs: Inputs, *, gathers_again: bool = False) -> Capture:
    """Return forward and backward graph of ``model(*inputs)``, or ``model(**inputs)``; no memory of
    a device is taken, and ``model`` stays unchanged. With ``gathers_again`` no parameter stays
    gathered from forward to backward, whatever ``reshard_after_forward`` is.

    They are the same on all process ranks: shards count with their padding. Regions that the model
    checkpoints are recomputed in backward, but for those with several units.

    Raises
    ------
    InputError
        where parameters are on the host (``CPUOffloadPolicy``); with ``gathers_again``, where
        ``model`` reads a parameter outside of its unit, which works as long as that unit stays
        gathered.
    """

    if (name := offloaded_parameter(model)) is not None:
        raise InputError(
            f"{plain_parameter_name(name)}: expected a parameter on the device that computes, found"
            " it on the host (CPUOffloadPolicy), and the graph has no copies from there; call"
            " fully_shard without offload_policy; memory_cap and keep hold a step within the device"
        )

    def trace() -> Capture:
        copy, given, kept = fake_step(model, inputs, gathers_again=gathers_again)
        _refuse_repeats(model, copy)
        name = type(copy).__name__
        passes = (save_regions_of_several_units(_unit_of_parameters(model)), save_as_eager())
        kept = () if gathers_again else kept
        capture = capture_module(copy, given, source=name, kept_parameters=kept, passes=passes)
        if gathers_again:
            _refuse_reads_outside(capture.graphs[-1])
        if len(capture.graphs) == 2:
            _refuse_gathers_of_inputs(model, capture.graphs[-1])
        capture = resharded(capture, model)
        _send_as_bytes(capture, model)
        return capture

    return traced(trace)


def resharded(capture: Capture, model: nn.Module) -> Capture:
    """Return ``capture``, of ``model``, with those parameters resharded in their node that
    ``fully_shard`` reshards to fewer process ranks than they are sharded on
    (``reshard_after_forward=8``).

    Each such unit has a process group of its own; the graphs name the first of them, since FSDP2
    runs all gathers on one stream.
    """
    named = gathered_by_fsdp2(model)
    wanted = {name: of for name, of in named.items() if of.node_group is not None}
    if not wanted or len(capture.graphs) != 2:
        return capture
    nodes: dict[str, NodeGroup] = {}
    for of in wanted.values():
        nodes.setdefault(of.shard_group.group_name, _node_group(of.node_group))
    pairs = ((nodes[o.shard_group.group_name], _node_group(o.node_group)) for o in wanted.values())
    if any(first.ranks != other.ranks for first, other in pairs):
        raise InputError(
            "expected reshard_after_forward with one number of process ranks, found several; give"
            " fully_shard the same number everywhere"
        )
    forward, backward = capture.graphs
    again = [found.name for found in keepable(forward, backward, nodes)]
    entries = [in_node(name) for name in again if name in wanted]
    groups = {node.name: node.ranks for node in nodes.values()}
    return replace(
        capture,
        graphs=keep(forward, backward, entries, nodes),
        group_ranks={**capture.group_ranks, **groups},
    )


def _send_as_bytes(capture: Capture, model: nn.Module) -> None:
    """Mark the gathers of ``capture``, of ``model``, of which FSDP2 gathers several dtypes as one:
    bytes.
    """
    names = {name for name, of in gathered_by_fsdp2(model).items() if of.as_bytes}
    for node in (node for graph in capture.graphs for node in graph.module.graph.nodes):
        custom = node.meta.get("custom", {})
        is_gather = collective_kind(node) == CollectiveKind.ALL_GATHER
        if is_gather and custom.get(PARAMETER_KEY) in names:
            node.meta["custom"] = {**custom, SENT_AS_KEY: BYTES}


def _node_group(group: Any) -> NodeGroup:
    ranks = tuple(dist.get_process_group_ranks(group))
    return NodeGroup(name=group.group_name, ranks=ranks, index=dist.get_rank(group))


def fake_step(
    model: nn.Module, inputs: Inputs, *, gathers_again: bool = False
) -> tuple[nn.Module, tuple[Any, ...], tuple[str, ...]]:
    """Return a fake copy of ``model`` that gathers its parameters when they are read, fake inputs,
    and the names of the parameters that stay gathered from forward to backward. Without
    ``gathers_again`` these are also read outside of their unit, as FSDP2 allows.
    """
    parameters, casts = _policies(model)
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    copies: dict[nn.Module, nn.Module] = {}

    def shard(owner: nn.Module, name: str, value: nn.Parameter) -> torch.Tensor:
        of = parameters.get((id(owner), name))
        if of is None:
            return mode.from_tensor(value.detach(), static_shapes=True)
        with mode:  # after an evaluation value may be the gathered tensor, in another dtype
            return torch.empty(_padded(of), dtype=of.dtype, device=value.device)

    copy = fake_copy(
        model,
        mode,
        make=shard,
        class_of=class_before_fsdp,
        without_hooks_of=HOOKS_OF_FSDP,
        copies=copies,
    )
    _gather_when_read(copy, copies, parameters, gathers_again=gathers_again)
    for original, new in copies.items():
        if id(original) in casts:
            _cast(new, casts[id(original)])
    copy.register_forward_hook(lambda _, args, found: tree_map(local_part, found))
    kept = tuple(name for name, of in _by_name(model, parameters).items() if of.kept)
    return copy, fake_call(copy, inputs, mode), kept


def _by_name(
    model: nn.Module, parameters: Mapping[tuple[int, str], GatheredParameter]
) -> dict[str, GatheredParameter]:
    """Return ``parameters`` by their fully qualified name, as the graphs have it."""
    return {
        plain_parameter_name(f"{path}.{name}" if path else name): parameters[id(module), name]
        for path, module in model.named_modules()
        for name in module._parameters
        if (id(module), name) in parameters
    }


def gathered_by_fsdp2(model: nn.Module) -> dict[str, GatheredParameter]:
    """Return the parameters that ``fully_shard`` shards by name: all but its ``ignored_params``."""
    return _by_name(model, _policies(model)[0])


def _unit_of_parameters(model: nn.Module) -> dict[str, int]:
    return {name: of.unit for name, of in gathered_by_fsdp2(model).items()}


def kept_by_fsdp2(model: nn.Module) -> tuple[str, ...]:
    """Return the parameters that ``reshard_after_forward`` of ``fully_shard`` keeps."""
    return tuple(name for name, of in gathered_by_fsdp2(model).items() if of.kept)


def _policies(
    model: nn.Module,
) -> tuple[dict[tuple[int, str], GatheredParameter], dict[int, CastModule]]:
    try:
        return fsdp_policies(model)
    except ValueError as error:
        raise InputError(
            "expected fully_shard with parameters on one or two data-parallel dimensions, found"
            f" {error}; leave fully_shard out, and have the model gather its parameters when it"
            " reads them, under torch.compile with apsched.backend (docs/training-job.md)"
        ) from None


def _padded(of: GatheredParameter) -> list[int]:
    """Return the shape of a shard with its padding."""
    size = of.shard_group.size()
    return [-(-n // size) if dim == of.dim else n for dim, n in enumerate(of.shape)]


def _gather_when_read(
    copy: nn.Module,
    copies: Mapping[nn.Module, nn.Module],
    parameters: Mapping[tuple[int, str], GatheredParameter],
    *,
    gathers_again: bool,
) -> None:
    """Have ``copy`` gather its parameters when it reads them, each once in a run of its unit, or of
    ``copy`` if it stays gathered; a tied one belongs to the first module that has it.
    """
    modules: dict[int, list[nn.Module]] = {}
    for original, new in copies.items():
        if isinstance(original, FSDPModule):
            modules.setdefault(fsdp_unit_of(original), []).append(new)
    by_unit: dict[int, list[Read]] = {}
    stay = {of.unit for of in parameters.values() if of.kept and not gathers_again}
    made: dict[int, Read] = {}
    for original, new in copies.items():
        reads: dict[str, Read] = {}
        for name in original._parameters:
            of = parameters.get((id(original), name))
            if of is None:
                continue
            if id(of) in made:
                del new._parameters[name]
            else:
                read = Read(owner=new, name=name, read=partial(_gathered, of=of), once=True)
                made[id(of)] = read
                by_unit.setdefault(of.unit, []).append(read)
            reads[name] = made[id(of)]
            reads[name].places.append(new)
        if reads:
            gather_when_read(new, reads)
    for unit, entered in by_unit.items():  # modules of one unit need not run in a row
        is_alone = len(modules[unit]) == 1 and unit not in stay
        gather_once(modules[unit][0] if is_alone else copy, entered)


def read_in_checkpoints(forward: CapturedGraph) -> frozenset[str]:
    """Return the parameters that ``forward`` reads in checkpointed regions. Eager torch reads them
    in backward, too: recomputation runs from the begin of a region, whatever backward needs of it.
    """
    return frozenset(
        node.meta["custom"][PARAMETER_KEY]
        for node in forward.module.graph.nodes
        if PARAMETER_KEY in node.meta.get("custom", {})
        and any(
            "ac_graph_id" in user.meta and PARAMETER_KEY not in user.meta.get("custom", {})
            for user in node.users
        )
    )


def _refuse_reads_outside(backward: CapturedGraph) -> None:
    """Raise ``InputError`` for a parameter whose gradient ``backward`` reduces in several parts: of
    each place where it is gathered.
    """
    parts: dict[torch.fx.Node, int] = {}
    for node in backward.module.graph.nodes:
        if collective_kind(node) in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE):
            parts[node] = 1
        elif len(node.all_input_nodes) == 1 or node.target is torch.ops.aten.add.Tensor:
            parts[node] = sum(parts.get(one, 0) for one in node.all_input_nodes)
    (output,) = backward.module.graph.find_nodes(op="output")
    for value, descriptor in zip(output.args[0], output.meta.get("desc", ()), strict=False):
        name = gradient_of(descriptor)
        if name is not None and isinstance(value, torch.fx.Node) and parts.get(value, 0) > 1:
            raise InputError(
                f"{name}: expected each parameter to be read in the forward of its own unit, since"
                " keep decides which units stay gathered; found that it is read outside, too: leave"
                " keep out (and accumulate, where keep is auto), or do not call fully_shard on that"
                " unit, so that the unit around it has its parameters"
            )


def _refuse_gathers_of_inputs(model: nn.Module, backward: CapturedGraph) -> None:
    """Raise ``InputError`` for a collective of ``backward`` on another process group than those of
    ``fully_shard``, with no compute before it: a schedule may launch it early, and FSDP2 cannot.
    """
    own = set[str]()
    for of in gathered_by_fsdp2(model).values():
        groups = of.shard_group, of.replicate_group, of.node_group
        own.update(group.group_name for group in groups if group is not None)
    early: set[torch.fx.Node] = set()
    for node in backward.module.graph.nodes:
        moves_data = node.op == "placeholder" or serves_alone(node)
        if moves_data and early.issuperset(node.all_input_nodes):
            early.add(node)
        if node in early and is_collective(node) and group_name(node) not in own:
            raise InputError(
                "backward: expected the collectives of tensor parallelism behind compute, found"
                f" {node.name} of {innermost_module(node) or 'the model'}, which gathers a tensor"
                " that forward saved, or the gradient of a result in parts; FSDP2 has no setting"
                " for it: choose placements with which backward needs none (as with sequence"
                " parallelism), or have the model gather its parameters when it reads them, under"
                " torch.compile with apsched.backend (docs/training-job.md)"
            )


def _refuse_repeats(model: nn.Module, copy: nn.Module) -> None:
    """Have ``copy`` raise ``InputError`` where a unit of ``model`` runs again in one forward."""
    ran: set[str] = set()
    in_forward = False

    def begin(*_: object) -> None:
        nonlocal in_forward
        ran.clear()
        in_forward = True

    def end(*_: object) -> None:  # checkpointed modules run again in backward
        nonlocal in_forward
        in_forward = False

    def enter(name: str, *_: object) -> None:
        if in_forward and name in ran:
            raise InputError(
                f"{name}: expected each unit to run once in forward, found that it runs again;"
                " FSDP2 then gathers and reduces it in each run, and has one setting for all of"
                " them: do not call fully_shard on it, so that the unit around it has its"
                " parameters"
            )
        ran.add(name)

    for name, module in model.named_modules():
        if name and isinstance(module, FSDPModule):
            copy.get_submodule(name).register_forward_pre_hook(partial(enter, name))
    copy.register_forward_pre_hook(begin, prepend=True)
    copy.register_forward_hook(end, always_call=True)


def _gathered(x: Any, of: GatheredParameter) -> torch.Tensor:
    """Return a whole parameter from its shard, as FSDP2 hands it to the module."""
    shards, dim = _group(of.shard_group), of.dim
    x = sum_gradient(x, _group(of.replicate_group), of.reduce_dtype)
    whole = gather_shards(x, shards, of.param_dtype, of.reduce_dtype)
    if dim:
        whole = whole.view(shards.size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)
    if whole.shape[dim] > of.shape[dim]:
        whole = whole.narrow(dim, 0, of.shape[dim])
    return whole if of.placed is None else as_dtensor(whole, of.placed)


def _group(group: Any) -> Group:
    if group is None:
        return ALONE
    return Group(size=group.size(), name=group.group_name, rank=dist.get_rank(group))


def _cast(module: nn.Module, cast: CastModule) -> None:
    def to(dtype: torch.dtype, value: Any) -> Any:
        return torch.utils._pytree.tree_map(
            lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x,
            value,
        )

    if (given := cast.inputs) is not None:
        module.register_forward_pre_hook(
            lambda _, args, kwargs: (to(given, args), to(given, kwargs)),
            prepend=True,
            with_kwargs=True,
        )
    if (result := cast.outputs) is not None:
        module.register_forward_hook(lambda _, args, output: to(result, output))
