"""The result of ``tune_fsdp2``: the settings of eager FSDP2, and the predicted figures."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from apsched.errors import InputError
from apsched.integrations.eager.kept import KeptInPart
from apsched.integrations.eager.micro_batches import Fsdp2MicroBatches
from apsched.integrations.eager.settings import Fsdp2Settings
from apsched.integrations.fsdp2_units import some
from apsched.pipeline.result import Result
from apsched.quantities import show_us
from apsched.report.assumed_sizes import assumed_text
from apsched.schedule.result import Scored
from apsched.units import ticks_to_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp2Tuning:
    """The result of :func:`tune_fsdp2`."""

    settings: Fsdp2Settings | None
    """The settings of the units, of several micro-batches those of the first; ``None`` where an
    error left the model as it was.
    """
    results: tuple[Result, ...]
    """Of the forward and the backward graph; of several micro-batches, of each of their graphs."""
    counts: tuple[int, ...] = (1, 1)
    """How often a step runs each of these graphs."""
    untuned: tuple[Scored, ...] = ()
    """FSDP2's schedule of forward and backward without settings, with the units kept that
    ``fully_shard`` keeps.
    """
    micro_batches: Fsdp2MicroBatches | None = None
    """With ``accumulate`` the settings of each micro-batch."""
    choices: Mapping[str, float | None] = field(default_factory=dict)
    """With ``keep="auto"`` the step time of each common choice that was solved, in microseconds;
    ``None`` where one does not fit.
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
        runs = zip(self.counts, self.results, strict=False)
        return sum(count * (result.step_time_us or 0.0) for count, result in runs)

    @property
    def untuned_us(self) -> float:
        """The same of FSDP2 without settings: the next unit's gather in flight, no more; each
        micro-batch by itself.
        """
        ticks = sum(one.step_time_ticks for one in self.untuned)
        return ticks_to_us(ticks) * self._num_micro_batches

    @property
    def gain(self) -> float:
        """Share of the step time that is saved, as the costs predict it."""
        return 1 - self.step_time_us / self.untuned_us if self.untuned_us else 0.0

    def begin(self, micro_batch: int, *, last: bool = False) -> None:
        """Set up the model for ``micro_batch``, as :meth:`Fsdp2MicroBatches.begin`; where an error
        left the model as it was, do nothing.

        ``InputError`` for a number that the step does not have, and for a new step where the one
        before had no last micro-batch.
        """
        if self.micro_batches is not None:
            self.micro_batches.begin(micro_batch, last=last)
        elif self.settings is not None and micro_batch != 0:
            raise InputError(
                f"begin: expected micro-batch 0, found {micro_batch}; the settings are of a step of"
                " one: state the number of micro-batches with tune_fsdp2(..., accumulate=N)"
            )

    @property
    def _num_micro_batches(self) -> int:
        return 1 if self.micro_batches is None else len(self.micro_batches.settings)

    @property
    def _buffers(self) -> int:
        """Reduce-scatters in flight, the most of all micro-batches."""
        of_one = () if self.settings is None else (self.settings,)
        every = of_one if self.micro_batches is None else self.micro_batches.settings
        return max((one.reduce_scatter_buffers for one in every), default=1)

    def _change(self) -> str:
        """Return the change of the step time in words."""
        if self.gain >= 0:
            return f"{100 * self.gain:.1f} % less"
        caps = (result.caps.memory_cap_bytes for result in self.results)
        pairs = zip(caps, self.untuned, strict=False)  # the first two are forward and backward
        exceeds = any(cap is not None and one.peak_memory_bytes > cap for cap, one in pairs)
        return f"{-100 * self.gain:.1f} % more{', to fit the memory cap' if exceeds else ''}"

    def __str__(self) -> str:
        """Return one line about it."""
        if self.settings is None:
            return "FSDP2 stays unchanged"
        return (
            f"FSDP2 tuned: {len(self.settings.units)} units,{self._of_micro_batches()} step time"
            f" {show_us(self.step_time_us)} predicted, {show_us(self.untuned_us)} untuned"
            f" ({self._change()}){'' if self.in_part is None else f'; {self.in_part}'}"
            f"{self._few_buffers()}{self._without_unread()}{self._assumed()}"
        )

    def _of_micro_batches(self) -> str:
        count = self._num_micro_batches
        return "" if count == 1 else f" {count} micro-batches,"

    def _assumed(self) -> str:
        """Return the sizes that depend on data in words; all micro-batches assume the same."""
        found = [(one.problem.name, one.assumptions) for one in self.results[:2]]
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
            f"; predicted with {self._buffers} reduce-scatters in flight,"
            " this torch keeps one (torch 2.13 has a setting for it)"
        )
