"""Check a schedule against the requirements of the user's plan on each collective. Shares no code
with the solver.
"""

from apsched.problem.problem import Problem
from apsched.schedule.schedule import Schedule, Step, StepKind


def broken_rules(problem: Problem, schedule: Schedule) -> list[str]:
    """Return the violations of the plan by ``schedule``, a sentence each, with the rule if one
    requires it.
    """
    if all(c.restriction.rules == () and c.restriction.group is None for c in problem.collectives):
        return []
    wrong = _groups(problem, schedule) + _payload(problem, schedule) + _places(problem, schedule)
    return list(dict.fromkeys(wrong))


def _groups(problem: Problem, schedule: Schedule) -> list[str]:
    """The members of a group are in one bucket, alone if it is closed; a collective whose bucketing
    the plan forbids is in none.
    """
    bucket_of = {c: b for b, bucket in enumerate(schedule.buckets) for c in bucket.members}
    members: dict[int, list[int]] = {}
    for c, collective in enumerate(problem.collectives):
        if collective.restriction.group is not None:
            members.setdefault(collective.restriction.group, []).append(c)
    wrong = []
    for group in members.values():
        buckets = {bucket_of.get(c, -1 - c) for c in group}
        if len(buckets) > 1:
            wrong.append(
                f"{_names(problem, group)} are in {len(buckets)} launches, not in"
                f" one{_rule(problem, group[0])}"
            )
        for c in group:
            others = schedule.buckets[bucket_of[c]].members if c in bucket_of else (c,)
            joined = [
                d
                for d in others
                if problem.collectives[d].restriction.group
                != problem.collectives[c].restriction.group
            ]
            if problem.collectives[c].restriction.closed and joined:
                wrong.append(
                    f"{_names(problem, joined)} joins the bucket of"
                    f" {_names(problem, group)}{_rule(problem, c)}"
                )
    return wrong


def _payload(problem: Problem, schedule: Schedule) -> list[str]:
    """Members stand in the buffer in the order of the plan."""
    wrong = []
    for b, bucket in enumerate(schedule.buckets):
        order = [problem.collectives[c].restriction.payload for c in bucket.members]
        if order != sorted(order):
            wrong.append(
                f"bucket {b}: the members stand in another payload"
                f" order{_rule(problem, bucket.members[0])}"
            )
    return wrong


def _places(problem: Problem, schedule: Schedule) -> list[str]:
    """Launches and waits stand between the compute nodes of the plan; a copy-in not before."""
    slot = _slot_of_steps(problem, schedule)
    wrong = []
    launched = {c: (Step(StepKind.NODE, m.start),) * 2 for c, m in enumerate(problem.collectives)}
    for b, bucket in enumerate(schedule.buckets):
        kind = StepKind.START if bucket.coalesced else StepKind.COPY_IN
        launched |= dict.fromkeys(bucket.members, (Step(kind, b), Step(StepKind.START, b)))
    waited = {c: Step(StepKind.NODE, m.wait) for c, m in enumerate(problem.collectives)}
    for c, collective in enumerate(problem.collectives):
        limits, name = collective.restriction, problem.node_names[collective.start]
        first, start = (slot[step] for step in launched[c])
        if limits.start_slots is not None and not (
            limits.start_slots[0] <= first and start <= limits.start_slots[1]
        ):
            wrong.append(
                f"{name} is launched behind compute node {start}, not"
                f" {_between(limits.start_slots)}{_rule(problem, c)}"
            )
        if (
            limits.wait_slots is not None
            and not limits.wait_slots[0] <= slot.get(waited[c], -1) <= limits.wait_slots[1]
        ):
            wrong.append(
                f"{name} is waited for behind compute node {slot.get(waited[c])}, not"
                f" {_between(limits.wait_slots)}{_rule(problem, c)}"
            )
    return wrong


def _slot_of_steps(problem: Problem, schedule: Schedule) -> dict[Step, int]:
    """Return for each step the compute nodes that keep their order before it."""
    compute_order, slots, passed = frozenset(problem.compute_order), {}, 0
    for step in schedule.steps:
        slots[step] = passed
        passed += step.kind is StepKind.NODE and step.index in compute_order
    return slots


def _between(slots: tuple[int, int]) -> str:
    return f"{slots[0]}" if slots[0] == slots[1] else f"{slots[0]} to {slots[1]}"


def _names(problem: Problem, members: list[int]) -> str:
    names = [problem.node_names[problem.collectives[c].start] for c in members]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _rule(problem: Problem, c: int) -> str:
    """Return the rules that concern ``c``, for the end of a sentence."""
    rules = problem.collectives[c].restriction.rules
    return f" ({', '.join(problem.rules[r] for r in rules)})" if rules else ""
