"""Problem + plan -> the problem as the plan restricts it: a pure function; the solver decides
everything that the plan leaves open.

Rules are about collectives that can move (they serve a parameter); collectives on the path of
compute keep to their data anyway. A contradiction among rules, or with the data, is an
``InputError`` here, which names the rule; the solver reports a clash with a cap.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from apsched.errors import InputError
from apsched.names import direction_named
from apsched.problem.plan.bitwise import BITWISE_RULE, fsdp_units
from apsched.problem.plan.check import check_feasible
from apsched.problem.plan.rules import Plan, Rule
from apsched.problem.problem import Problem
from apsched.problem.restriction import Restriction

_NEAREST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Collectives that a rule wants in one bucket."""

    members: tuple[int, ...]
    closed: bool
    rule: int
    payload: tuple[int, ...] = ()
    """Place of each member in the payload, where it matters."""


@dataclass(slots=True)
class Demands:
    """The requirements of a plan's rules on the collectives of one problem, before the check."""

    problem: Problem
    rules: list[str] = field(default_factory=list)
    alone: dict[int, int] = field(default_factory=dict)
    """Collective -> the rule that wants it in no bucket."""
    groups: list[Group] = field(default_factory=list)
    starts: list[tuple[int, int, int]] = field(default_factory=list)
    """(collective, slot of its launch, rule)."""
    waits: dict[int, int] = field(default_factory=dict)
    """Collective -> slot of its wait."""

    def name(self, c: int) -> str:
        """Return the name of a collective for messages: its node and the parameter it serves."""
        collective = self.problem.collectives[c]
        module = f" ({collective.module})" if collective.module else ""
        return f"{self.problem.node_names[collective.start]}{module}"

    def wrong(self, rules: Iterable[int], what: str) -> InputError:
        """Return an error that names these rules, followed by the given text."""
        return InputError(
            f"{self.problem.name}: {' and '.join(self.rules[r] for r in dict.fromkeys(rules))}:"
            f" {what}"
        )


def restricted(problem: Problem, plan: Plan, *, bitwise: bool = False) -> Problem:
    """Return ``problem`` under ``plan``, and with ``bitwise`` in bitwise mode; the same problem
    where nothing is about it. A group of the plan with the members of a bitwise bucket is that
    bucket.
    """
    demanded = demands(problem, plan)
    if bitwise and (units := fsdp_units(problem)):
        rule = len(demanded.rules)
        demanded.rules.append(BITWISE_RULE)
        buckets = {frozenset(unit) for unit in units}
        demanded.groups = [g for g in demanded.groups if frozenset(g.members) not in buckets]
        demanded.groups += [
            Group(members=unit, closed=True, rule=rule, payload=tuple(range(len(unit))))
            for unit in units
        ]
    return impose(demanded)


def demands(problem: Problem, plan: Plan) -> Demands:
    """Return the requirements of ``plan`` on ``problem``."""
    demanded = Demands(problem)
    found = [(rule, matches(problem, rule)) for rule in plan.rules]
    demanded.rules = [f"rule {i + 1} ({rule})" for i, rule in enumerate(plan.rules)]
    for i, (rule, matched) in enumerate(found):
        if rule.forbid or rule.pin:
            demanded.alone |= {c: i for c in matched if c not in demanded.alone}
        if rule.pin:
            for c in matched:
                demanded.starts.append((c, _slot(problem, problem.collectives[c].start), i))
                demanded.waits[c] = _slot(problem, problem.collectives[c].wait)
        if rule.group:
            demanded.groups += _groups(demanded, i, rule, matched)
    mates = {c: group.members for group in demanded.groups for c in group.members}
    for i, (rule, matched) in enumerate(found):
        if rule.prefetch is not None:
            demanded.starts += _prefetched(demanded, i, rule.prefetch, rule.kind, matched, mates)
        if rule.start is not None:
            demanded.starts += [
                (c, _start_slot(demanded, i, rule, match), i) for c, match in matched.items()
            ]
    return demanded


