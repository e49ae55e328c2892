"""The merge of chains that ends first, by labels.

The machine here is smaller than that of a schedule: one compute stream, and a stream for each group
with the collectives on the path; gathers and reductions of parameters take no time. A *label* is a
state that some merge of the first units of all chains reaches:

    now       when the compute stream is free
    free[s]   when stream s is free
    there[c]  when the result of collective c is there, of each that a chain has launched and still
              needs

From a label the next unit of any chain runs, (M1): it begins at max(now, there[c] of all c that it
needs). A collective that it launches is there at max(now, free[s], there[c] of its inputs) + price.
All three never fall where an input grows. So of two labels with the same units behind them, one
that is at most as large in every entry is never worse, and the other is dropped, (M2). The least
``now`` at the end is that of the fastest merge. Of equal labels the one stays whose chains were
closer together, since their activations are alive for less time.

Chains are at most ``_WINDOW`` units further apart than is asked. With two chains that is the only
limit, as long as no more than ``_LABELS_OF_TWO`` labels are there. With more chains those with the
least idle time are kept, and the merge need not be the fastest.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from apsched.problem.problem import Problem
from apsched.solver.bounds.any_order.two_chains import undominated
from apsched.solver.interleave.units import is_compute

_WINDOW = 40
"""Units by which the distance of two chains may differ from the one that is asked."""
_LABELS_OF_TWO = 2_000
"""Labels that are kept behind each unit with two chains: more than the graphs of models have."""
_STEPS_OF_MORE = 200_000
"""Labels that are made in all with three chains or more."""
_FEWEST_LABELS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """A collective on the path, launched behind a unit."""

    stream: int
    launch_ticks: int
    price_ticks: int
    inputs: tuple[int, ...]
    """Places, among those that were pending and those launched since, of the collectives whose
    results it takes.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A unit of a chain, with the collectives that are launched before the next one."""

    work_ticks: int
    needs: tuple[int, ...]
    """Places of the pending collectives whose results its compute takes."""
    launches: tuple[_Launch, ...]
    kept: tuple[int, ...]
    """Places, among those pending and those launched, of the ones pending behind it."""


@dataclass(slots=True)
class _Use:
    """The collectives that a unit takes and launches, by their numbers in the problem."""

    work_ticks: int = 0
    needs: set[int] = field(default_factory=set)
    launched: dict[int, set[int]] = field(default_factory=dict)
    """With the collectives whose results each takes."""


def _parts(problem: Problem, units: Sequence[Sequence[int]]) -> list[_Part]:
    """Return the launches before the first unit of a chain as a unit of no work, then its units."""
    uses = _uses(problem, units)
    last_use = {c: u for u, use in enumerate(uses) for c in use.needs.union(*use.launched.values())}
    parts: list[_Part] = []
    pending: list[int] = []
    for u, use in enumerate(uses):
        place = {c: k for k, c in enumerate([*pending, *use.launched])}
        still = [c for c in place if last_use.get(c, -1) > u]
        parts.append(
            _Part(
                work_ticks=use.work_ticks,
                needs=tuple(place[c] for c in pending if c in use.needs),
                launches=tuple(
                    _launch(problem, c, sorted(place[i] for i in inputs))
                    for c, inputs in use.launched.items()
                ),
                kept=tuple(place[c] for c in still),
            )
        )
        pending = still
    return parts


def _launch(problem: Problem, number: int, inputs: list[int]) -> _Launch:
    collective = problem.collectives[number]
    key = problem.keys[collective.key]
    return _Launch(
        stream=key.stream,
        launch_ticks=key.launch_ticks,
        price_ticks=key.price(collective.size_bytes),
        inputs=tuple(inputs),
    )


def _uses(problem: Problem, units: Sequence[Sequence[int]]) -> list[_Use]:
    """Return the use before the first unit, then that of each unit up to the compute of the next;
    a node that takes no time passes on the collectives that it waits for.
    """
    starts = {c.start: k for k, c in enumerate(problem.collectives) if c.on_path}
    waits = {c.wait: k for k, c in enumerate(problem.collectives) if c.on_path}
    delays: dict[int, set[int]] = {}
    uses = [_Use()]
    for number, unit in enumerate(units):
        for node in unit:
            inputs = set().union(*(delays.get(p, ()) for p in problem.predecessors[node]))
            if is_compute(problem, node):
                if len(uses) == number + 1:
                    uses.append(_Use())
                uses[-1].work_ticks += problem.duration_ticks[node]
                uses[-1].needs |= inputs
            elif node in starts:
                uses[-1].launched[starts[node]] = inputs
            else:
                delays[node] = {waits[node]} if node in waits else inputs
        if len(uses) == number + 1:
            uses.append(_Use())
    return uses


@dataclass(frozen=True, slots=True)
class _Label:
    """A state that a merge reaches, and how."""

    now: int
    free: tuple[int, ...]
    there: tuple[tuple[int, ...], ...]
    """For each chain, the collectives that are pending in it."""
    before: "_Label | None" = None
    chain: int = -1
    """Whose unit was the last."""
    idle_ticks: int = 0
    lag: int = 0
    """Units by which chains were apart from the first one, summed over all units so far."""

    def entries(self) -> tuple[int, ...]:
        """Return all times in a row."""
        return (self.now, *self.free, *(ticks for there in self.there for ticks in there))


def fastest_numbers(
    problem: Problem, chains: Sequence[Sequence[Sequence[int]]], apart: int
) -> list[list[int]]:
    """Return for each chain the places of its units in the merge that ends first.

    Each chain is at least ``apart`` units behind the one before it; of two that may be 0 units
    apart, either may be ahead. Each is at most ``_WINDOW`` units further away.
    """
    parts = [_parts(problem, units) for units in chains]
    lengths = [len(units) for units in chains]
    most, least = _LABELS_OF_TWO, apart or -_WINDOW
    if len(chains) > 2:  # where chains are alike, each order among them would be kept apart
        least = apart
        most = max(_FEWEST_LABELS, _STEPS_OF_MORE // (sum(lengths) * len(chains)))
    first = _Label(0, (0,) * len(problem.streams), ((),) * len(chains))
    for k, of_chain in enumerate(parts):
        first = _after(first, k, of_chain[0], 0)
    reached = {(0,) * len(chains): [replace(first, before=None)]}
    for _ in range(sum(lengths)):
        further: dict[tuple[int, ...], list[_Label]] = defaultdict(list)
        for done, labels in reached.items():
            for k in _may_go_on(done, lengths, range(least, apart + _WINDOW + 1)):
                part = parts[k][done[k] + 1]
                behind = (*done[:k], done[k] + 1, *done[k + 1 :])
                lag = sum(abs(behind[0] - count) for count in behind)
                further[behind] += [_after(label, k, part, lag) for label in labels]
        reached = {done: _undominated(labels) for done, labels in further.items()}
        if sum(map(len, reached.values())) > most:
            reached = _least_idle(reached, most)
    (ends,) = reached.values()
    return _numbers(min(ends, key=lambda label: (label.now, label.lag)), len(chains))


def _may_go_on(done: Sequence[int], lengths: Sequence[int], behind: range) -> Iterator[int]:
    """Yield the chains whose next unit may run, with so many units ``done``: so that each chain is
    so many units ``behind`` the one before, unless that is at its end.
    """
    for k, count in enumerate(done):
        if count == lengths[k]:
            continue
        first = k == 0 or done[k - 1] == lengths[k - 1]
        last = k + 1 == len(done) or done[k + 1] == lengths[k + 1]
        if (first or done[k - 1] - count > behind[0]) and (
            last or count - done[k + 1] < behind[-1]
        ):
            yield k


def _after(label: _Label, chain: int, part: _Part, lag: int) -> _Label:
    """Return ``label`` with ``part`` of ``chain`` behind it, (M1)."""
    pending, free = list(label.there[chain]), list(label.free)
    begin = max((label.now, *(pending[c] for c in part.needs)))
    now = begin + part.work_ticks
    for launch in part.launches:
        inputs = (pending[c] for c in launch.inputs)
        now += launch.launch_ticks
        free[launch.stream] = max((now, free[launch.stream], *inputs)) + launch.price_ticks
        pending.append(free[launch.stream])
    there = (
        *label.there[:chain],
        tuple(pending[c] for c in part.kept),
        *label.there[chain + 1 :],
    )
    # What is over by now cannot delay anything: all such times count as now.
    return _Label(
        now,
        tuple([max(now, ticks) for ticks in free]),
        tuple([tuple([max(now, ticks) for ticks in of_chain]) for of_chain in there]),
        label,
        chain,
        label.idle_ticks + begin - label.now,
        label.lag + lag,
    )


def _undominated(labels: list[_Label]) -> list[_Label]:
    """Return the labels of which no other one is at most as large in every entry, (M2)."""
    first: dict[tuple[int, ...], _Label] = {}
    for label in sorted(labels, key=lambda label: label.lag):
        first.setdefault(label.entries(), label)
    return [first[entries] for entries in undominated(first)]


def _least_idle(
    reached: dict[tuple[int, ...], list[_Label]], most: int
) -> dict[tuple[int, ...], list[_Label]]:
    """Return the ``most`` labels with the least idle time."""
    ranked = sorted(
        (label.idle_ticks, label.lag, done, k)
        for done, labels in reached.items()
        for k, label in enumerate(labels)
    )
    kept: dict[tuple[int, ...], list[_Label]] = defaultdict(list)
    for _, _, done, k in ranked[:most]:
        kept[done].append(reached[done][k])
    return kept


def _numbers(label: _Label, num_chains: int) -> list[list[int]]:
    """Return the places of each chain's units on the way to ``label``."""
    way: list[int] = []
    while label.before is not None:
        way.append(label.chain)
        label = label.before
    numbers: list[list[int]] = [[] for _ in range(num_chains)]
    for place, chain in enumerate(reversed(way)):
        numbers[chain].append(place)
    return numbers
