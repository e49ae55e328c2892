"""``--vary NAME=VALUES``: the options that vary in a study, as typed. Values stay text, as the
options themselves do.

seq=2048,8192                          a list
memory_cap=40GiB,60GiB,none            the same of caps
memory_cap=floor..none:20              20 caps from the least feasible to the memory of the fastest
                                       schedule, both included
seq=2048..8192:4                       4 values, evenly spaced: 2048, 4096, 6144, 8192
mesh=fsdp=64,fsdp=128                  meshes: a comma begins the next one where it names an axis
                                       that the mesh has already
mesh=fsdp=64|fsdp=8,tp=8               with ``|`` only that separates values
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from apsched.config import Unit
from apsched.errors import InputError
from apsched.options_table import BY_NAME, OPTIONS
from apsched.quantities import MemoryCap, exact_bytes, parse_count, parse_memory_cap, parse_number


def _axes(*units: Unit) -> tuple[str, ...]:
    return tuple(option.name for option in OPTIONS if option.axis and option.unit in units)


COUNTS = _axes(Unit.COUNT)
NUMBERS = _axes(Unit.SHARE, Unit.NUMBER)
SPEEDS = ("network", "compute")
SWITCHES = _axes(Unit.SWITCH)
AXES = (
    *_axes(Unit.MEMORY_CAP),
    *("source", *_axes(Unit.TEXT)),
    *COUNTS,
    *_axes(Unit.BYTES),
    *NUMBERS,
    *SWITCHES,
    *SPEEDS,
)
_RANGE = re.compile(r"(?P<first>[^:|,]*)\.\.(?P<last>[^:|,]*):(?P<count>[0-9]+)")
_MOST_VALUES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRange:
    """Evenly spaced memory caps; an end may be ``floor``, the last may be ``none``, the memory that
    the fastest schedule needs.
    """

    first: MemoryCap
    last: MemoryCap
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One option and its values, in the order given, each once."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAxis:
    """Memory caps; ``None`` is the device's memory."""

    caps: tuple[MemoryCap | MemoryRange | None, ...] = (None,)

    @property
    def several(self) -> bool:
        """Whether there is more than one cap."""
        return len(self.caps) > 1 or any(isinstance(cap, MemoryRange) for cap in self.caps)


def parse_vary(texts: Sequence[str]) -> tuple[tuple[Axis, ...], MemoryAxis | None]:
    """Return the axes that ``--vary`` states, in the order of their names, and the memory caps; a
    name given again adds values.
    """
    values: dict[str, list[str]] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not rest.strip():
            raise InputError(f"--vary: expected NAME=VALUES such as seq=2048,8192; found {text!r}")
        if name not in AXES:
            near = get_close_matches(name, AXES, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise InputError(f"--vary: expected one of {', '.join(AXES)}; found {name!r}{hint}")
        values.setdefault(name, []).extend(_values(name, rest))
    memory = values.pop("memory_cap", None)
    axes = tuple(
        Axis(name=name, values=tuple(dict.fromkeys(values[name])))
        for name in AXES
        if name in values
    )
    return axes, MemoryAxis(caps=tuple(dict.fromkeys(map(_memory, memory)))) if memory else None


def axis_text(name: str, value: object) -> str:
    """Return the value of an option as people type it: ``100MB``, ``0.1%``, ``yes``."""
    unit = BY_NAME[name].unit if name in BY_NAME else Unit.TEXT
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if unit is Unit.BYTES and isinstance(value, int):
        return exact_bytes(value)
    if unit is Unit.SHARE and isinstance(value, int | float):
        return f"{100 * value:.12g}%"
    if isinstance(value, float):
        return f"{value:.12g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def label_of(name: str, text: str) -> str:
    """Return the value ``text`` of an axis as tables and reports show it, each value in one way."""
    if name not in (*_axes(Unit.BYTES), *NUMBERS):
        return text
    return axis_text(name, BY_NAME[name].read(text))


def _values(name: str, text: str) -> list[str]:
    if "|" in text:
        pieces = text.split("|")
    elif name == "mesh":
        pieces = _meshes(text)
    else:
        pieces = text.split(",")
    pieces = [piece.strip() for piece in pieces]
    if "" in pieces:
        raise InputError(
            f"--vary: expected a value between the separators of {name}={text}; found none"
        )
    if name == "memory_cap":
        return pieces
    return [value for piece in pieces for value in _spread(name, piece)]


def _meshes(text: str) -> list[str]:
    """Split meshes at the commas that begin a new one: where an axis is named that the mesh has
    already.
    """
    meshes: list[list[str]] = [[]]
    for part in text.split(","):
        axis = part.partition("=")[0].strip()
        if any(known.partition("=")[0].strip() == axis for known in meshes[-1]):
            meshes.append([])
        meshes[-1].append(part.strip())
    return [",".join(mesh) for mesh in meshes]


def _spread(name: str, text: str) -> list[str]:
    """Return the values of a range of numbers; ``text`` itself where it is none."""
    match = _RANGE.fullmatch(text)
    if match is None or name not in COUNTS + NUMBERS:
        if match is not None:
            raise InputError(
                f"--vary: ranges are for memory_cap, {', '.join(COUNTS + NUMBERS)}; found"
                f" {name}={text}"
            )
        return [text]
    count = _count(match, name, match["first"])
    label = f"--vary {name}"
    if name in NUMBERS:
        low, high = parse_number(match["first"], label), parse_number(match["last"], label)
        return [f"{low + (high - low) * k / (count - 1):.12g}" for k in range(count)]
    least, most = parse_count(match["first"], label), parse_count(match["last"], label)
    return [str(least + (most - least) * k // (count - 1)) for k in range(count)]


def _memory(text: str) -> MemoryCap | MemoryRange:
    match = _RANGE.fullmatch(text)
    if match is None:
        return parse_memory_cap(text, "--vary memory_cap")
    first = parse_memory_cap(match["first"] or "floor", "--vary memory_cap")
    last = parse_memory_cap(match["last"] or "none", "--vary memory_cap")
    if first.size_bytes is None:
        raise InputError(
            f"--vary memory_cap: expected a range that begins with bytes or floor; found {text!r}"
        )
    if (
        first.above_floor == last.above_floor
        and last.size_bytes is not None
        and last.size_bytes < first.size_bytes
    ):
        raise InputError(f"--vary memory_cap: expected a range that rises; found {text!r}")
    count = _count(match, "memory_cap", match["first"] or "floor")
    return MemoryRange(first=first, last=last, count=count)


def _count(match: re.Match[str], name: str, first: str) -> int:
    """Return the number of values of a range, whose ends are two of them."""
    whole = f"{name}={match[0]}"
    count = parse_count(match["count"], f"--vary {whole}")
    if count > _MOST_VALUES:
        raise InputError(f"--vary {whole}: expected at most {_MOST_VALUES} values; found {count}")
    if count < 2:
        raise InputError(
            f"--vary {name}: expected a range of at least 2 values, found {whole}; state one value"
            f" alone: {name}={first}"
        )
    return count
