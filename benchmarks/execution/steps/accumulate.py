"""A step of several micro-batches in a row, with choices of parameters and gradients that they
share.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from apsched.capture.captured import Capture, CapturedGraph
from apsched.config import SolveOptions
from apsched.costs.measured_model import MeasuredCostModel
from apsched.fx.keep import outputs_of
from apsched.models.build import BuiltModel
from apsched.models.training import forward_inputs
from apsched.names import NEXT, SUM, mark_of, name_of
from apsched.pipeline.solve_graph import SolveRequest
from apsched.problem.problem import Problem
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.schedule.schedule import Schedule
from apsched.whole_step.accumulation.search import solve_accumulation, solve_baselines
from apsched.whole_step.accumulation.step import Accumulation, gradients_of, held_in
from apsched.whole_step.keep_request import AUTO, KeepRequest
from apsched.whole_step.pair import Graphs, Step
from apsched.writeback.write_back import write_back
from benchmarks.execution.calibration import Found
from benchmarks.execution.steps.keep import TIGHT, loaded
from benchmarks.execution.steps.step_run import Step as Ran
from benchmarks.execution.steps.step_run import from_first_rank
from benchmarks.execution.worker import as_run, counted, exported

NUM_MICRO_BATCHES = 3
_NAMED = ("none", "kept", "no_sync", "once")
Call = Callable[[int, int, list[Any]], Any]
"""Micro-batch, 0 for forward or 1 for backward, and inputs -> outputs."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Forward and backward of one micro-batch."""

    capture: Capture
    modules: tuple[GraphModule, GraphModule]
    beside_bytes: tuple[int, int]
    """Bytes that are alive beside each graph."""


@dataclass(frozen=True, kw_only=True)
class AccumulatedRun:
    """Scheduled graphs of all micro-batches, ready to run."""

    name: str
    inputs: tuple[BuiltModel, ...]
    """The model with the inputs of each micro-batch."""
    pairs: tuple[Pair, ...]
    """One for each micro-batch."""
    kept: frozenset[str]
    """The entries of the choice."""
    num_outputs: int
    """Outputs of backward before those that stay gathered."""
    num_through: int
    """Values that stay gathered, and that backward only hands on."""
    sums: tuple[tuple[int, ...], ...]
    """Places among the outputs of backward of each gradient that is added."""

    def run(self) -> Ran:
        """Run a step."""
        with torch.no_grad():
            return self._step(lambda k, d, boxed: self.pairs[k].modules[d](*boxed))

    def priced(self, found: Found) -> list[Problem]:
        """Return the graphs as they run, in order."""
        known: dict[int, list[Problem]] = {}
        for pair in self.pairs:
            if id(pair) not in known:
                known[id(pair)] = as_run(pair.modules, pair.capture, found)
        return [problem for pair in self.pairs for problem in known[id(pair)]]

    def memory(self, model: MeasuredCostModel) -> list[dict[str, int]]:
        """Return for each graph the peak of live bytes as counted while it runs for real, and as
        predicted.
        """
        rows = []

        def call(k: int, direction: int, boxed: list[Any]) -> Any:
            pair = self.pairs[k]
            captured, module = pair.capture.graphs[direction], pair.modules[direction]
            outputs, row = counted(captured, module, boxed, pair.capture, model)
            for key in ("counted_bytes", "predicted_bytes"):
                row[key] += pair.beside_bytes[direction]
            rows.append(row)
            return outputs

        self._step(call)
        return rows

    def _step(self, call: Call) -> Ran:
        names = [name for name, _ in self.inputs[0].module.named_parameters()]
        added = {place for places in self.sums for place in places}
        losses, gradients = [], dict[str, torch.Tensor]()
        held: list[Any] = []
        before: list[Any] = []
        for k, built in enumerate(self.inputs):
            last = k == len(self.inputs) - 1
            boxed = [*forward_inputs(built), *held]
            held = []  # the graph lets go of its inputs, and so must this function
            loss, *passed = call(k, 0, boxed)
            cut = len(passed) - self.num_through
            through = [] if last else passed[cut:]
            boxed = [*passed[:cut], torch.ones_like(loss), *before, *through]
            passed, through, before = [], [], []
            outputs = list(call(k, 1, boxed))
            held = outputs[self.num_outputs :]
            if not last:
                before = [outputs[places[0]] for places in self.sums]
            losses.append(loss)
            for place, name in enumerate(names):
                if last or place not in added:
                    _add(gradients, name, outputs[place])
            outputs = []
        return torch.stack(losses).sum(), gradients


