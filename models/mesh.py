"""Meshes of process ranks by name: ``fsdp=64``, ``fsdp=16,tp=8``, ``replicate=4,fsdp=16``,
``replicate=64``, ``fsdp=64,ep=8``.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from apsched.errors import InputError
from apsched.units import MOST_RANKS

_AXES = ("replicate", "fsdp", "tp", "ep")
_ALIASES = {"dp": "fsdp", "ddp": "replicate"}
"""Other names of axes: data parallelism, sharded or not."""
_HSDP = re.compile(r"\bhsdp\s*=\s*(\d+)\s*x\s*(\d+)")
_EXAMPLES = "fsdp=64, fsdp=16,tp=8, replicate=4,fsdp=16, replicate=64 or fsdp=64,ep=8"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec:
    """Sizes of the axes of parallelism; the outermost axis is ``replicate``, then ``fsdp``, then
    ``tp``.
    """

    replicate: int = 1
    """Copies of the model: gradients are all-reduced (DDP; with ``fsdp`` HSDP)."""
    fsdp: int = 1
    """Process ranks over which every parameter is sharded."""
    tp: int = 1
    """Process ranks over which every matrix product is split."""
    ep: int = 1
    """Process ranks over which routed experts are split; a part of ``fsdp``, so it adds no process
    ranks.
    """

    def __post_init__(self) -> None:
        for axis in _AXES:
            if getattr(self, axis) < 1:
                raise InputError(
                    f"the size of mesh axis {axis!r} must be at least 1; found"
                    f" {getattr(self, axis)}"
                )
        if self.world_size > MOST_RANKS:
            raise InputError(
                f"a mesh has at most {MOST_RANKS} process ranks, the product of replicate, fsdp"
                f" and tp, since each is listed by its number; found {self.world_size} in {self}:"
                " state smaller axes"
            )
        if self.fsdp % self.ep:
            raise InputError(
                f"mesh axis 'ep' lies inside 'fsdp' and must divide it; found ep={self.ep} and"
                f" fsdp={self.fsdp}"
            )

    @classmethod
    def parse(cls, text: str) -> "MeshSpec":
        """Return the mesh of ``text``, such as ``fsdp=16,tp=8``; raises :class:`InputError` with
        the error. ``dp=64`` is ``fsdp=64``, ``ddp=64`` is ``replicate=64`` and ``hsdp=4x16`` is
        ``replicate=4,fsdp=16``.
        """
        sizes: dict[str, int] = {}
        for part in _HSDP.sub(r"replicate=\1,fsdp=\2", text).split(","):
            axis, equals, size = (piece.strip() for piece in part.partition("="))
            axis = _ALIASES.get(axis, axis)
            if not equals:
                raise InputError(
                    f"a mesh is a list of axis=size such as {_EXAMPLES}; found {part.strip()!r} in"
                    f" {text!r}"
                )
            if axis == "hsdp":
                raise InputError(
                    "mesh axis 'hsdp' takes two sizes, hsdp=NxM for N copies that are each sharded"
                    f" over M process ranks; found {part.strip()!r} in {text!r}"
                )
            if axis not in _AXES:
                raise InputError(
                    f"mesh axes are {', '.join(_AXES)} (ddp=N, dp=N and hsdp=NxM name some of"
                    f" them); found {axis!r} in {text!r}"
                )
            if axis in sizes:
                raise InputError(f"mesh axis {axis!r} is given twice in {text!r}; give it once")
            if not size.removeprefix("-").isdecimal():
                raise InputError(
                    f"the size of mesh axis {axis!r} must be a whole number; found {size!r} in"
                    f" {text!r}"
                )
            sizes[axis] = int(size)
        return cls(**sizes)

    @property
    def world_size(self) -> int:
        """Number of process ranks."""
        return self.replicate * self.fsdp * self.tp

    @property
    def data_parallel_size(self) -> int:
        """Number of process ranks that work on different tokens (``tp`` ranks share theirs)."""
        return self.replicate * self.fsdp

    def axes_of(self, ranks: Sequence[int]) -> str:
        """Return the axes whose process group of process rank 0 is ``ranks``, with slashes between
        them; empty where none is.
        """
        groups = {
            "replicate": (self.replicate, self.fsdp * self.tp),
            "fsdp": (self.fsdp, self.tp),
            "tp": (self.tp, 1),
            "ep": (self.ep, 1),
            "fsdp of experts": (self.fsdp // self.ep if self.ep > 1 else 1, self.ep),
        }
        return "/".join(
            axis
            for axis, (size, stride) in groups.items()
            if size > 1 and tuple(ranks) == tuple(range(0, size * stride, stride))
        )

    def __str__(self) -> str:
        """Return the text that :meth:`parse` reads."""
        named = [f"{axis}={getattr(self, axis)}" for axis in _AXES if getattr(self, axis) > 1]
        return ",".join(named) or "fsdp=1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One process group as this process rank sees it."""

    size: int
    name: str
    """Name that functional collectives carry; empty for a group of one."""
    rank: int
    """This process rank's place in the group."""


ALONE = Group(size=1, name="", rank=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """Device meshes of a :class:`MeshSpec` on the running process group, without axes of size 1."""

    spec: MeshSpec
    dense: DeviceMesh
    """Axes ``replicate``, ``fsdp``, ``tp``: for every parameter that is no routed expert's."""
    expert: DeviceMesh
    """Axes ``replicate``, ``fsdp`` (the rest of FSDP after ``ep``), ``ep``: for routed experts."""


def build_meshes(spec: MeshSpec, device_type: str) -> Meshes:
    """Return the device meshes of ``spec``; needs a process group of ``spec.world_size``.

    As in TorchTitan, ``ep`` takes neighbouring process ranks of ``fsdp``, and experts are
    FSDP-sharded over the other ``fsdp / ep``.
    """
    if dist.get_world_size() != spec.world_size:
        raise InputError(
            f"mesh {spec} needs {spec.world_size} process ranks; the process group has"
            f" {dist.get_world_size()}: start that many or change the mesh"
        )
    dense = _device_mesh(
        device_type, {"replicate": spec.replicate, "fsdp": spec.fsdp, "tp": spec.tp}
    )
    if spec.ep == 1:
        return Meshes(spec=spec, dense=dense, expert=dense)
    if spec.tp > 1:
        raise InputError(
            f"mesh axes 'ep' and 'tp' can't be combined; found {spec}: drop one of them"
        )
    expert = _device_mesh(
        device_type, {"replicate": spec.replicate, "fsdp": spec.fsdp // spec.ep, "ep": spec.ep}
    )
    return Meshes(spec=spec, dense=dense, expert=expert)


def group_of(mesh: DeviceMesh, axis: str) -> Group:
    """Return the process group of ``axis``; of size 1 where the mesh has no such axis."""
    if axis not in (mesh.mesh_dim_names or ()):
        return ALONE
    group = mesh.get_group(axis)
    return Group(size=group.size(), name=group.group_name, rank=dist.get_rank(group))


def _device_mesh(device_type: str, sizes: dict[str, int]) -> DeviceMesh:
    shape = {axis: size for axis, size in sizes.items() if size > 1}
    if not shape:
        shape = {"fsdp": math.prod(sizes.values())}
    return init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))
