"""``tune_fsdp2``: eager FSDP2 set up by a solved schedule, in the job and in one call."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import nn

from apsched.capture.captured import Capture
from apsched.capture.fake_copy import Inputs, inputs_of
from apsched.capture.fsdp2 import (
    capture_fsdp2,
    gathered_by_fsdp2,
    kept_by_fsdp2,
    read_in_checkpoints,
)
from apsched.compiler.memory_in_use import agreed_memory, with_memory_in_use
from apsched.compiler.ranks.agreement import GraphAgreement
from apsched.compiler.schedule_captured import priced_step, progress_of, running_groups
from apsched.compiler.schedule_graph import Launches, all_or_none
from apsched.compiler.settings import Settings
from apsched.config import Caps
from apsched.errors import InfeasibleError, InputError
from apsched.integrations.eager.accumulation import UnitsToShare
from apsched.integrations.eager.agreed import as_launches, units_agreement
from apsched.integrations.eager.kept import KeptUnits, UnitsToKeep, agreed_choice, request_of
from apsched.integrations.eager.micro_batches import (
    Fsdp2MicroBatches,
    micro_batches_of_units,
    pair_of_results,
    steps_in_words,
)
from apsched.integrations.eager.settings import in_words, lacks_buffers, set_up
from apsched.integrations.eager.solve_units import answered_as_units, units_in_order, untuned_of
from apsched.integrations.eager.tuning import Fsdp2Tuning
from apsched.integrations.fsdp2 import checked_settings, fsdp2_plan, solved_graphs
from apsched.integrations.fsdp2_units import running_units, units_of, unread_parameters
from apsched.integrations.unit_order import Units
from apsched.names import mark_of
from apsched.pipeline.assumptions import check_hints
from apsched.pipeline.load import LoadedGraph
from apsched.pipeline.result import Result
from apsched.pipeline.solve_graph import SolveRequest, resolve_caps, solve_graph, under_plan
from apsched.problem.problem import Problem
from apsched.quantities import checked_count
from apsched.report.explanation import explain_in_job
from apsched.schedule.result import Scored
from apsched.solver import solve_requested
from apsched.torch_compat.compilers import plain_parameter_name, uncompiled
from apsched.whole_step.accumulation.step import with_gradients
from apsched.whole_step.keep_request import AUTO, KeepRequest

_FIXED = {"max_compute_move": 0}
_REFUSED = ("plan", "bitwise", "parameter_order", "second_group", "max_compute_move", "schedule")
"""Settings that eager FSDP2 decides itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solved:
    """The graphs, solved, before anything is set."""

    pairs: tuple[tuple[int, tuple[Result, ...]], ...]
    """Number of micro-batches, and their answers for forward and backward, in order."""
    untuned: tuple[Scored, ...]
    kept: KeptUnits | None = None
    checkpointed: frozenset[str] = frozenset()
    """Parameters that checkpointed regions read, in backward again."""

    @property
    def results(self) -> tuple[Result, ...]:
        """The answers for all graphs, each once."""
        return tuple(self._by_name.values())

    @property
    def counts(self) -> tuple[int, ...]:
        """How often a step runs each of ``results``."""
        runs = Counter[str]()
        for count, results in self.pairs:
            runs.update({one.problem.name: count for one in results})
        return tuple(runs[name] for name in self._by_name)

    @property
    def _by_name(self) -> dict[str, Result]:
        return {one.problem.name: one for _, results in self.pairs for one in results}


