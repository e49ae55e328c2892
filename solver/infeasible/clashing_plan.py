"""Caps that the user's plan alone breaks: the rule, and the least cap that fits."""

from collections.abc import Iterator
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

    Where compute moves, the node that needs a result may come sooner by the cap on moves, and a
    place of the plan counts the nodes that then stand before it.
    """
    if caps.max_compute_move is None:
        return
    sooner = caps.max_compute_move
    place = {node: k - sooner for k, node in enumerate(problem.compute_order)}
    for c, collective in enumerate(problem.collectives):
        slots = collective.restriction.start_slots
        if caps.max_prefetch is None or slots is None or not problem.needs[c]:
            continue
        needs = [
            place[problem.needs[d][0]] for d in _mates(problem, c) if problem.needs[d]
        ]  # of a bucket the first one counts
        distance = min(max(need - slots[1], 0) for need in needs if need + 2 * sooner >= slots[1])
        if distance > caps.max_prefetch:
            yield PlanClash(
                cap="max_prefetch",
                least=distance,
                nodes=(problem.node_names[collective.start],),
                message=(
                    f"the plan wants a launch {distance} compute nodes ahead, more than"
                    f" max_prefetch of {caps.max_prefetch}: {_rules(problem, [c])}"
                ),
            )


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


def _rules(problem: Problem, members: list[int]) -> str:
    return " and ".join(
        problem.rules[r]
        for r in sorted({r for c in members for r in problem.collectives[c].restriction.rules})
    )
