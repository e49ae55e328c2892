"""Clusters: a device, its node and its network, each a small TOML file. No torch here.

The files beside this package name the source of every number. A user's own file has the same keys,
or names one of those files as its ``base`` and has only the keys that differ; a key that is
unknown, missing or impossible is an error that names the file and the key.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any

from apsched.atomic_files import one_component
from apsched.errors import InputError

LIBRARIES = ("nccl", "gloo")
DEFAULT_CLUSTER = "h100"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakTflops:
    """Dense peak of the device in TFLOP/s (10**12 floating point operations a second, a
    multiply-add is two) by dtype.
    """

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
    """Bytes that a process can allocate."""
    memory_bandwidth_gb_per_s: float
    matmul_efficiency: float
    """Share of the peak that large matrix products reach, those that fill the device
    (:mod:`apsched.costs.compute.efficiency`).
    """
    attention_efficiency: float
    """Share of the peak that fused attention reaches, forward, with heads 128 wide."""
    memory_efficiency: float
    """Share of the memory bandwidth that copies and pointwise kernels reach."""
    kernel_us: float
    """Floor of every kernel."""
    peak_tflops: PeakTflops
    attention_backward_efficiency: float | None = None
    """The same of its backward; ``None``: as forward."""
    num_processors: int | None = None
    """Streaming multiprocessors (compute units) that share the tiles of a matrix product; ``None``:
    products of any shape fill it.
    """

    @property
    def memory_bytes_per_us(self) -> float:
        """Memory bandwidth as achieved."""
        return self.memory_bandwidth_gb_per_s * 1e3 * self.memory_efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class IntraNode:
    """The links inside a node: NVLink, or its substitute."""

    busbw_gb_per_s: float
    """Bus bandwidth (nccl-tests' busbw) of a ring over large messages, each GPU."""
    low_latency_busbw_gb_per_s: float
    """Bus bandwidth that the low-latency (LL) protocol reaches."""
    latency_us: float
    """Of one hop."""
    in_switch_all_reduce_busbw_gb_per_s: float | None = None
    """busbw of an all-reduce over the whole node that the switch adds up (NVLink SHARP); ``None``
    where it cannot.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class InterNode:
    """The network between nodes, one NIC for each process rank."""

    gbit_per_s_per_rank: float
    efficiency: float
    """Share of the line rate that large messages reach."""
    low_latency_busbw_gb_per_s: float
    """Bus bandwidth that the low-latency (LL) protocol reaches across nodes, over all NICs of a
    node.
    """
    latency_us: float
    """Of one hop."""
    protocols: str = "LL LL128 Simple"
    """Protocols of the library that the network takes: LL and LL128 need writes to arrive in
    order.
    """

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
    coalesced_member_us: float | None = None
    """Price of each member of one launch of several transfers (ncclGroupStart), on the group's
    stream; ``None``: buckets are flat.
    """
    compute_slowdown: float | None = None
    """Factor by which compute takes longer while a collective runs, with ``--contention compute``.
    """


_SECTIONS: Mapping[str, type[Any]] = {
    "peak_tflops": PeakTflops,
    "device": Device,
    "intra_node": IntraNode,
    "inter_node": InterNode,
}
_AT_MOST_ONE = ("efficiency",)
_PROTOCOLS = ("LL", "LL128", "Simple")
# what a number can be, by the end of its key: outside, the unit is most likely another one
_POSSIBLE: Mapping[str, tuple[float, float, str]] = {
    "memory_bytes": (1e8, 1e14, "bytes (80 GB is 80_000_000_000)"),
    "gb_per_s": (1e-3, 1e6, "GB/s, 10**9 bytes a second"),
    "gbit_per_s_per_rank": (1e-2, 1e5, "Gbit/s, 10**9 bits a second"),
    "_us": (1e-3, 1e6, "microseconds"),
    "peak_tflops": (1e-4, 1e6, "TFLOP/s, 10**12 operations a second"),
    "ranks_per_node": (1, 4096, "process ranks"),
    "compute_slowdown": (1, 10, "times the duration without a collective beside it"),
    "num_processors": (1, 1e5, "processors of one device"),
}


def cluster_names() -> tuple[str, ...]:
    """Return the names of the clusters that ship with the package, the default first."""
    files = resources.files("apsched.costs.clusters").iterdir()
    names = sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))
    return tuple(sorted(names, key=lambda name: name != DEFAULT_CLUSTER))


def load_cluster(name_or_path: str | Path = DEFAULT_CLUSTER) -> Cluster:
    """Return the cluster with that name, or the one in that TOML file.

    Raises ``InputError`` when there is no such name or file, or when the file has unknown, missing
    or impossible entries.
    """
    if not isinstance(name_or_path, str | PathLike):
        raise InputError(
            "cluster: expected the name of a cluster or the path of a .toml file, found"
            f" {name_or_path!r}"
        )
    text = str(name_or_path)
    if isinstance(name_or_path, str) and text in cluster_names():
        return _shipped(text)
    path = Path(name_or_path)
    if path.suffix != ".toml" and not path.is_file():
        raise InputError(
            "expected the name of a cluster or the path of a .toml file, found"
            f" {text!r}{_did_you_mean(text, cluster_names())}; clusters:"
            f" {', '.join(cluster_names())}"
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read the cluster file {path}: {error.strerror or error}"
        ) from error
    return _parse(content, str(path))


def cluster_of_file(name: str, where: str) -> Cluster:
    """Return the cluster that the file ``where`` names: one that ships, else a TOML file in the
    working directory.

    ``InputError`` if the name would lead elsewhere: a name in a file is no path.
    """
    if name in cluster_names():
        return _shipped(name)
    try:
        return load_cluster(one_component(name, "cluster"))
    except InputError as error:
        raise InputError(f"{where}: {error}; or state the cluster (--cluster, cluster=)") from None


def cluster_text(name: str) -> str:
    """Return the file of a cluster that ships with the package; that of its base follows as comment
    lines.
    """
    if name not in cluster_names():
        raise InputError(
            f"expected a cluster among {', '.join(cluster_names())}; found"
            f" {name!r}{_did_you_mean(name, cluster_names())}"
        )
    text = resources.files("apsched.costs.clusters").joinpath(f"{name}.toml").read_text()
    base = tomllib.loads(text).get("base")
    if base is None:
        return text
    return (
        text
        + f"\n# values from {base}:\n"
        + "".join(f"# {line}\n" if line else "#\n" for line in cluster_text(base).splitlines())
    )


def content_of(cluster: Cluster) -> dict[str, Any]:
    """Return the keys and values of ``cluster`` as its file has them, without those that the file
    leaves out.
    """
    return _without_defaults(asdict(cluster))


def differing_key(one: Cluster, other: Cluster) -> tuple[str, object, object] | None:
    """Return the first key, with both values, in which two clusters differ; ``None`` where all
    that has an effect on costs and memory is equal: name and description have none.
    """
    here, there = (dict(_flat(asdict(cluster))) for cluster in (one, other))
    return next(
        (
            (key, here[key], there[key])
            for key in here
            if key not in ("name", "description") and here[key] != there[key]
        ),
        None,
    )


def _without_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_defaults(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@lru_cache
def _shipped(name: str) -> Cluster:
    return _parse(
        resources.files("apsched.costs.clusters").joinpath(f"{name}.toml").read_bytes(),
        f"{name}.toml",
    )


def _parse(content: bytes, where: str) -> Cluster:
    try:
        data = tomllib.loads(content.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{where}: not a TOML file: {error}") from error
    return cluster_of_content(_on_base(data, where), where)


def cluster_of_content(content: Mapping[str, object], where: str) -> Cluster:
    """Return the cluster with the keys of a cluster file; ``InputError`` names ``where`` and the
    key that is unknown, missing or impossible.
    """
    cluster = _build(Cluster, content, where, "")
    assert isinstance(cluster, Cluster)
    _check_together(cluster, where)
    if cluster.library not in LIBRARIES:
        hint = _did_you_mean(cluster.library, LIBRARIES)
        raise InputError(
            f"{where}: library must be one of {', '.join(LIBRARIES)}; found"
            f" {cluster.library!r}{hint}"
        )
    return cluster


def _on_base(data: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the file's own keys over those of the cluster that it names as its ``base``."""
    if "base" not in data:
        return data
    base = data.pop("base")
    if base not in cluster_names():
        hint = _did_you_mean(str(base), cluster_names())
        raise InputError(
            f"{where}: base must be a cluster that ships with apsched"
            f" ({', '.join(cluster_names())}); found {base!r}{hint}"
        )
    text = resources.files("apsched.costs.clusters").joinpath(f"{base}.toml").read_text()
    return _over(_on_base(tomllib.loads(text), f"{base}.toml"), data)


def _over(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: base.get(key)
        for key in own
        if isinstance(own[key], dict) and isinstance(base.get(key), dict)
    }
    return {
        **base,
        **own,
        **{key: _over(table, own[key]) for key, table in both.items() if table is not None},
    }


def _check_together(cluster: Cluster, where: str) -> None:
    unknown = [name for name in cluster.inter_node.protocols.split() if name not in _PROTOCOLS]
    if unknown or "Simple" not in cluster.inter_node.protocols.split():
        raise InputError(
            f"{where}: inter_node.protocols must be names among {' '.join(_PROTOCOLS)}, Simple with"
            f" them; found {cluster.inter_node.protocols!r}"
        )
    intra = cluster.intra_node
    if intra.low_latency_busbw_gb_per_s > intra.busbw_gb_per_s:
        raise InputError(
            f"{where}: intra_node.low_latency_busbw_gb_per_s cannot exceed"
            f" intra_node.busbw_gb_per_s; found {intra.low_latency_busbw_gb_per_s:g} and"
            f" {intra.busbw_gb_per_s:g}"
        )


def _build(kind: type[Any], data: Mapping[str, object], where: str, prefix: str) -> Any:
    """Return ``kind`` from a TOML table whose keys are its fields."""
    known = [field.name for field in fields(kind)]
    for key in data:
        if key not in known:
            raise InputError(
                f"{where}: unknown key {prefix + key!r}{_did_you_mean(key, known)}; keys here:"
                f" {', '.join(known)}"
            )
    values = {}
    for field in fields(kind):
        key = prefix + field.name
        if field.name not in data:
            if field.default is MISSING:
                raise InputError(
                    f"{where}: key {key!r} is missing; add it (the files that ship with apsched"
                    " show how)"
                )
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
    for end, (least, most, unit) in _POSSIBLE.items():
        if (key.endswith(end) or f".{end}." in key) and not least <= value <= most:
            raise InputError(
                f"{where}: {key} must be in {unit}, between {least:g} and {most:g}; found {value:g}"
            )
    if kind in (int, int | None):
        if value != int(value):
            raise InputError(f"{where}: {key} must be a whole number; found {value}")
        return int(value)
    return float(value)


def _did_you_mean(found: str, known: tuple[str, ...] | list[str]) -> str:
    close = get_close_matches(found, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
