r"""Buckets by module: none, one for each transformer block, or by the user's entries; made into an
:class:`apsched.problem.plan.rules.Plan`.

A bucket is a set of parameters, in order of registration. Entries of a user's plan are regular
expressions on module names::

    tok_embeddings          one bucket
    layers.[0-5]            six: one for each module that it matches
    layers\.\d+             one for each layer
    norm+output             one for both; as a list: ["norm", "output"]
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from torch import nn

from apsched.errors import InputError
from apsched.fx.passes.checkpointing import blocks_of
from apsched.kinds import BUCKET_KINDS, CollectiveKind
from apsched.names import bucket_labels
from apsched.problem.plan.rules import Plan, Rule
from apsched.problem.problem import Problem
from apsched.torch_compat.compilers import plain_parameter_name

_NEAREST = 3
_AND = re.compile(r"(?<!\\[dwsDWS])(?<=\w)\+(?=[A-Za-z(])")
"""A plus between names; at the end of a name, behind a class or before a point it is that of
regular expressions.
"""
DEFAULT_BUCKET = "everything else"
NO_BUCKETS = Plan((Rule(match=".*", forbid=True),))
"""Every collective alone, as captured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleBuckets:
    """Parameters by bucket; in forward order where the plan is in that order."""

    buckets: Mapping[str, tuple[str, ...]]
    """Name of the bucket -> its parameters, in order of registration."""

    def plan(self, problems: Sequence[Problem]) -> Plan:
        """Return the rules that make these buckets, and no others, of the collectives of
        ``problems``.

        The collectives of a bucket can share a launch: parameters that are gathered on another
        group (experts) have buckets of their own.
        """
        rules = []
        for names in self.buckets.values():
            for kind in BUCKET_KINDS:
                keys = {name: _keys_of(problems, name, kind) for name in names}
                parts: list[tuple[dict[str, int], list[str]]] = []
                for name in names:
                    if not keys[name]:
                        continue
                    fitting = (
                        part
                        for part in parts
                        if all(part[0].get(graph, key) == key for graph, key in keys[name].items())
                    )
                    part = next(fitting, None)
                    if part is None:
                        parts.append(part := ({}, []))
                    part[0].update(keys[name])
                    part[1].append(name)
                rules += [
                    Rule(
                        match="|".join(map(re.escape, part)),
                        kind=kind.value,
                        group=True,
                        closed=True,
                    )
                    for _, part in parts
                ]
        return Plan(tuple(rules))


def _keys_of(problems: Sequence[Problem], name: str, kind: CollectiveKind) -> dict[str, int]:
    """Return graph -> key of the collectives of this kind that serve a parameter; empty where they
    can't share launches, or differ.
    """
    keys: dict[str, int] = {}
    for problem in problems:
        of_module = [
            c
            for c in problem.collectives
            if c.module == name and not c.on_path and problem.keys[c.key].kind == kind
        ]
        if not all(c.may_share for c in of_module) or len({c.key for c in of_module}) > 1:
            return {}
        keys.update((problem.name, c.key) for c in of_module)
    return keys


def block_buckets(module: nn.Module) -> ModuleBuckets:
    """Return a bucket for each transformer block, as TorchTitan's ``transformer_block_bucketing``
    and FSDP2 units have it.

    For modules outside of blocks see :func:`apsched.names.bucket_labels`, which also makes the
    baseline ``transformer_block``.
    """
    blocks = blocks_of(module)
    if not blocks:
        raise InputError(
            "expected a model with blocks in a ModuleList or ModuleDict, found none; name the"
            " modules of each bucket (user_buckets)"
        )
    known = frozenset(map(plain_parameter_name, blocks))
    labels = bucket_labels(
        [plain_parameter_name(parameter) for parameter, _ in module.named_parameters()],
        lambda parameter: next((b for b in _modules(parameter) if b in known), ""),
        depth=min(block.count(".") for block in known) or 1,
    )
    buckets: dict[str, list[str]] = {}
    for parameter, label in labels.items():
        buckets.setdefault(label, []).append(parameter)
    return ModuleBuckets(
        buckets={_label(label, names): tuple(names) for label, names in buckets.items()}
    )


def user_buckets(
    entries: Iterable[str | Sequence[str]], parameters: Sequence[str], *, uncovered: str = "error"
) -> ModuleBuckets:
    """Return the buckets that ``entries`` name; ``parameters`` are all names, in order of
    registration.

    Parameters that no entry covers are an ``error``, or with ``uncovered="default"`` share a bucket
    of their own.

    Raises
    ------
    InputError
        For an entry that matches nothing (with the nearest names), a parameter in two buckets, and
        parameters in none.
    """
    if uncovered not in ("error", "default"):
        raise InputError(f"uncovered: expected error or default, found {uncovered!r}")
    modules = list(
        dict.fromkeys(m for parameter in parameters for m in (*_modules(parameter), parameter))
    )
    buckets: dict[str, tuple[str, ...]] = {}
    owner: dict[str, str] = {}
    for entry in entries:
        for label, names in _named(entry, modules, parameters).items():
            for name in names:
                if name in owner:
                    raise InputError(
                        f"buckets: expected each parameter in one bucket, found {name} in"
                        f" {owner[name]!r} and {label!r}"
                    )
                owner[name] = label
            buckets[label] = names
    left = tuple(name for name in parameters if name not in owner)
    if left and uncovered == "error":
        more = f" and {len(left) - _NEAREST} more" if len(left) > _NEAREST else ""
        raise InputError(
            "buckets: expected every parameter in a bucket, found none for"
            f" {', '.join(left[:_NEAREST])}{more};"
            " name their modules, or let a default bucket take them"
        )
    return ModuleBuckets(buckets=buckets | ({DEFAULT_BUCKET: left} if left else {}))


def _named(
    entry: str | Sequence[str], modules: Sequence[str], parameters: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return the buckets of one entry: one for each match, or one for all matches of several
    expressions.
    """
    parts = _AND.split(entry) if isinstance(entry, str) else list(entry)
    matches = [_matching(part, modules) for part in parts]
    if len(parts) == 1:
        return {module: _inside([module], parameters) for module in matches[0]}
    return {"+".join(parts): _inside([module for found in matches for module in found], parameters)}


def _matching(expression: str, modules: Sequence[str]) -> list[str]:
    """Return the modules that an expression matches, without those inside of others that it
    matches.
    """
    try:
        pattern = re.compile(expression)
    except re.error as error:
        raise InputError(
            f"buckets: expected regular expressions on module names, found {expression!r}: {error}"
        ) from None
    found = {module for module in modules if pattern.fullmatch(module)}
    if not found:
        near = (
            get_close_matches(re.sub(r"\\(.)", r"\1", expression), modules, n=_NEAREST, cutoff=0.3)
            or modules[:_NEAREST]
        )
        raise InputError(
            f"buckets: expected modules that {expression!r} matches, found none; the nearest names"
            f" are {', '.join(near)}"
        )
    return [
        module
        for module in modules
        if module in found and not any(outer in found for outer in _modules(module))
    ]


def _inside(modules: Sequence[str], parameters: Sequence[str]) -> tuple[str, ...]:
    chosen = set(modules)
    return tuple(
        name
        for name in parameters
        if name in chosen or any(module in chosen for module in _modules(name))
    )


def _modules(name: str) -> list[str]:
    """Return the modules around ``name``, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:k]) for k in range(1, len(parts))]


def _label(label: str, names: Sequence[str]) -> str:
    """Return the name of a bucket after the blocks: the modules in it."""
    if not label.startswith("behind "):
        return label
    return "+".join(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
