"""A graph solved as eager FSDP2 runs its units, with FSDP2's own schedule as a baseline."""

from contextlib import nullcontext
from dataclasses import replace

from torch import nn

from apsched.compiler.ranks.agreement import GraphAgreement
from apsched.compiler.ranks.answer import Solve, answered
from apsched.compiler.settings import Settings
from apsched.config import Caps, SolveOptions
from apsched.integrations.fsdp2_units import forward_hooks, needs_of, running_units, units_of
from apsched.integrations.unit_order import Units, as_units_run, moved_as_units_run
from apsched.problem.problem import Problem
from apsched.schedule.result import Scored, SolveResult
from apsched.solver.baselines import with_units

AS_FSDP2 = "fsdp2"
"""The baseline that follows the defaults of FSDP2: one bucket for each unit, and the gather of the
next unit in flight.
"""


def units_in_order(model: nn.Module, forward: Problem) -> Units:
    """Return the parameters of each unit, in the order of the hooks in forward."""
    units = running_units(units_of(model), forward)
    by_parameter = {name: unit for unit in units for name in unit.parameters}
    parameters = {unit.name: unit.parameters for unit in units}
    return [parameters[hook.unit] for hook in forward_hooks(units, needs_of(forward, by_parameter))]


def answered_as_units(
    problem: Problem,
    caps: Caps,
    options: SolveOptions,
    *,
    solving: Solve,
    settings: Settings,
    agreement: GraphAgreement | None,
    units: Units,
) -> SolveResult:
    """Return the answer for ``problem``, the same on all process ranks of ``agreement``, in the
    order in which FSDP2 runs ``units``.
    """
    found = answered(problem, caps, options, solving, sources=settings.answers, agreement=agreement)
    with agreement.job.working() if agreement else nullcontext():
        return _in_order(problem, caps, found, units)


def searched_as_units(
    problem: Problem, caps: Caps, options: SolveOptions, *, solving: Solve, units: Units
) -> SolveResult:
    """As :func:`answered_as_units`, on this process rank alone."""
    return _in_order(problem, caps, solving(problem, caps, options), units)


def _in_order(problem: Problem, caps: Caps, found: SolveResult, units: Units) -> SolveResult:
    plain = with_units(problem, caps, AS_FSDP2, units)
    return as_units_run(problem, caps, replace(found, baselines=(*found.baselines, plain)), units)


def untuned(problem: Problem, caps: Caps, units: Units) -> Scored:
    """Return FSDP2's schedule of ``problem`` without settings."""
    return moved_as_units_run(problem, caps, with_units(problem, caps, AS_FSDP2, units), units)


def untuned_of(found: SolveResult) -> Scored:
    """Return FSDP2's schedule without settings among the baselines of ``found``."""
    return next(one for one in found.baselines if one.name == AS_FSDP2)
