"""Limits and choices of the user; frozen, checked on construction. The form of an option of the
command line (:mod:`apsched.options_table` lists them).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, TypeVar

from apsched.errors import InputError

DEFAULT_COMPUTE_MOVE = 200
"""Default for the places by which compute may move: two layers of LLaMA; larger values did not
help.
"""


OPTIMIZERS = ("adamw", "adamw-bf16", "sgd", "none")
DEFAULT_OPTIMIZER = "adamw"
DEFAULT_RESERVE = 0.05
"""Share of a device's memory kept free for fragmentation. With expandable segments the allocator of
torch needed at most 2.9 % of 80 GiB in addition to the tensors (on an H200, docs/memory.md).
"""
RESERVE_OF_FIXED_SEGMENTS = 0.12
"""The same without expandable segments, torch's default: at most 11.7 % of 80 GiB."""


def is_number(value: object) -> bool:
    """Whether ``value`` is a number, and no switch."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """Limits that a schedule must keep; ``None`` is no limit."""

    memory_cap_bytes: int | None = None
    """Live bytes at any step, parameters and other inputs included."""
    bucket_cap_bytes: int | None = None
    """Bytes of one bucket, counted once (a collective that is larger alone stays alone)."""
    max_topo_span: int | None = None
    """Rank of the latest member of a bucket minus rank of the first."""
    max_prefetch: int | None = None
    """Compute nodes between a start and the first compute node that needs its result."""
    in_flight_cap_bytes: int | None = None
    """Output bytes of all collectives, on-path ones too, started and not yet waited for."""
    max_compute_move: int | None = 0
    """Places among the compute nodes by which one of them may move from where it was captured. A
    record that leaves it out keeps compute as captured; where a call has neither record nor
    keyword, and in the commands, it is ``DEFAULT_COMPUTE_MOVE``.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InputError(
                    f"{field.name}: expected a whole number >= 0 or None, found {value!r}"
                )


