"""The user's request for kept parameters: ``none``, ``all``, ``auto``, or a file of names.

A file has an entry a line, without ``#`` comments: the name of a parameter, or a regular expression
that fits all of its name. With ``@node`` behind it the parameter is resharded in its node: each
process rank keeps one part, and backward gathers it in the node. A parameter that another entry
keeps is kept. In a step of several micro-batches ``@next`` has the parameter gathered from backward
to the next forward, and ``@sum`` its gradients added and reduced once. With ``@sum-shards`` (HSDP)
the reduced shards of its gradients are added and all-reduced once, if no entry has it with
``@sum``.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from os import PathLike
from pathlib import Path

from apsched.errors import InputError
from apsched.names import (
    IN_NODE,
    NEXT,
    SUM,
    SUM_SHARDS,
    in_node,
    mark_of,
    marked,
    name_of,
)
from apsched.problem.plan.rules import Plan
from apsched.whole_step.choices import ALL, NONE, Choice

AUTO = "auto"
_WHICH = {
    "": "forward and backward both gather",
    IN_NODE: (
        "forward and backward both gather, over several nodes with several of their process ranks"
        " on each,"
    ),
    NEXT: "forward gathers, in a step of several micro-batches (accumulate),",
    SUM: (
        "have a gradient that backward reduces, in a step of several micro-batches (accumulate),"
    ),
    SUM_SHARDS: (
        "have a gradient that backward reduces to shards and then over replicas (HSDP), in a step"
        " of several micro-batches (accumulate),"
    ),
}
_OTHER_NODES = ", or state the cluster it was chosen for, whose ranks_per_node make the nodes"
_WITHOUT_SPACE = re.compile(rf"(?<=\S)({IN_NODE}|{NEXT}|{SUM_SHARDS}|{SUM})$")
KEPT_FILE = "kept.txt"
"""File of an answer that has the names of the parameters kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRequest:
    """The parameters to keep."""

    mode: str = NONE
    """``none``, ``all``, ``auto``, or ``names``."""
    entries: tuple[str, ...] = ()
    """Names and regular expressions, of ``names``."""
    is_default: bool = False
    """Whether nothing is stated: where a step has no such choice, none is made."""

    def chosen(self, names: Sequence[str], label: str = "--keep") -> Choice:
        """Return those of ``names`` that are kept; of ``auto`` none is known. ``names`` are the
        parameters that both graphs gather, and once more with ``@node`` those that can be
        resharded in their node.

        ``InputError`` for an entry that is none of these.
        """
        for entry in self.entries:
            if not _fits(entry, names):
                same = [name for name in names if mark_of(name) == mark_of(entry)]
                known = f"such as {_nearest(entry, same)}" if same else "there are none"
                other = "" if same or mark_of(entry) != IN_NODE else _OTHER_NODES
                raise InputError(
                    f"{label}: expected parameters that {_WHICH[mark_of(entry)]} ({known}), found"
                    f" none that {entry!r} fits; drop that entry{other}"
                )
        return self.fitting(names)

    def fitting(self, names: Sequence[str]) -> Choice:
        """As :meth:`chosen`, for one of several graphs: an entry may be about another."""
        if self.mode == ALL:
            return Choice(name for name in names if mark_of(name) not in (IN_NODE, SUM_SHARDS))
        found = Choice(name for entry in self.entries for name in _fits(entry, names))
        whole = {name_of(entry) for entry in found if mark_of(entry) == SUM}
        return found - {*map(in_node, found), *(marked(name, SUM_SHARDS) for name in whole)}


DEFAULT = KeepRequest(mode=AUTO, is_default=True)
"""The request of a step about which nothing is stated."""


def of_direction(keep: KeepRequest, direction: str, label: str = "--keep") -> KeepRequest:
    """Return ``keep``, a request for graphs of ``direction``; ``InputError`` where it would have a
    single graph keep parameters.
    """
    if direction in ("forward", "backward") and keep.mode != NONE:
        raise InputError(
            f"{label}: expected forward and backward, which keep parameters together, found"
            f" --direction {direction}; choose --direction both, or keep none"
        )
    return keep


def _fits(entry: str, names: Sequence[str]) -> list[str]:
    """Return the parameter called ``entry``; else those that it fits as a regular expression."""
    pattern, among = name_of(entry), [n for n in names if mark_of(n) == mark_of(entry)]
    return [n for n in among if n == entry] or [
        n for n in among if re.fullmatch(pattern, name_of(n))
    ]


def _nearest(entry: str, names: Sequence[str]) -> str:
    """Return the first of those ``names`` that are most like ``entry``."""
    return max(names, key=lambda name: SequenceMatcher(a=name, b=entry).ratio())


def keep_request(
    stated: str | PathLike[str] | Iterable[str] | None, label: str = "--keep"
) -> KeepRequest:
    """Return the stated request: ``none``, ``all``, ``auto``, the path of a file, or in Python a
    sequence of names; ``None`` is ``none``.
    """
    if stated is None:
        return KeepRequest()
    if isinstance(stated, str) and stated in (NONE, ALL, AUTO):
        return KeepRequest(mode=stated)
    if isinstance(stated, str | PathLike):
        return KeepRequest(mode="names", entries=_checked(_entries(stated, label), label))
    entries = tuple(stated) if isinstance(stated, Iterable) else ()
    if not entries or not all(isinstance(entry, str) for entry in entries):
        raise InputError(
            f"{label}: expected auto, none, all, a file or names of parameters; found {stated!r}"
        )
    return KeepRequest(mode="names", entries=_checked(entries, label))


def of_one_micro_batch(request: KeepRequest, label: str) -> KeepRequest:
    """Return ``request``; ``InputError`` if it has entries about several micro-batches."""
    several = next((e for e in request.entries if mark_of(e) in (NEXT, SUM, SUM_SHARDS)), None)
    if several is not None:
        raise InputError(
            f"{label}: expected parameters that are kept from forward to backward, found"
            f" {several!r}, an entry of a step of several micro-batches; replay such a step with"
            " apply_fsdp2_micro_batches, or drop the entries with @next, @sum"
            " and @sum-shards"
        )
    return request


def plan_for(plan: Plan, request: KeepRequest) -> Plan:
    """Return ``plan`` for a solve that keeps the parameters of ``request``."""
    return replace(plan, chooses_kept=request.mode == AUTO)


def kept_file(kept: Choice) -> bytes:
    """Return the file of an answer: the names kept, sorted, one a line."""
    return "".join(f"{name}\n" for name in sorted(kept)).encode()


def _entries(path: str | PathLike[str], label: str) -> tuple[str, ...]:
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise InputError(
            f"{label}: expected auto, none, all or a readable file with a parameter a line, found"
            f" {str(path)!r}: {error}"
        ) from None
    entries = (" ".join(line.partition("#")[0].split()) for line in lines)
    return tuple(entry for entry in entries if entry)


def _checked(stated: tuple[str, ...], label: str) -> tuple[str, ...]:
    """Return the entries ``stated``, with a space before their marks; ``InputError`` for one that
    is no regular expression.
    """
    entries = tuple(_WITHOUT_SPACE.sub(r" \1", entry) for entry in stated)
    for entry in entries:
        try:
            re.compile(name_of(entry))
        except re.error as error:
            raise InputError(
                f"{label}: expected the name of a parameter or a regular expression, found"
                f" {entry!r}: {error}"
            ) from None
    return entries
