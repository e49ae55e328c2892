"""Caps that the user's plan alone breaks: the rule, and the least cap that fits."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from apsched.config import Caps
from apsched.problem.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanClash:
    """A cap that no schedule under the plan keeps."""

    cap: str
    """A field of :class:`apsched.config.Caps`."""
    least: int
    """The use of the resource by the plan."""
    nodes: tuple[str, ...]
    message: str


def plan_clashes(problem: Problem, caps: Caps) -> tuple[PlanClash, ...]:
    """Return for each cap the worst excess of the plan."""
    worst: dict[str, PlanClash] = {}
    for clash in (*_groups(problem, caps), *_prefetch(problem, caps)):
        if clash.cap not in worst or clash.least > worst[clash.cap].least:
            worst[clash.cap] = clash
    return tuple(worst.values())


def _groups(problem: Problem, caps: Caps) -> Iterator[PlanClash]:
    members: dict[int, list[int]] = {}
    for c, collective in enumerate(problem.collectives):
        if collective.restriction.group is not None:
            members.setdefault(collective.restriction.group, []).append(c)
    for group in members.values():
        in_group = [problem.collectives[c] for c in group]
        starts = [c.start for c in in_group]
        for cap, value, what in (
            ("bucket_cap_bytes", sum(c.size_bytes for c in in_group), "bytes in one bucket"),
            (
                "in_flight_cap_bytes",
                sum(c.output_bytes for c in in_group),
                "bytes in flight at once",
            ),
            ("max_topo_span", max(starts) - min(starts), "ranks in one bucket"),
        ):
            limit = getattr(caps, cap)
            if limit is not None and value > limit:
                yield PlanClash(
                    cap=cap,
                    least=value,
                    nodes=tuple(problem.node_names[c.start] for c in in_group),
                    message=(
                        f"the plan wants {value} {what}, more than {cap} of {limit}:"
                        f" {_rules(problem, group)}"
                    ),
                )


def _prefetch(problem: Problem, caps: Caps) -> Iterator[PlanClash]:
    """Yield the launches that the plan places further ahead than the cap on prefetch.

    Where compute moves, the node that needs a result may come sooner by the cap on moves, but
    behind all compute whose results it takes; a place of the plan counts the nodes that then stand
    before it.
    """
    planned = [c for c, one in enumerate(problem.collectives) if one.restriction.start_slots]
    if caps.max_prefetch is None or not planned:
        return
    place = {node: k for k, node in enumerate(problem.compute_order)}
    moves = len(place) if caps.max_compute_move is None else caps.max_compute_move
    before: dict[int, int] = {}

    def soonest(node: int) -> int:
        if moves and node not in before:
            before[node] = _num_before(problem, node, place)
        return max(place[node] - moves, before[node]) if moves else place[node]

    for c in planned:
        collective = problem.collectives[c]
        slots = collective.restriction.start_slots
        if slots is None or not problem.needs[c]:
            continue
        needs = [
            problem.needs[d] for d in _mates(problem, c) if problem.needs[d]
        ]  # of a bucket the first one counts
        distance = min(
            max(min(map(soonest, nodes)) - slots[1], 0)
            for nodes in needs
            if place[nodes[0]] + moves >= slots[1]
        )
        if distance > caps.max_prefetch:
            yield PlanClash(
                cap="max_prefetch",
                least=distance,
                nodes=(problem.node_names[collective.start],),
                message=(
                    f"the plan wants a launch {'at least ' if moves else ''}{distance} compute"
                    f" nodes ahead, more than max_prefetch of {caps.max_prefetch}:"
                    f" {_rules(problem, [c])}"
                ),
            )


def _num_before(problem: Problem, node: int, place: Mapping[int, int]) -> int:
    """Return the number of compute nodes, which have a ``place``, that ``node`` comes behind."""
    seen, left = {node}, [node]
    while left:
        found = [p for p in problem.predecessors[left.pop()] if p not in seen]
        seen.update(found)
        left += found
    return sum(p in place for p in seen) - 1


def _mates(problem: Problem, c: int) -> Iterator[int]:
    """Yield the collectives that may share the launch of ``c`` under the plan, itself included."""
    one = problem.collectives[c]
    for d, other in enumerate(problem.collectives):
        one_group = (
            one.restriction.group is not None and one.restriction.group == other.restriction.group
        )
        may = one.key == other.key and one.may_share and other.may_share
        if (
            d == c
            or one_group
            or (may and not one.restriction.closed and not other.restriction.closed)
        ):
            yield d


def rules_with_places(problem: Problem) -> str:
    """Return the rules that state places of launches; empty for none."""
    planned = [c for c, one in enumerate(problem.collectives) if one.restriction.start_slots]
    return _rules(problem, planned)


def _rules(problem: Problem, members: list[int]) -> str:
    return " and ".join(
        problem.rules[r]
        for r in sorted({r for c in members for r in problem.collectives[c].restriction.rules})
    )