def impose(demanded: Demands) -> Problem:
    """Return the problem with ``demanded`` in its collectives; ``InputError`` where that is
    contradictory.
    """
    problem = demanded.problem
    if not (demanded.alone or demanded.groups or demanded.starts):
        return problem
    groups = _checked_groups(demanded)
    starts: dict[int, tuple[int, list[int]]] = {}
    for c, slot, rule in demanded.starts:
        other, rules = starts.setdefault(c, (slot, []))
        if other != slot:
            raise demanded.wrong(
                [*rules, rule],
                f"{demanded.name(c)} cannot be launched both before compute node {other} and before"
                f" {slot}",
            )
        rules.append(rule)
    collectives = list(problem.collectives)
    for c, collective in enumerate(problem.collectives):
        number, group = groups.get(c, (None, None))
        launch = starts.get(c)
        named = {
            *(launch[1] if launch else ()),
            *([demanded.alone[c]] if c in demanded.alone else []),
            *([group.rule] if group else []),
        }
        if not named:
            continue
        alone = c in demanded.alone or (
            group is not None and group.closed and len(group.members) == 1
        )
        together = group is not None and len(group.members) > 1
        collectives[c] = replace(
            collective,
            restriction=Restriction(
                alone=alone,
                group=number if together else None,
                closed=together and group is not None and group.closed,
                payload=(
                    group.payload[group.members.index(c)]
                    if group is not None and group.payload
                    else 0
                ),
                flat=group is not None and bool(group.payload),
                start_slots=(launch[0],) * 2 if launch else None,
                wait_slots=(demanded.waits[c],) * 2 if c in demanded.waits else None,
                rules=tuple(sorted(named)),
            ),
        )
    plan = replace(problem, collectives=tuple(collectives), rules=tuple(demanded.rules))
    check_feasible(plan)
    return plan


def check_matches(problems: Sequence[Problem], plan: Plan) -> None:
    """Raise ``InputError`` for a rule that matches nothing in any of ``problems``, with the nearest
    names; rules about kept parameters are checked when these are chosen.
    """
    check_chooses_kept(plan)
    for i, rule in enumerate(plan.rules):
        if rule.keep is not None:
            continue
        in_direction = [
            p
            for p in problems
            if rule.direction in (None, direction_named(p.name) or rule.direction)
        ]
        if in_direction and not any(matches(problem, rule) for problem in in_direction):
            raise InputError(
                f"rule {i + 1} ({rule}) matches no collective of"
                f" {', '.join(p.name for p in in_direction)}: {_hint(in_direction, rule)}"
            )


def check_chooses_kept(plan: Plan) -> None:
    """Raise ``InputError`` for a rule about kept parameters in a solve that does not choose
    them.
    """
    for i, rule in enumerate(plan.rules):
        if rule.keep is not None and not plan.chooses_kept:
            raise InputError(
                f"rule {i + 1} ({rule}): expected a solve of forward and backward that chooses the"
                ' kept parameters; state --keep auto (keep="auto" in Python) for both of them, or'
                " drop the rule"
            )


def matches(problem: Problem, rule: Rule) -> dict[int, re.Match[str]]:
    """Return the collectives that ``rule`` is about, with the matches of their parameter names."""
    pattern = re.compile(rule.match)
    found: dict[int, re.Match[str]] = {}
    if rule.keep is not None:  # it is about parameters
        return found
    for c, collective in enumerate(problem.collectives):
        direction = direction_named(problem.name) or collective.direction
        if collective.on_path or not collective.module or rule.direction not in (None, direction):
            continue
        if rule.kind in (None, problem.keys[collective.key].kind) and (
            match := pattern.fullmatch(collective.module)
        ):
            found[c] = match
    return found


def _hint(problems: Sequence[Problem], rule: Rule) -> str:
    moving = [(p, c) for p in problems for c in p.collectives if not c.on_path and c.module]
    kinds = sorted({p.keys[c.key].kind for p, c in moving})
    names = list(dict.fromkeys(c.module for _, c in moving))
    pattern = re.compile(rule.match)
    if not names:
        return "no collective here has a name"
    if any(pattern.fullmatch(name) for name in names):
        return f"such names there are, but only of {' and '.join(kinds)}"
    if any(pattern.fullmatch(module) for name in names for module in _modules(name)):
        return rf"it names a module; collectives inside it match '{rule.match}\..*'"
    plain = re.sub(r"\\(.)", r"\1", rule.match)
    near = get_close_matches(plain, names, n=_NEAREST, cutoff=0.3) or names[:_NEAREST]
    return f"the nearest names are {', '.join(near)}"


def _modules(name: str) -> Iterator[str]:
    """Yield the modules that hold the parameter or module ``name``, itself left out."""
    parts = name.split(".")
    return (".".join(parts[:k]) for k in range(len(parts) - 1, 0, -1))


def _slot(problem: Problem, rank: int) -> int:
    """Return the slot where a node of this rank stands: the number of compute nodes before it."""
    return bisect_left(problem.compute_order, rank)


