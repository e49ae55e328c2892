"""The MILP in the place of the solver: ``apsched solve --solver milp``."""

from apsched.config import Caps, MilpOptions, SolveOptions
from apsched.errors import InputError
from apsched.problem.problem import Problem
from apsched.schedule.result import SolveResult
from apsched.schedule.score import score
from apsched.solver.arrays.floated import normal_form_is_all
from apsched.solver.arrays.instance import Instance
from apsched.solver.baselines import baselines
from apsched.solver.bounds.best import best_bound
from apsched.solver.bounds.memory_and_launches import later_bounds
from apsched.solver.bounds.step_time import TimeBound
from apsched.solver.infeasible.explain import explain
from apsched.solver.milp.model import solve_milp
from apsched.solver.reorder.min_memory import least_memory


def solve_with_milp(
    problem: Problem,
    caps: Caps | None = None,
    options: SolveOptions | None = None,
    milp: MilpOptions | None = None,
) -> SolveResult:
    """Return the MILP's schedule where it finds one within its time limit, or the best baseline,
    with the MILP's bound.

    The objectives are kept in strict order: ``options.time_slack`` is not used. Raises InputError
    where the solver cannot run, the problem is too large for the formulation, or compute may move
    or buckets be coalesced, which it does not decide.
    """
    caps, options, milp = caps or Caps(), options or SolveOptions(), milp or MilpOptions()
    instance = Instance.of(problem, caps)
    _check(instance)
    made = baselines(instance)
    known = min((b for b in made if b.fits), key=lambda b: b.step_time_ticks, default=None)
    found = solve_milp(
        problem,
        caps,
        solver_name=milp.solver_name,
        time_limit_s=milp.time_limit_s,
        known=known.schedule if known is not None else None,
    )
    floor_bytes, floor_bound = least_memory(problem, caps, options)
    answered = found.schedule is not None and (
        known is None or found.schedule != known.schedule or found.proven[0]
    )
    scored = (
        score(problem, "milp", found.schedule, caps)
        if answered and found.schedule is not None
        else None
    )
    fitting = [s for s in (scored, *made) if s is not None and s.fits]
    best = min(
        fitting, key=lambda s: s.step_time_ticks, default=None
    )  # of equals the MILP's, which stands first
    who = f"milp ({found.solver_name})"
    bound = TimeBound(ticks=found.bound_ticks, source=who)
    if not normal_form_is_all(problem, caps):  # the MILP decides schedules in normal form alone
        bound = min(bound, best_bound(instance, None), key=lambda b: b.ticks)
    if best is None:
        return SolveResult.infeasible(
            explain(instance, options),
            bound_ticks=bound.ticks,
            bound_source=bound.source,
            baselines=made,
            floor_memory_bytes=floor_bytes,
            floor_bound_bytes=floor_bound,
            solved_by=who,
        )
    later = later_bounds(instance, best, 0, floor_bound)
    return SolveResult.found(
        best,
        bound_ticks=bound.ticks,
        bound_source=bound.source,
        baselines=made,
        floor_memory_bytes=floor_bytes,
        floor_bound_bytes=floor_bound,
        fastest_ticks=best.step_time_ticks,
        time_limit_ticks=later.limit_ticks,
        peak_bound_bytes=later.peak_bytes,
        launches_bound=later.launches,
        solved_by=who if best is scored else best.name,
    )


def _check(instance: Instance) -> None:
    """Raise InputError where the formulation does not decide all of ``instance``."""
    if instance.caps.max_compute_move != 0:
        raise InputError(
            "max_compute_move: the MILP keeps compute as captured; expected 0, found"
            f" {instance.caps.max_compute_move!r}"
        )
    if instance.problem.contention is not None:
        raise InputError(
            "contention: the MILP does not know it; leave it out, or solve with cp-sat"
        )
    if instance.arrays.coalesces.any():
        raise InputError(
            "coalesced_member_us: the MILP knows flat buckets only; expected costs without it, or"
            " --solver cp-sat"
        )
