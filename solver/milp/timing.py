"""Rows of time. The formulas are in :mod:`apsched.solver.milp.model`."""

from dataclasses import dataclass

import pulp
from pulp import LpAffineExpression as Linear

from apsched.solver.milp.events import Column, Events
from apsched.solver.milp.order import Order
from apsched.solver.milp.time_windows import Windows, windows


@dataclass(slots=True)
class Clock:
    """When things happen, in units of ``scale`` ticks."""

    scale: float
    horizon: float
    step: pulp.LpVariable
    end: list[Linear]
    """End of each event on the compute stream."""
    begin: list[pulp.LpVariable]
    windows: Windows
    """In ticks."""

    def slack(self, latest_ticks: int, earliest_ticks: int) -> float:
        """Return M: the largest difference of an end at ``latest_ticks`` and a begin at
        ``earliest_ticks``.
        """
        return max(0, latest_ticks - earliest_ticks) / self.scale


def add_time(order: Order, horizon_ticks: int) -> Clock:
    """Add (6) to (12) to the model: a schedule takes at most ``horizon_ticks``."""
    events = order.events
    scale = max(1.0, horizon_ticks / 10_000)
    horizon = horizon_ticks / scale
    compute_order = [
        events.problem.duration_ticks[node] / scale for node in events.problem.compute_order
    ]
    when = windows(events, horizon_ticks)
    begin = [
        pulp.LpVariable(f"t_{u}", when.earliest_begin[u] / scale) for u in range(events.num_events)
    ]
    end = [
        pulp.LpVariable(f"e_{u}", when.earliest_end[u] / scale, when.latest_end[u] / scale)
        for u in range(events.num_units)
    ]
    ends = [Linear(variable) for variable in end]
    ends += [begin[events.compute_order(k)] + ticks for k, ticks in enumerate(compute_order)]
    ends.append(Linear(begin[-1]))
    step = pulp.LpVariable(
        "step", 0, horizon, cat="Integer" if scale == 1 else "Continuous"
    )  # whole ticks: prunes
    clock = Clock(scale, horizon, step, ends, begin, when)
    if not when.possible:
        return clock
    _decided(order, when)
    _compute_stream(order, clock)
    transfer_end = _transfers(order, clock)
    _loads(order, clock)
    order.model += clock.step >= begin[-1], "step_compute"
    for c, finished in enumerate(transfer_end):
        order.model += clock.step >= finished, f"step_transfer_{c}"
    return clock


def _decided(order: Order, when: Windows) -> None:
    """(17) windows: o[u,v] = 0 where earliest_end[u] > latest_begin[v]."""
    for (u, v), before in order.pairs.items():
        if before and when.excludes(u, v):
            order.model += before == 0, f"too_late_{u}_{v}"


def _compute_stream(order: Order, clock: Clock) -> None:
    """(6) e[u] >= t[u] + work[u]; (7) t[v] >= e[u] - (latest_end[u] - earliest_begin[v]) (1 -
    o[u,v]) for every pair of events.
    """
    events, when = order.events, clock.windows
    for c in range(len(events.take)):
        take, start, wait, give = events.take[c], events.start[c], events.wait[c], events.give[c]
        with_c = [(b, column) for b, column in enumerate(events.columns) if c in column.members]
        at_take = order.sum_of((b, column.take_ticks / clock.scale) for b, column in with_c)
        launch = order.sum_of((b, column.launch_ticks / clock.scale) for b, column in with_c)
        at_wait = order.sum_of((b, column.wait_ticks / clock.scale) for b, column in with_c)
        at_give = order.sum_of(
            (b, column.give_ticks[column.members.index(c)] / clock.scale) for b, column in with_c
        )
        works = [(take, at_take + launch)] if take == start else [(take, at_take), (start, launch)]
        works += [(wait, at_wait + at_give)] if wait == give else [(wait, at_wait), (give, at_give)]
        for u, work in works:
            order.model += clock.end[u] >= clock.begin[u] + work, f"work_{c}_{u}"
        for first, second in ((take, start), (wait, give)):
            if first != second:  # alone they are one event, one piece of work after the other
                order.model += clock.begin[second] >= clock.end[first], f"pieces_{c}_{second}"
    for u in range(events.num_events):
        for v in range(events.num_events):
            if u != v and not (u >= events.num_units and v > u + 1):
                _after(
                    order,
                    clock.begin[v],
                    clock.end[u],
                    order.before(u, v),
                    clock.slack(when.latest_end[u], when.earliest_begin[v]),
                )


def _after(order: Order, later: Linear, earlier: Linear, holds: Linear, most: float) -> None:
    """Later >= earlier where ``holds`` is 1; elsewhere they differ by ``most`` at most, and no
    relation holds.
    """
    if not holds and not holds.constant:
        return
    order.model += later >= earlier - max(0.0, most) * (1 - holds)


