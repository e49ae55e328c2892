r"""Rules of a user for certain collectives, which regular expressions on parameter names select.

A rule states its collectives (``match``, ``kind``, ``direction``) and the decision about them::

    Rule(match=r"output\.weight", forbid=True)
        never in a bucket
    Rule(match=r"layers\.(\d+)\..*", kind="all_gather", group=True, by=r"\1")
        one bucket for each layer
    Rule(match=r"layers\.0\..*", kind="all_gather", prefetch=4)
        launched four compute nodes before the need
    Rule(match=r"norm\.weight", kind="all_gather", start=r"layers\.31\.attention")
        launched right before that module begins
    Rule(match=r"tok_embeddings\.weight", pin=True)
        start and wait stay where they were captured
    Rule(match=r"layers\.31\..*", keep=True)
        these parameters stay gathered from forward to backward

``apsched.problem.plan.plan_file`` reads them from a file, ``apsched.problem.plan.apply`` applies
them to a problem. The solver decides everything else.
"""

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from apsched.errors import InputError
from apsched.kinds import BUCKET_KINDS
from apsched.names import DIRECTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule: its collectives, and the decision about them. Checked when it is made."""

    match: str
    """Regular expression that matches the whole name of the parameter that a collective serves."""
    kind: str | None = None
    """Collectives of this kind only; ``None``: of any."""
    direction: str | None = None
    """Collectives of the ``forward`` or the ``backward`` pass only; ``None``: of both."""
    forbid: bool = False
    """Never in a bucket."""
    group: bool = False
    """All matches of one kind share one bucket, or with ``by`` those for which ``by`` is the
    same.
    """
    by: str = ""
    r"""Label of a group, made of the text that ``match`` captured: ``\1``, ``\g<name>``."""
    closed: bool = False
    """No other collective joins the bucket of the group."""
    pin: bool = False
    """Alone, with start and wait between the compute nodes where they were captured."""
    prefetch: int | None = None
    """Launched so many compute nodes before the first that needs the match (or its group); at the
    beginning where there are fewer.
    """
    start: str | int | None = None
    r"""Launched right before the first compute node of the module that this expression matches
    (``\1`` is the text that ``match`` captured), or before the first compute node of that rank or a
    later one.
    """
    keep: bool | None = None
    """``True``: parameters that match are kept from forward to backward; ``False``: they are
    gathered again. Of the whole step: in a rule of its own, without ``kind`` and ``direction``.
    """

    def __post_init__(self) -> None:
        self._check_types()
        try:
            re.compile(self.match)
            re.compile(self._start_pattern(lambda _: "x"))
        except (re.error, OverflowError) as error:
            raise self._wrong(f"expected regular expressions, found {error}") from None
        try:
            re.sub(self.match, self.by, "")
        except (IndexError, re.error) as error:
            raise self._wrong(
                f"by: '{self.by}' is no template for the groups of match ({error})"
            ) from None
        if self.kind is not None and self.kind not in BUCKET_KINDS:
            raise self._wrong(f"kind: expected {', '.join(BUCKET_KINDS)}; found {self.kind!r}")
        if self.direction is not None and self.direction not in DIRECTIONS:
            raise self._wrong(
                f"direction: expected {' or '.join(DIRECTIONS)}; found {self.direction!r}"
            )
        demanded = [name for name in ("forbid", "group", "pin") if getattr(self, name)]
        timed = [name for name in ("prefetch", "start") if getattr(self, name) is not None]
        if self.keep is not None:
            others = [*demanded, *timed, *(n for n in ("kind", "direction") if getattr(self, n))]
            if others:
                raise self._wrong(
                    f"keep is about the whole step, found {' and '.join(others)}, too; state two"
                    " rules"
                )
        elif not demanded and not timed:
            raise self._wrong(
                "it decides nothing; state forbid, group, pin, prefetch, start or keep"
            )
        if len(demanded) > 1 or len(timed) > 1 or (self.pin and timed):
            raise self._wrong(f"{' and '.join([*demanded, *timed])} contradict each other")
        if not self.group and (self.by or self.closed):
            raise self._wrong(f"{'by' if self.by else 'closed'} belongs to group = true")

    def _check_types(self) -> None:
        for name, of in (
            ("match", str),
            ("by", str),
            ("forbid", bool),
            ("group", bool),
            ("closed", bool),
            ("pin", bool),
        ):
            if not isinstance(getattr(self, name), of):
                expected = {str: "a text", bool: "true or false"}[of]
                raise InputError(f"{name}: expected {expected}, found {getattr(self, name)!r}")
        if not isinstance(self.keep, bool | None):
            raise self._wrong(f"keep: expected true or false, found {self.keep!r}")
        if (
            isinstance(self.prefetch, bool)
            or not isinstance(self.prefetch, int | None)
            or (self.prefetch or 0) < 0
        ):
            raise self._wrong(f"prefetch: expected a whole number >= 0, found {self.prefetch!r}")
        if isinstance(self.start, bool) or not isinstance(self.start, str | int | None):
            raise self._wrong(
                f"start: expected a regular expression or the rank of a node, found {self.start!r}"
            )

    def _wrong(self, what: str) -> InputError:
        return InputError(f"{self}: {what}")

    def _start_pattern(self, value: Callable[[str], str]) -> str:
        return (
            re.sub(r"\\(?:([1-9])|g<(\w+)>)", lambda m: value(m[1] or m[2]), self.start)
            if isinstance(self.start, str)
            else ""
        )

    def start_pattern(self, found: re.Match[str]) -> str:
        """Return the expression of the module to start before, with the text that ``match``
        captured filled in.
        """

        def captured(name: str) -> str:
            return re.escape(found[int(name) if name.isdigit() else name] or "")

        try:
            return self._start_pattern(captured)
        except (IndexError, re.error):
            raise self._wrong(
                f"start: '{self.start}' refers to something that match does not capture"
            ) from None

    def group_name(self, found: re.Match[str]) -> str:
        """Return the label that distinguishes the group of a match from others of this rule."""
        return found.expand(self.by)

    def __str__(self) -> str:
        about = [f"match '{self.match}'", *(word for word in (self.kind, self.direction) if word)]
        return f"{', '.join(about)}: {', '.join(self._demands()) or 'nothing'}"

    def _demands(self) -> Iterable[str]:
        yield from (name for name in ("forbid", "pin") if getattr(self, name))
        if self.group:
            yield " ".join(
                [
                    "group",
                    *([f"by '{self.by}'"] if self.by else []),
                    *(["closed"] if self.closed else []),
                ]
            )
        if self.prefetch is not None:
            yield f"prefetch {self.prefetch}"
        if self.start is not None:
            yield f"start '{self.start}'"
        if self.keep is not None:
            yield "keep" if self.keep else "gather again"


@dataclass(frozen=True, slots=True)
class Plan:
    """The rules of a plan, in their order."""

    rules: tuple[Rule, ...] = ()
    chooses_kept: bool = False
    """Whether it is for a solve that chooses the kept parameters: other solves refuse such rules.
    """

    @property
    def decides_kept(self) -> bool:
        """Whether a rule is about kept parameters."""
        return any(rule.keep is not None for rule in self.rules)


def digest(rules: Iterable[str]) -> str:
    """Return a short digest of the rules of a plan, as text: equal rules, equal digest."""
    return hashlib.sha256("\n".join(rules).encode()).hexdigest()[:16]
