"""Constraint (20): which buckets are coalesced (see ``apsched.solver.constraints``)."""

from apsched.solver.variables import Variables


def forms(v: Variables) -> None:
    """(20) Forms: who is in a coalesced bucket, and who has memory of its own.

    j[c,h] = x[c,h] and w[h];   w[h] implies not x[c,h] for c that cannot be in one;   l[c] = y[c] + sum_h j[c,h]
    """
    for (c, h), joins in v.joins.items():
        if h not in v.coalesced:
            continue
        if (c, h) not in v.carried:
            v.model.add_implication(v.coalesced[h], joins.negated())
            continue
        carried = v.carried[c, h]
        v.model.add_implication(carried, joins)
        v.model.add_implication(carried, v.coalesced[h])
        v.model.add_bool_or([joins.negated(), v.coalesced[h].negated(), carried])
    for c, loose in v.loose.items():
        inside = [v.carried[c, h] for h in v.heads(c) if (c, h) in v.carried]
        if inside:
            v.model.add(loose == v.alone[c] + sum(inside)).with_name(f"loose[{c}]")