def tune_fsdp2(
    model: nn.Module,
    inputs: Any,
    *,
    keep: str | PathLike[str] | Sequence[str] | None = None,
    accumulate: int = 1,
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
    accumulate
        Micro-batches of a step, one after the other; ``inputs`` are of one. With more than one the
        choice is also which units stay gathered until the next micro-batch, and which gradients are
        added and reduced once (docs/accumulate.md); ``keep`` is ``"auto"`` then where it is not
        stated, and takes these entries, too. Nothing is set yet: call :meth:`Fsdp2Tuning.begin`
        before each micro-batch. Gradients are bit for bit those of the same switches set by hand;
        gradients that are added before their reduction differ in the last bits from those reduced
        each time.
    settings
        See :class:`apsched.compiler.settings.Settings`: cluster, memory_cap, budget, on_error ...

    Raises
    ------
    InputError
        with ``on_error="raise"``, where the model cannot be captured or FSDP2 cannot follow the
        schedule; nothing is set then, on any process rank.
    """
    chosen = _chosen(settings)
    accumulate = checked_count(accumulate, "accumulate", least=1)
    wanted = AUTO if keep is None and accumulate > 1 else keep
    model = uncompiled(model)
    given = inputs_of(inputs)

    def attempt(agreement: GraphAgreement | None) -> tuple[_Solved | None, Launches]:
        request = None if wanted is None else request_of(wanted, model, accumulate)
        if agreement is not None:
            words = None if request is None else ", ".join(request.entries) or request.mode
            stated = {"keep": str(words), "accumulate": str(accumulate)}
            agreement.same_settings("fully_shard", stated)
        at_work = agreement.job.working() if agreement else nullcontext()
        with at_work, progress_of(chosen).stage("capture"):
            capture = _captured(model, given, gathers_again=request is not None)
            hinted = (replace(graph, hints=chosen.stated_hints) for graph in capture.graphs)
            capture = replace(capture, graphs=tuple(hinted))
        if request is None:
            solved = _solved_graphs(model, capture, chosen, agreement)
        else:
            solved = _solved_step(model, capture, request, accumulate, chosen, agreement)
        solved = replace(solved, checkpointed=read_in_checkpoints(capture.graphs[0]))
        sizes = [s for one in solved.results if (a := one.assumptions) for s in a.sizes]
        check_hints(chosen.stated_hints, sizes, "hints", "the step has")
        found = _settings(model, solved)
        texts = in_words(found.settings[0]) if accumulate == 1 else steps_in_words(found)
        return solved, as_launches(texts, agreement)

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
    return _tuned(model, solved, accumulate)


def _tuned(model: nn.Module, solved: _Solved, accumulate: int) -> Fsdp2Tuning:
    """Set up ``model``, of several micro-batches nothing yet, and return the result."""
    steps = _settings(model, solved)
    unread = unread_parameters(steps.units, solved.results[0].problem)
    sharded = gathered_by_fsdp2(model)
    applied = steps.settings[0]
    if accumulate == 1:
        set_up(model, steps.units, applied)
    return Fsdp2Tuning(
        settings=applied,
        results=solved.results,
        counts=solved.counts,
        untuned=solved.untuned,
        micro_batches=steps if accumulate > 1 else None,
        choices={} if solved.kept is None else solved.kept.choices,
        in_part=None if solved.kept is None else solved.kept.in_part,
        lacks_buffers=any(lacks_buffers(model, one) for one in steps.settings),
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
    units_of(model)  # refuses a part of a model, whose parameters no unit in it gathers
    with torch.inference_mode(False), torch.enable_grad():
        capture = capture_fsdp2(model, inputs, gathers_again=gathers_again)
    if gathers_again and len(capture.graphs) == 1:
        raise InputError(
            "keep: expected a step with a backward graph, which finds the units kept, found a model"
            " without a gradient; leave keep and accumulate out, or let a parameter require a"
            " gradient"
        )
    return capture


def _chosen(settings: Mapping[str, Any]) -> Settings:
    if refused := next((name for name in _REFUSED if name in settings), None):
        raise InputError(f"{refused}: expected no such setting, found one; eager FSDP2 decides it")
    return Settings.of({**settings, **_FIXED}, unused=_REFUSED)


def _solved_graphs(
    model: nn.Module, capture: Capture, settings: Settings, agreement: GraphAgreement | None
) -> _Solved:
    """Return both graphs solved, with the units kept that ``fully_shard`` keeps."""
    progress = progress_of(settings)
    in_use = agreed_memory(settings, agreement)
    with agreement.job.working() if agreement else nullcontext():
        request = replace(settings.solve_request, bitwise_price=False)
        groups = running_groups()
        graphs, request = priced_step(capture.graphs, settings, groups, request, progress)
        graphs = tuple(with_memory_in_use(one, in_use, request.optimizer) for one in graphs)
    results: tuple[Result, ...] = ()
    for graph in graphs:  # forward first: its order is that of the units
        forward = results[0].problem if results else None
        results = (*results, _solved(model, graph, request, settings, agreement, forward))
    untuned = tuple(untuned_of(one.answer) for one in results)
    return _Solved(pairs=((1, results),), untuned=untuned)


def _solved(
    model: nn.Module,
    graph: LoadedGraph,
    request: SolveRequest,
    settings: Settings,
    agreement: GraphAgreement | None,
    forward: Problem | None,
) -> Result:
    """Return the answer for one graph with a bucket for each unit, on all process ranks the
    same; ``forward`` is the forward graph where this one is the backward graph.
    """
    with agreement.job.working() if agreement else nullcontext():
        request = replace(request, plan=fsdp2_plan(model, graph.problem))
        (graph,) = under_plan((graph,), request)
        caps = resolve_caps(graph, request, progress_of(settings))
    units = units_in_order(model, forward or graph.problem)
    result = _scheduled(graph, caps, request, settings, agreement, units)
    _refuse_too_little_memory([(result, 0)])
    return result


def _solved_step(
    model: nn.Module,
    capture: Capture,
    keep: KeepRequest,
    accumulate: int,
    settings: Settings,
    agreement: GraphAgreement | None,
) -> _Solved:
    """Return the graphs of all micro-batches solved, with the units of ``keep`` kept; ``capture``
    has all of them gathered again.
    """
    kept_now = kept_by_fsdp2(model)
    one = UnitsToKeep.of(model, capture, keep, settings, agreement, kept_now)
    with agreement.job.working() if agreement else nullcontext():
        step = one if accumulate == 1 else UnitsToShare.of(one, accumulate)
    found = agreed_choice(step.chosen, agreement)
    with agreement.job.working() if agreement else nullcontext():
        pairs, untuned = step.pairs(found), one.untuned()
    units = units_in_order(model, one.step.graphs[0].problem)
    request = one.step.request
    known: dict[tuple[str, Caps], Result] = {}
    needs: list[tuple[Result, int]] = []
    solved = []
    for pair in pairs:
        results = []
        for k, graph in enumerate(pair.graphs):
            key = graph.problem.name, pair.caps[k]
            if key not in known:
                result = _scheduled(graph, pair.caps[k], request, settings, agreement, units)
                known[key] = with_gradients(result, pair.gradient_bytes[k])
                needs.append((known[key], pair.outside_bytes[k]))
            results.append(known[key])
        solved.append((pair.count, tuple(results)))
    _refuse_too_little_memory(needs)
    return _Solved(pairs=tuple(solved), untuned=untuned, kept=found)


def _refuse_too_little_memory(needs: Sequence[tuple[Result, int]]) -> None:
    """Raise ``InfeasibleError`` where a result has no schedule; each comes with the memory of its
    step outside of it.
    """
    step_bytes = max(result.answer.floor_memory_bytes + outside for result, outside in needs)
    for result, outside in needs:
        if result.best is None:
            without_plan = "without the units and the order of FSDP2"
            raise InfeasibleError(explain_in_job(result, outside, step_bytes, without_plan))


def _settings(model: nn.Module, solved: _Solved) -> Fsdp2MicroBatches:
    """Return the settings of the units that run, for each micro-batch."""
    units = tuple(
        replace(
            unit,
            only_embeddings=unit.only_embeddings
            and solved.checkpointed.isdisjoint(unit.parameters),
        )
        for unit in running_units(units_of(model), solved.results[0].problem)
    )
    if len(solved.pairs) == 1 and solved.pairs[0][0] == 1:
        one = checked_settings(model, units, solved_graphs(solved.results))
        return Fsdp2MicroBatches(model=model, units=units, settings=(one,))
    pairs = [pair_of_results(count, *results) for count, results in solved.pairs]
    kept = () if solved.kept is None else solved.kept.kept
    whole = {entry for entry in kept if not mark_of(entry)}
    return micro_batches_of_units(model, units, pairs, whole)


def _scheduled(
    graph: LoadedGraph,
    caps: Caps,
    request: SolveRequest,
    settings: Settings,
    agreement: GraphAgreement | None,
    units: Units,
) -> Result:
    """Return the answer for ``graph`` under its plan, on all process ranks the same; without a
    schedule where none fits.
    """
    progress = progress_of(settings)
    search = partial(
        answered_as_units,
        solving=partial(solve_requested, progress=progress.solver),
        settings=settings,
        agreement=agreement,
        units=units,
    )
    return solve_graph(graph, request, progress, caps=caps, search=search)
