"""Parameters as DTensor shards that every use gathers: FSDP, HSDP, DDP and tensor parallelism that
a tracer can see.

The idea is that of SimpleFSDP ("SimpleFSDP: Simpler Fully Sharded Data Parallel with
torch.compile", 2024): reading ``module.weight`` casts the shard, gathers it and returns a plain
tensor. Its gradient is reduce-scattered (FSDP), then all-reduced over ``replicate``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from apsched.errors import InputError
from apsched.models.collectives import gather_shards, sum_gradient
from apsched.models.layers import SUMMED, WHOLE
from apsched.models.mesh import ALONE, Group, Meshes, group_of
from apsched.models.options import ModelOptions
from apsched.torch_compat.graphs import strided_shard

Values = Callable[[str, torch.Size], torch.Tensor]
"""Name and whole shape of a parameter -> its values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSharding:
    """The layout of one parameter on its mesh, and its gather."""

    mesh: DeviceMesh
    inner: Group
    """Process ranks that keep their part through the whole step: ``tp``, or ``ep`` for routed
    experts.
    """
    inner_dim: int | None
    """Dim that ``inner`` splits; ``None`` where every rank of ``inner`` has the whole parameter."""
    fsdp_dim: int
    inner_shape: tuple[int, ...]
    """Shape on one process rank of ``inner``, whole over ``fsdp``."""
    options: ModelOptions
    fsdp_mesh: DeviceMesh | None = field(init=False, default=None)
    """The axis ``fsdp`` of ``mesh``; made before the trace, in which torch 2.11 makes none."""

    def __post_init__(self) -> None:
        if "fsdp" in (self.mesh.mesh_dim_names or ()):
            object.__setattr__(self, "fsdp_mesh", self.mesh["fsdp"])

    def placements(self) -> tuple[Placement, ...]:
        """Return the DTensor placements of the shard."""
        by_axis: dict[str, Placement] = {"replicate": Replicate(), "fsdp": Shard(self.fsdp_dim)}
        if (
            self.inner_dim == self.fsdp_dim and self.inner.size > 1
        ):  # split over the inner axis first, over fsdp second
            by_axis["fsdp"] = strided_shard(self.fsdp_dim, self.inner.size)
        by_axis["tp"] = by_axis["ep"] = (
            Replicate() if self.inner_dim is None else Shard(self.inner_dim)
        )
        return tuple(by_axis[axis] for axis in self.mesh.mesh_dim_names or ())

    def own_part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this process rank's shard of ``whole``, with a storage of its own size."""
        part = whole if self.inner_dim is None else _chunk(whole, self.inner_dim, self.inner)
        part = _chunk(part, self.fsdp_dim, group_of(self.mesh, "fsdp"))
        if part.numel() == whole.numel():
            return part.contiguous()
        return part.clone(memory_format=torch.contiguous_format)

    def own_shape(self) -> tuple[int, ...]:
        """Return the shape of this process rank's shard."""
        fsdp = group_of(self.mesh, "fsdp")
        return tuple(
            _bounds(size, fsdp)[1] if dim == self.fsdp_dim else size
            for dim, size in enumerate(self.inner_shape)
        )

    def gather(self, parameter: DTensor) -> torch.Tensor:
        """Return the parameter as one ``inner`` process rank uses it, in ``param_dtype``."""
        return self.gather_local(parameter.to_local())

    def gather_local(self, x: torch.Tensor) -> torch.Tensor:
        """As :meth:`gather`, of the local tensor of the parameter."""
        x = sum_gradient(x, group_of(self.mesh, "replicate"), self.options.reduce_dtype)
        fsdp = group_of(self.mesh, "fsdp")
        if fsdp.size == 1:
            x = x.to(self.options.param_dtype)
        elif self.fsdp_dim == 0 and self.inner_shape[0] % fsdp.size == 0:
            x = self._redistributed(x)
        else:
            x = self._gathered_by_hand(x, fsdp)
        return sum_gradient(x, self.inner, x.dtype) if self.inner_dim is None else x

    def _redistributed(self, x: torch.Tensor) -> torch.Tensor:
        options, shape, stride = (
            self.options,
            torch.Size(self.inner_shape),
            _strides(self.inner_shape),
        )
        shard = DTensor.from_local(
            x, self.fsdp_mesh, (Shard(0),), run_check=False, shape=shape, stride=stride
        )
        whole = shard.redistribute(
            placements=(Replicate(),),
            forward_dtype=options.param_dtype,
            backward_dtype=options.reduce_dtype,
        )
        return whole.to_local(grad_placements=(Partial(),))

    def _gathered_by_hand(self, x: torch.Tensor, fsdp: Group) -> torch.Tensor:
        """Gather along another dim, or unevenly; DTensor would make a node for every process rank
        of the group.
        """
        dim, size = self.fsdp_dim, self.inner_shape[self.fsdp_dim]
        part = -(-size // fsdp.size)
        if part * fsdp.size > size:
            x = F.pad(x, (0, 0) * (x.dim() - dim - 1) + (0, part - x.shape[dim]))
        gathered = gather_shards(x, fsdp, self.options.param_dtype, self.options.reduce_dtype)
        if dim:
            gathered = gathered.view(fsdp.size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)
        return gathered.narrow(dim, 0, size) if part * fsdp.size > size else gathered


def shard_parameters(
    model: nn.Module,
    meshes: Meshes,
    options: ModelOptions,
    *,
    device: torch.device,
    values: Values | None,
) -> None:
    """Replace every parameter of ``model`` (on ``meta``, whole) by its shard in float32, gathered
    whenever it is read.

    Without ``values`` the shards are empty: under a fake mode they take no memory.
    """
    for module_name, module in model.named_modules():
        shardings = {}
        for name, whole in tuple(module.named_parameters(recurse=False)):
            fqn = f"{module_name}.{name}" if module_name else name
            sharding = _sharding(module, name, fqn, whole, meshes, options)
            if values is None:
                local = torch.empty(sharding.own_shape(), device=device)
            else:
                local = sharding.own_part(values(fqn, whole.shape)).to(device, copy=True)
            shard = DTensor.from_local(
                local,
                sharding.mesh,
                sharding.placements(),
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
            module.register_parameter(name, nn.Parameter(shard))
            shardings[name] = sharding
        if shardings:
            _gather_when_read(module, shardings)


def _sharding(
    module: nn.Module,
    name: str,
    fqn: str,
    whole: torch.Tensor,
    meshes: Meshes,
    options: ModelOptions,
) -> ParameterSharding:
    is_expert = name in getattr(module, "expert_parallel", ())
    mesh = meshes.expert if is_expert else meshes.dense
    inner = group_of(mesh, "ep" if is_expert else "tp")
    split: int | str | None = 0 if is_expert else getattr(module, "tensor_parallel", {}).get(name)
    if inner.size == 1:
        inner, split = ALONE, 0  # nothing to split and nothing to sum
    if split is None:
        raise InputError(
            f"parameter {fqn} has no rule for tensor parallelism; drop 'tp' from the mesh"
        )
    inner_dim = split if isinstance(split, int) else None
    if split == WHOLE:
        inner = ALONE
    if split not in (SUMMED, WHOLE, inner_dim):
        raise AssertionError(f"unknown rule {split!r} for {fqn}")
    shape = list(whole.shape)
    if inner_dim is not None:
        if shape[inner_dim] % inner.size:
            raise InputError(
                f"dim {inner_dim} of parameter {fqn} of shape {tuple(shape)} can't be split evenly"
                f" over {inner.size} process ranks; change the size of 'tp' or 'ep'"
            )
        shape[inner_dim] //= inner.size
    fsdp_size = group_of(mesh, "fsdp").size
    # The first dim that divides evenly; where there is none, dim 0 with padding.
    fsdp_dim = next((dim for dim, size in enumerate(shape) if size % fsdp_size == 0), 0)
    return ParameterSharding(
        mesh=mesh,
        inner=inner,
        inner_dim=inner_dim,
        fsdp_dim=fsdp_dim,
        inner_shape=tuple(shape),
        options=options,
    )


def _bounds(size: int, group: Group) -> tuple[int, int]:
    """Return start and length of the part that DTensor gives to this process rank: the last parts
    are smaller or empty.
    """
    part = -(-size // group.size)
    start = min(group.rank * part, size)
    return start, min(part, size - start)


def _chunk(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    return x.narrow(dim, *_bounds(x.shape[dim], group))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _gather_when_read(module: nn.Module, shardings: dict[str, ParameterSharding]) -> None:
    """Give ``module`` a class of its own whose parameters read as gathered; names in the state dict
    stay.
    """

    def reader(name: str) -> property:
        def read(self: nn.Module) -> torch.Tensor | None:
            parameter = self._parameters[name]
            return (
                shardings[name].gather(parameter) if isinstance(parameter, DTensor) else parameter
            )

        return property(read)

    module.__class__ = type(
        type(module).__name__, (type(module),), {name: reader(name) for name in shardings}
    )