def _groups(
    demanded: Demands, i: int, rule: Rule, matched: dict[int, re.Match[str]]
) -> list[Group]:
    """Return the groups that ``rule`` makes of its matches: one for each kind, and each value of
    ``by``.
    """
    problem = demanded.problem
    found: dict[tuple[str, str], list[int]] = {}
    for c, match in matched.items():
        found.setdefault(
            (problem.keys[problem.collectives[c].key].kind, rule.group_name(match)), []
        ).append(c)
    return [Group(members=tuple(members), closed=rule.closed, rule=i) for members in found.values()]


def _checked_groups(demanded: Demands) -> dict[int, tuple[int, Group]]:
    """Return for each collective in a group the number of the group."""
    problem = demanded.problem
    groups: dict[int, tuple[int, Group]] = {}
    for number, group in enumerate(demanded.groups):
        for c in group.members:
            if c in groups:
                raise demanded.wrong(
                    [groups[c][1].rule, group.rule], f"{demanded.name(c)} would be in two groups"
                )
            if c in demanded.alone and len(group.members) > 1:
                raise demanded.wrong(
                    [demanded.alone[c], group.rule],
                    f"{demanded.name(c)} cannot be alone and in a group",
                )
            if not problem.collectives[c].may_share and len(group.members) > 1:
                raise demanded.wrong(
                    [group.rule],
                    f"{demanded.name(c)} cannot share a launch: it writes where it reads",
                )
            groups[c] = number, group
        keys = {problem.collectives[c].key: c for c in group.members}
        if len(keys) > 1:
            one, other = sorted(keys.values())[:2]
            raise demanded.wrong(
                [group.rule],
                f"{_differ(demanded, one, other)}; narrow match, or tell them apart with by",
            )
    return groups


def _differ(demanded: Demands, one: int, other: int) -> str:
    a, b = (demanded.problem.keys[demanded.problem.collectives[c].key] for c in (one, other))
    fields = ("group", "reduce_op", "dtype", "device")
    what = next(name for name in fields if getattr(a, name) != getattr(b, name))
    label = {"group": "process group"}.get(what, what)
    return (
        f"{demanded.name(one)} and {demanded.name(other)} cannot share a launch: {label}"
        f" {getattr(a, what)} and {getattr(b, what)}"
    )


def _prefetched(
    demanded: Demands,
    i: int,
    distance: int,
    kind: str | None,
    matched: dict[int, re.Match[str]],
    mates: dict[int, tuple[int, ...]],
) -> list[tuple[int, int, int]]:
    """Return the launches so many compute nodes before the first that needs the collective, or its
    group.
    """
    problem = demanded.problem
    starts = []
    for c in matched:
        needs = [problem.needs[d][0] for d in mates.get(c, (c,)) if problem.needs[d]]
        if needs:
            starts.append((c, max(_slot(problem, min(needs)) - distance, 0), i))
        elif kind is not None:
            raise demanded.wrong(
                [i],
                f"no compute node needs {demanded.name(c)}, so that nothing can be launched ahead"
                " of it",
            )
    if matched and not starts:
        raise demanded.wrong(
            [i],
            "no compute node needs the collectives that it matches, so none can be launched ahead",
        )
    return starts


def _start_slot(demanded: Demands, i: int, rule: Rule, match: re.Match[str]) -> int:
    problem = demanded.problem
    if isinstance(rule.start, int):
        if not 0 <= rule.start < problem.num_nodes:
            raise demanded.wrong(
                [i],
                f"start: expected the rank of a node, below {problem.num_nodes}; found"
                f" {rule.start}",
            )
        return _slot(problem, rule.start)
    pattern = re.compile(rule.start_pattern(match))
    modules = {
        name: k
        for k, name in reversed(
            list(enumerate(problem.modules[node] for node in problem.compute_order))
        )
        if name
    }
    slots = [
        k
        for name, k in modules.items()
        if any(pattern.fullmatch(module) for module in (name, *_modules(name)))
    ]
    if not slots:
        plain = re.sub(r"\\(.)", r"\1", pattern.pattern)
        near = get_close_matches(plain, modules, n=_NEAREST, cutoff=0.3) or list(modules)[:_NEAREST]
        raise demanded.wrong(
            [i],
            f"start: no compute node is in a module {pattern.pattern!r}; the nearest are"
            f" {', '.join(near)}",
        )
    return min(slots)