DEFAULT_NOISE = 0.2
DEFAULT_MEASURE = "worst"
MEASURES = ("mean", DEFAULT_MEASURE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioOptions:
    """Number of scenarios, their distance from the costs, and the objective."""

    count: int
    noise: float = DEFAULT_NOISE
    """sigma of every factor."""
    measure: str = DEFAULT_MEASURE
    """``mean`` or ``worst`` step time over the scenarios."""

    def __post_init__(self) -> None:
        if (
            isinstance(self.count, bool)
            or not isinstance(self.count, int)
            or not 1 <= self.count <= 10_000
        ):
            raise InputError(
                f"scenarios: expected a whole number from 1 to 10000, found {self.count!r}"
            )
        if not is_number(self.noise) or not 0 < self.noise <= 2:
            raise InputError(
                f"noise: expected a number above 0 and at most 2, found {self.noise!r}"
            )
        if self.measure not in MEASURES:
            raise InputError(f"robust: expected {' or '.join(MEASURES)}, found {self.measure!r}")


def scenario_options(
    count: int | None, noise: float | None, measure: str | None, *, dashes: str = ""
) -> ScenarioOptions | None:
    """Return the scenarios as requested; ``None`` for none. ``InputError`` where ``noise`` or
    ``robust`` is stated without any; ``dashes`` come before the names in it.
    """
    stated = {
        name: value for name, value in (("noise", noise), ("measure", measure)) if value is not None
    }
    if count is None:
        for name in stated:
            flag = dashes + ("robust" if name == "measure" else name)
            raise InputError(
                f"{flag}: it is about scenarios; state their number with {dashes}scenarios"
            )
        return None
    return ScenarioOptions(count=count, **stated)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class MilpOptions:
    """Solver and time limit of the MILP; checked where it runs."""

    solver_name: str = "PULP_CBC_CMD"
    """As PuLP calls it."""
    time_limit_s: float = 60.0
    """Seconds of all its solves together."""

    def __post_init__(self) -> None:
        if not 0 < self.time_limit_s < float("inf"):
            raise InputError(
                "time_limit_s: expected a finite number of seconds above 0, found"
                f" {self.time_limit_s!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveOptions:
    """Budget and objective of the search."""

    time_slack: float = 0.001
    """Share of the best step time that lower memory and fewer launches may cost."""
    budget: float = 20.0
    """Most work of a search (evaluations) and of an objective of CP-SAT (deterministic time), not
    seconds.
    """
    seed: int = 0
    num_workers: int = 1
    """Threads of CP-SAT; more than one is not reproducible across machines."""

    def __post_init__(self) -> None:
        if not is_number(self.time_slack) or not 0 <= self.time_slack <= 1:
            raise InputError(
                f"time_slack: expected a share between 0 and 1, found {self.time_slack!r}"
            )
        if not is_number(self.budget) or not 0 <= self.budget < float("inf"):
            raise InputError(f"budget: expected a finite number >= 0, found {self.budget!r}")
        if (
            isinstance(self.seed, bool)
            or not isinstance(self.seed, int)
            or not 0 <= self.seed < 2**31
        ):
            raise InputError(f"seed: expected a whole number from 0 to 2^31-1, found {self.seed!r}")
        if (
            isinstance(self.num_workers, bool)
            or not isinstance(self.num_workers, int)
            or self.num_workers < 1
        ):
            raise InputError(
                f"num_workers: expected a whole number >= 1, found {self.num_workers!r}"
            )


Record = TypeVar("Record", Caps, SolveOptions)
_RECORDS = {"caps": Caps, "options": SolveOptions}
"""Argument of a call -> type of its record."""


def checked_switches(**stated: object) -> None:
    """Raise ``InputError`` for a switch that is neither True nor False; its name is in it."""
    for name, value in stated.items():
        if not isinstance(value, bool):
            raise InputError(f"{name}: expected True or False, found {value!r}")


def checked_texts(**stated: object) -> None:
    """Raise ``InputError`` for an argument that is no text; its name is in it."""
    for name, value in stated.items():
        if not isinstance(value, str):
            raise InputError(f"{name}: expected a text, found {value!r}")


def with_keywords(record: Record, name: str, keywords: Mapping[str, Any]) -> Record:
    """Return ``record``, which a call took as its argument ``name``, with the values of
    ``keywords``, as far as they are not ``None``.

    ``InputError`` for a value that both state, and where ``record`` is none.
    """
    expected = _RECORDS[name]
    if not isinstance(record, expected):
        raise InputError(f"{name}: expected apsched.{expected.__name__}(...), found {record!r}")
    usual = type(record)()
    stated = {keyword: value for keyword, value in keywords.items() if value is not None}
    for keyword in stated:
        if getattr(record, keyword) != getattr(usual, keyword):
            raise InputError(
                f"{keyword}: expected it once, found it in {name} and as a keyword; leave one out"
            )
    return replace(record, **stated)


class Unit(StrEnum):
    """The kind of value of an option."""

    TEXT = "text"
    COUNT = "count"
    BYTES = "bytes"
    MEMORY_CAP = "memory cap"
    SHARE = "share"
    NUMBER = "number"
    SWITCH = "switch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option on all its surfaces."""

    name: str
    """Of the setting, of the axis of a study, and, with dashes, of the flag."""
    group: str
    """Heading of the help, under which a command takes all or none."""
    unit: Unit
    help: str
    metavar: str = ""
    """Empty for a switch."""
    parse: Callable[[str, str], Any] | None = None
    """``(text, label)`` -> value; ``None``: the text is the value."""
    default: Any = None
    """Value where nothing is stated."""
    field: str = ""
    """Of the record that carries it, where that is not ``name``."""
    typed: str = ""
    """The name on the command line, where that is not ``name``."""
    several: bool = False
    """May be given again."""
    setting: bool = False
    """``apsched.backend`` has it, under the same name."""
    axis: bool = True
    """``apsched study --vary`` has it."""

    @property
    def flag(self) -> str:
        """As typed: ``--memory-cap``."""
        return f"--{(self.typed or self.name).replace('_', '-')}"

    @property
    def field_name(self) -> str:
        """Of the record that carries it: ``memory_cap_bytes``."""
        return self.field or self.name

    def read(self, stated: Any, label: str = "") -> Any:
        """Return the parsed value of a text or a value; ``InputError`` names ``label``, or the
        flag.
        """
        if isinstance(stated, list):  # each time that it was given
            return tuple(self.read(one, label) for one in stated)
        if isinstance(stated, str) and self.parse is not None:
            return self.parse(stated, label or self.flag)
        return stated


def one_of(*words: str) -> Callable[[str, str], str]:
    """Return a parser that takes one of ``words``, and no other."""

    def parse(text: str, label: str) -> str:
        if text not in words:
            expected = f"{', '.join(words[:-1])} or {words[-1]}"
            raise InputError(f"{label}: expected {expected}; found {text!r}")
        return text

    return parse
