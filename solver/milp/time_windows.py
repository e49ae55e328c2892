"""Time windows of the events within a horizon: they tighten every M, and decide some orders
beforehand.
"""

from dataclasses import dataclass

from apsched.solver.milp.events import Events


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """For each event, in ticks: no schedule within the horizon has it begin or end earlier, or
    later.
    """

    earliest_begin: tuple[int, ...]
    earliest_end: tuple[int, ...]
    latest_begin: tuple[int, ...]
    latest_end: tuple[int, ...]

    @property
    def possible(self) -> bool:
        """Whether every event has time."""
        begins = all(a <= b for a, b in zip(self.earliest_begin, self.latest_begin, strict=True))
        return begins and all(
            a <= b for a, b in zip(self.earliest_end, self.latest_end, strict=True)
        )

    def excludes(self, u: int, v: int) -> bool:
        """Whether ``u`` can't come before ``v``: it would end after ``v`` must have begun."""
        return self.earliest_end[u] > self.latest_begin[v]


def windows(events: Events, horizon_ticks: int) -> Windows:
    """(17) windows: longest paths over the precedences, with the least work of each event and
    the least transfer of each wait.

    earliest_begin[v] = max over u before v of earliest_end[u], and the compute of the compute order
    before v; earliest_end = begin + least work, of a wait also its start's end + least transfer +
    least epilogues; latest_end and latest_begin the same from the horizon backwards
    """
    work, transfer = _least(events)
    count = range(events.num_events)
    order = sorted(count, key=lambda u: sum(events.never_after(v, u) for v in count))
    start_of = {wait: start for start, wait in zip(events.start, events.wait, strict=True)}
    wait_of = {start: wait for wait, start in start_of.items()}
    compute_order = events.problem.compute_order
    before = [
        sum(
            work[events.compute_order(k)]
            for k in range(len(compute_order))
            if events.always_before(events.compute_order(k), u)
        )
        for u in count
    ]
    after = [
        sum(
            work[events.compute_order(k)]
            for k in range(len(compute_order))
            if events.always_before(u, events.compute_order(k))
        )
        for u in count
    ]
    begin, end = list(before), [0] * events.num_events
    for u in order:
        begin[u] = max(
            [
                begin[u],
                *(
                    end[v]
                    for v in order
                    if v != u and events.never_after(v, u) and not events.never_after(u, v)
                ),
            ]
        )
        end[u] = begin[u] + work[u]
        if u in start_of:
            end[u] = max(end[u], end[start_of[u]] + transfer[u] + work[u])
    latest_end, latest_begin = [horizon_ticks - ticks for ticks in after], [0] * events.num_events
    for u in reversed(order):
        later = (
            v for v in order if v != u and events.never_after(u, v) and not events.never_after(v, u)
        )
        latest_end[u] = min([latest_end[u], *(latest_begin[v] for v in later)])
        if u in wait_of:
            latest_end[u] = min(
                latest_end[u], latest_end[wait_of[u]] - work[wait_of[u]] - transfer[wait_of[u]]
            )
        latest_begin[u] = latest_end[u] - work[u]
    return Windows(
        earliest_begin=tuple(begin),
        earliest_end=tuple(end),
        latest_begin=tuple(latest_begin),
        latest_end=tuple(latest_end),
    )


def _least(events: Events) -> tuple[list[int], dict[int, int]]:
    """Return the least work of each event in any bucket, and for each wait the least transfer."""
    work = [0] * events.num_events
    transfer: dict[int, int] = {}
    for k, node in enumerate(events.problem.compute_order):
        work[events.compute_order(k)] = events.problem.duration_ticks[node]
    for c in range(len(events.take)):
        with_c = [column for column in events.columns if c in column.members]
        for first, second, ticks in (
            (events.take[c], events.start[c], [(b.take_ticks, b.launch_ticks) for b in with_c]),
            (
                events.wait[c],
                events.give[c],
                [(b.wait_ticks, b.give_ticks[b.members.index(c)]) for b in with_c],
            ),
        ):
            if first == second:
                work[first] = min(a + b for a, b in ticks)
            else:
                work[first], work[second] = min(a for a, _ in ticks), min(b for _, b in ticks)
        transfer[events.wait[c]] = min(column.transfer_ticks for column in with_c)
    return work, transfer
