"""Private attributes of torch's ``fully_shard``: which modules share a unit, and how it gathers its
parameters.
"""

from dataclasses import dataclass
from typing import Any

import torch

from apsched.torch_compat.version import check_torch_version

check_torch_version()


def fsdp_unit_of(module: Any) -> int:
    """Return the identity of the unit of an ``FSDPModule``.

    ``fully_shard([a, b])`` makes one unit of two modules: they share one state
    (torch/distributed/fsdp/_fully_shard/_fully_shard.py, FSDPModule._get_fsdp_state).
    """
    return id(module._get_fsdp_state())


def resharded_to(module: Any) -> bool | int:
    """Return whether an ``FSDPModule`` reshards its parameters after forward; of one that reshards
    to fewer process ranks than they are sharded on, their number (FSDPParamGroup,
    ``post_forward_mesh_info``).
    """
    for group in _groups_of(module._get_fsdp_state()):
        later, info = group.post_forward_mesh_info, group.mesh_info
        return later is info or (later is not None and int(later.shard_mesh_size))
    return True


def group_names_of_units(model: Any) -> tuple[str, ...]:
    """Return the names of the process groups in which the units of ``model`` gather and reduce
    their parameters, by first appearance (FSDPParamGroup, ``mesh_info``), then of those on whose
    mesh parameters are placed (tensor parallelism).
    """
    from torch.distributed.fsdp import FSDPModule

    units = (module for module in model.modules() if isinstance(module, FSDPModule))
    found = [group for unit in units for group in _groups_of(unit._get_fsdp_state())]
    kinds = ("shard_process_group", "replicate_process_group")
    groups = [getattr(one.mesh_info, kind, None) for one in found for kind in kinds]
    specs = (_placed(parameter) for one in found for parameter in one.fsdp_params)
    groups += [group for spec in specs if spec is not None for group in spec.mesh.get_all_groups()]
    return tuple({group.group_name: None for group in groups if group is not None})


def _groups_of(state: Any) -> list[Any]:
    """Return the groups of parameters of a unit, one for each mesh (_fsdp_state.py,
    FSDPState._fsdp_param_groups).
    """
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 has one group at most
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return groups


def runs_in_fsdp() -> bool:
    """Return whether a step of a module is running on which ``fully_shard`` was called
    (torch/distributed/_composable_state.py, _module_state_mapping;
    torch/distributed/fsdp/_fully_shard/_fsdp_state.py, FSDPState._training_state).
    """
    if not torch.distributed.is_available():
        return False
    from torch.distributed import _composable_state
    from torch.distributed.fsdp import FSDPModule

    modules: list[Any] = list(_composable_state._module_state_mapping)
    return any(
        module._get_fsdp_state()._training_state.name != "IDLE"
        for module in modules
        if isinstance(module, FSDPModule)
    )


HOOKS_OF_FSDP = "torch.distributed.fsdp."
"""Module of the hooks that ``fully_shard`` puts on modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredParameter:
    """The arguments of ``fully_shard`` for one parameter."""

    unit: int
    """Identity of its unit, as in :func:`fsdp_unit_of`."""
    shape: torch.Size
    """Of the whole."""
    dim: int
    """Sharded."""
    dtype: torch.dtype
    """Of the shard."""
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    as_bytes: bool
    """Gathered as bytes, with parameters of another dtype (_fsdp_collectives.py,
    ``_get_all_gather_input_metadatas``).
    """
    shard_group: Any
    replicate_group: Any
    """``None`` without replicas."""
    kept: bool
    """From forward to backward."""
    placed: Any
    """``DTensorSpec`` of the parameter before ``fully_shard``, on the mesh of tensor or expert
    parallelism; ``None`` for a plain tensor.
    """
    node_group: Any
    """Of the ranks that share it between forward and backward (``reshard_after_forward=8``);
    ``None`` where it is kept, or sharded over all.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CastModule:
    """The treatment by ``fully_shard`` of inputs and outputs of a module."""

    inputs: torch.dtype | None
    outputs: torch.dtype | None


def class_before_fsdp(module: Any) -> Any:
    """Return the class that ``module`` had before ``fully_shard``
    (torch/distributed/fsdp/_fully_shard/_fully_shard.py, FSDPModule.__new__).
    """
    from torch.distributed.fsdp import FSDPModule

    of = type(module)
    return of.__mro__[getattr(of, "_orig_cls_mro_index", 2)] if issubclass(of, FSDPModule) else of


