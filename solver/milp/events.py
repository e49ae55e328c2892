"""The events that the MILP orders: those of each collective, their precedences, and the buckets
that the caps allow.

Each collective has four events, in its bucket or alone: *take* (its input is read: prologues and
copy-in), *start*, *wait* and *give* (its result is there: copy-out and epilogue). Members of a
bucket share take, start and wait; alone, take and start are one event, and so are wait and give;
only in an all-gather bucket do wait and give differ. The compute nodes that keep their order are
events too, numbered after those of the collectives, and the output is the last one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from apsched.config import Caps
from apsched.errors import InputError
from apsched.kinds import CollectiveKind, NodeKind
from apsched.problem.problem import Problem
from apsched.units import allocated_bytes

MOST_COLLECTIVES = 40
MOST_BUCKETS = 4_000
WAIT_RANK = -1


@dataclass(frozen=True, slots=True)
class Spot:
    """A step inside an event: prologues and epilogues by node, a wait or copy-out before them, a
    copy-in or start after them.
    """

    event: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One bucket that may be chosen, or one collective alone, with its exact prices."""

    members: tuple[int, ...]
    take_ticks: int
    """Prologues (of several members, without their casts) and copy-in."""
    launch_ticks: int
    transfer_ticks: int
    wait_ticks: int
    """Epilogues that run at the wait: all but those of a gather."""
    give_ticks: tuple[int, ...]
    """Copy-out and epilogue of each member, where they run apart from the wait: of a gather."""
    input_bytes: int
    """As the allocator takes them for one buffer."""
    output_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Events of a problem within caps; ``u`` and ``v`` index them."""

    problem: Problem
    caps: Caps
    num_units: int
    """Events of collectives; compute node k is event ``num_units + k``, the output the last."""
    take: tuple[int, ...]
    start: tuple[int, ...]
    wait: tuple[int, ...]
    give: tuple[int, ...]
    columns: tuple[Column, ...]
    hosts: tuple[tuple[Spot, ...], ...]
    """For each node the spots that it follows at once, or its own; empty where it runs with the
    inputs.
    """
    reach: tuple[int, ...]
    """For each event the set of events never before it (bits), itself left out."""
    strict: tuple[int, ...]
    """For each event the set of events always after it (bits)."""

    @property
    def num_events(self) -> int:
        """Number of events, the output included."""
        return len(self.reach)

    def compute_order(self, k: int) -> int:
        """Return the event of compute node ``k`` (of the output for k = number of compute
        nodes).
        """
        return self.num_units + k

    def gathers(self, c: int) -> bool:
        """Whether collective ``c`` is an all-gather."""
        return self.problem.keys[self.problem.collectives[c].key].kind == CollectiveKind.ALL_GATHER

    def always_before(self, u: int, v: int) -> bool:
        """Whether ``u`` comes before ``v`` in every schedule."""
        return bool(self.strict[u] >> v & 1)

    def never_after(self, u: int, v: int) -> bool:
        """Whether ``u`` comes before ``v`` or with it in every schedule."""
        return u == v or bool(self.reach[u] >> v & 1)


def create_events(problem: Problem, caps: Caps) -> Events:
    """Return the events of ``problem``; InputError where it is too large for the formulation."""
    num_collectives = len(problem.collectives)
    if num_collectives > MOST_COLLECTIVES:
        raise InputError(
            f"the MILP takes problems of at most {MOST_COLLECTIVES} collectives; {problem.name} has"
            f" {num_collectives}: choose --solver cp-sat, or fewer --layers"
        )
    draft = _Draft(problem, [c.may_share for c in problem.collectives])
    columns = tuple(
        _column(problem, members)
        for members in _allowed(problem, caps, draft)
        if _as_planned(problem, members)
    )
    shared = {c for column in columns if len(column.members) > 1 for c in column.members}
    draft = _Draft(problem, [c in shared for c in range(num_collectives)])
    return Events(
        problem=problem,
        caps=caps,
        num_units=draft.num_units,
        take=tuple(draft.take),
        start=tuple(draft.start),
        wait=tuple(draft.wait),
        give=tuple(draft.give),
        columns=columns,
        hosts=tuple(draft.hosts),
        reach=tuple(draft.reach),
        strict=tuple(draft.strict),
    )


class _Draft:
    """Numbers the events and closes the relation of events that must precede others."""

    def __init__(self, problem: Problem, shares: Sequence[bool]) -> None:
        self.problem = problem
        self.take: list[int] = []
        self.start: list[int] = []
        self.wait: list[int] = []
        self.give: list[int] = []
        self.num_units = 0
        for c, collective in enumerate(problem.collectives):
            self.take.append(self._new())
            self.start.append(self._new() if shares[c] else self.take[c])
            self.wait.append(self._new())
            apart = shares[c] and problem.keys[collective.key].kind == CollectiveKind.ALL_GATHER
            self.give.append(self._new() if apart else self.wait[c])
        num_events = self.num_units + len(problem.compute_order) + 1
        self.reach = [0] * num_events
        self.strict = [0] * num_events
        self.hosts: list[tuple[Spot, ...]] = [()] * problem.num_nodes
        self._place()
        self._precede()
        self._close()

    def _new(self) -> int:
        self.num_units += 1
        return self.num_units - 1

    def _place(self) -> None:
        problem = self.problem
        for k, node in enumerate(problem.compute_order):
            self.hosts[node] = (Spot(self.num_units + k, 0),)
        for c, collective in enumerate(problem.collectives):
            for node in collective.prologue:
                self.hosts[node] = (Spot(self.take[c], node),)
            for node in collective.epilogue:
                self.hosts[node] = (Spot(self.give[c], node),)
            self.hosts[collective.start] = (Spot(self.start[c], problem.num_nodes),)
            self.hosts[collective.wait] = (Spot(self.give[c], WAIT_RANK),)
        own = {*problem.compute_order, *problem.travels, *problem.collective_of_node}
        for node, kind in enumerate(problem.kinds):
            if kind is NodeKind.OUTPUT:
                self.hosts[node] = (Spot(len(self.reach) - 1, 0),)
            elif node not in own:
                self.hosts[node] = tuple(
                    {spot: None for p in problem.predecessors[node] for spot in self.hosts[p]}
                )

    def _precede(self) -> None:
        problem = self.problem
        takes = {collective.start: self.take[c] for c, collective in enumerate(problem.collectives)}
        own = {*problem.compute_order, *problem.travels, *problem.collective_of_node}
        for node in own:
            event = takes.get(node, self.hosts[node][0].event)
            for p in problem.predecessors[node]:
                for spot in self.hosts[p]:
                    if spot.event != event:
                        self.strict[spot.event] |= 1 << event
        for c in range(len(problem.collectives)):
            self.strict[self.start[c]] |= 1 << self.wait[c]
            for first, second in ((self.take[c], self.start[c]), (self.wait[c], self.give[c])):
                if first != second:
                    self.reach[first] |= 1 << second
        for k, _ in pairwise(range(self.num_units, len(self.reach))):
            self.strict[k] |= 1 << (k + 1)
        for u in range(self.num_units):
            self.strict[u] |= 1 << (len(self.reach) - 1)
        self._precede_as_planned()

    def _precede_as_planned(self) -> None:
        """Launches and waits stand between the compute nodes of the user's plan."""
        num_compute = len(self.problem.compute_order)
        for c, collective in enumerate(self.problem.collectives):
            restriction = collective.restriction
            for first, last, slots in (
                (self.take[c], self.start[c], restriction.start_slots),
                (self.wait[c], self.wait[c], restriction.wait_slots),
            ):
                if slots is not None and slots[0] > 0:
                    self.strict[self.num_units + slots[0] - 1] |= 1 << first
                if slots is not None and slots[1] < num_compute:
                    self.strict[last] |= 1 << (self.num_units + slots[1])

    def _close(self) -> None:
        """Transitive closure; a path is strict if one of its arcs is."""
        n = len(self.reach)
        for u in range(n):
            self.reach[u] |= self.strict[u]
        for k in range(n):
            for u in range(n):
                if self.reach[u] >> k & 1:
                    self.strict[u] |= self.reach[k] if self.strict[u] >> k & 1 else self.strict[k]
                    self.reach[u] |= self.reach[k]


