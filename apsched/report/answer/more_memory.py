"""The gain of a step from more memory, for a person and for a program."""

from collections.abc import Collection
from typing import Any

from apsched.names import mark_of, name_of
from apsched.quantities import show_bytes, show_us
from apsched.report.answer.accumulation import SECTIONS, accumulation_figures
from apsched.report.answer.joint_graph import choice_figures
from apsched.report.answer.kept_words import kept_in_words
from apsched.report.answer.whole_step import kept_figures
from apsched.units import ticks_to_us
from apsched.whole_step.accumulation.search import AccumulationAnswer
from apsched.whole_step.joint_graph.step import JointAnswer
from apsched.whole_step.one_more import MoreMemory


def more_memory_json(found: MoreMemory) -> dict[str, Any]:
    """Return the figures of a step with more memory for ``--json``."""
    more = found.more
    if isinstance(more, AccumulationAnswer):
        figures = accumulation_figures(more.best)
    elif isinstance(more, JointAnswer):
        figures = choice_figures(more.best)
    else:
        figures = kept_figures(more.best)
    return {
        "more_bytes": found.more_bytes,
        "memory_cap_bytes": more.cap_bytes,
        **figures,
        "bound_us": ticks_to_us(more.bound.ticks),
        "gain_us": ticks_to_us(found.gain_ticks),
        "proven_gain_us": ticks_to_us(found.proven_ticks),
        "possible_gain_us": ticks_to_us(found.possible_ticks),
        "also_kept": sorted(found.also_kept),
        "no_longer_kept": sorted(found.no_longer_kept),
    }


def more_memory_lines(found: MoreMemory) -> tuple[str, ...]:
    """Return the gain from more memory in words."""
    now, more = found.now, found.more
    caps = f"memory cap {show_bytes(now.cap_bytes)} -> {show_bytes(more.cap_bytes)}"
    possible = f"at most {show_us(ticks_to_us(found.possible_ticks))}"
    if not found.gain_ticks:
        gain = f"no gain found; {possible}" if found.possible_ticks else "gains nothing (proven)"
        return (f"one more {show_bytes(found.more_bytes)} ({caps}): {gain}",)
    share = 100 * found.gain_ticks / now.best.step_ticks
    if found.proven_ticks:
        possible = f"at least {show_us(ticks_to_us(found.proven_ticks))}, {possible}"
    return (
        f"one more {show_bytes(found.more_bytes)} ({caps}):"
        f" -{show_us(ticks_to_us(found.gain_ticks))} ({share:.2f} %), proven:"
        f" {possible}",
        *(f"  {line}" for line in _changes(found)),
    )


def _changes(found: MoreMemory) -> list[str]:
    """Return the change of the choice in words."""
    now, more = found.now, found.more
    changed = (found.also_kept, found.no_longer_kept)
    if not any(changed):
        return ["the choice stays the same"]
    if isinstance(now, AccumulationAnswer):
        return [
            f"{verb} {line}"
            for verb, entries in zip(("also", "no longer"), changed, strict=True)
            for line in _by_kind(entries, now.entries)
        ]
    parts = [
        f"{len(names)} {verb} ({kept_in_words(names, now.names)})"
        for verb, names in zip(("more kept", "again"), changed, strict=True)
        if names
    ]
    assert not isinstance(more, AccumulationAnswer)
    added = more.best.kept_bytes - now.best.kept_bytes
    return [f"{', '.join(parts)}: {show_bytes(abs(added))} {'less' if added < 0 else 'more'}"]


def _by_kind(entries: Collection[str], every: Collection[str]) -> list[str]:
    """Return ``entries`` of a choice by kind in words; ``every`` has all entries it may have."""

    def names(some: Collection[str], mark: str) -> list[str]:
        return [name_of(entry) for entry in some if mark_of(entry) == mark]

    return [
        f"{words}: {kept_in_words(chosen, names(every, mark))}"
        for mark, words in SECTIONS.items()
        if (chosen := names(entries, mark))
    ]
