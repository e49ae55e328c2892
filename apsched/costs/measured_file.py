"""Measured costs as a file (``costs.toml``): plain TOML that people read, edit and compare. No
torch here.

format = "apsched costs"
version = 1
device = "AMD EPYC, one thread"
cluster = "cpu"

[launch_us]
all_gather = 48.1

[[transfers]]
kind = "all_gather"
ranks = 4
nodes = 1
source = "profile"
gb_per_s = 1.2
points = [[16384, 210.5], [65536, 251.0]]

[sizes]
u0 = 6144

[compute.profile]
"aten::mm(float32[128,64], float32[64,192]{1,64}) -> float32[128,192]" = 48.2
"""

import json
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from apsched.costs.measured import (
    FASTEST_GB_PER_S,
    SLOWEST_GB_PER_S,
    SOURCES,
    MeasuredCosts,
    Price,
    Transfers,
)
from apsched.errors import InputError
from apsched.kinds import PRICED_KINDS, CollectiveKind
from apsched.units import LARGEST_MESSAGE_BYTES, LONGEST_US, MOST_RANKS

FORMAT = "apsched costs"
VERSION = 2
"""Since 2 with sizes; files without are written as version 1."""
_KEYS = (
    "format",
    "version",
    "device",
    "cluster",
    "launch_us",
    "copies",
    "transfers",
    "sizes",
    "compute",
)
_TRANSFER_KEYS = ("kind", "ranks", "nodes", "source", "gb_per_s", "points")


def dump_costs(costs: MeasuredCosts) -> bytes:
    """Return ``costs`` as TOML; equal costs give equal bytes."""
    lines = [
        f"format = {json.dumps(FORMAT)}",
        f"version = {VERSION if costs.sizes else 1}",
        f"device = {json.dumps(costs.device)}",
    ]
    lines += [f"cluster = {json.dumps(costs.cluster)}"]
    if costs.copies:
        lines += [f"copies = {_points(costs.copies)} # bytes, microseconds"]
    if costs.launch_us:
        lines += ["", "[launch_us] # of a bucket, on the compute stream"]
        lines += [
            f"{kind} = {_number(time_us)}" for kind, time_us in sorted(costs.launch_us.items())
        ]
    for t in sorted(costs.transfers, key=lambda t: (t.kind, t.num_ranks, t.num_nodes)):
        lines += [
            "",
            "[[transfers]]",
            f"kind = {json.dumps(t.kind)}",
            f"ranks = {t.num_ranks}",
            f"nodes = {t.num_nodes}",
        ]
        lines += [f"source = {json.dumps(t.source)}"]
        if t.bytes_per_us is not None:
            lines += [
                f"gb_per_s = {_number(t.bytes_per_us / 1e3, digits=6)} # beyond the largest of the"
                " points"
            ]
        lines += [f"points = {_points(t.points)} # bytes counted once, microseconds"]
    if costs.sizes:
        lines += ["", "[sizes] # that depend on data, as the profile has them"]
        ordered = sorted(costs.sizes.items(), key=lambda item: (len(item[0]), item))
        lines += [f"{symbol} = {size}" for symbol, size in ordered]
    for source in SOURCES:
        entries = sorted(
            (operation, price.time_us)
            for operation, price in costs.compute.items()
            if price.source == source
        )
        if entries:
            lines += ["", f"[compute.{source}] # microseconds on the compute stream"]
            lines += [
                f"{json.dumps(operation)} = {_number(time_us)}" for operation, time_us in entries
            ]
    return ("\n".join(lines) + "\n").encode()


def load_costs(path: str | Path) -> MeasuredCosts:
    """Return the costs in the file ``path``; ``InputError`` names the file, the entry and the
    error.
    """
    if path == "":  # as a path it is the working directory
        raise InputError(
            "the costs: expected the path of a file, found an empty path; `apsched calibrate`"
            " writes such files"
        )
    path = Path(path)
    try:
        content = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise InputError(
            f"cannot read the costs {path}: {error.strerror or error}; `apsched calibrate` writes"
            " them"
        ) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(
            f"{path}: expected TOML as `apsched calibrate` writes it, found {error}"
        ) from None
    try:
        return _parsed(content)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _parsed(content: Mapping[str, Any]) -> MeasuredCosts:
    if content.get("format") != FORMAT:
        raise InputError(
            f'expected format = "{FORMAT}", found {content.get("format")!r}; `apsched calibrate`'
            " writes such files"
        )
    version = content.get("version")
    if type(version) is not int or version < 1:
        raise InputError(f"expected a version number, found {version!r}")
    if version > VERSION:
        raise InputError(
            f"written by a newer apsched (version {version}, this one reads up to {VERSION});"
            " upgrade apsched"
        )
    _refuse_unknown(content, _KEYS, "costs")
    launch_us = _table(content, "launch_us")
    return MeasuredCosts(
        device=_text(content, "device"),
        cluster=_text(content, "cluster"),
        compute=_compute(_table(content, "compute")),
        transfers=_all_transfers(_list(content, "transfers")),
        launch_us={
            _known_kind(kind, "launch_us"): _time(value, f"launch_us.{kind}")
            for kind, value in launch_us.items()
        },
        copies=_read_points(content.get("copies", []), "copies"),
        sizes={symbol: _size(symbol, value) for symbol, value in _table(content, "sizes").items()},
    )


def _size(symbol: str, value: Any) -> int:
    if not symbol.isidentifier() or type(value) is not int or not 0 <= value < 2**31:
        raise InputError(
            "sizes: expected whole numbers from 0 to 2147483647 by symbol, such as u0 = 6144;"
            f" found {symbol} = {value!r}"
        )
    return value


