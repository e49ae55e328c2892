"""``tune_fsdp2``: eager FSDP2 set up by a solved schedule, in the job and in one call."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from apsched.capture.captured import CapturedGraph
from apsched.capture.fake_copy import inputs_of
from apsched.capture.fsdp2 import capture_fsdp2
from apsched.compiler.memory_in_use import agreed_memory, with_memory_in_use
from apsched.compiler.ranks.agreement import GraphAgreement
from apsched.compiler.ranks.answer import Solve, answered
from apsched.compiler.schedule_captured import priced, progress_of, running_groups
from apsched.compiler.schedule_graph import Launches, all_or_none
from apsched.compiler.settings import Settings
from apsched.config import Caps, SolveOptions
from apsched.errors import InfeasibleError, InputError
from apsched.integrations.eager.agreed import as_launches, units_agreement
from apsched.integrations.eager.settings import Fsdp2Settings, in_words, set_up
from apsched.integrations.fsdp2 import checked_settings, fsdp2_plan, solved_graphs
from apsched.integrations.fsdp2_units import (
    forward_hooks,
    needs_of,
    plain_name,
    running_units,
    units_of,
)
from apsched.integrations.unit_order import Units, as_units_run
from apsched.pipeline.result import Result
from apsched.pipeline.solve_graph import resolve_caps, solve_graph, under_plan
from apsched.problem.problem import Problem
from apsched.quantities import show_us
from apsched.report.explanation import explain_in_job
from apsched.schedule.result import Scored, SolveResult
from apsched.solver import solve_requested
from apsched.solver.baselines import with_units
from apsched.torch_compat.compilers import uncompiled
from apsched.units import ticks_to_us

_FIXED = {"max_compute_move": 0}
_REFUSED = ("plan", "bitwise", "parameter_order", "second_group", "max_compute_move", "schedule")
"""Settings that eager FSDP2 decides itself."""
_AS_FSDP2 = "fsdp2"
"""The baseline that follows the defaults of FSDP2: one bucket for each unit, and the gather of the
next unit in flight.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp2Tuning:
    """The result of :func:`tune_fsdp2`."""

    settings: Fsdp2Settings | None
    """The settings of the units; ``None`` where an error left the model as it was."""
    results: tuple[Result, ...]
    """Of the forward and the backward graph."""

    @property
    def step_time_us(self) -> float:
        """Step time that the costs predict; 0 where nothing was set."""
        return sum(result.step_time_us or 0.0 for result in self.results)

    @property
    def untuned_us(self) -> float:
        """The same of FSDP2 without settings: the next unit's gather in flight, no more."""
        return ticks_to_us(sum(one.step_time_ticks for _, one in self._untuned()))

    @property
    def gain(self) -> float:
        """Share of the step time that is saved, as the costs predict it."""
        return 1 - self.step_time_us / self.untuned_us if self.untuned_us else 0.0

    def _untuned(self) -> list[tuple[Result, Scored]]:
        """Return each result with FSDP2's schedule of its graph without settings."""
        return [
            (result, baseline)
            for result in self.results
            for baseline in result.answer.baselines
            if baseline.name == _AS_FSDP2
        ]

    def _change(self) -> str:
        """Return the change of the step time in words."""
        if self.gain >= 0:
            return f"{100 * self.gain:.1f} % less"
        caps = ((result.caps.memory_cap_bytes, one) for result, one in self._untuned())
        exceeds = any(cap is not None and one.peak_memory_bytes > cap for cap, one in caps)
        return f"{-100 * self.gain:.1f} % more{', to fit the memory cap' if exceeds else ''}"

    def __str__(self) -> str:
        """Return one line about it."""
        if self.settings is None:
            return "FSDP2 stays unchanged"
        return (
            f"FSDP2 tuned: {len(self.settings.units)} units, step time"
            f" {show_us(self.step_time_us)} predicted, {show_us(self.untuned_us)} untuned"
            f" ({self._change()})"
        )


