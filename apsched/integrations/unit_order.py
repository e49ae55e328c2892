"""The order in which FSDP2 gathers and reduces units, and a schedule in that order.

The root unit is gathered first and reduced last: its hooks run around those of all other units
(torch/distributed/fsdp/_fully_shard/_fsdp_state.py, ``_pre_forward`` and
``_root_post_backward_final_callback``), also where its own parameters are those of the head, which
is needed last and has the first gradient. A unit is reduced when its backward has ended: behind the
units in it, and an embedding behind all others. A unit with parameters on several meshes (experts
under expert parallelism) gathers and reduces once on each, at one place
(_fsdp_state.py, ``_fsdp_param_groups``).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from apsched.config import Caps
from apsched.errors import InfeasibleError
from apsched.kinds import CollectiveKind
from apsched.names import direction_named
from apsched.problem.problem import Collective, Problem
from apsched.schedule.result import Scored, SolveResult
from apsched.schedule.schedule import Schedule, Step, StepKind
from apsched.schedule.score import scored
from apsched.schedule.verify import verify

Units = Sequence[Collection[str]]
"""The parameters of each unit; the units are in the order of their hooks in forward."""


def as_units_run(problem: Problem, caps: Caps, answer: SolveResult, units: Units) -> SolveResult:
    """Return ``answer`` with the gathers of the unit that runs first before all others in forward,
    or the reductions in the order of FSDP2 in backward, in its schedule and in the baselines; the
    fastest of them is the schedule.

    Raises
    ------
    InfeasibleError
        where none of them keeps ``caps`` in that order.
    """
    if answer.best is None:
        return answer
    moved = [
        moved_as_units_run(problem, caps, one, units) for one in (answer.best, *answer.baselines)
    ]
    allowed = [one for one in moved if one.fits]
    if not allowed:
        raise InfeasibleError(
            f"{problem.name}: expected a schedule that keeps the caps in the order in which FSDP2"
            f" gathers and reduces units, found none: {moved[0].violations[0]}; state a higher cap,"
            " or call fully_shard on fewer modules"
        )
    best = min(allowed, key=lambda one: one.step_time_ticks)
    return replace(
        answer,
        best=best,
        baselines=tuple(moved[1:]),
        fastest_ticks=answer.fastest_ticks if best is answer.best else best.step_time_ticks,
        time_limit_ticks=max(answer.time_limit_ticks, best.step_time_ticks),
    )


def reduced_as_units_run(
    problem: Problem, schedule: Schedule, units: Units, memory_cap_bytes: int | None
) -> Schedule | None:
    """Return ``schedule`` with its reductions in the order of ``units``; ``None`` where that breaks
    a data dependence, or takes more memory than both the schedule and ``memory_cap_bytes`` (of
    which ``None`` is no cap).
    """
    moved = _reduced_in_order(problem, schedule, units)
    if verify(problem, moved, Caps()):
        return None
    if memory_cap_bytes is None:
        return moved
    before, behind = (scored(problem, "", one).peak_memory_bytes for one in (schedule, moved))
    return moved if behind <= max(before, memory_cap_bytes) else None


def moved_as_units_run(problem: Problem, caps: Caps, one: Scored, units: Units) -> Scored:
    """Return ``one`` with the units as FSDP2 runs them; with the caps or data dependences that this
    breaks as its violations, where it cannot be.
    """
    found = []
    for schedule in _as_units_run(problem, one.schedule, units):
        if schedule == one.schedule:
            return one
        wrong = verify(problem, schedule, caps)
        moved = replace(one, violations=wrong) if wrong else scored(problem, one.name, schedule)
        found.append(moved)
    return min(found, key=lambda moved: (not moved.fits, moved.step_time_ticks))


def _as_units_run(problem: Problem, schedule: Schedule, units: Units) -> Iterator[Schedule]:
    """Yield ``schedule`` with the units as FSDP2 runs them: gathers of a unit on several meshes at
    the place of the first, and where that differs at the place of the last.
    """
    for at_last in (False, True):
        together = _gathered_together(problem, schedule, units, at_last=at_last)
        if direction_named(problem.name) == "forward":
            yield _gathered_first(problem, together, units[0] if units else ())
        else:
            yield _reduced_in_order(problem, together, units[::-1])
        if together == schedule:
            return


def _gathered_together(
    problem: Problem, schedule: Schedule, units: Units, *, at_last: bool
) -> Schedule:
    """Return ``schedule`` with the gathers of each unit in a row, where the first of them is
    launched, or the last.
    """
    served = _served(problem, schedule, [CollectiveKind.ALL_GATHER])
    steps = list(schedule.steps)
    for unit in units:
        own = _of(problem, served, unit)
        launches = _launches(problem, steps, own)
        if not launches or own.issuperset(steps[launches[0] : launches[-1] + 1]):
            continue
        place = launches[-1] if at_last else launches[0] + 1
        before, behind = steps[:place], steps[place:]
        if at_last:
            moved = [step for step in before if step in own]
            before = [step for step in before if step not in own]
        else:
            moved = [step for step in behind if step in own]
            behind = [step for step in behind if step not in own]
        steps = [*before, *moved, *behind]
    return replace(schedule, steps=tuple(steps))


def _launches(problem: Problem, steps: Sequence[Step], own: Collection[Step]) -> list[int]:
    """Return the places of the launches among the steps ``own``."""
    starts = {one.start for one in problem.collectives}
    return [
        place
        for place, step in enumerate(steps)
        if step in own
        and (step.kind is StepKind.START or (step.kind is StepKind.NODE and step.index in starts))
    ]


def _gathered_first(problem: Problem, schedule: Schedule, unit: Collection[str]) -> Schedule:
    """Return ``schedule`` with the gathers of ``unit`` before all others."""
    served = _served(problem, schedule, [CollectiveKind.ALL_GATHER])
    own = _of(problem, served, unit)
    others = [k for k, step in enumerate(schedule.steps) if step in served and step not in own]
    if not others or not own:
        return schedule
    before, behind = schedule.steps[: others[0]], schedule.steps[others[0] :]
    rest = (step for step in behind if step not in own)
    return replace(schedule, steps=(*before, *(s for s in behind if s in own), *rest))


def _reduced_in_order(problem: Problem, schedule: Schedule, units: Units) -> Schedule:
    """Return ``schedule`` with the reduce-scatters of ``units`` in their order: one that is too
    early is launched right behind the one before it, and waited for before the next; so are those
    of one unit.
    """
    served = _served(problem, schedule, [CollectiveKind.REDUCE_SCATTER])
    reductions = [CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE]
    touched = _served(problem, schedule, reductions, results=True)
    launched = [(_of(problem, served, unit), _of(problem, touched, unit)) for unit in units]
    launched = [one for one in launched if one[0]]
    steps = list(schedule.steps)
    places = {step: place for place, step in enumerate(steps)}
    for k, (own, related) in enumerate(launched):
        end = 1 + max(places[step] for step in launched[k - 1][0]) if k else 0
        on_meshes = _launches(problem, steps, own)
        if not own.issuperset(steps[on_meshes[0] : on_meshes[-1] + 1]):
            end = max(end, 1 + on_meshes[-1])
        if min(places[step] for step in own) >= end:
            continue
        following = launched[k + 1][0] if k + 1 < len(launched) else set()
        launches = [step for step in steps[:end] if step in own]
        results = [step for step in steps[:end] if step in related - own]
        until = next((j for j in range(end, len(steps)) if steps[j] in following), end)
        steps = [
            *(step for step in steps[:end] if step not in related),
            *launches,
            *steps[end:until],
            *results,
            *steps[until:],
        ]
        places = {step: place for place, step in enumerate(steps)}
    return replace(schedule, steps=tuple(steps))


def _served(
    problem: Problem, schedule: Schedule, kinds: Collection[str], *, results: bool = False
) -> dict[Step, set[int]]:
    """Return step -> the collectives of parameters of these kinds that it launches or makes ready
    for that; with ``results`` also those that it waits for, or whose results it changes.
    """
    reduced = _reduced(problem)
    chosen = {
        c: one
        for c, one in enumerate(problem.collectives)
        if not one.on_path and problem.keys[one.key].kind in kinds
        if problem.keys[one.key].kind != CollectiveKind.ALL_REDUCE
        or _sums_shards(problem, one, reduced)
    }
    found: dict[Step, set[int]] = {}
    for c, one in chosen.items():
        behind = (one.wait, *one.epilogue) if results else ()
        for node in (*one.prologue, one.start, *behind):
            found.setdefault(Step(StepKind.NODE, node), set()).add(c)
    bucketed = (StepKind.COPY_IN, StepKind.START, *([StepKind.WAIT] if results else []))
    for b, bucket in enumerate(schedule.buckets):
        if members := chosen.keys() & set(bucket.members):
            found |= {Step(kind, b): set(members) for kind in bucketed}
    return {step: found[step] for step in schedule.steps if step in found}


def _reduced(problem: Problem) -> set[int]:
    """Return the nodes that have results of reduce-scatters."""
    return {
        node
        for c in problem.collectives
        if not c.on_path and problem.keys[c.key].kind == CollectiveKind.REDUCE_SCATTER
        for node in (c.wait, *c.epilogue)
    }


def _sums_shards(problem: Problem, one: Collective, reduced: Collection[int]) -> bool:
    """Return whether the all-reduce ``one`` sums shards over replicas, which are ``reduced``, and
    not parts of a gradient that is reduced behind it, as tensor parallelism has them.
    """
    return any(
        before in reduced
        for node in (one.start, *one.prologue)
        for before in problem.predecessors[node]
    )


def _of(problem: Problem, served: dict[Step, set[int]], unit: Collection[str]) -> set[Step]:
    """Return the steps that serve parameters of ``unit`` alone."""
    return {
        step
        for step, members in served.items()
        if all(problem.collectives[c].module in unit for c in members)
    }