def _transfers(order: Order, clock: Clock) -> list[pulp.LpVariable]:
    """(8) f[c] >= s[c] + T, s[c] >= e[start[c]]; (9) on one stream s[d] >= f[c] - M (1 -
    o[start[c],start[d]]);

    (10) the wait: e[wait[c]] >= f[c] + epilogues, and where it stays one event with the give, so
         does that.
    """
    events, problem, when = order.events, order.events.problem, clock.windows
    stream = [problem.keys[m.key].stream for m in problem.collectives]
    begin = [
        pulp.LpVariable(f"s_{c}", when.earliest_end[u] / clock.scale)
        for c, u in enumerate(events.start)
    ]
    end = [
        pulp.LpVariable(f"f_{c}", 0, when.latest_end[u] / clock.scale)
        for c, u in enumerate(events.wait)
    ]
    for c in range(len(stream)):
        with_c = [(b, column) for b, column in enumerate(events.columns) if c in column.members]
        order.model += begin[c] >= clock.end[events.start[c]], f"launched_{c}"
        order.model += end[c] >= begin[c] + order.sum_of(
            (b, column.transfer_ticks / clock.scale) for b, column in with_c
        )
        after_wait = order.sum_of((b, column.wait_ticks / clock.scale) for b, column in with_c)
        if events.wait[c] == events.give[c]:
            after_wait += order.sum_of(
                (b, column.give_ticks[column.members.index(c)] / clock.scale)
                for b, column in with_c
            )
        order.model += clock.end[events.wait[c]] >= end[c] + after_wait, f"waited_{c}"
        for d in range(len(stream)):
            if d != c and stream[d] == stream[c]:
                most = clock.slack(
                    when.latest_end[events.wait[c]], when.earliest_end[events.start[d]]
                )
                _after(
                    order, begin[d], end[c], order.before(events.start[c], events.start[d]), most
                )
    return end


def _loads(order: Order, clock: Clock) -> None:
    """(11) cuts: between the ends of compute node j (or the beginning) and the begin of compute
    node k (or the end) lies the work that comes

    between them in any order, and (12) on each stream the transfers that do.
    """
    events, problem = order.events, order.events.problem
    num_compute = len(problem.compute_order)
    stream = [
        problem.keys[problem.collectives[column.members[0]].key].stream for column in events.columns
    ]
    for j in range(-1, num_compute):
        since = clock.end[events.compute_order(j)] if j >= 0 else Linear()
        between = 0.0
        for k in range(j + 1, num_compute + 1):
            until = clock.begin[events.compute_order(k)]
            work = [
                (b, _work_between(order, b, j, k) / clock.scale) for b in range(len(events.columns))
            ]
            if k > j + 1 or any(ticks for _, ticks in work):
                order.model += until >= since + between + order.sum_of(work), f"load_{j}_{k}"
            if k < num_compute:
                between += problem.duration_ticks[problem.compute_order[k]] / clock.scale
            for s in range(len(problem.streams)):
                sent = [
                    (b, column.transfer_ticks / clock.scale)
                    for b, column in enumerate(events.columns)
                    if stream[b] == s and _sent_between(events, column, j, k)
                ]
                if sent:
                    order.model += (
                        (until if k < num_compute else clock.step) >= since + order.sum_of(sent),
                        f"stream_{s}_{j}_{k}",
                    )


def _sent_between(events: Events, column: Column, j: int, k: int) -> bool:
    """Whether the transfer of ``column`` lies between compute nodes j and k in every order; the end
    is after everything.
    """
    before = k == len(events.problem.compute_order) or any(
        events.always_before(events.wait[c], events.compute_order(k)) for c in column.members
    )
    return before and (
        j < 0
        or any(
            events.always_before(events.compute_order(j), events.start[c]) for c in column.members
        )
    )


def _work_between(order: Order, b: int, j: int, k: int) -> int:
    """Return the compute ticks of column ``b`` that lie between compute nodes j and k in every
    order.
    """
    events, column = order.events, order.events.columns[b]

    def inside(units: tuple[int, ...], members: tuple[int, ...]) -> bool:
        after = j < 0 or any(
            events.always_before(events.compute_order(j), units[c]) for c in members
        )
        return after and any(
            events.always_before(units[c], events.compute_order(k)) for c in members
        )

    work = sum(
        ticks
        for units, ticks in (
            (events.take, column.take_ticks),
            (events.start, column.launch_ticks),
            (events.wait, column.wait_ticks),
        )
        if inside(units, column.members)
    )
    return work + sum(
        ticks
        for c, ticks in zip(column.members, column.give_ticks, strict=True)
        if inside(events.give, (c,))
    )
