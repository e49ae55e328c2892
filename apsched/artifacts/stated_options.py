"""The stated options of a command, kept beside its answer: as flags of the same command, and of the
commands that use its answer.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from apsched.config import Option, Unit
from apsched.options_table import BY_NAME, SETTINGS, in_group

APPLY_FLAGS = tuple(
    flag
    for group in ("source", "costs", "contention")
    for flag in (option.flag for option in in_group(group))
)
"""Options that ``apsched apply`` takes, too: those that make the graph and its prices."""


def stated_options(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return flag -> value of the options that differ from the default, in the order of the
    command's options.
    """
    return {
        BY_NAME[name].flag: value
        for name, value in args.items()
        if name in BY_NAME and value not in (None, False, []) and not _is_default(name, value)
    }


def _is_default(name: str, value: Any) -> bool:
    """Whether ``value`` is the text that the command line has where nothing is typed."""
    return BY_NAME[name].unit is Unit.TEXT and BY_NAME[name].default == value


def words(options: Mapping[str, Any], flags: Sequence[str] | None = None) -> str:
    """Return ``options`` as words of a shell; with ``flags`` only those."""
    arguments: list[str] = []
    for flag, value in options.items():
        if flags is not None and flag not in flags:
            continue
        for one in value if isinstance(value, list) else [value]:
            arguments += [flag] if one is True else [flag, str(one)]
    return shlex.join(arguments)


def backend_arguments(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of ``apsched.backend`` that stand for ``options``, as Python writes
    them.
    """
    found = {
        option.name: repr(_as_python(option, options[option.flag]))
        for option in SETTINGS
        if option.flag in options
    }
    if "--costs" in options:
        found.pop("cluster", None)
        cluster = f", cluster={str(options['--cluster'])!r}" if "--cluster" in options else ""
        found["cost_model"] = f"apsched.load_cost_model({str(options['--costs'])!r}{cluster})"
    return found


def _as_python(option: Option, value: Any) -> Any:
    """Return the typed value of ``option`` as a setting: numbers as numbers, sizes as typed."""
    if option.unit in (Unit.COUNT, Unit.NUMBER, Unit.SHARE):
        return option.read(value)
    if option.several and option.parse is not None:
        return option.read(",".join(value))
    return value if option.unit is Unit.SWITCH else str(value)
