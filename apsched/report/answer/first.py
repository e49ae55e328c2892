"""The summary that ``solve`` prints first: the step, best baseline, rate, memory, next steps."""

import math
from collections.abc import Sequence

from apsched.pipeline.load import JOINT
from apsched.pipeline.rate import StepRate
from apsched.pipeline.result import Result
from apsched.quantities import show_bytes, show_us
from apsched.schedule.result import AS_CAPTURED, Score
from apsched.units import ticks_to_us
from apsched.whole_step.optimizer_ends import optimizer_ends

_WIDTH = 78
_LARGE_LAUNCH_BYTES = 4 * 2**30
_SMALLEST_GAIN = 0.005
"""Smaller possible gains are not suggested."""
SLOWER, LESS_MEMORY = 0.02, 0.1
"""A baseline or a choice is suggested that is at most so much slower, and needs at least so much
less memory.
"""
_KNEE_SLOWER = 0.1
"""The knee is suggested where it is at most so much slower."""


def first_lines(
    results: Sequence[Result],
    rate: StepRate | None,
    *,
    bound_us: float | None = None,
    suggestion: str = "",
    keeps: bool = False,
    bound_of: str = "",
) -> tuple[str, ...]:
    """Return the summary of a step whose graphs all have a schedule, in lines of 80 columns or
    fewer. ``bound_us`` is the bound on the step where it is not that of its graphs,
    ``suggestion`` an option about the whole step that may be worth a try. A step that ``keeps``
    parameters has another floor than its graphs. ``bound_of`` names the schedules that the
    bound is about, where it is not about all.
    """
    step_us = sum(result.step_time_us or 0.0 for result in results)
    if bound_us is None:
        bound_us = sum(result.bound_us for result in results)
    gap = (step_us - bound_us) / step_us if step_us else 0.0
    names = " + ".join(result.problem.name for result in results)
    parts = " + ".join(show_us(result.step_time_us or 0.0) for result in results)
    lines = [
        f"{names}: {show_us(step_us)}" + (f" = {parts}" if len(results) > 1 else ""),
        f"proven: no schedule{bound_of} takes less than {show_us(bound_us)}"
        f" (gap {100 * gap:.2f} %)",
        _against_baseline(results, step_us),
        *(whole_step_lines(results, rate, step_us, bound_us) if _is_step(results) else []),
        _memory_line(results),
        *_next_lines(results, gap, suggestion, keeps=keeps),
    ]
    return tuple(line for text in lines for line in _wrapped(text))


def best_baseline(result: Result) -> tuple[str, float] | None:
    """Return the name and the step time in microseconds of the fastest baseline of a graph that
    fits; the order as captured only where no other fits, ``None`` where none does.
    """
    scores = (*result.answer.baselines, *result.others)
    times = {s.name: ticks_to_us(s.step_time_ticks) for s in scores if s.fits}
    used = {name: us for name, us in times.items() if name != AS_CAPTURED} or times
    return min(used.items(), key=lambda item: item[1]) if used else None


def _best_baselines(results: Sequence[Result]) -> tuple[str, float] | None:
    """Return the best baseline of each graph in words, one name where it is the same for all, and
    the sum of their step times in microseconds; ``None`` where a graph has none that fits.
    """
    found = [best_baseline(result) for result in results]
    best = [one for one in found if one is not None]
    if len(best) < len(found):
        return None
    names = [name for name, _ in best]
    total_us = sum(us for _, us in best)
    if len({*names}) == 1:
        return f"baseline that fits: {names[0]}", total_us
    of_each = zip(results, names, strict=True)
    listed = ", ".join(f"{result.problem.name} {name}" for result, name in of_each)
    return f"baselines that fit: {listed}", total_us


def _against_baseline(results: Sequence[Result], step_us: float) -> str:
    found = _best_baselines(results)
    if found is None:
        return no_baseline(results)
    baselines, baseline_us = found
    share = (baseline_us - step_us) / baseline_us if baseline_us else 0.0
    percent = f"{100 * abs(share):.2f}"
    change = f"{percent} % {'faster' if share >= 0 else 'SLOWER'} than"
    if percent == "0.00":
        change = "as fast as"
    return f"{change} the best {baselines}, {show_us(baseline_us)}"


def no_baseline(results: Sequence[Result]) -> str:
    """Return the line about a step of which no baseline fits in all graphs."""
    planned = any(result.problem.rules for result in results)
    return (
        f"no baseline fits the caps{' and the plan' if planned else ''}"
        f"{' in every graph' if len(results) > 1 else ''}"
    )


def _is_step(results: Sequence[Result]) -> bool:
    """Whether the graphs are the whole step: forward and backward, or both as one."""
    return len(results) > 1 or results[0].problem.name == JOINT


def whole_step_lines(
    results: Sequence[Result],
    rate: StepRate | None,
    step_us: float,
    bound_us: float | None = None,
) -> list[str]:
    """Return the time of a step with its optimizer, if that is known, and its rate. ``bound_us`` is
    the bound on the step, where it is forward and backward: the lines then say how much an
    optimizer that updates each parameter by itself saves, if that is worth a line.
    """
    accounts = [result.account for result in results if result.account is not None]
    optimizer_us = max((account.optimizer_us for account in accounts), default=0.0)
    whole_us, lines = step_us + optimizer_us, []
    if optimizer_us:
        name = accounts[0].optimizer
        lines.append(f"with the optimizer ({name}, {show_us(optimizer_us)}): {show_us(whole_us)}")
        ends = None if bound_us is None else optimizer_ends(results, bound_us)
        if ends is not None and ends.saved >= _SMALLEST_GAIN:
            lines.append(
                f"updated as soon as gradients are reduced: {show_us(ends.beside_us)}, bound"
                f" {show_us(ends.bound_us)}"
            )
    if rate is not None:
        lines.append(_rate_line(rate, whole_us))
    return lines


