"""Clusters: a device, its node and its network, each a small TOML file. No torch here.

The files beside this package name the source of every number. A user's own file has the same keys; a key that is unknown,
missing or impossible is an error that names the file and the key.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from apsched.errors import InputError

LIBRARIES = ("nccl", "gloo")
DEFAULT_CLUSTER = "h100"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakTflops:
    """Dense peak of the device in TFLOP/s (10**12 floating point operations a second, a multiply-add is two) by dtype."""

    bf16: float
    fp16: float
    tf32: float
    fp32: float
    fp64: float | None = None
    """``None``: half of fp32."""
    fp8: float | None = None
    """``None``: as bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator (or one process on a CPU)."""

    memory_bytes: int
    """What a process can allocate."""
    memory_bandwidth_gb_per_s: float
    matmul_efficiency: float
    """Share of the peak that large matrix products reach."""
    attention_efficiency: float
    """Share of the peak that fused attention reaches."""
    memory_efficiency: float
    """Share of the memory bandwidth that copies and pointwise kernels reach."""
    kernel_us: float
    """Floor of every kernel."""
    peak_tflops: PeakTflops

    @property
    def memory_bytes_per_us(self) -> float:
        """Memory bandwidth as achieved."""
        return self.memory_bandwidth_gb_per_s * 1e3 * self.memory_efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class IntraNode:
    """The links inside a node: NVLink, or what stands for it."""

    busbw_gb_per_s: float
    """Bus bandwidth (nccl-tests' busbw) of a ring over large messages, each GPU."""
    low_latency_busbw_gb_per_s: float
    """Bus bandwidth that the low-latency (LL) protocol reaches."""
    latency_us: float
    """Of one hop."""
    in_switch_all_reduce_busbw_gb_per_s: float | None = None
    """busbw of an all-reduce over the whole node that the switch adds up (NVLink SHARP); ``None`` where it cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterNode:
    """The network between nodes, one NIC for each process rank."""

    gbit_per_s_per_rank: float
    efficiency: float
    """Share of the line rate that large messages reach."""
    low_latency_busbw_gb_per_s: float
    """Bus bandwidth that the low-latency (LL) protocol reaches across nodes, over all NICs of a node."""
    latency_us: float
    """Of one hop."""

    @property
    def nic_gb_per_s(self) -> float:
        """Bandwidth of one NIC as achieved, in GB/s."""
        return self.gbit_per_s_per_rank / 8 * self.efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A named cluster; process ranks are numbered node by node."""

    name: str
    description: str
    ranks_per_node: int
    library: str
    """``nccl`` or ``gloo``: whose algorithms and protocols price the collectives."""
    launch_us: float
    """Price of one collective on the compute stream, however few bytes it moves."""
    device: Device
    intra_node: IntraNode
    inter_node: InterNode


_SECTIONS: Mapping[str, type[Any]] = {"peak_tflops": PeakTflops, "device": Device, "intra_node": IntraNode, "inter_node": InterNode}
_AT_MOST_ONE = ("efficiency",)


def cluster_names() -> tuple[str, ...]:
    """Return the names of the clusters that ship with the package, the default first."""
    files = resources.files("apsched.costs.clusters").iterdir()
    names = sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))
    return tuple(sorted(names, key=lambda name: name != DEFAULT_CLUSTER))


def load_cluster(name_or_path: str | Path = DEFAULT_CLUSTER) -> Cluster:
    """Return the cluster with that name, or the one in that TOML file.

    Raises ``InputError`` when there is no such name or file, or when the file has unknown, missing or impossible entries.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, str) and text in cluster_names():
        return _shipped(text)
    path = Path(name_or_path)
    if path.suffix != ".toml" and not path.is_file():
        raise InputError(
            f"expected the name of a cluster or the path of a .toml file, found {text!r}{_did_you_mean(text, cluster_names())}; "
            f"clusters: {', '.join(cluster_names())}"
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the cluster file {path}: {error.strerror or error}") from error
    return _parse(content, str(path))


@lru_cache
def _shipped(name: str) -> Cluster:
    return _parse(resources.files("apsched.costs.clusters").joinpath(f"{name}.toml").read_bytes(), f"{name}.toml")


def _parse(content: bytes, where: str) -> Cluster:
    try:
        data = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{where}: not a TOML file: {error}") from error
    cluster = _build(Cluster, data, where, "")
    assert isinstance(cluster, Cluster)
    if cluster.library not in LIBRARIES:
        hint = _did_you_mean(cluster.library, LIBRARIES)
        raise InputError(f"{where}: library must be one of {', '.join(LIBRARIES)}; found {cluster.library!r}{hint}")
    return cluster


def _build(kind: type[Any], data: Mapping[str, object], where: str, prefix: str) -> Any:
    """Return ``kind`` from a TOML table whose keys are its fields."""
    known = [field.name for field in fields(kind)]
    for key in data:
        if key not in known:
            raise InputError(f"{where}: unknown key {prefix + key!r}{_did_you_mean(key, known)}; keys here: {', '.join(known)}")
    values = {}
    for field in fields(kind):
        key = prefix + field.name
        if field.name not in data:
            if field.default is MISSING:
                raise InputError(f"{where}: key {key!r} is missing; add it (the files that ship with apsched show how)")
            continue
        value = data[field.name]
        if field.name in _SECTIONS:
            if not isinstance(value, Mapping):
                raise InputError(f"{where}: {key!r} must be a table [{key}]; found {value!r}")
            values[field.name] = _build(_SECTIONS[field.name], value, where, key + ".")
        else:
            values[field.name] = _checked_value(value, field.type, where, key)
    return kind(**values)


def _checked_value(value: object, kind: object, where: str, key: str) -> object:
    if kind is str:
        if not isinstance(value, str) or not value:
            raise InputError(f"{where}: {key} must be a non-empty string; found {value!r}")
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{where}: {key} must be a number; found {value!r}")
    if not math.isfinite(value) or value <= 0:
        raise InputError(f"{where}: {key} must be finite and above 0; found {value}")
    if key.endswith(_AT_MOST_ONE) and value > 1:
        raise InputError(f"{where}: {key} must be at most 1 (a share of the peak); found {value}")
    if kind is int:
        if value != int(value):
            raise InputError(f"{where}: {key} must be a whole number; found {value}")
        return int(value)
    return float(value)


def _did_you_mean(found: str, known: tuple[str, ...] | list[str]) -> str:
    close = get_close_matches(found, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
