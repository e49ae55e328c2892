"""Variables and rows of membership and order: binaries only. The formulas are in
:mod:`apsched.solver.milp.model`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations, permutations

import pulp
from pulp import LpAffineExpression as Linear

from apsched.solver.milp.events import Events, Spot


@dataclass(slots=True)
class Order:
    """The model under construction: buckets, and the order of events."""

    events: Events
    model: pulp.LpProblem
    chosen: list[pulp.LpVariable] = field(default_factory=list)
    """lambda[B], one a column."""
    together: dict[tuple[int, int], Linear] = field(default_factory=dict)
    """b[c,d], c < d, of collectives that some column holds."""
    alone: list[Linear] = field(default_factory=list)
    pairs: dict[tuple[int, int], Linear] = field(default_factory=dict)
    """o[u,v] for each ordered pair of events."""
    binaries: list[pulp.LpVariable] = field(default_factory=list)

    def before(self, u: int, v: int) -> Linear:
        """Return o[u,v]: 1 where event ``u`` comes strictly before event ``v``."""
        return self.pairs[u, v]

    def at_or_before(self, p: Spot, q: Spot) -> Linear:
        """Return le(p,q): 1 where the step at ``p`` is that at ``q`` or comes before it."""
        if p.event == q.event:
            return Linear(constant=float(p.rank <= q.rank))
        return (
            1 - self.pairs[q.event, p.event] if p.rank <= q.rank else self.pairs[p.event, q.event]
        )

    def sum_of(self, amounts: Iterable[tuple[int, float]]) -> Linear:
        """Return the sum of lambda[B] x amount over (column, amount)."""
        return pulp.lpSum(amount * self.chosen[b] for b, amount in amounts if amount)


def create_order(events: Events, model: pulp.LpProblem) -> Order:
    """Return the order variables of ``events`` in ``model``, with (1) to (4)."""
    order = Order(events, model)
    _membership(order)
    _pairs(order)
    _one_order(order)
    _early_enough(order)
    return order


def _membership(order: Order) -> None:
    """(1) for each c: sum of lambda[B] over the columns that hold c = 1; b[c,d] = sum over those
    that hold both.
    """
    columns = order.events.columns
    order.chosen = [pulp.LpVariable(f"lambda_{b}", cat="Binary") for b in range(len(columns))]
    order.binaries += order.chosen
    holding: dict[tuple[int, int], list[pulp.LpVariable]] = {}
    for column, chosen in zip(columns, order.chosen, strict=True):
        for pair in combinations(column.members, 2):
            holding.setdefault(pair, []).append(chosen)
    for c in range(len(order.events.take)):
        chosen_with_c = [order.chosen[b] for b, column in enumerate(columns) if c in column.members]
        order.model += pulp.lpSum(chosen_with_c) == 1, f"membership_{c}"
        order.alone.append(
            next(
                (
                    Linear(order.chosen[b])
                    for b, column in enumerate(columns)
                    if column.members == (c,)
                ),
                Linear(),
            )
        )
    for (c, d), several in holding.items():
        together = pulp.LpVariable(f"b_{c}_{d}", 0, 1)
        order.model += together == pulp.lpSum(several), f"together_{c}_{d}"
        order.together[c, d] = Linear(together)


def _ties(order: Order) -> dict[tuple[int, int], Linear]:
    """Return for each pair of events that may be one the expression of that."""
    events = order.events
    ties: dict[tuple[int, int], Linear] = {}
    for (c, d), together in order.together.items():
        for which in (events.take, events.start, events.wait):
            ties[which[c], which[d]] = together
    for c, alone in enumerate(order.alone):
        for first, second in ((events.take[c], events.start[c]), (events.wait[c], events.give[c])):
            if first != second:
                ties[first, second] = alone
    return ties | {(v, u): tie for (u, v), tie in ties.items()}


def _pairs(order: Order) -> None:
    """(2) o[u,v] + o[v,u] = 1 - tie[u,v]; tie = b[c,d] of takes, starts, waits; = alone[c] of take
    and start, wait and give.
    """
    events, ties = order.events, _ties(order)
    for u in range(events.num_events):
        for v in range(u + 1, events.num_events):
            tie = ties.get((u, v), Linear())
            if events.always_before(u, v):
                forward, backward = Linear(constant=1.0), Linear()
            elif events.always_before(v, u):
                forward, backward = Linear(), Linear(constant=1.0)
            elif events.never_after(u, v):
                forward, backward = 1 - tie, Linear()
            elif events.never_after(v, u):
                forward, backward = Linear(), 1 - tie
            else:
                variable = pulp.LpVariable(f"o_{u}_{v}", cat="Binary")
                order.binaries.append(variable)
                forward, backward = Linear(variable), 1 - tie - variable
                if tie:
                    order.model += backward >= 0, f"one_side_{u}_{v}"
            order.pairs[u, v], order.pairs[v, u] = forward, backward


def _one_order(order: Order) -> None:
    """(3) o[u,w] <= o[u,v] + o[v,w] for all events: a strict weak order, in which members of a
    bucket are one.
    """
    events, seen = order.events, set()
    units = range(events.num_units)
    triples = [*permutations(units, 3)]
    for k in range(events.num_units, events.num_events - 1):
        for u, v in permutations(units, 2):
            triples += [(u, v, k), (u, k, v), (k, u, v)]
    for k, later in combinations(range(events.num_units, events.num_events - 1), 2):
        if later == k + 1:
            triples += (
                [(later, u, k) for u in units]
                + [(u, later, k) for u in units]
                + [(k, u, later) for u in units]
            )
            triples += (
                [(later, k, u) for u in units]
                + [(u, k, later) for u in units]
                + [(k, later, u) for u in units]
            )
    for u, v, w in triples:
        first, second, whole = order.pairs[u, v], order.pairs[v, w], order.pairs[u, w]
        if (not whole and not whole.constant) or _is_one(first) or _is_one(second):
            continue
        row = first + second - whole
        terms = {x: a for x, a in row.items() if a}
        least = row.constant + sum(min(0, a) for a in terms.values())
        signature = (row.constant, frozenset((x.name, a) for x, a in terms.items()))
        if least < 0 and signature not in seen:
            seen.add(signature)
            order.model += row >= 0


def _is_one(expression: Linear) -> bool:
    return not expression and expression.constant == 1


def _early_enough(order: Order) -> None:
    """(4) prefetch: sum of lambda[B] <= o[k,start[h]] over the B of first member h whose start must
    come after compute node k.
    """
    events, most = order.events, order.events.caps.max_prefetch
    if most is None:
        return
    place = {node: k for k, node in enumerate(events.problem.compute_order)}
    held: dict[tuple[int, int], list[pulp.LpVariable]] = {}
    for column, chosen in zip(events.columns, order.chosen, strict=True):
        needs = [
            place[events.problem.needs[c][0]] for c in column.members if events.problem.needs[c]
        ]
        if needs and (earliest := min(needs) - most - 1) >= 0:
            held.setdefault((column.members[0], earliest), []).append(chosen)
    for (head, k), several in held.items():
        order.model += (
            pulp.lpSum(several) <= order.before(events.compute_order(k), events.start[head]),
            f"prefetch_{head}_{k}",
        )


def in_flight(order: Order) -> None:
    """(5) in flight: at each start d, sum over c of output[c] x (1 - o[start[d],start[c]] -
    o[wait[c],start[d]]) <= cap.
    """
    events, cap = order.events, order.events.caps.in_flight_cap_bytes
    if cap is None:
        return
    moving = [
        (c, m.output_bytes) for c, m in enumerate(events.problem.collectives) if m.output_bytes
    ]
    scale = max((size for _, size in moving), default=1) / 1000
    for d in range(len(events.start)):
        flying = pulp.lpSum(
            size
            / scale
            * (
                (1 - order.before(events.start[d], events.start[c]))
                - order.before(events.wait[c], events.start[d])
            )
            if events.start[c] != events.start[d]
            else size / scale
            for c, size in moving
        )
        order.model += flying <= (cap + 0.5) / scale, f"in_flight_{d}"
