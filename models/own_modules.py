"""Modules of the user's own, sharded like the presets: FSDP, HSDP or DDP of any ``nn.Module``.

Each parameter is a shard of its own that every use gathers, in its own type, and is reduced in that
type: as ``fully_shard`` does without mixed precision, but parameter by parameter, so that the
solver chooses the buckets. Names stay those of the module. Parameters that are DTensors already
(tensor parallelism) keep their placements; data parallelism goes over the local tensors.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from apsched.errors import InputError
from apsched.fx.collectives import is_communication
from apsched.models.collectives import sum_gradient
from apsched.models.mesh import ALONE, Group, Meshes, MeshSpec, group_of
from apsched.models.options import ModelOptions
from apsched.models.sharding import ParameterSharding
from apsched.torch_compat.compilers import outside_of_transforms
from apsched.torch_compat.graphs import fake_mode_of
from apsched.torch_compat.partition import flex_attention_uncompiled

_DATA_AXES = ("replicate", "fsdp")


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnSharding:
    """The form of reading one parameter of a user's module."""

    data: ParameterSharding | None
    """``None`` where every process rank has the whole parameter, and its own part of the model."""
    tensor_parallel: DTensor | None
    """The parameter before, if the module split it itself."""
    summed: Group = ALONE
    """Process ranks that have parts of its gradient beside those of ``data``."""

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the parameter as the module uses it; a plain tensor, which a module that wants no
        DTensor put in its place, is its local shard.
        """
        if not isinstance(parameter, DTensor) or self.data is None:
            return sum_gradient(self._gathered(parameter), self.summed, parameter.dtype)
        x = sum_gradient(self._gathered(parameter.to_local()), self.summed, parameter.dtype)
        before = self.tensor_parallel
        if before is None:
            return x
        return DTensor.from_local(
            x,
            before.device_mesh,
            before.placements,
            run_check=False,
            shape=before.shape,
            stride=before.stride(),
        )

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        if self.data is None:
            return x
        if self.data.inner_shape:
            return self.data.gather_local(x)
        for axis in _DATA_AXES:  # a number: there is nothing to split
            x = sum_gradient(x, group_of(self.data.mesh, axis), self.data.options.reduce_dtype)
        return x.to(self.data.options.param_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A parameter where it is registered, and the form of reading it."""

    owner: nn.Module
    name: str
    read: Callable[[torch.Tensor], torch.Tensor]
    """Its shard -> the parameter as the module uses it."""
    places: list[nn.Module] = field(default_factory=list)
    """Modules that have it; more than one where it is tied."""
    once: bool = False
    """Also one that is not tied is gathered, and its gradient reduced, once in a pass."""
    this_pass: dict[bool, torch.Tensor] = field(default_factory=dict)
    """The gathered value of this forward pass, of a tied parameter: it is gathered, and its
    gradient reduced, once; another one without gradients, as reentrant checkpointing reads it.
    """

    def value(self) -> torch.Tensor | None:
        """Return the parameter as the module uses it."""
        parameter = self.owner._parameters[self.name]
        if parameter is None:
            return None
        with outside_of_transforms(parameter):
            if not self.is_shared:
                return self.read(parameter)
            with_gradient = torch.is_grad_enabled()
            if with_gradient not in self.this_pass:
                self.this_pass[with_gradient] = self.read(parameter)
            return self.this_pass[with_gradient]

    @property
    def is_shared(self) -> bool:
        """Whether its uses in a pass share one gather."""
        return self.once or len(self.places) > 1


def gather_once(module: nn.Module, reads: Iterable[Read]) -> None:
    """Have each forward pass of ``module`` gather those of ``reads`` once that are shared."""
    shared = [read for read in reads if read.is_shared]

    def forget(*_: object) -> None:
        for read in shared:
            read.this_pass.clear()

    if shared:
        module.register_forward_pre_hook(forget)
        module.register_forward_hook(forget, always_call=True)


def check_own_mesh(source: str, mesh: MeshSpec) -> None:
    """Raise :class:`InputError` for axes of ``mesh`` that have no meaning for an arbitrary
    ``nn.Module``.
    """
    for axis, size in (("tp", mesh.tp), ("ep", mesh.ep)):
        if size > 1:
            raise InputError(
                f"{source}: expected a mesh of replicate and fsdp, along which any module is"
                f" sharded, found {axis}={size} in --mesh {mesh}; have the function return a module"
                " with DTensor parameters (torch.distributed.tensor.parallel)"
            )


def is_distributed(module: nn.Module, inputs: tuple[Any, ...]) -> str:
    """Return the parts of ``module`` that are distributed already, as text; empty if there are
    none.

    Parameters that are DTensors are, and a forward pass that launches collectives; it is run on
    fake tensors, which computes nothing.
    """
    if any(isinstance(child, FSDPModule) for child in module.modules()):
        return "units of fully_shard"
    if any(isinstance(tensor, DTensor) for tensor in _state(module).values()):
        return "DTensor parameters"
    watch = _CollectiveWatch()
    with suppress(Exception):  # the capture says why, with the line of the user's file
        _run_fake(module, inputs, watch)
    return "collectives" if watch.found else ""


