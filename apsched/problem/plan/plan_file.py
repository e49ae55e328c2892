"""Plan files: the rules of a plan as TOML (``[[rule]]``) or JSON (``{"rule": [...]}``), whatever
the file is called.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any

from apsched.errors import InputError
from apsched.problem.plan.rules import Plan, Rule

_LARGEST_FILE_BYTES = 1 << 24
_KEYS = tuple(field.name for field in fields(Rule))


def load_plan(path: str | PathLike[str]) -> Plan:
    """Return the plan in the file ``path``; ``InputError`` names the file, the rule and the
    error.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read the plan {path}: {error.strerror or error}") from None
    return parse_plan(content, str(path))


def as_plan(plan: Plan | str | PathLike[str] | None) -> Plan:
    """Return a plan as handed to the API: a plan, the path of a plan file, or none."""
    if plan is None:
        return Plan()
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, str | PathLike):
        return load_plan(plan)
    raise InputError(
        f"plan: expected an apsched.Plan, the path of a plan file, or None; found {plan!r}"
    )


def parse_plan(content: bytes, path: str) -> Plan:
    """Return the plan that ``content`` states."""
    data = _read(content, path)
    if not isinstance(data, dict) or not isinstance(data.get("rule"), list) or not data["rule"]:
        raise InputError(
            f"{path}: expected rules, each as a table [[rule]] (TOML) or in the list 'rule' (JSON);"
            " found none"
        )
    _check_keys(data, ("rule",), path)
    return Plan(
        tuple(_rule(values, f"{path}: rule {i + 1}") for i, values in enumerate(data["rule"]))
    )


def _read(content: bytes, path: str) -> Any:
    if len(content) > _LARGEST_FILE_BYTES:
        raise InputError(f"{path}: expected a plan, found more than {_LARGEST_FILE_BYTES} bytes")
    try:
        text = content.decode("utf-8-sig")
        if Path(path).suffix == ".json" or text.lstrip().startswith("{"):
            return json.loads(text)
        return tomllib.loads(text)
    except UnicodeDecodeError:
        raise InputError(
            f"{path}: expected a plan in TOML or JSON, found something that is no text"
        ) from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}: expected JSON, found an error in line {error.lineno}, column"
            f" {error.colno}: {error.msg.removesuffix(' at')}; correct the file"
        ) from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        hint = (
            "; regular expressions stand in single quotes: match = 'layers\\.0\\..*'"
            if "\\" in str(error)
            else ""
        )
        raise InputError(f"{path}: expected TOML, found: {error}{hint}") from None


def _rule(values: object, where: str) -> Rule:
    if not isinstance(values, dict):
        raise InputError(f"{where}: expected keys and values, found {values!r}")
    _check_keys(values, _KEYS, where)
    if "match" not in values:
        raise InputError(
            f"{where}: expected match, a regular expression for names of parameters; found none"
        )
    try:
        return Rule(**values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _check_keys(values: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in values:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(f"{where}: expected {', '.join(known)}; found {key!r}{meant}")