def _add(gradients: dict[str, torch.Tensor], name: str, gradient: torch.Tensor) -> None:
    if name in gradients:
        gradients[name].add_(gradient)
    else:
        gradients[name] = gradient


def accumulated_inputs(built: BuiltModel) -> tuple[BuiltModel, ...]:
    """Return the model with the inputs of each micro-batch: the tokens, shifted."""
    return tuple(
        replace(built, inputs=tuple(x.roll(k, 1) for x in built.inputs))
        for k in range(NUM_MICRO_BATCHES)
    )


def accumulated_runs(
    built: BuiltModel, capture: Capture, known: Found, budget: float
) -> list[AccumulatedRun]:
    """Return the step with each choice, that of micro-batches by themselves first; all process
    ranks have the choices and schedules of process rank 0.
    """
    graphs = [loaded(capture, known, k) for k in range(len(capture.graphs))]
    request = SolveRequest(memory_cap=MemoryCap(), options=SolveOptions(budget=budget))
    accumulation = Accumulation.of(
        Step.of(graphs, request, Progress(quiet=True)), NUM_MICRO_BATCHES
    )
    chosen = from_first_rank(lambda: _choices(accumulation, request))
    inputs = accumulated_inputs(built)
    return [
        _run(accumulation, name, inputs, known, capture, kept, sent)
        for name, (kept, sent) in chosen.items()
    ]


Sent = list[tuple[tuple[Schedule, Schedule], tuple[int, int]]]
"""Schedules and bytes beside the graphs, of each micro-batch."""


def _choices(
    accumulation: Accumulation, request: SolveRequest
) -> dict[str, tuple[frozenset[str], Sent]]:
    """Return entries, and schedules of each micro-batch, by the name of the choice."""
    found = solve_baselines(accumulation, _NAMED)
    peaks = found["none"].peak_bytes, found["once"].peak_bytes
    tight = replace(request, memory_cap=MemoryCap(size_bytes=sum(peaks) // 2))
    step = Step.of(accumulation.step.graphs, tight, Progress(quiet=True))
    several = Accumulation.of(step, NUM_MICRO_BATCHES)
    found[TIGHT] = solve_accumulation(several, KeepRequest(mode=AUTO)).best
    return {
        name: (
            solved.kept,
            [
                (_schedules(pair.results), pair.beside_bytes)
                for pair in solved.pairs
                for _ in range(pair.count)
            ],
        )
        for name, solved in found.items()
    }


def _schedules(results: Sequence[Any]) -> tuple[Schedule, Schedule]:
    first, second = (result.best.schedule for result in results)
    return first, second


def _run(
    accumulation: Accumulation,
    name: str,
    inputs: tuple[BuiltModel, ...],
    known: Found,
    capture: Capture,
    kept: frozenset[str],
    sent: Sent,
) -> AccumulatedRun:
    pairs: list[Pair] = []
    graphs = accumulation.graphs_of(kept)
    each = list(graphs) if len(graphs) > 1 else [graphs[0]] * len(inputs)
    for k, (pair, (schedules, beside)) in enumerate(zip(each, sent, strict=True)):
        if k and each[k] is each[k - 1]:
            pairs.append(pairs[-1])
            continue
        captured = _captured(pair)
        modules = tuple(
            write_back(c.module, exported(c, c.module, known.queues, capture), schedule)
            for c, schedule in zip(captured, schedules, strict=True)
        )
        pairs.append(
            Pair(
                capture=replace(capture, graphs=captured),
                modules=(modules[0], modules[1]),
                beside_bytes=beside,
            )
        )
    under = accumulation.step.under(
        frozenset(entry for entry in kept if mark_of(entry) not in (NEXT, SUM))
    )
    held, sums = held_in(under), gradients_of(under[1])
    _, backward = _captured(under)
    values = [v for n in sorted(_names(kept, NEXT)) for v in held[n]]
    return AccumulatedRun(
        name=name,
        inputs=inputs,
        pairs=tuple(pairs),
        kept=kept,
        num_outputs=len(outputs_of(backward.module.graph)),
        num_through=sum(v.backward is None for v in values),
        sums=tuple(r.outputs for n in sorted(_names(kept, SUM)) for r in sums[n]),
    )


def _names(kept: frozenset[str], mark: str) -> set[str]:
    return {name_of(entry) for entry in kept if mark_of(entry) == mark}


def _captured(pair: Graphs) -> tuple[CapturedGraph, CapturedGraph]:
    first, second = (graph.captured for graph in pair)
    assert first is not None
    assert second is not None
    return first, second