def shard_module(
    module: nn.Module,
    meshes: Meshes,
    options: ModelOptions | None = None,
    *,
    summed: Mapping[nn.Module, Group] | None = None,
) -> None:
    """Shard every parameter of ``module`` over the axes ``replicate`` and ``fsdp``, and gather it
    whenever it is read.

    Parameters may be real or fake; a shard is of the same sort. Tied parameters stay tied. Those
    that are no floating-point numbers have no gradient to reduce and stay whole. Without
    ``options`` each parameter is gathered and reduced in its own type. ``summed`` says of modules
    over which group the gradients of their parameters are summed, too. Those that a module names in
    ``expert_parallel`` are split along dim 0 over ``ep`` first.
    """
    mesh = _data_mesh(meshes.dense)
    summed = summed or {}
    made: dict[int, Read] = {}
    places = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    for child in tuple(module.modules()):
        tied = any(places[id(parameter)] > 1 for parameter in child._parameters.values())
        if mesh is None and child not in summed and not tied:
            continue
        reads: dict[str, Read] = {}
        for name, whole in tuple(child.named_parameters(recurse=False, remove_duplicate=False)):
            if not whole.is_floating_point():
                continue
            if id(whole) in made:  # a tied one belongs to the first module that has it
                del child._parameters[name]
            else:
                if name in getattr(child, "expert_parallel", ()):
                    parameter, sharding = _expert_sharded(whole, meshes.expert, options)
                else:
                    group = summed.get(child, ALONE)
                    parameter, sharding = _sharded(whole, mesh, options, group)
                child.register_parameter(name, parameter)
                made[id(whole)] = Read(owner=child, name=name, read=sharding.read)
            reads[name] = made[id(whole)]
            reads[name].places.append(child)
        if reads:
            gather_when_read(child, reads)
    gather_once(module, made.values())


def _data_mesh(dense: DeviceMesh) -> DeviceMesh | None:
    """Return the part of the mesh over which data is parallel; ``None`` where there is none."""
    axes = tuple(axis for axis in _DATA_AXES if axis in (dense.mesh_dim_names or ()))
    if not axes or all(group_of(dense, axis).size == 1 for axis in axes):
        return None
    return dense if axes == dense.mesh_dim_names else dense[axes]


def _sharded(
    whole: nn.Parameter, mesh: DeviceMesh | None, options: ModelOptions | None, summed: Group
) -> tuple[nn.Parameter, _OwnSharding]:
    if mesh is None:
        return whole, _OwnSharding(data=None, tensor_parallel=None, summed=summed)
    before = whole if isinstance(whole, DTensor) else None
    local = whole.detach() if before is None else before.to_local().detach()
    shape = tuple(local.shape)
    fsdp = group_of(mesh, "fsdp").size
    data = ParameterSharding(
        mesh=mesh,
        inner=ALONE,
        inner_dim=0,
        fsdp_dim=next((dim for dim, size in enumerate(shape) if size % fsdp == 0), 0),
        inner_shape=shape,
        options=options or ModelOptions(param_dtype=whole.dtype, reduce_dtype=whole.dtype),
    )
    shard = DTensor.from_local(
        data.own_part(local) if shape else local,
        mesh,
        data.placements() if shape else [Replicate()] * mesh.ndim,
        run_check=False,
        shape=local.shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    parameter = nn.Parameter(shard, requires_grad=whole.requires_grad)
    return parameter, _OwnSharding(data=data, tensor_parallel=before, summed=summed)


def _expert_sharded(
    whole: nn.Parameter, mesh: DeviceMesh, options: ModelOptions | None
) -> tuple[nn.Parameter, _OwnSharding]:
    """Return the shard of parameters of experts that lie side by side along dim 0."""
    ep, fsdp = group_of(mesh, "ep"), group_of(mesh, "fsdp").size
    shape = (whole.shape[0] // ep.size, *whole.shape[1:])
    data = ParameterSharding(
        mesh=mesh,
        inner=ep,
        inner_dim=0,
        fsdp_dim=next((dim for dim, size in enumerate(shape) if size % fsdp == 0), 0),
        inner_shape=shape,
        options=options or ModelOptions(param_dtype=whole.dtype, reduce_dtype=whole.dtype),
    )
    shard = DTensor.from_local(
        data.own_part(whole.detach()),
        mesh,
        data.placements(),
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    parameter = nn.Parameter(shard, requires_grad=whole.requires_grad)
    return parameter, _OwnSharding(data=data, tensor_parallel=None)


def _reader(read: Read) -> Callable[[nn.Module], torch.Tensor | None]:
    return lambda module: read.value()


def gather_when_read(module: nn.Module, reads: Mapping[str, Read]) -> None:
    """Give ``module`` a class of its own whose parameters read as gathered."""
    members: dict[str, Any] = {name: property(_reader(read)) for name, read in reads.items()}
    if isinstance(module, nn.RNNBase):  # it reads a list that it makes itself

        def weights(self: Any) -> list[Any]:
            return [getattr(self, name, None) for name in self._flat_weights_names]

        members["_flat_weights"] = property(weights, lambda self, value: None)
    module.__class__ = type(type(module).__name__, (type(module),), members)


class _CollectiveWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether an operator talks to other process ranks."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= is_communication(func)
        return func(*args, **(kwargs or {}))


def _run_fake(module: nn.Module, inputs: tuple[Any, ...], watch: _CollectiveWatch) -> None:
    state = _state(module)
    mode = fake_mode_of((*state.values(), *inputs)) or FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        return mode.from_tensor(value)

    with torch.no_grad(), flex_attention_uncompiled(), mode, watch:
        functional_call(
            module, {name: fake(value) for name, value in state.items()}, tree_map(fake, inputs)
        )


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
