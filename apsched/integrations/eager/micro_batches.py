"""A solved step of several micro-batches in a row as settings of eager FSDP2, for each micro-batch.

FSDP2 has public setters for all that such a step shares: ``set_reshard_after_forward`` (kept from
forward to backward), ``set_reshard_after_backward`` (gathered until the next micro-batch),
``set_requires_gradient_sync`` (gradients added, and reduced in the last micro-batch) and
``set_requires_all_reduce`` (shards of gradients added, and all-reduced in the last micro-batch).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from apsched.errors import InputError
from apsched.integrations.eager.settings import (
    Fsdp2Settings,
    UnitSettings,
    check_resharded,
    in_words,
    set_up,
)
from apsched.integrations.fsdp2 import Solved, fsdp2_settings, refuse_moved_compute
from apsched.integrations.fsdp2_units import Unit, check_same_model, movable
from apsched.kinds import CollectiveKind
from apsched.pipeline.result import Result
from apsched.problem.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedPair:
    """The schedules of some of the micro-batches."""

    count: int
    forward: Solved
    backward: Solved


@dataclass(slots=True, kw_only=True, repr=False)
class Fsdp2MicroBatches:
    """The settings of a model for each of several micro-batches in a row."""

    model: nn.Module
    units: tuple[Unit, ...]
    settings: tuple[Fsdp2Settings, ...]
    """One for each micro-batch."""
    _is_open: bool = field(default=False, init=False)
    """Whether gradients are not reduced yet, or parameters stay gathered, behind the micro-batch
    that was begun.
    """

    def __repr__(self) -> str:
        """One line: the model, its units and micro-batches."""
        return (
            f"Fsdp2MicroBatches({type(self.model).__name__}: {len(self.units)} units,"
            f" {len(self.settings)} micro-batches)"
        )

    def begin(self, micro_batch: int, *, last: bool = False) -> None:
        """Set up the model for ``micro_batch``, counted from 0; call it before its forward. A step
        of fewer micro-batches says of its ``last`` one that it is.

        ``InputError`` for a number that the step does not have, and for a new step where the one
        before had no last micro-batch.
        """
        if not 0 <= micro_batch < len(self.settings):
            raise InputError(
                f"begin: expected a micro-batch from 0 to {len(self.settings) - 1}, found"
                f" {micro_batch}; the schedules are of a step of {len(self.settings)}"
            )
        if micro_batch == 0 and self._is_open:
            raise InputError(
                "begin: expected a last micro-batch in the step before (number"
                f" {len(self.settings) - 1}; in a step of fewer begin(k, last=True)), found none:"
                " its gradients are not reduced, or parameters stayed gathered while the optimizer"
                " changed them; go on from a checkpoint before that step"
            )
        settings = self.settings[-1 if last else micro_batch]
        self._is_open = not all(map(_ends_alone, settings.units))
        set_up(self.model, self.units, settings)
        handles = {unit.name: unit.handle for unit in self.units}
        for one in settings.units:
            handle = handles[one.name]
            handle.set_reshard_after_backward(one.reshard_after_backward, recurse=False)
            handle.set_requires_gradient_sync(one.reduce_gradients, recurse=False)
            both = one.reduce_gradients and one.all_reduce_gradients
            handle.set_requires_all_reduce(both, recurse=False)


def solved_pair(count: int, forward: Solved, backward: Solved) -> SolvedPair:
    """Return the schedules of ``count`` micro-batches; ``InputError`` for moved compute."""
    for problem, schedule in (forward, backward):
        refuse_moved_compute(problem, schedule)
    return SolvedPair(count=count, forward=forward, backward=backward)


def pair_of_results(count: int, forward: Result, backward: Result) -> SolvedPair:
    """Return the schedules of ``count`` micro-batches; ``InputError`` where one has none."""
    return solved_pair(count, _of_result(forward), _of_result(backward))


def _of_result(result: Result) -> Solved:
    if result.schedule is None:
        raise InputError(
            f"{result.problem.name}: expected a schedule, found that none fits the caps"
        )
    return result.problem, result.schedule


def micro_batches_of_units(
    model: nn.Module, units: Sequence[Unit], pairs: Sequence[SolvedPair], kept: Collection[str]
) -> Fsdp2MicroBatches:
    """Return the settings of the ``units`` of ``model`` for the micro-batches ``pairs``; ``kept``
    are the parameters that are kept from forward to backward.

    ``InputError`` where FSDP2 cannot follow a schedule or the choice.
    """
    first, last = pairs[0].forward[0], pairs[-1].backward[0]
    check_same_model(model, first)
    every = _gathered_or_reduced(units, first, CollectiveKind.ALL_GATHER)
    reduced = _gathered_or_reduced(units, last, CollectiveKind.REDUCE_SCATTER)
    all_reduced = _gathered_or_reduced(units, last, CollectiveKind.ALL_REDUCE)
    found: list[Fsdp2Settings] = []
    for pair, after in zip(pairs, [*pairs[1:], None], strict=True):
        graphs = {"forward": pair.forward, "backward": pair.backward}
        settings = fsdp2_settings(units, graphs, first, kept)
        check_resharded(units, settings)
        summed = reduced - _covered(units, pair.backward[0], last, CollectiveKind.REDUCE_SCATTER)
        partial = all_reduced - _covered(units, pair.backward[0], last, CollectiveKind.ALL_REDUCE)
        held = set[str]()
        if after is not None:
            held = every - _covered(units, after.forward[0], first, CollectiveKind.ALL_GATHER)
        of_unit = (
            replace(
                unit,
                reshard_after_backward=unit.name not in held,
                reduce_gradients=unit.name not in summed,
                all_reduce_gradients=unit.name not in partial,
            )
            for unit in settings.units
        )
        found += [replace(settings, units=tuple(of_unit))] * pair.count
    return Fsdp2MicroBatches(model=model, units=tuple(units), settings=tuple(found))


def steps_in_words(step: Fsdp2MicroBatches) -> list[str]:
    """Return the settings of each micro-batch, so that process ranks compare them."""
    return [
        f"micro-batch {k}: {text}"
        for k, settings in enumerate(step.settings)
        for text in in_words(settings)
    ]


def _ends_alone(unit: UnitSettings) -> bool:
    """Return whether ``unit`` leaves nothing for the next micro-batch."""
    return unit.reshard_after_backward and unit.reduce_gradients and unit.all_reduce_gradients


_VERBS = {
    CollectiveKind.ALL_GATHER: "gathers",
    CollectiveKind.REDUCE_SCATTER: "reduces",
    CollectiveKind.ALL_REDUCE: "all-reduces",
}


def _gathered_or_reduced(units: Sequence[Unit], problem: Problem, kind: CollectiveKind) -> set[str]:
    """Return the units that have a parameter which ``problem`` gathers or reduces."""
    now = {c.module for c in movable(problem, kind)}
    return {unit.name for unit in units if now.intersection(unit.parameters)}


def _covered(
    units: Sequence[Unit], problem: Problem, whole: Problem, kind: CollectiveKind
) -> set[str]:
    """Return the units that ``problem`` gathers or reduces; ``InputError`` if it does so for a part
    of the parameters that ``whole`` has of a unit.
    """
    found = set()
    every, now = ({c.module for c in movable(graph, kind)} for graph in (whole, problem))
    for unit in units:
        parameters = [name for name in unit.parameters if name in every]
        missing = [name for name in parameters if name not in now]
        if missing and len(missing) < len(parameters):
            here = next(name for name in parameters if name in now)
            verb = _VERBS[kind]
            raise InputError(
                f"{problem.name}: FSDP2 {verb} a unit as one, and of {unit.name} the schedule"
                f" {verb} {here} and not {missing[0]}; solve with plan=fsdp2_plan(model, *graphs),"
                " where graphs = apsched.capture(model, inputs), on the command line with --buckets"
                " FILE; entries of --keep or keep= must have all parameters of the unit"
            )
        if parameters and not missing:
            found.add(unit.name)
    return found
