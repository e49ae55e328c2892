"""The gathers that the hook of each unit launches, so that they run in the order of a schedule. No
torch here.

Eager FSDP2 launches gathers in hooks only: the hook before unit h gathers h itself, unless h is
gathered already, then the units in its prefetch list, and then unit h computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from apsched.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """The hook before one unit, in the order in which they run."""

    unit: str
    need: int | None
    """Compute nodes before the first that needs the unit; ``None`` where this pass does not gather
    it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One gather of a schedule."""

    unit: str
    gap: int
    """Compute nodes before it."""


def prefetch_lists(hooks: Sequence[Hook], launches: Sequence[Launch]) -> dict[str, tuple[str, ...]]:
    """Return for each unit the prefetches of its hook; gathers then run in the order of
    ``launches``.

    A launch belongs to the last hook at or before it: ``slot = max {h : need_h <= gap}``, or an
    earlier one if a later launch would overtake it. The launch is a prefetch if that hook is not
    the hook of its own unit. The hook before a unit also makes the launches within that unit, so
    that nothing is launched late.

    Raises
    ------
    InputError
        where a unit would have to be gathered before the first hook.
    """
    place = {hook.unit: h for h, hook in enumerate(hooks)}
    lists: dict[str, list[str]] = {hook.unit: [] for hook in hooks}
    latest = len(hooks)
    for launch in reversed(launches):
        own = place[launch.unit]
        slot = min(
            latest,
            max(
                (
                    h
                    for h, hook in enumerate(hooks)
                    if hook.need is not None and hook.need <= launch.gap
                ),
                default=0,
            ),
        )
        if slot >= own:
            latest = own - 1
            continue
        if slot < 0:
            raise InputError(
                f"the schedule gathers {launch.unit} before {hooks[0].unit}, and FSDP2 gathers the"
                " unit that runs first before all others; call tune_fsdp2, which solves in that"
                " order, or give the root module no parameters of its own (fully_shard on each of"
                " its children)"
            )
        lists[hooks[slot].unit].append(launch.unit)
        latest = slot
    return {unit: tuple(reversed(names)) for unit, names in lists.items()}