def _allowed(problem: Problem, caps: Caps, draft: _Draft) -> list[tuple[int, ...]]:
    """Return every collective alone, and every bucket that the caps and the data allow."""
    found: list[tuple[int, ...]] = []
    for c in range(len(problem.collectives)):
        for members in _grown(problem, caps, draft, (c,)):
            found.append(members)
            if len(found) > MOST_BUCKETS:
                raise InputError(
                    f"the MILP takes at most {MOST_BUCKETS} possible buckets, and {problem.name}"
                    " has more within these caps: lower --bucket-cap or --max-topo-span, or choose"
                    " --solver cp-sat"
                )
    return found


def _as_planned(problem: Problem, members: tuple[int, ...]) -> bool:
    """Whether groups of the user's plan are in ``members`` as a whole or not at all, and closed
    ones without other members.
    """
    groups = {problem.collectives[c].restriction.group for c in members} - {None}
    whole = {
        c
        for c, collective in enumerate(problem.collectives)
        if collective.restriction.group in groups
    }
    alone = not any(problem.collectives[c].restriction.closed for c in members) or whole == {
        *members
    }
    return alone and whole <= {*members}


def _grown(
    problem: Problem, caps: Caps, draft: _Draft, members: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    yield members
    first = problem.collectives[members[0]]
    if not first.may_share:
        return
    size = sum(problem.collectives[c].size_bytes for c in members)
    for d in range(members[-1] + 1, len(problem.collectives)):
        other = problem.collectives[d]
        if other.key != first.key or not other.may_share:
            continue
        if caps.bucket_cap_bytes is not None and size + other.size_bytes > caps.bucket_cap_bytes:
            continue
        if caps.max_topo_span is not None and other.start - first.start > caps.max_topo_span:
            break
        if any(
            draft.strict[draft.take[a]] >> draft.take[b] & 1
            for c in members
            for a, b in ((c, d), (d, c))
        ):
            continue
        yield from _grown(problem, caps, draft, (*members, d))


def _column(problem: Problem, members: tuple[int, ...]) -> Column:
    collectives = [problem.collectives[c] for c in members]
    key = problem.keys[collectives[0].key]
    several, gathers = len(members) > 1, key.kind == CollectiveKind.ALL_GATHER
    prologues = sum(
        problem.duration_ticks[node]
        for m in collectives
        for node in m.prologue
        if not (several and node in m.cast)
    )
    epilogues = [sum(problem.duration_ticks[node] for node in m.epilogue) for m in collectives]
    return Column(
        members=members,
        take_ticks=prologues
        + (problem.copy_price(sum(m.copied_bytes for m in collectives)) if several else 0),
        launch_ticks=key.launch_ticks if several else problem.duration_ticks[collectives[0].start],
        transfer_ticks=key.price(sum(m.size_bytes for m in collectives)),
        wait_ticks=0 if gathers else sum(epilogues),
        give_ticks=tuple(
            ticks + (problem.copy_price(m.output_bytes) if several else 0) if gathers else 0
            for m, ticks in zip(collectives, epilogues, strict=True)
        ),
        input_bytes=allocated_bytes(sum(m.input_bytes for m in collectives)),
        output_bytes=allocated_bytes(sum(m.output_bytes for m in collectives)),
    )
