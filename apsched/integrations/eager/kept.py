"""The units of eager FSDP2 that stay gathered from forward to backward, chosen by a solve of the
whole step in the order in which FSDP2 runs units.

FSDP2 keeps all parameters of a unit or none. A request that keeps a part of a unit is solved as
stated, too, so that the answer has the cost of whole units.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from torch import nn

from apsched.capture.captured import Capture
from apsched.compiler.memory_in_use import agreed_memory, with_memory_in_use
from apsched.compiler.ranks.agreement import GraphAgreement
from apsched.compiler.schedule_captured import priced_step, progress_of, running_groups
from apsched.compiler.settings import Settings
from apsched.config import Caps
from apsched.errors import InfeasibleError, InputError
from apsched.integrations.eager.solve_units import searched_as_units, units_in_order, untuned
from apsched.integrations.fsdp2_units import units_of
from apsched.integrations.unit_order import Units
from apsched.names import is_in_node
from apsched.pipeline.load import LoadedGraph
from apsched.pipeline.result import Result
from apsched.pipeline.solve_graph import lowered, solve_graph, under_plan
from apsched.problem.plan.module_buckets import ModuleBuckets
from apsched.problem.plan.rules import Plan
from apsched.problem.problem import Problem
from apsched.progress import Progress
from apsched.quantities import show_us
from apsched.schedule.result import Scored
from apsched.solver import solve_requested
from apsched.torch_compat.fsdp import resharded_to
from apsched.units import ticks_to_us
from apsched.whole_step.choices import Choice, Parameter
from apsched.whole_step.improve import ticks_of
from apsched.whole_step.keep_request import AUTO, KeepRequest, keep_request, of_one_micro_batch
from apsched.whole_step.pair import Graphs, Step
from apsched.whole_step.search import solve_step

_FEW = 3
"""Of so many units that are kept in part every way to keep them whole is solved."""
AS_IT_WAS = "as fully_shard says"
"""The choice of ``reshard_after_forward``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptInPart:
    """The cost of whole units, where a request keeps a part of some."""

    units: tuple[str, ...]
    stated_us: float | None
    """Step time with the parameters kept as stated; ``None`` where that does not fit."""
    whole_us: float | None
    """Step time with each of these units kept or gathered again as one."""

    def __str__(self) -> str:
        """Return one line about it."""
        stated, whole = (
            "does not fit" if us is None else show_us(us) for us in (self.stated_us, self.whole_us)
        )
        return (
            f"keep has a part of {', '.join(self.units)}, and FSDP2 keeps whole units: as stated"
            f" {stated}, whole {whole}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptUnits:
    """The choice."""

    kept: Choice
    """Names of the parameters, without those of wrappers around modules."""
    choices: Mapping[str, float | None]
    """Step time of common choices that were solved, by name; ``None`` where one does not fit."""
    in_part: KeptInPart | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CappedPair:
    """Forward and backward of some of the micro-batches, and their caps."""

    count: int = 1
    """Micro-batches that run them."""
    graphs: Graphs
    caps: tuple[Caps, Caps]
    """Without the bytes outside."""
    outside_bytes: tuple[int, int]
    """Memory of the step outside of each graph."""
    gradient_bytes: tuple[int, int] = (0, 0)
    """Of these, the gradients of the micro-batches before."""


@dataclass(frozen=True, kw_only=True)
class _UnitStep(Step):
    """A step whose schedules have the order in which FSDP2 runs ``units``."""

    units: Units = ()

    def solve_graph(self, graph: LoadedGraph, caps: Caps, *, search_alone: bool = False) -> Result:
        solving = partial(
            solve_requested, search_alone=search_alone, progress=self.progress_of(graph)
        )
        in_order = partial(searched_as_units, solving=solving, units=self.units)
        quiet = Progress(quiet=True)
        try:
            return solve_graph(graph, self.request, quiet, caps=caps, search=in_order)
        except InfeasibleError:  # no schedule in that order keeps the caps
            none = replace(caps, memory_cap_bytes=0)
            return solve_graph(graph, self.request, quiet, caps=none)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitsToKeep:
    """A step of eager FSDP2 with a choice of the units that are kept."""

    step: _UnitStep
    request: KeepRequest
    unit_of: Mapping[str, str]
    """Parameter -> unit; graphs name parameters without the names of wrappers around modules."""
    as_it_was: Choice
    """The parameters that ``reshard_after_forward`` of ``fully_shard`` keeps."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        capture: Capture,
        request: KeepRequest,
        settings: Settings,
        agreement: GraphAgreement | None,
        kept: Sequence[str],
    ) -> "UnitsToKeep":
        """Return the step of ``capture``, which gathers all parameters of ``model`` again, within
        the memory that no process rank has in use; ``kept`` are those that stay gathered now.
        """
        in_use = agreed_memory(settings, agreement)
        with agreement.job.working() if agreement else nullcontext():
            progress = progress_of(settings)
            solving = replace(settings.solve_request, bitwise_price=False)
            groups = running_groups()
            priced, solving = priced_step(capture.graphs, settings, groups, solving, progress)
            graphs = [
                # FSDP2 has no setter for a number of process ranks: nothing is resharded in a node
                replace(with_memory_in_use(graph, in_use, solving.optimizer), nodes={})
                for graph in priced
            ]
            plan = _plan(model, [graph.problem for graph in graphs])
            solving = replace(solving, plan=replace(plan, chooses_kept=request.mode == AUTO))
            units = units_in_order(model, graphs[0].problem)
            step = _UnitStep.of(under_plan(graphs, solving), solving, progress)
            unit_of = {p: u.name for u in units_of(model) for p in u.parameters}
            step = replace(step, units=units, parameters=_alike(step, unit_of))
            known = {p.name for p in step.parameters}
            as_it_was = Choice(known.intersection(kept))
            return cls(step=step, request=request, unit_of=unit_of, as_it_was=as_it_was)

    def chosen(self) -> KeptUnits:
        """Return the choice of the request, of whole units."""
        if self.request.mode == AUTO:
            return self._fastest()
        stated, step = self._stated(), self._capped()
        if not (split := self._split(stated)):
            return KeptUnits(kept=stated, choices={})
        ways = [step.solve(kept) for kept in self._whole(stated, split)]
        best, exact = min(ways, key=ticks_of), step.solve(stated)
        in_part = KeptInPart(
            units=tuple(split),
            stated_us=ticks_to_us(exact.step_ticks) if exact.fits else None,
            whole_us=ticks_to_us(best.step_ticks) if best.fits else None,
        )
        return KeptUnits(kept=best.kept, choices={}, in_part=in_part)

    def _stated(self) -> Choice:
        """Return the parameters that the request names."""
        return Choice(self.request.chosen(list(self.step.entries), "keep"))

    def _capped(self) -> _UnitStep:
        """Return the step with its memory cap; a floor is the least memory that fits the stated
        choice and each way to keep whole units.
        """
        if self.request.mode == AUTO:
            return self.step
        stated = self._stated()
        split = self._split(stated)
        choices = [stated, *(self._whole(stated, split) if split else ())]
        return self.step.above_floor_of(p for kept in choices for p in self.step.pairs_of(kept))

    def _split(self, kept: Choice) -> list[str]:
        """Return the units of which ``kept`` has some of the parameters that may be kept."""
        left = {self.unit_of[p.name] for p in self.step.parameters if p.name not in kept}
        return sorted({self.unit_of[name] for name in kept} & left)

    def _fastest(self) -> KeptUnits:
        """Return the fastest choice that is found, no slower than the one of ``fully_shard``."""
        step = self.step
        now = step.solve(self.as_it_was)
        answer = solve_step(step)
        best = now if ticks_of(now) < ticks_of(answer.best) else answer.best
        named = {**answer.baselines, AS_IT_WAS: step.solved[self.as_it_was]}
        choices = {
            name: ticks_to_us(one.step_ticks) if one.fits else None for name, one in named.items()
        }
        return KeptUnits(kept=best.kept, choices=choices)

    def _whole(self, stated: Choice, split: Sequence[str]) -> list[Choice]:
        """Return ``stated`` with each of the units ``split`` kept or gathered again as one."""
        parts: dict[str, set[str]] = {unit: set() for unit in split}
        for p in self.step.parameters:
            if self.unit_of[p.name] in parts:
                parts[self.unit_of[p.name]].add(p.name)
        rest = stated - Choice(name for names in parts.values() for name in names)
        ways = list(product((False, True), repeat=len(split)))
        if len(split) > _FEW:
            ways = [ways[0], ways[-1]]
        return [
            rest.union(*(parts[unit] for unit, kept in zip(split, way, strict=True) if kept))
            for way in ways
        ]

    def pairs(self, found: KeptUnits) -> tuple[CappedPair, ...]:
        """Return both graphs with the parameters of ``found`` kept, and their caps."""
        step = self._capped()
        forward, backward = step.under(found.kept)
        more = step.communicator_bytes((forward, backward))
        first, second = step.caps
        outside = more, more + step.beside_bytes(found.kept)
        caps = lowered(first, outside[0]), lowered(second, outside[1])
        return (CappedPair(graphs=(forward, backward), caps=caps, outside_bytes=outside),)

    def untuned(self) -> tuple[Scored, ...]:
        """Return FSDP2's schedules without settings, of the choice of ``fully_shard``."""
        pairs = zip(self.step.under(self.as_it_was), self.step.caps, strict=True)
        return tuple(untuned(graph.problem, caps, self.step.units) for graph, caps in pairs)


def request_of(keep: object, model: nn.Module, accumulate: int = 1) -> KeepRequest:
    """Return the request ``keep`` for the units of ``model``, in a step of ``accumulate``
    micro-batches; ``InputError`` where FSDP2 has no setter for it.
    """
    request = keep_request(keep, "keep")  # type: ignore[arg-type]
    if accumulate == 1:
        request = of_one_micro_batch(request, "keep")
    if shared := next(filter(is_in_node, request.entries), None):
        raise InputError(
            f"keep: expected units that are kept or gathered again, found {shared!r}; FSDP2 has no"
            " setter for a number of process ranks: call fully_shard(..., reshard_after_forward=8)"
            " on these units, and leave keep out"
        )
    for unit in units_of(model):
        if not isinstance(number := resharded_to(unit.handle), bool):
            raise InputError(
                f"keep: expected reshard_after_forward True or False in each unit, found {number}"
                f" in {unit.name}, for which FSDP2 has no setter; leave keep out, or call"
                " fully_shard without that number"
            )
    return request


def agreed_choice(choose: Callable[[], KeptUnits], agreement: GraphAgreement | None) -> KeptUnits:
    """Return the choice of ``choose``; with ``agreement`` one process rank solves for all."""

    def solved() -> bytes:
        found = choose()
        part = found.in_part
        words = {
            "kept": sorted(found.kept),
            "choices": dict(found.choices),
            "in_part": part and [part.units, part.stated_us, part.whole_us],
        }
        return json.dumps(words).encode()

    data = solved() if agreement is None else agreement.shared("keep", {}, solved)[0]
    words = json.loads(data)
    part = words["in_part"]
    return KeptUnits(
        kept=Choice(words["kept"]),
        choices=words["choices"],
        in_part=part and KeptInPart(units=tuple(part[0]), stated_us=part[1], whole_us=part[2]),
    )


def _plan(model: nn.Module, problems: Sequence[Problem]) -> Plan:
    """Return the plan with a bucket for each unit."""
    buckets = {unit.name: unit.parameters for unit in units_of(model)}
    return ModuleBuckets(buckets=buckets).plan(problems)


def _alike(step: Step, unit_of: Mapping[str, str]) -> tuple[Parameter, ...]:
    """Return the parameters of ``step``, those of one unit decided on alike."""
    first: dict[str, str] = {}
    for p in step.parameters:
        first.setdefault(unit_of[p.name], p.name)
    return tuple(replace(p, together=first[unit_of[p.name]]) for p in step.parameters)
