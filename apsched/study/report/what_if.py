"""One change of hardware or size, answered directly: the step before and after the change, each
with its bound, and the proven part of the difference.

    network=2x        twice the bandwidth between nodes (:mod:`apsched.study.speeds`)
    compute=0.8x      compute at 0.8 times its speed
    ranks=4096        so many process ranks: FSDP is scaled (a mesh of replicas alone: those),
                      everything else stays
    memory=-10GiB     a memory cap that is so much lower (or with ``+`` higher)

Two searches differ by chance, so only bounds prove a difference: the best schedule before the
change takes at least the bound before the change.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from apsched.errors import InputError
from apsched.pipeline.sources import DEFAULT_MESH, SourceKind, classify
from apsched.quantities import MemoryCap, parse_bytes, parse_count
from apsched.study.rows import Point
from apsched.study.setting import Setting
from apsched.study.speeds import Speeds, parse_times

NAMES = ("network", "compute", "ranks", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The changes of ``then``."""

    speeds: Speeds
    num_ranks: int | None = None
    more_bytes: int = 0
    """Added to the memory cap; negative for less."""
    text: str = ""
    """As typed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One graph now and then."""

    now: Point
    then: Point
    notes: tuple[str, ...] = ()
    """Remarks on the changed costs."""

    @property
    def gain_us(self) -> float | None:
        """By how much the schedule found then is shorter; ``None`` where one has none."""
        if self.now.step_time_us is None or self.then.step_time_us is None:
            return None
        return self.now.step_time_us - self.then.step_time_us

    @property
    def least_gain_us(self) -> float | None:
        """Proven: no schedule of now gains less, since none is faster than the bound of now;
        negative where nothing is proven.
        """
        return (
            None if self.then.step_time_us is None else self.now.bound_us - self.then.step_time_us
        )

    @property
    def most_gain_us(self) -> float | None:
        """Proven: the schedule of now gains no more, whatever is found then; negative where the
        step is proven to get longer.
        """
        return None if self.now.step_time_us is None else self.now.step_time_us - self.then.bound_us

    @property
    def verdict(self) -> str:
        """``shorter``, ``longer`` or ``not shorter``, all proven; ``nothing provable``, ``nothing
        changes`` or ``nothing fits ...``.
        """
        if self.now.point_id == self.then.point_id:
            return "nothing changes"
        if self.then.step_time_us is None:
            return "nothing fits then"
        if self.now.step_time_us is None:
            return "nothing fits now"
        assert self.least_gain_us is not None
        assert self.most_gain_us is not None
        if self.least_gain_us > 0:
            return "shorter"
        if self.most_gain_us < 0:
            return "longer"
        return "not shorter" if self.most_gain_us == 0 else "nothing provable"


def parse_what_if(texts: Sequence[str]) -> WhatIf:
    """Return the changes that ``--if`` states, all of them together."""
    found: dict[str, str] = {}
    for text in (part for joined in texts for part in joined.split(",")):
        name, equals, value = (piece.strip() for piece in text.partition("="))
        if not equals or not value or name not in NAMES:
            raise InputError(
                "--if: expected network=2x, compute=0.8x, ranks=4096 or memory=-10GiB; found"
                f" {text!r}"
            )
        if name in found:
            raise InputError(f"--if: {name} is given twice; give it once")
        found[name] = value
    memory = found.get("memory")
    if memory is not None and memory[0] not in "+-":
        raise InputError(
            f"--if memory: expected a change of the cap, such as +10GiB or -10GiB; found {memory!r}"
        )
    speeds = {
        name: parse_times(found[name], f"--if {name}")
        for name in ("network", "compute")
        if name in found
    }
    return WhatIf(
        speeds=Speeds(**speeds),
        num_ranks=parse_count(found["ranks"], "--if ranks", least=1) if "ranks" in found else None,
        more_bytes=(
            0
            if memory is None
            else parse_bytes(memory[1:], "--if memory") * (-1 if memory[0] == "-" else 1)
        ),
        text=", ".join(f"{name}={value}" for name, value in found.items()),
    )


def then(setting: Setting, what_if: WhatIf) -> Setting:
    """Return the setting as it would be; the memory cap is another matter (:func:`cap_then`)."""
    speeds = Speeds(
        network=setting.speeds.network * what_if.speeds.network,
        compute=setting.speeds.compute * what_if.speeds.compute,
    )
    request = setting.request
    if what_if.num_ranks is not None:
        request = replace(request, mesh=_mesh_of(setting, what_if.num_ranks))
    return replace(setting, request=request, speeds=speeds)


def cap_then(
    cap: MemoryCap | None, what_if: WhatIf, device_memory_bytes: int | None
) -> MemoryCap | None:
    """Return the memory cap as it would be; ``None`` is the device's memory."""
    if not what_if.more_bytes:
        return cap
    if cap is None:
        if device_memory_bytes is None:
            raise InputError(
                "--if memory: the memory of the cluster is not known here; state --memory-cap"
            )
        cap = MemoryCap(size_bytes=device_memory_bytes)
    if cap.size_bytes is None:
        raise InputError("--if memory: there is no cap that could change; state --memory-cap")
    if cap.size_bytes + what_if.more_bytes < 0:
        raise InputError(
            "--if memory: expected a cap that stays above 0 (or above the floor, where it counts"
            " from there)"
        )
    return replace(cap, size_bytes=cap.size_bytes + what_if.more_bytes)


def _mesh_of(setting: Setting, num_ranks: int) -> str:
    kind = classify(setting.request.source)
    if kind in (SourceKind.GRAPH_FILE, SourceKind.REPRO):
        raise InputError(
            f"--if ranks: {setting.request.source!r} is a {kind.value}: it holds the shards of the"
            " process ranks that it was captured for, and their sizes change with the number; use"
            " the preset or function itself"
        )
    if kind is SourceKind.FUNCTION and setting.request.mesh is None:
        raise InputError("--if ranks: state --mesh, so that its FSDP axis can be scaled")
    from apsched.models.mesh import MeshSpec

    mesh = MeshSpec.parse(setting.request.mesh or DEFAULT_MESH)
    axis = "replicate" if mesh.fsdp == 1 and mesh.replicate > 1 else "fsdp"
    others = mesh.world_size // getattr(mesh, axis)
    size, rest = divmod(num_ranks, others)
    step = mesh.ep if axis == "fsdp" else 1
    if rest or not size or size % step:
        raise InputError(
            f"--if ranks: mesh {mesh} scaled along {axis} has a multiple of {others * step} process"
            f" ranks; found {num_ranks}"
        )
    return str(replace(mesh, **{axis: size}))
