"""``tune_fsdp2``: eager FSDP2 set up by a solved schedule, in the job and in one call."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import nn

from apsched.capture.captured import Capture, CapturedGraph
from apsched.capture.fake_copy import Inputs, inputs_of
from apsched.capture.fsdp2 import capture_fsdp2, gathered_by_fsdp2, kept_by_fsdp2
from apsched.compiler.memory_in_use import agreed_memory, with_memory_in_use
from apsched.compiler.ranks.agreement import GraphAgreement
from apsched.compiler.schedule_captured import priced, progress_of, running_groups
from apsched.compiler.schedule_graph import Launches, all_or_none
from apsched.compiler.settings import Settings
from apsched.config import Caps
from apsched.errors import InfeasibleError, InputError
from apsched.integrations.eager.agreed import as_launches, units_agreement
from apsched.integrations.eager.kept import (
    KeptInPart,
    KeptUnits,
    UnitsToKeep,
    agreed_choice,
    request_of,
)
from apsched.integrations.eager.settings import Fsdp2Settings, in_words, lacks_buffers, set_up
from apsched.integrations.eager.solve_units import answered_as_units, units_in_order, untuned_of
from apsched.integrations.fsdp2 import checked_settings, fsdp2_plan, solved_graphs
from apsched.integrations.fsdp2_units import running_units, some, units_of, unread_parameters
from apsched.integrations.unit_order import Units
from apsched.pipeline.assumptions import check_hints
from apsched.pipeline.load import LoadedGraph
from apsched.pipeline.result import Result
from apsched.pipeline.solve_graph import SolveRequest, resolve_caps, solve_graph, under_plan
from apsched.problem.problem import Problem
from apsched.quantities import show_us
from apsched.report.assumed_sizes import assumed_text
from apsched.report.explanation import explain_in_job
from apsched.schedule.result import Scored
from apsched.solver import solve_requested
from apsched.torch_compat.compilers import plain_parameter_name, uncompiled
from apsched.units import ticks_to_us
from apsched.whole_step.keep_request import KeepRequest

_FIXED = {"max_compute_move": 0}
_REFUSED = ("plan", "bitwise", "parameter_order", "second_group", "max_compute_move", "schedule")
"""Settings that eager FSDP2 decides itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp2Tuning:
    """The result of :func:`tune_fsdp2`."""

    settings: Fsdp2Settings | None
    """The settings of the units; ``None`` where an error left the model as it was."""
    results: tuple[Result, ...]
    """Of the forward and the backward graph."""
    untuned: tuple[Scored, ...] = ()
    """FSDP2's schedule of each graph without settings, with the units kept that ``fully_shard``
    keeps.
    """
    choices: Mapping[str, float | None] = field(default_factory=dict)
    """With ``keep="auto"`` the step time of each common choice of kept units that was solved, in
    microseconds; ``None`` where one does not fit.
    """
    in_part: KeptInPart | None = None
    """The cost of whole units, where ``keep`` names a part of some."""
    lacks_buffers: bool = False
    """This torch keeps one reduce-scatter in flight, and the schedule has more: the step may take
    longer than predicted.
    """
    unread: tuple[str, ...] = ()
    """Parameters that the step ``model(*inputs)`` does not read, of units that it runs: FSDP2
    gathers them with their unit, and the prediction has neither their gather nor their memory.
    """

    @property
    def step_time_us(self) -> float:
        """Step time that the costs predict; 0 where nothing was set."""
        return sum(result.step_time_us or 0.0 for result in self.results)

    @property
    def untuned_us(self) -> float:
        """The same of FSDP2 without settings: the next unit's gather in flight, no more."""
        return ticks_to_us(sum(one.step_time_ticks for one in self.untuned))

    @property
    def gain(self) -> float:
        """Share of the step time that is saved, as the costs predict it."""
        return 1 - self.step_time_us / self.untuned_us if self.untuned_us else 0.0

    def _change(self) -> str:
        """Return the change of the step time in words."""
        if self.gain >= 0:
            return f"{100 * self.gain:.1f} % less"
        caps = (result.caps.memory_cap_bytes for result in self.results)
        pairs = zip(caps, self.untuned, strict=True)
        exceeds = any(cap is not None and one.peak_memory_bytes > cap for cap, one in pairs)
        return f"{-100 * self.gain:.1f} % more{', to fit the memory cap' if exceeds else ''}"

    def __str__(self) -> str:
        """Return one line about it."""
        if self.settings is None:
            return "FSDP2 stays unchanged"
        return (
            f"FSDP2 tuned: {len(self.settings.units)} units, step time"
            f" {show_us(self.step_time_us)} predicted, {show_us(self.untuned_us)} untuned"
            f" ({self._change()}){'' if self.in_part is None else f'; {self.in_part}'}"
            f"{self._few_buffers()}{self._without_unread()}{self._assumed()}"
        )

    def _assumed(self) -> str:
        """Return the sizes that depend on data in words."""
        found = [(one.problem.name, one.assumptions) for one in self.results]
        return "".join(f"; {name} assumes {assumed_text(sizes)}" for name, sizes in found if sizes)

    def _without_unread(self) -> str:
        if not self.unread:
            return ""
        return (
            f"; predicted without the gather of {some(self.unread)}, which the captured step does"
            " not read and FSDP2 gathers with the rest of the unit (where a loss outside of forward"
            " reads it, tune with a forward that does)"
        )

    def _few_buffers(self) -> str:
        if self.settings is None or not self.lacks_buffers:
            return ""
        return (
            f"; predicted with {self.settings.reduce_scatter_buffers} reduce-scatters in flight,"
            " this torch keeps one (torch 2.13 has a setting for it)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solved:
    """Both graphs, solved, before anything is set."""

    results: tuple[Result, ...]
    untuned: tuple[Scored, ...]
    kept: KeptUnits | None = None


def tune_fsdp2(
    model: nn.Module,
    inputs: Any,
    *,
    keep: str | PathLike[str] | Sequence[str] | None = None,
    **settings: Any,
) -> Fsdp2Tuning:
    """Set up ``model``, on which ``fully_shard`` was called, to gather in the order of a solved
    schedule of its own training step::

        for block in model.layers:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        print(apsched.tune_fsdp2(model, (tokens,), cluster="h100"))

    Call it on every process rank, before the first step, with parameters on their device. The
    step ``model(*inputs)``, or ``model(**inputs)`` for a mapping, is captured with fake tensors on
    the host, with the units, the mixed precision and the resharding passed to ``fully_shard``. One
    process rank solves, and all ranks apply the same settings, by public setters alone. Losses and
    weights stay the same, bit for bit.

    Parameters
    ----------
    inputs
        The inputs of forward: a tuple, one tensor, or a mapping of inputs by name; only shapes and
        dtypes matter.
    keep
        Units that stay gathered from forward to backward: ``"auto"`` (the fastest choice that fits,
        forward and backward solved as one step under the memory that no process rank has in use),
        ``"none"``, ``"all"``, names of parameters or regular expressions, or a file of them. It
        takes the place of ``reshard_after_forward``, which counts where ``keep`` is ``None``. FSDP2
        keeps whole units: where names are a part of one, the faster of both ways to keep it whole
        is set, and ``in_part`` has the cost.
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

    def attempt(agreement: GraphAgreement | None) -> tuple[_Solved | None, Launches]:
        request = None if keep is None else request_of(keep, model)
        if agreement is not None:
            words = None if request is None else ", ".join(request.entries) or request.mode
            agreement.same_settings("fully_shard", {"keep": str(words)})
        with agreement.job.working() if agreement else nullcontext():
            capture = _captured(model, given, gathers_again=request is not None)
            hinted = (replace(graph, hints=chosen.stated_hints) for graph in capture.graphs)
            capture = replace(capture, graphs=tuple(hinted))
        if request is None:
            solved = _solved_graphs(model, capture, chosen, agreement)
        else:
            solved = _solved_step(model, capture, request, chosen, agreement)
        sizes = [s for one in solved.results if (a := one.assumptions) for s in a.sizes]
        check_hints(chosen.stated_hints, sizes, "hints", "the step has")
        units = running_units(units_of(model), solved.results[0].problem)
        settings = checked_settings(model, units, solved_graphs(solved.results))
        return solved, as_launches(in_words(settings), agreement)

    as_it_was: _Solved | None = None
    solved = all_or_none(
        lambda: units_agreement(model, chosen.deadline_s),
        as_it_was,
        chosen,
        "fully_shard",
        attempt,
    )
    if solved is None:
        return Fsdp2Tuning(settings=None, results=())
    units = running_units(units_of(model), solved.results[0].problem)
    applied = checked_settings(model, units, solved_graphs(solved.results))
    unread = unread_parameters(units, solved.results[0].problem)
    sharded = gathered_by_fsdp2(model)
    set_up(model, units, applied)
    return Fsdp2Tuning(
        settings=applied,
        results=solved.results,
        untuned=solved.untuned,
        choices={} if solved.kept is None else solved.kept.choices,
        in_part=None if solved.kept is None else solved.kept.in_part,
        lacks_buffers=lacks_buffers(model, applied),
        unread=tuple(name for name in unread if name in sharded),
    )


def _captured(model: nn.Module, inputs: Inputs, *, gathers_again: bool) -> Capture:
    """Return forward and backward of the training step, also where the caller, as one that
    initialises weights, has switched gradients off.
    """
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise InputError(
                f"{plain_parameter_name(name)}: expected a parameter on the device of the job,"
                " whose operators (as of attention) are captured, found it on meta; call tune_fsdp2"
                " after model.to_empty(device=...), with inputs on that device"
            )
    with torch.inference_mode(False), torch.enable_grad():
        return capture_fsdp2(model, inputs, gathers_again=gathers_again)


def _chosen(settings: Mapping[str, Any]) -> Settings:
    if refused := next((name for name in _REFUSED if name in settings), None):
        raise InputError(f"{refused}: expected no such setting, found one; eager FSDP2 decides it")
    return Settings.of({**settings, **_FIXED}, unused=_REFUSED)


def _solved_graphs(
    model: nn.Module, capture: Capture, settings: Settings, agreement: GraphAgreement | None
) -> _Solved:
    """Return both graphs solved, with the units kept that ``fully_shard`` keeps."""
    results: tuple[Result, ...] = ()
    for graph in capture.graphs:  # forward first: its order is that of the units
        forward = results[0].problem if results else None
        results = (*results, _solved(model, graph, settings, agreement, forward))
    return _Solved(results=results, untuned=tuple(untuned_of(one.answer) for one in results))


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
        request = replace(request, plan=fsdp2_plan(model, problem))
        (graph,) = under_plan((graph,), request)
        caps = resolve_caps(graph, request, progress)
    units = units_in_order(model, forward or problem)
    return _scheduled(graph, caps, request, settings, agreement, units)


def _solved_step(
    model: nn.Module,
    capture: Capture,
    keep: KeepRequest,
    settings: Settings,
    agreement: GraphAgreement | None,
) -> _Solved:
    """Return both graphs solved, with the units of ``keep`` kept; ``capture`` has all of them
    gathered again.
    """
    kept_now = kept_by_fsdp2(model)
    step = UnitsToKeep.of(model, capture, keep, settings, agreement, kept_now)
    found = agreed_choice(step, agreement)
    with agreement.job.working() if agreement else nullcontext():
        graphs, caps = step.graphs(found)
        untuned = step.untuned()
    units = units_in_order(model, step.step.graphs[0].problem)
    results = []
    for graph, limits in zip(graphs, caps, strict=True):
        request = step.step.request
        results.append(_scheduled(graph, limits, request, settings, agreement, units))
    return _Solved(results=tuple(results), untuned=untuned, kept=found)


def _scheduled(
    graph: LoadedGraph,
    caps: Caps,
    request: SolveRequest,
    settings: Settings,
    agreement: GraphAgreement | None,
    units: Units,
) -> Result:
    """Return the answer for ``graph`` under its plan, on all process ranks the same."""
    progress = progress_of(settings)
    search = partial(
        answered_as_units,
        solving=partial(solve_requested, progress=progress.solver),
        settings=settings,
        agreement=agreement,
        units=units,
    )
    result = solve_graph(graph, request, progress, caps=caps, search=search)
    if result.best is None:
        raise InfeasibleError(explain_in_job(result))
    return result
