"""Constraint (13): prices of buckets (see ``apsched.solver.cpsat.constraints``)."""

from ortools.sat.python import cp_model

from apsched.costs.price_curve import PriceCurve
from apsched.solver.cpsat.variables import Linear, Variables


def prices(v: Variables) -> None:
    """(13) Prices: the cost of a bucket depends on its bytes, by the piece [low, high] of the curve
    that they lie in.

    y[h]:  tau[h] = T[h], that of h alone
    z[h]:  tau[h] >= price(sum_c size[c] x[c,h]),  theta[h] >= copy price(sum_c cp[c] x[c,h])
    w[h]:  tau[h] >= price(sum_c size[c] x[c,h]) + sum_c member[h] x[c,h]
    """
    k = v.arrays
    for h in v.alone:
        key = v.problem.keys[int(k.key[h])]
        members = v.members(h)
        v.model.add(v.transfer_ticks[h] == int(k.transfer_ticks[h])).only_enforce_if(v.alone[h])
        if len(members) > 1:
            sizes = {c: int(k.size_bytes[c]) for c in members}
            copied = {c: int(k.copied_bytes[c]) for c in members}
            for_members = int(k.member_ticks[h]) * sum(v.joins[c, h] for c in members)
            at_least: list[tuple[cp_model.IntVar, Linear]] = [(v.several[h], v.transfer_ticks[h])]
            at_least += [
                (literal, v.transfer_ticks[h] - for_members) for literal in v.coalesced_literal(h)
            ]
            _at_least_price(v, h, key.price, sizes, at_least)
            _at_least_price(
                v, h, v.problem.copy_price, copied, [(v.several[h], v.copy_in_ticks[h])]
            )


_EXACT_PRODUCT = 2**53
"""Beyond it the slope of a piece is rounded down to a fraction that CP-SAT's 64-bit sums can
hold.
"""


def _at_least_price(
    v: Variables,
    h: int,
    curve: PriceCurve,
    bytes_of: dict[int, int],
    prices: list[tuple[cp_model.IntVar, Linear]],
) -> None:
    """Each of ``prices`` is at least that of the curve where its literal holds."""
    total = sum(size * v.joins[c, h] for c, size in bytes_of.items())
    largest = sum(bytes_of.values())
    pieces = []
    last = len(curve.size_bytes) - 2
    for k, (low, high) in enumerate(zip(curve.size_bytes, curve.size_bytes[1:], strict=False)):
        if low > largest:
            break
        on_piece = v.model.new_bool_var(f"piece[{h},{k}]")
        pieces.append(on_piece)
        v.model.add(total >= low).only_enforce_if(on_piece)
        if k < last:
            v.model.add(total <= high).only_enforce_if(on_piece)
        rise, run = curve.price_ticks[k + 1] - curve.price_ticks[k], high - low
        while (
            run * max(v.horizon_ticks, 1) > _EXACT_PRODUCT
            or rise * max(largest, 1) > _EXACT_PRODUCT
        ):
            rise, run = rise // 2, -(-run // 2)
        for form, price in prices:
            v.model.add(
                price * run >= curve.price_ticks[k] * run + (total - low) * rise
            ).only_enforce_if(on_piece, form)
    v.model.add_exactly_one(pieces)


def forms(v: Variables) -> None:
    """(19) Forms: who is in a coalesced bucket, and who has memory of its own.

    j[c,h] = x[c,h] and w[h];   w[h] implies not x[c,h] for c that cannot be in one
    l[c] = y[c] + sum_h j[c,h]
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
