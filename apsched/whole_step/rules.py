"""Rules of a plan about parameters: kept from forward to backward, gathered again, or decided on
alike.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches

from apsched.errors import InputError
from apsched.kinds import BUCKET_KINDS, CollectiveKind
from apsched.problem.plan.rules import Plan
from apsched.problem.problem import Problem
from apsched.whole_step.choices import Choice

_NEAREST = 3


def by_rules(
    plan: Plan, names: Sequence[str], gathered: Collection[str] = ()
) -> tuple[Choice, Choice]:
    """Return those of the parameters ``names`` that ``plan`` keeps, and those that it has gathered
    again. That none of ``gathered``, in one graph or in both, is kept already holds of those that
    are not in ``names``.

    ``InputError`` for a rule that matches none of them, and for two that contradict each other.
    """
    found: dict[str, int] = {}
    for i, rule in enumerate(plan.rules):
        if rule.keep is None:
            continue
        matched = [name for name in names if re.fullmatch(rule.match, name)]
        holds = not rule.keep and any(re.fullmatch(rule.match, name) for name in gathered)
        if not matched and not holds:
            raise InputError(
                f"{_text(plan, i)} matches no parameter that forward and backward both gather:"
                f" {nearest_names(rule.match, names)}"
            )
        for name in matched:
            other = found.setdefault(name, i)
            if plan.rules[other].keep != rule.keep:
                raise InputError(
                    f"{_text(plan, other)} and {_text(plan, i)}: {name} cannot be kept and gathered"
                    " again; narrow match"
                )
    kept = Choice(name for name, i in found.items() if plan.rules[i].keep)
    return kept, Choice(found) - kept


def together_by_plan(
    groups: Mapping[str, str],
    problems: Iterable[Problem],
    kinds: Collection[CollectiveKind] = BUCKET_KINDS,
) -> dict[str, str]:
    """Return parameter -> name of its group, with those groups joined that the plan of ``problems``
    puts into one bucket of ``kinds``; ``groups`` has them as they are without a plan.
    """
    found, place = dict(groups), {name: k for k, name in enumerate(groups)}
    for problem in problems:
        together: dict[int, list[str]] = {}
        for one in problem.collectives:
            bucket, kind = one.restriction.group, problem.keys[one.key].kind
            if bucket is not None and kind in kinds and one.module in found:
                together.setdefault(bucket, []).append(one.module)
        for members in together.values():
            joined = {found[name] for name in members}
            first = found[min(members, key=place.__getitem__)]
            if len(joined) > 1:
                found = {name: first if of in joined else of for name, of in found.items()}
    return found


def _text(plan: Plan, i: int) -> str:
    return f"rule {i + 1} ({plan.rules[i]})"


def nearest_names(pattern: str, names: Sequence[str]) -> str:
    """Return those of ``names`` in words that are nearest to ``pattern``, which fits none."""
    if not names:
        return "there are none"
    plain = re.sub(r"\\(.)", r"\1", pattern)
    near = get_close_matches(plain, names, n=_NEAREST, cutoff=0.3) or names[:_NEAREST]
    return f"the nearest names are {', '.join(near)}"