def _compute(sections: Mapping[str, Any]) -> dict[str, Price]:
    _refuse_unknown(sections, SOURCES, "compute")
    prices: dict[str, Price] = {}
    for source in sections:
        for operation, value in _table(sections, source).items():
            if operation in prices:
                raise InputError(f"{operation!r} has two prices; keep one of them")
            prices[operation] = Price(time_us=_time(value, repr(operation)), source=source)
    return prices


def _all_transfers(entries: list[Any]) -> tuple[Transfers, ...]:
    found: dict[tuple[str, int, int], Transfers] = {}
    for k, entry in enumerate(entries):
        one = _transfers(entry, f"transfers {k}")
        if one.num_nodes > one.num_ranks:
            raise InputError(
                f"transfers {k}: expected at most as many nodes as ranks; found {one.num_nodes} and"
                f" {one.num_ranks}"
            )
        if found.setdefault((one.kind, one.num_ranks, one.num_nodes), one) is not one:
            raise InputError(
                f"transfers {k}: {one.kind} of {one.num_ranks} ranks on {one.num_nodes} nodes has"
                " an entry already; keep one of them"
            )
    return tuple(found.values())


def _transfers(entry: Any, where: str) -> Transfers:
    if not isinstance(entry, dict):
        raise InputError(f"{where}: expected a table, found {entry!r}")
    _refuse_unknown(entry, _TRANSFER_KEYS, where)
    kind, source = _known_kind(entry.get("kind"), where), entry.get("source")
    if source not in SOURCES:
        raise InputError(f"{where}: expected a source among {', '.join(SOURCES)}, found {source!r}")
    points = _read_points(entry.get("points"), where)
    if not points:
        raise InputError(f"{where}: expected points = [[bytes, microseconds], ...], found none")
    gb_per_s = entry.get("gb_per_s")
    if gb_per_s is not None and not (
        SLOWEST_GB_PER_S <= _number_of(gb_per_s, f"{where}, gb_per_s") <= FASTEST_GB_PER_S
    ):
        raise InputError(
            f"{where}: gb_per_s must be in GB/s, 10**9 bytes a second, between"
            f" {SLOWEST_GB_PER_S:g} and {FASTEST_GB_PER_S:g}; found {gb_per_s!r}"
        )
    return Transfers(
        kind=kind,
        num_ranks=_count(entry, "ranks", where),
        num_nodes=_count(entry, "nodes", where),
        source=source,
        points=points,
        bytes_per_us=None if gb_per_s is None else gb_per_s * 1e3,
    )


def _read_points(value: Any, where: str) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, list) or not all(
        isinstance(point, list) and len(point) == 2 for point in value
    ):
        raise InputError(
            f"{where}: expected points = [[bytes, microseconds], ...], found {value!r}"
        )
    points: list[tuple[int, float]] = []
    for size_bytes, time_us in value:
        if (
            type(size_bytes) is not int
            or not 1 <= size_bytes <= LARGEST_MESSAGE_BYTES
            or not _time(time_us, where)
        ):
            raise InputError(
                f"{where}: bytes must be a whole number from 1 to {LARGEST_MESSAGE_BYTES} and times"
                f" above 0; found [{size_bytes!r}, {time_us!r}]"
            )
        if points and size_bytes <= points[-1][0]:
            raise InputError(
                f"{where}: the bytes of points must increase; found {size_bytes} after"
                f" {points[-1][0]}"
            )
        points.append((size_bytes, float(time_us)))
    return tuple(points)


def _known_kind(kind: Any, where: str) -> CollectiveKind:
    if kind not in PRICED_KINDS:
        raise InputError(
            f"{where}: expected a kind among {', '.join(PRICED_KINDS)}, found {kind!r}"
        )
    return CollectiveKind(kind)


def _refuse_unknown(entry: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    unknown = sorted(set(entry) - set(known))
    if unknown:
        raise InputError(
            f"{where}: expected the keys {', '.join(known)}, found {', '.join(unknown)}"
        )


def _time(value: Any, where: str) -> float:
    if _number_of(value, where) > LONGEST_US:
        raise InputError(f"{where}: expected at most a day, in microseconds; found {value!r}")
    return float(value)


def _number_of(value: Any, where: str) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value <= sys.float_info.max  # also of an int that no float can hold
    ):
        raise InputError(f"{where}: expected a finite number, 0 or more; found {value!r}")
    return float(value)


def _count(entry: Mapping[str, Any], key: str, where: str) -> int:
    value = entry.get(key)
    if type(value) is not int or not 1 <= value <= MOST_RANKS:
        raise InputError(
            f"{where}: expected {key} to be a whole number from 1 to {MOST_RANKS}, found {value!r}"
        )
    return value


def _text(content: Mapping[str, Any], key: str) -> str:
    value = content.get(key)
    if not isinstance(value, str):
        raise InputError(f"expected {key} to be a text, found {value!r}")
    return value


def _table(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = content.get(key, {})
    if not isinstance(value, dict):
        raise InputError(f"expected {key} to be a table, found {value!r}")
    return value


def _list(content: Mapping[str, Any], key: str) -> list[Any]:
    value = content.get(key, [])
    if not isinstance(value, list):
        raise InputError(f"expected {key} to be an array of tables, found {value!r}")
    return value


def _number(value: float, *, digits: int = 3) -> str:
    return f"{value:.{digits}f}".rstrip("0") + ("0" if round(value, digits) == round(value) else "")


def _points(points: tuple[tuple[int, float], ...]) -> str:
    return f"[{', '.join(f'[{size}, {_number(time_us)}]' for size, time_us in points)}]"
