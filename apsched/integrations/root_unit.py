"""The root unit of FSDP2 is gathered first and reduced last: its hooks run around those of all
other units (torch/distributed/fsdp/_fully_shard/_fsdp_state.py, ``_pre_forward`` and
``_root_post_backward_final_callback``), also where its own parameters are those of the head, which
is needed last and has the first gradient.
"""

from collections.abc import Collection
from dataclasses import replace

from apsched.config import Caps
from apsched.kinds import CollectiveKind
from apsched.problem.problem import Problem
from apsched.schedule.result import Scored, SolveResult
from apsched.schedule.schedule import Schedule, Step, StepKind
from apsched.schedule.score import scored
from apsched.schedule.verify import verify


def as_root_runs(
    problem: Problem, caps: Caps, answer: SolveResult, parameters: Collection[str]
) -> SolveResult:
    """Return ``answer`` with the gathers of ``parameters``, those of the root unit, before all
    other gathers of parameters in forward, or their reductions behind all others in backward, in
    its schedule and in the baselines; the fastest of them is the schedule. One that is not allowed
    then stays as it is.
    """
    if answer.best is None:
        return answer
    moved = [_moved(problem, caps, one, parameters) for one in (answer.best, *answer.baselines)]
    best = min((one for one in moved if one), key=lambda s: s.step_time_ticks, default=answer.best)
    baselines = zip(moved[1:], answer.baselines, strict=True)
    return replace(
        answer,
        best=best,
        baselines=tuple(one or before for one, before in baselines),
        fastest_ticks=answer.fastest_ticks if best is answer.best else best.step_time_ticks,
        time_limit_ticks=max(answer.time_limit_ticks, best.step_time_ticks),
    )


def _moved(problem: Problem, caps: Caps, one: Scored, parameters: Collection[str]) -> Scored | None:
    """Return a schedule in which the root unit runs as in FSDP2; ``None`` where ``caps`` or data
    dependences do not allow it.
    """
    is_forward = problem.name == "forward"
    schedule = _as_root_runs(problem, one.schedule, parameters, is_forward=is_forward)
    if schedule == one.schedule:
        return one if one.fits else None
    return None if verify(problem, schedule, caps) else scored(problem, one.name, schedule)


def _as_root_runs(
    problem: Problem, schedule: Schedule, parameters: Collection[str], *, is_forward: bool
) -> Schedule:
    collectives = {
        c: one
        for c, one in enumerate(problem.collectives)
        if not one.on_path
        and (problem.keys[one.key].kind == CollectiveKind.ALL_GATHER) == is_forward
    }
    root = {c for c, one in collectives.items() if one.module in parameters}
    launches = {n: {c} for c, one in collectives.items() for n in (*one.prologue, one.start)}
    results = {n: {c} for c, one in collectives.items() for n in (one.wait, *one.epilogue)}

    def served(step: Step) -> set[int]:
        """Return the collectives that a step launches, or makes ready for that."""
        if step.kind in (StepKind.COPY_IN, StepKind.START):
            return collectives.keys() & schedule.buckets[step.index].members
        return launches.get(step.index, set()) if step.kind is StepKind.NODE else set()

    def finished(step: Step) -> set[int]:
        """Return the reductions that a step waits for, or whose results it changes."""
        if is_forward:
            return set()
        if step.kind is StepKind.WAIT:
            return collectives.keys() & schedule.buckets[step.index].members
        return results.get(step.index, set()) if step.kind is StepKind.NODE else set()

    steps = schedule.steps
    others = [k for k, step in enumerate(steps) if served(step) - root]
    own = [
        k for k, step in enumerate(steps) if (of := served(step) | finished(step)) and of <= root
    ]
    mine = set(own)
    if not others or not own:
        return schedule
    end = others[0] if is_forward else others[-1] + 1
    rest = [k for k in range(len(steps)) if k not in mine]
    order = [*(k for k in rest if k < end), *own, *(k for k in rest if k >= end)]
    return replace(schedule, steps=tuple(steps[k] for k in order))
