"""Rows of time. The formulas are in :mod:`apsched.solver.milp`."""

from dataclasses import dataclass

import pulp

from apsched.solver.milp_order import Linear, Order


@dataclass(slots=True)
class Clock:
    """When things happen, in units of ``scale`` ticks."""

    scale: float
    horizon: float
    step: pulp.LpVariable
    end: list[Linear]
    """Of each event on the compute stream."""
    begin: list[pulp.LpVariable]


def add_time(order: Order, horizon_ticks: int) -> Clock:
    """Add (6) to (12) to the model: a schedule takes at most ``horizon_ticks``."""
    events = order.events
    scale = max(1.0, horizon_ticks / 10_000)
    horizon = horizon_ticks / scale
    begin = [pulp.LpVariable(f"t_{u}", 0, horizon) for u in range(events.num_events)]
    end = [pulp.LpVariable(f"e_{u}", 0, horizon) for u in range(events.num_units)]
    spine = [events.problem.duration_ticks[node] / scale for node in events.problem.spine]
    ends = [Linear(variable) for variable in end]
    ends += [begin[events.spine(k)] + ticks for k, ticks in enumerate(spine)]
    ends.append(Linear(begin[-1]))
    clock = Clock(scale, horizon, pulp.LpVariable("step", 0, horizon), ends, begin)
    _compute_stream(order, clock)
    transfer_end = _transfers(order, clock)
    _loads(order, clock)
    order.model += clock.step >= begin[-1], "step_compute"
    for c, finished in enumerate(transfer_end):
        order.model += clock.step >= finished, f"step_transfer_{c}"
    return clock


def _compute_stream(order: Order, clock: Clock) -> None:
    """(6) e[u] >= t[u] + work[u], each kind of event its own work; (7) t[v] >= e[u] - H (1 - o[u,v]) for every pair."""
    events = order.events
    for c in range(len(events.take)):
        take, start, wait, give = events.take[c], events.start[c], events.wait[c], events.give[c]
        mine = [(b, column) for b, column in enumerate(events.columns) if c in column.members]
        at_take = order.sum_of((b, column.take_ticks / clock.scale) for b, column in mine)
        launch = order.sum_of((b, column.launch_ticks / clock.scale) for b, column in mine)
        at_wait = order.sum_of((b, column.wait_ticks / clock.scale) for b, column in mine)
        at_give = order.sum_of((b, column.give_ticks[column.members.index(c)] / clock.scale) for b, column in mine)
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
                _after(order, clock.begin[v], clock.end[u], order.before(u, v), clock.horizon)


def _after(order: Order, later: Linear, earlier: Linear, holds: Linear, horizon: float) -> None:
    """Later >= earlier where ``holds`` is 1."""
    if not holds and not holds.constant:
        return
    order.model += later >= earlier - horizon * (1 - holds)


def _transfers(order: Order, clock: Clock) -> list[pulp.LpVariable]:
    """(8) f[c] >= s[c] + T, s[c] >= e[start[c]]; (9) s[d] >= f[c] - H (1 - o[start[c],start[d]]) on one stream;

    (10) the wait: e[wait[c]] >= f[c] + epilogues, and where it stays one event with the give, so does that.
    """
    events, problem = order.events, order.events.problem
    stream = [problem.keys[m.key].stream for m in problem.collectives]
    begin = [pulp.LpVariable(f"s_{c}", 0, clock.horizon) for c in range(len(stream))]
    end = [pulp.LpVariable(f"f_{c}", 0, clock.horizon) for c in range(len(stream))]
    for c in range(len(stream)):
        mine = [(b, column) for b, column in enumerate(events.columns) if c in column.members]
        order.model += begin[c] >= clock.end[events.start[c]], f"launched_{c}"
        order.model += end[c] >= begin[c] + order.sum_of((b, column.transfer_ticks / clock.scale) for b, column in mine)
        after_wait = order.sum_of((b, column.wait_ticks / clock.scale) for b, column in mine)
        if events.wait[c] == events.give[c]:
            after_wait += order.sum_of((b, column.give_ticks[column.members.index(c)] / clock.scale) for b, column in mine)
        order.model += clock.end[events.wait[c]] >= end[c] + after_wait, f"waited_{c}"
        for d in range(len(stream)):
            if d != c and stream[d] == stream[c]:
                _after(order, begin[d], end[c], order.before(events.start[c], events.start[d]), clock.horizon)
    return end


def _loads(order: Order, clock: Clock) -> None:
    """(11) cuts: t[k] >= the work that comes before spine node k in any order; (12) step >= the load of each stream."""
    events, problem = order.events, order.events.problem
    done = 0.0
    for k in range(events.num_events - events.num_units):
        event = events.spine(k)
        before = [order.sum_of((b, _work_before(order, b, event) / clock.scale) for b in range(len(events.columns)))]
        order.model += clock.begin[event] >= done + pulp.lpSum(before), f"load_{k}"
        if k < len(problem.spine):
            done += problem.duration_ticks[problem.spine[k]] / clock.scale
    for s in range(len(problem.streams)):
        mine = [
            (b, column.transfer_ticks / clock.scale)
            for b, column in enumerate(events.columns)
            if problem.keys[problem.collectives[column.members[0]].key].stream == s
        ]
        order.model += clock.step >= order.sum_of(mine), f"stream_{s}"


def _work_before(order: Order, b: int, event: int) -> int:
    """Return the compute ticks of column ``b`` that come before ``event`` in every order."""
    events, column = order.events, order.events.columns[b]
    work = 0
    for events_of, ticks in ((events.take, column.take_ticks), (events.start, column.launch_ticks), (events.wait, column.wait_ticks)):
        if any(events.always_before(events_of[c], event) for c in column.members):
            work += ticks
    return work + sum(
        ticks for c, ticks in zip(column.members, column.give_ticks, strict=True) if events.always_before(events.give[c], event)
    )
