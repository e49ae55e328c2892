"""The options that a command was given, kept beside what it found: as flags of the same command,
and of those that use its answer.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

_DEFAULTS = {"direction": "both", "solver": "cp-sat"}
_ELSEWHERE = (
    "run",
    "source",
    "out",
    "json",
    "metrics",
    "vary",
    "what_if",
    "full",
    "slowdown",
    "ignore",
    "jobs",
    "engine",
)
"""What is no option of a search: where answers go, how they are printed, and what makes a study of
many.
"""
APPLY_FLAGS = (
    *("--mesh", "--seq", "--batch", "--layers", "--ac", "--direction"),
    *("--costs", "--cluster", "--collectives", "--unfused", "--contention"),
    "--unpacked-limit",
)
"""Options that ``apsched apply`` takes, too: those that make the graph and its prices."""
_SETTINGS = {
    "--cluster": str,
    "--memory-cap": str,
    "--bucket-cap": str,
    "--in-flight-cap": str,
    "--max-topo-span": int,
    "--max-prefetch": int,
    "--max-compute-move": int,
    "--plan": str,
    "--bitwise": bool,
    "--contention": str,
    "--second-group": bool,
    "--budget": float,
    "--seed": int,
}
"""Options that are settings of ``apsched.backend``, under the same names."""


def stated_options(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return flag -> value of what is not the default, in the order of the command's options."""
    return {
        flag_of(name): value
        for name, value in args.items()
        if name not in _ELSEWHERE
        and value not in (None, False, [])
        and _DEFAULTS.get(name) != value
    }


def flag_of(name: str) -> str:
    """Return the flag of an option's name: ``memory_cap`` -> ``--memory-cap``."""
    return f"--{name.replace('_', '-')}"


def words(options: Mapping[str, Any], flags: Sequence[str] | None = None) -> str:
    """Return ``options`` as words of a shell; with ``flags`` only those."""
    said: list[str] = []
    for flag, value in options.items():
        if flags is not None and flag not in flags:
            continue
        for one in value if isinstance(value, list) else [value]:
            said += [flag] if one is True else [flag, str(one)]
    return shlex.join(said)


def backend_arguments(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of ``apsched.backend`` that stand for ``options``, as Python writes
    them.
    """
    found = {}
    for flag, kind in _SETTINGS.items():
        if flag in options:
            value = None if kind is int and options[flag] == "none" else kind(options[flag])
            found[flag.removeprefix("--").replace("-", "_")] = repr(value)
    if "--costs" in options:
        found.pop("cluster", None)
        cluster = f", cluster={str(options['--cluster'])!r}" if "--cluster" in options else ""
        found["cost_model"] = f"apsched.load_cost_model({str(options['--costs'])!r}{cluster})"
    return found
