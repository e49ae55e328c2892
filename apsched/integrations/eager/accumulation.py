"""The units of eager FSDP2 that several micro-batches in a row share, chosen by a solve of the
whole step in the order in which FSDP2 runs units: those that are kept from forward to backward,
those that stay gathered until the next micro-batch, and those whose gradients are reduced once.
"""

from collections.abc import Collection
from dataclasses import dataclass

from apsched.errors import InputError
from apsched.integrations.eager.kept import AS_IT_WAS, CappedPair, KeptUnits, UnitsToKeep
from apsched.names import mark_of, name_of
from apsched.pipeline.solve_graph import lowered
from apsched.units import ticks_to_us
from apsched.whole_step.accumulation.search import solve_accumulation
from apsched.whole_step.accumulation.step import Accumulation
from apsched.whole_step.choices import Choice
from apsched.whole_step.improve import ticks_of
from apsched.whole_step.keep_request import AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitsToShare:
    """A step of several micro-batches of eager FSDP2 with a choice of the units they share."""

    units: UnitsToKeep
    """The choice for one micro-batch."""
    accumulation: Accumulation

    @classmethod
    def of(cls, units: UnitsToKeep, num_micro_batches: int) -> "UnitsToShare":
        """Return the step of ``num_micro_batches`` whose micro-batches are the step ``units``.

        ``InputError`` where the request has a part of a unit.
        """
        accumulation = Accumulation.of(units.step, num_micro_batches, units.unit_of)
        if units.request.mode != AUTO:
            stated = Choice(units.request.chosen(list(accumulation.entries), "keep"))
            _refuse_parts(stated, accumulation.entries, units)
            accumulation = accumulation.above_floor_of(stated)
        return cls(units=units, accumulation=accumulation)

    def chosen(self) -> KeptUnits:
        """Return the choice of the request: ``"auto"`` is the fastest that is found, no slower than
        each micro-batch by itself with the units kept that ``fully_shard`` keeps.
        """
        accumulation, request = self.accumulation, self.units.request
        if request.mode != AUTO:
            return KeptUnits(
                kept=Choice(request.chosen(list(accumulation.entries), "keep")), choices={}
            )
        now = accumulation.solve(self.units.as_it_was)
        answer = solve_accumulation(accumulation, request, "keep")
        now = accumulation.solved.get(now.kept, now)
        best = now if ticks_of(now) < ticks_of(answer.best) else answer.best
        named = {**answer.baselines, AS_IT_WAS: now}
        return KeptUnits(
            kept=best.kept,
            choices={
                name: ticks_to_us(one.step_ticks) if one.fits else None
                for name, one in named.items()
            },
        )

    def pairs(self, found: KeptUnits) -> tuple[CappedPair, ...]:
        """Return the graphs of the first, a middle and the last micro-batch under ``found``, equal
        ones once, and their caps.
        """
        first, second = self.accumulation.step.caps
        pairs = []
        for pair in self.accumulation.pairs_of(found.kept):
            outside = self.accumulation.outside_bytes(found.kept, pair)
            one = CappedPair(
                count=pair.count,
                graphs=pair.graphs,
                caps=(lowered(first, outside[0]), lowered(second, outside[1])),
                outside_bytes=outside,
                gradient_bytes=pair.gradient_bytes,
            )
            pairs.append(one)
        return tuple(pairs)


def _refuse_parts(stated: Choice, entries: Collection[str], units: UnitsToKeep) -> None:
    """Raise ``InputError`` where ``stated`` has some entries of a unit, and not all of their
    kind.
    """
    of_unit: dict[tuple[str, str], list[str]] = {}
    for entry in sorted(entries):
        of_unit.setdefault((units.unit_of[name_of(entry)], mark_of(entry)), []).append(entry)
    for (unit, _), own in of_unit.items():
        with_it = [entry for entry in own if entry in stated]
        without = [entry for entry in own if entry not in stated]
        if with_it and without:
            raise InputError(
                f"keep: expected all parameters of a unit or none, found {with_it[0]!r} of {unit}"
                f" and not {without[0]!r}; FSDP2 has one switch for the unit: add it, or leave out"
                " both"
            )