def _placed(parameter: Any) -> Any:
    """Return the ``DTensorSpec`` of a parameter of FSDP before it is sharded; ``None`` for a plain
    tensor.
    """
    if not parameter.is_dtensor:
        return None
    names = ("_unsharded_dtensor_spec", "_tp_spec")  # that of today, and of torch 2.11
    return next(getattr(parameter, name) for name in names if hasattr(parameter, name))


def as_dtensor(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """Return the DTensor of ``spec`` whose part on this process rank is ``local``."""
    from torch.distributed.tensor import DTensor

    found: torch.Tensor = DTensor.from_local(
        local,
        spec.mesh,
        spec.placements,
        run_check=False,
        shape=spec.tensor_meta.shape,
        stride=spec.tensor_meta.stride,
    )
    return found


def local_part(value: Any) -> Any:
    """Return the part of a DTensor on this process rank, and any other value as it is. A tracer
    takes the mesh of a DTensor that a model returns for an output of the graph, and may find it
    among the inputs of backward.
    """
    from torch.distributed.tensor import DTensor

    return value.to_local() if isinstance(value, DTensor) else value


def offloaded_parameter(model: Any) -> str | None:
    """Return the name of a parameter that is on the host while its unit computes on a device
    (``CPUOffloadPolicy``); ``None`` where there is none (_fsdp_state.py, ``_device``;
    _fsdp_param.py, ``offload_to_cpu``).
    """
    from torch.distributed.fsdp import FSDPModule

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        if state is None or state._device.type == "cpu":
            continue
        for one in (one for group in _groups_of(state) for one in group.fsdp_params):
            if one.offload_to_cpu:
                return str(names.get(id(one.sharded_param), one._module_info.param_name))
    return None


def fsdp_policies(
    model: Any,
) -> tuple[dict[tuple[int, str], GatheredParameter], dict[int, CastModule]]:
    """Return the arguments of ``fully_shard``, by module (its ``id``) and name of the parameter,
    and by module; ``ValueError`` for an argument without a counterpart in a graph.

    (torch/distributed/fsdp/_fully_shard/_fsdp_state.py, _fsdp_param_group.py, _fsdp_param.py)
    """
    from torch.distributed.fsdp import FSDPModule

    parameters: dict[tuple[int, str], GatheredParameter] = {}
    casts: dict[int, CastModule] = {}
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        policy = state._mp_policy
        casts[id(module)] = CastModule(
            inputs=policy.param_dtype if policy.cast_forward_inputs else None,
            outputs=policy.output_dtype,
        )
        for group in _groups_of(state):
            later, info = group.post_forward_mesh_info, group.mesh_info
            if not hasattr(info, "shard_process_group"):
                raise ValueError("a mesh without a sharded dimension")
            # torch keeps the root's parameters by default (_lazy_init)
            kept = later is None or (module is model and state._auto_reshard_after_forward is True)
            as_bytes = len({_gathered_dtype(one, policy) for one in group.fsdp_params}) > 1
            for one in group.fsdp_params:
                whole = one.sharded_param
                if one.is_dtensor and getattr(info, "is_spmd_mesh", False):
                    raise ValueError("a parameter on one mesh of all dimensions (dp_mesh_dims)")
                param_dtype = _gathered_dtype(one, policy)
                gathered = GatheredParameter(
                    unit=id(state),
                    shape=one._orig_size,
                    dim=one.fsdp_placement.dim,
                    dtype=whole.dtype,
                    param_dtype=param_dtype,
                    reduce_dtype=policy.reduce_dtype or param_dtype,
                    as_bytes=as_bytes,
                    shard_group=info.shard_process_group,
                    replicate_group=getattr(info, "replicate_process_group", None),
                    kept=kept,
                    placed=_placed(one),
                    node_group=None if later in (None, info) else later.shard_process_group,
                )
                own = one._module_info
                parameters[id(own.module), own.param_name] = gathered
                for other, name in zip(own.shared_modules, own.shared_param_names, strict=True):
                    parameters[id(other), name] = gathered
    return parameters, casts


def _gathered_dtype(parameter: Any, policy: Any) -> torch.dtype:
    """Return the dtype in which a parameter of FSDP is gathered."""
    own: torch.dtype = parameter.sharded_param.dtype
    stated: torch.dtype | None = policy.param_dtype if own.is_floating_point else None
    return stated or own
