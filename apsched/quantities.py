"""Reads the quantities that people type: ``60GiB``, ``none``, ``floor+2GiB``, ``0.1%``, ``500MB``,
``dp=0-63``. No torch here.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from apsched.errors import InputError

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", start=1)},
}
_BYTES = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(?P<unit>[a-z]*)", re.IGNORECASE)
_BYTES_EXAMPLES = "60GiB, 500MB or 1048576"
_LARGEST_BYTES = 2**62
_RANKS = re.compile(r"(?P<first>\d{1,9})(?:-(?P<last>\d{1,9})(?::(?P<step>\d{1,9}))?)?")
_MOST_RANKS = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCap:
    """A memory cap as stated: a number of bytes, none, or relative to the least that is
    feasible.
    """

    size_bytes: int | None = None
    """Bytes (above the least feasible where ``above_floor``); ``None`` for no cap."""
    above_floor: bool = False


def parse_bytes(text: str, label: str = "size") -> int:
    """Return the bytes that ``text`` states, rounded down; 1 kB is 1000 bytes, 1 KiB is 1024. A
    number without a unit is whole bytes.

    Raises ``InputError``, which names ``label``, where it is no such quantity.
    """
    match = _BYTES.fullmatch(text.strip())
    factor = _UNITS.get(match["unit"].lower()) if match else None
    if match is None or factor is None:
        raise InputError(
            f"{label}: expected a number of bytes such as {_BYTES_EXAMPLES}; found {text!r}"
        )
    number = Fraction(match["number"])
    if not match["unit"] and number.denominator != 1:
        raise InputError(
            f"{label}: expected whole bytes, or a number with a unit; found {text!r}; add the unit,"
            f" such as {match['number']}GiB"
        )
    size_bytes: int = math.floor(number * factor)
    if size_bytes > _LARGEST_BYTES:
        raise InputError(f"{label}: expected at most 4 EiB; found {text!r}")
    return size_bytes


def parse_optional_bytes(text: str, label: str = "size") -> int | None:
    """Return the bytes that ``text`` states, or ``None`` for ``none``."""
    return None if _is_none(text) else parse_bytes(text, label)


def parse_memory_cap(text: str, label: str = "--memory-cap") -> MemoryCap:
    """Return the cap that ``text`` states: bytes, ``none``, ``floor`` or ``floor+2GiB``."""
    stripped = text.strip()
    if _is_none(stripped):
        return MemoryCap()
    head, plus, rest = stripped.partition("+")
    if head.strip().lower() != "floor":
        if not _BYTES.fullmatch(stripped):
            raise InputError(
                f"{label}: expected bytes such as {_BYTES_EXAMPLES}, or none, floor or floor+2GiB;"
                f" found {text!r}"
            )
        return MemoryCap(size_bytes=parse_bytes(stripped, label))
    return MemoryCap(size_bytes=parse_bytes(rest, label) if plus else 0, above_floor=True)


def parse_share(text: str, label: str = "share") -> float:
    """Return the share from 0 to 1 that ``text`` states, such as ``0.1%`` or ``0.001``."""
    stripped = text.strip()
    number = stripped.removesuffix("%").strip()
    try:
        value = float(number) / (100 if stripped.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise InputError(
            f"{label}: expected a share between 0 and 1, such as 0.1% or 0.001; found {text!r}"
        )
    return value


def parse_count(text: str, label: str = "count", *, least: int = 0) -> int:
    """Return the whole number that ``text`` states, at least ``least``."""
    stripped = text.strip()
    if not (stripped.isascii() and stripped.isdigit()) or not least <= int(stripped) < 2**31:
        raise InputError(
            f"{label}: expected a whole number from {least} to 2147483647; found {text!r}"
        )
    return int(stripped)


def checked_count(value: object, label: str, *, least: int = 0) -> int:
    """Return ``value``, a whole number that is at least ``least``; ``InputError``, which names
    ``label``, where it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise InputError(
            f"{label}: expected a whole number from {least} to 2147483647; found {value!r}"
        )
    return value


