"""The settings of eager FSDP2: set by the public setters of ``fully_shard``'s modules, and in words
that process ranks compare.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields

from torch import nn

from apsched.errors import InputError
from apsched.integrations.fsdp2_units import Unit
from apsched.torch_compat.fsdp import resharded_to

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSettings:
    """The settings of one unit."""

    name: str
    forward_prefetch: tuple[str, ...]
    """Units whose gathers its hook launches in forward, in order."""
    backward_prefetch: tuple[str, ...] | None
    """``None`` if only forward was solved: backward stays unchanged."""
    reshard_after_forward: bool | int
    """A number: to so many process ranks, that of ``fully_shard``."""
    unshard_in_backward: bool
    """Otherwise it has embeddings alone, and backward does not read them. Other units that the
    schedule does not gather in backward are gathered all the same: eager code may read them there,
    as activation checkpointing of regions with several units does.
    """
    reshard_after_backward: bool = True
    """Otherwise the next micro-batch finds the unit gathered."""
    reduce_gradients: bool = True
    all_reduce_gradients: bool = True
    """Otherwise its gradients are added to those of the next micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp2Settings:
    """The settings of a model."""

    units: tuple[UnitSettings, ...]
    """In the order in which they run."""
    reduce_scatter_buffers: int
    """Reduce-scatters in flight."""


def in_words(settings: Fsdp2Settings) -> tuple[str, ...]:
    """Return the units and then their settings, one text each, so that process ranks compare
    them.
    """
    texts = [f"the unit {unit.name}" for unit in settings.units]
    texts += [
        f"the setting {field.name} {getattr(unit, field.name)} of {unit.name}"
        for unit in settings.units
        for field in fields(unit)[1:]
    ]
    return (*texts, f"the setting reduce_scatter_buffers {settings.reduce_scatter_buffers}")


def set_up(model: nn.Module, units: Sequence[Unit], settings: Fsdp2Settings) -> None:
    """Set up the ``units`` of ``model`` for a forward and a backward with ``settings``."""
    handles = {unit.name: unit.handle for unit in units}
    setting_of = {setting.name: setting for setting in settings.units}
    for name, handle in handles.items():
        one = setting_of[name]
        handle.set_modules_to_forward_prefetch([handles[other] for other in one.forward_prefetch])
        if one.backward_prefetch is None:
            continue
        # An empty list would bring torch's own prefetch back; a unit that prefetches itself
        # launches nothing.
        handle.set_modules_to_backward_prefetch(
            [handles[other] for other in one.backward_prefetch] or [handle]
        )
        if isinstance(one.reshard_after_forward, bool):  # there is no setter for numbers
            handle.set_reshard_after_forward(one.reshard_after_forward, recurse=False)
        handle.set_unshard_in_backward(one.unshard_in_backward)
    if any(one.backward_prefetch is not None for one in settings.units):
        _set_buffers(model, settings)


def check_resharded(units: Sequence[Unit], settings: Fsdp2Settings) -> None:
    """Raise ``InputError`` for a unit whose number of process ranks to reshard to is not that of
    the settings.
    """
    handles = {unit.name: unit.handle for unit in units}
    for one in settings.units:
        wanted = one.reshard_after_forward
        found = resharded_to(handles[one.name])
        if not isinstance(wanted, bool) and found != wanted:
            raise InputError(
                f"{one.name}: the schedule reshards it to {wanted} process ranks, and FSDP2 has no"
                f" setter for that: call fully_shard(..., reshard_after_forward={wanted}) on it, or"
                " use apsched.tune_fsdp2 or apsched.solve_step(in_node=False), which reshard no"
                f" unit in a node; found {found}"
            )


def lacks_buffers(model: nn.Module, settings: Fsdp2Settings) -> bool:
    """Return whether this torch keeps one reduce-scatter in flight where ``settings`` have more:
    the setting for it is new in torch 2.13.
    """
    count = settings.reduce_scatter_buffers
    return count > 1 and not hasattr(model, "set_reduce_scatter_max_input_buffers")


def _set_buffers(model: nn.Module, settings: Fsdp2Settings) -> None:
    if lacks_buffers(model, settings):
        logger.warning(
            "this torch keeps one reduce-scatter in flight; the schedule has %d (torch 2.13 has a"
            " setting for it)",
            settings.reduce_scatter_buffers,
        )
    elif setter := getattr(model, "set_reduce_scatter_max_input_buffers", None):
        setter(settings.reduce_scatter_buffers)