def _rate_line(rate: StepRate, step_us: float) -> str:
    per_second = rate.num_samples / step_us * 1e6
    return (
        f"{per_second / rate.num_ranks:,.0f} {rate.unit}/s a process rank, {per_second:,.0f} on all"
        f" {rate.num_ranks}; MFU {100 * rate.model_us / step_us:.1f} %"
    )


def _memory_line(results: Sequence[Result]) -> str:
    """Return the highest peak of a graph, and the memory that the tightest graph leaves, with its
    name where it is another graph. The peak of the step may be higher: see ``kept_lines``.
    """
    peak = max(results, key=_peak_bytes)
    name = f"{peak.problem.name} peaks at" if len(results) > 1 else "peak"
    text = f"{name} {show_bytes(_peak_bytes(peak))}"
    accounts = [(result, result.account) for result in results if result.account is not None]
    if accounts:
        tight, account = min(accounts, key=lambda pair: pair[1].left_bytes - _peak_bytes(pair[0]))
        spare = account.left_bytes - _peak_bytes(tight)
        device = show_bytes(account.beside.device_bytes)
        text += (
            f"; {show_bytes(spare)} of the device ({device}) left"
            if spare >= 0
            else f"; {show_bytes(-spare)} MORE than the device ({device}) has for it"
        )
        if tight is not peak:
            text += f" ({tight.problem.name})"
    caps = list(dict.fromkeys(show_bytes(result.caps.memory_cap_bytes) for result in results))
    if not {*caps} <= {show_bytes(account.left_bytes) for _, account in accounts}:
        text += f"; memory cap {' and '.join(caps)}"
    return text


def _next_lines(
    results: Sequence[Result], gap: float, suggestion: str, *, keeps: bool
) -> list[str]:
    """Return one line of options that may be worth a try, ``suggestion`` first; no line if there
    are none.
    """
    found = [suggestion] if suggestion else []
    largest = max(
        (result for result in results if result.chosen is not None),
        key=lambda result: result.chosen.bucket_bytes if result.chosen else 0,
    )
    if largest.chosen is not None and largest.chosen.bucket_bytes >= _LARGE_LAUNCH_BYTES:
        size = show_bytes(largest.chosen.bucket_bytes)
        found.append(f"one launch has {size} ({largest.problem.name}): consider --bucket-cap")
    if gap >= _SMALLEST_GAIN:
        found.append(f"a larger --budget may gain up to {100 * gap:.2f} %")
    alone = len(results) == 1
    found += [text for result in results if (text := _less_memory(result, alone=alone))]
    least = max(result.answer.floor_memory_bytes for result in results)
    if not (found or keeps) and least <= (1 - LESS_MEMORY) * max(map(_peak_bytes, results)):
        found.append(f"{show_bytes(least)} are enough, slower: --memory-cap floor")
    return [f"try next: {'; '.join(found)}"] if found else []


def _less_memory(result: Result, *, alone: bool) -> str:
    """Return the price of less memory, if the search or a baseline gives it; else an empty text.
    ``alone``: a memory cap holds for this graph only.
    """
    assert result.best is not None
    peak, step = result.best.peak_memory_bytes, result.best.step_time_ticks
    enough = (1 - LESS_MEMORY) * peak
    baselines = [score for score in result.answer.baselines if score.fits]
    cheaper: list[Score] = [
        score
        for score in baselines
        if score.peak_memory_bytes <= enough and score.step_time_ticks <= (1 + SLOWER) * step
    ]
    name, knee = result.problem.name, result.answer.knee
    if (
        knee is not None
        and knee.peak_memory_bytes <= enough
        and step < knee.step_time_ticks <= (1 + _KNEE_SLOWER) * step
    ):
        slower = 100 * (knee.step_time_ticks / step - 1)
        text = f"{name} {slower:.2f} % slower needs {show_bytes(knee.peak_memory_bytes)}"
        if knee.step_time_ticks <= min((b.step_time_ticks for b in baselines), default=math.inf):
            slack = math.ceil(1000 * (knee.step_time_ticks / result.answer.fastest_ticks - 1)) / 10
            return f"{text}: --time-slack {slack:.1f}%{'' if alone else ' (of every graph)'}"
        # no slack makes an answer slower than a baseline that fits, but a cap does
        return f"{text}: --memory-cap {knee.peak_memory_bytes}" if alone else text
    if cheaper:
        least = min(cheaper, key=lambda score: score.peak_memory_bytes)
        slower = 100 * (least.step_time_ticks / step - 1)
        return f"{name} {slower:.1f} % slower needs {show_bytes(least.peak_memory_bytes)}"
    return ""


def _peak_bytes(result: Result) -> int:
    return result.best.peak_memory_bytes if result.best is not None else 0


def _wrapped(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(
        text,
        _WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,  # options stay whole
    )
