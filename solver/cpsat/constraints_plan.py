"""Constraint (18): the user's plan (see ``apsched.solver.cpsat.constraints``)."""

from apsched.schedule.schedule import StepKind
from apsched.solver.cpsat.variables import Variables


def plan(v: Variables) -> None:
    """(18) Plan: the members of a group share a bucket; launches and waits have the places of the
    plan.

    x[c,h] = x[d,h] for all h and c, d of one group
    x[c,h] implies not a[start h, last launch slot of c];
    a[wait c, first wait slot of c - 1],  not a[wait c, last wait slot of c]

    Readiness puts a launch behind its first slot, and x has no variable for a collective that would
    join a closed group of others.
    """
    _together(v)
    k, num_compute = v.arrays, len(v.arrays.compute_ticks)
    for (c, h), joins in v.joins.items():
        if (last := int(k.launch_last[c])) < num_compute:
            v.model.add_implication(joins, v.after_compute[(StepKind.START, h), last].negated())
    for c in v.alone:
        first, last = int(k.wait_first[c]), int(k.wait_last[c])
        if first > 0:
            v.model.add(v.after_compute[(StepKind.WAIT, c), first - 1] == 1)
        if last < num_compute:
            v.model.add(v.after_compute[(StepKind.WAIT, c), last] == 0)


def _together(v: Variables) -> None:
    groups: dict[int, list[int]] = {}
    for c, group in enumerate(v.arrays.group.tolist()):
        if group >= 0:
            groups.setdefault(group, []).append(c)
    for first, *others in groups.values():
        for h in v.alone:
            literals = [v.joins[c, h] for c in (first, *others) if (c, h) in v.joins]
            if len(literals) <= len(others):  # one of them cannot be there
                for literal in literals:
                    v.model.add(literal == 0)
            else:
                for literal in literals[1:]:
                    v.model.add(literal == literals[0])