def tune_fsdp2(model: nn.Module, inputs: Any, **settings: Any) -> Fsdp2Tuning:
    """Set up ``model``, on which ``fully_shard`` was called, to gather in the order of a solved
    schedule of its own training step::

        for block in model.layers:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        print(apsched.tune_fsdp2(model, (tokens,), cluster="h100"))

    Call it on every process rank, before the first step. The step ``model(*inputs)``, or
    ``model(**inputs)`` for a mapping, is captured with fake tensors on the host, with the units,
    the mixed precision and the resharding passed to ``fully_shard``. One process rank solves, and
    all ranks apply the same settings, by public setters alone. Losses and weights stay the same,
    bit for bit.

    Parameters
    ----------
    inputs
        The inputs of forward: a tuple, one tensor, or a mapping of inputs by name; only shapes and
        dtypes matter.
    settings
        See :class:`apsched.compiler.settings.Settings`: cluster, memory_cap, budget, on_error ...

    Raises
    ------
    InputError
        with ``on_error="raise"``, where the model cannot be captured or FSDP2 cannot follow the
        schedule; nothing is set then, on any process rank.
    """
    chosen = _chosen(settings)
    model = uncompiled(model)
    given = inputs_of(inputs)

    def attempt(
        agreement: GraphAgreement | None,
    ) -> tuple[tuple[Result, ...], Launches]:
        with agreement.job.working() if agreement else nullcontext():
            capture = capture_fsdp2(model, given)
        results: tuple[Result, ...] = ()
        for graph in capture.graphs:  # forward first: its order is that of the units
            forward = results[0].problem if results else None
            results = (*results, _solved(model, graph, chosen, agreement, forward))
        units = running_units(units_of(model), results[0].problem)
        settings = checked_settings(model, units, solved_graphs(results))
        return results, as_launches(in_words(settings), agreement)

    as_it_was: tuple[Result, ...] = ()
    results = all_or_none(
        lambda: units_agreement(model, chosen.deadline_s),
        as_it_was,
        chosen,
        "fully_shard",
        attempt,
    )
    if not results:
        return Fsdp2Tuning(settings=None, results=results)
    units = running_units(units_of(model), results[0].problem)
    applied = checked_settings(model, units, solved_graphs(results))
    set_up(model, units, applied)
    return Fsdp2Tuning(settings=applied, results=results)


def _chosen(settings: Mapping[str, Any]) -> Settings:
    if refused := next((name for name in _REFUSED if name in settings), None):
        raise InputError(f"{refused}: expected no such setting, found one; eager FSDP2 decides it")
    if "keep" in settings:
        raise InputError(
            "keep: expected no such setting, found one; parameters stay gathered as"
            " reshard_after_forward of fully_shard says; for another choice solve the step,"
            " apsched.solve_step(model, inputs, keep=..., plan=fsdp2_plan(model, *graphs),"
            " caps=apsched.Caps(max_compute_move=0)), and call apply_fsdp2 with its results"
        )
    return Settings.of({**settings, **_FIXED}, unused=_REFUSED)


def _solved(
    model: nn.Module,
    captured: CapturedGraph,
    settings: Settings,
    agreement: GraphAgreement | None,
    forward: Problem | None,
) -> Result:
    """Return the answer for one graph with a bucket for each unit, on all process ranks the
    same; ``forward`` is the forward graph where this one is the backward graph.
    """
    progress = progress_of(settings)
    in_use = agreed_memory(settings, agreement)
    with agreement.job.working() if agreement else nullcontext():
        request = replace(settings.solve_request, bitwise_price=False)
        graph, request = priced(captured, settings, running_groups(), request, progress)
        graph = with_memory_in_use(graph, in_use, request.optimizer)
        problem = graph.problem
        plain = (replace(c, module=plain_name(c.module)) for c in problem.collectives)
        problem = replace(problem, collectives=tuple(plain))
        request = replace(request, plan=fsdp2_plan(model, problem))
        (graph,) = under_plan((replace(graph, problem=problem),), request)
        caps = resolve_caps(graph, request, progress)
    search = partial(
        _answered,
        solving=partial(solve_requested, progress=progress.solver),
        settings=settings,
        agreement=agreement,
        units=_units_in_order(model, forward or problem),
    )
    result = solve_graph(graph, request, progress, caps=caps, search=search)
    if result.best is None:
        raise InfeasibleError(explain_in_job(result))
    return result


def _units_in_order(model: nn.Module, forward: Problem) -> Units:
    """Return the parameters of each unit, in the order of the hooks in forward."""
    units = running_units(units_of(model), forward)
    by_parameter = {name: unit for unit in units for name in unit.parameters}
    parameters = {unit.name: unit.parameters for unit in units}
    return [parameters[hook.unit] for hook in forward_hooks(units, needs_of(forward, by_parameter))]


def _answered(
    problem: Problem,
    caps: Caps,
    options: SolveOptions,
    *,
    solving: Solve,
    settings: Settings,
    agreement: GraphAgreement | None,
    units: Units,
) -> SolveResult:
    found = answered(problem, caps, options, solving, sources=settings.answers, agreement=agreement)
    with agreement.job.working() if agreement else nullcontext():
        untuned = with_units(problem, caps, _AS_FSDP2, units)
        found = replace(found, baselines=(*found.baselines, untuned))
        return as_units_run(problem, caps, found, units)