def parse_hints(text: str, label: str = "hints") -> dict[str, int]:
    """Return symbol -> size, as ``u0=6144,u1=512`` states them; none for an empty text."""
    hints = {}
    for part in filter(None, text.split(",")):
        symbol, equals, size = part.partition("=")
        if not equals or not symbol.strip().isidentifier():
            raise InputError(
                f"{label}: expected SYMBOL=SIZE such as u0=6144; found {part.strip()!r}"
            )
        hints[symbol.strip()] = parse_count(size, label)
    return hints


def parse_optional_count(text: str, label: str = "count", *, least: int = 0) -> int | None:
    """Return the whole number that ``text`` states, or ``None`` for ``none``."""
    return None if _is_none(text) else parse_count(text, label, least=least)


def parse_number(text: str, label: str = "number") -> float:
    """Return the finite number >= 0 that ``text`` states."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise InputError(f"{label}: expected a finite number >= 0; found {text!r}")
    return value


def parse_group_ranks(text: str, label: str = "--group-ranks") -> tuple[str, tuple[int, ...]]:
    """Return name and process ranks of the process group that ``text`` states: ``dp=0-63``,
    ``tp=0,8,16,24``, ``dp=0-56:8`` (every eighth).
    """
    name, equals, words = text.rpartition("=")
    ranks: list[int] = []
    for word in words.split(","):
        match = _RANKS.fullmatch(word.strip())
        if not (name and equals and match) or match["step"] == "0":
            raise InputError(
                f"{label}: expected the process ranks of a group, such as dp=0-63, tp=0,8,16,24 or"
                f" dp=0-56:8; found {text!r}"
            )
        first, last = int(match["first"]), int(match["last"] or match["first"])
        found = range(first, last + 1, int(match["step"] or 1))
        if len(found) > _MOST_RANKS:
            raise InputError(
                f"{label}: expected at most {_MOST_RANKS} process ranks; found {text!r}"
            )
        ranks += found
    return name, checked_group_ranks({name: ranks}, label)[name]


def checked_group_ranks(
    stated: Mapping[str, Sequence[int]] | None, label: str = "group_ranks"
) -> dict[str, tuple[int, ...]]:
    """Return the process ranks of each group that are ``stated``; InputError, which names
    ``label``, where they are none.
    """
    if not isinstance(stated, Mapping | None):
        raise InputError(f"{label}: expected {{name: process ranks}}, found {stated!r}")
    found: dict[str, tuple[int, ...]] = {}
    for name, ranks in (stated or {}).items():
        whole = isinstance(ranks, Sequence) and all(
            isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in ranks
        )
        if not isinstance(name, str) or not whole or not 0 < len(ranks) == len({*ranks}):
            raise InputError(
                f"{label}: expected distinct process ranks from 0 on, at least one, for the name of"
                f" a process group; found {name!r}: {ranks!r}"
            )
        found[name] = tuple(ranks)
    return found


def parse_module(text: str, label: str = "--import") -> str:
    """Return the name of a Python module."""
    if not all(part.isidentifier() for part in text.split(".")):
        raise InputError(
            f"{label}: expected the name of a module, such as my_job.ops; found {text!r}"
        )
    return text


def show_bytes(size_bytes: int | None) -> str:
    """Return ``size_bytes`` for people, in binary units: ``59.61 GiB``."""
    if size_bytes is None:
        return "none"
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(size_bytes) >= 1024**power:
            return f"{size_bytes / 1024**power:.2f} {unit}"
    return f"{size_bytes} B"


def exact_bytes(size_bytes: int) -> str:
    """Return ``size_bytes`` as people type it, exactly and as short as possible: ``100MB``."""
    fitting = (
        f"{size_bytes // factor}{_shown_unit(unit)}"
        for unit, factor in _UNITS.items()
        if size_bytes % factor == 0
    )
    return min(fitting, key=len)


def _shown_unit(unit: str) -> str:
    return unit.upper().replace("I", "i").replace("KB", "kB")


def show_gap(gap: float) -> str:
    """Return a gap between a figure and its bound, a share, for people; a gap is not shown as 0."""
    percent = 100 * gap
    return "< 0.001 %" if 0 < percent < 0.0005 else f"{percent:.3f} %"


def show_us(duration_us: float) -> str:
    """Return a duration for people: in milliseconds from one millisecond on."""
    return f"{duration_us / 1000:,.3f} ms" if duration_us >= 1000 else f"{duration_us:.2f} µs"


def _is_none(text: str) -> bool:
    return text.strip().lower() == "none"
