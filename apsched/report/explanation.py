"""The output of ``apsched explain``: the shares of a step time and the gain of one more of each
resource, or why nothing fits.
"""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from apsched.errors import ApschedError
from apsched.options_table import CAPS, FLAG_OF_CAP
from apsched.pipeline.result import Result
from apsched.quantities import show_bytes, show_gap, show_us
from apsched.report.answer.account import account_in_words
from apsched.report.binding import memory_text, shares, where_text
from apsched.report.console import plain_table
from apsched.schedule.result import WITHOUT_PLAN, Infeasibility, Relaxation
from apsched.units import ticks_to_us
from apsched.what_if.one_more import Relaxed

_SETTING_OF_CAP = {option.field_name: option.name for option in CAPS}
_NEEDS_LESS = (
    "a graph needs less with activation checkpointing or smaller inputs, and the device has more"
    " left with more process ranks"
)
_MORE = {"memory": "memory, 1 GiB", "network": "network, 1 Gb/s", "prefetch": "prefetch, 1 layer"}


def _as_flag(cap: str, value: int) -> str:
    return f"{FLAG_OF_CAP[cap]} {value}"


def _as_setting(cap: str, value: int) -> str:
    return f"{_SETTING_OF_CAP[cap]}={value}"


def print_binding(out: Console, result: Result, relaxed: Sequence[Relaxed]) -> None:
    """Print the owners of the step time with their shares, and the gain from one more of each
    thing.
    """
    path = result.path
    assert path is not None
    out.print(
        f"{result.problem.name}: step time {show_us(ticks_to_us(path.step_time_ticks))}, bound"
        f" {show_us(result.bound_us)}, gap {show_gap(result.gap)}",
        markup=False,
    )
    figures = ("ms", "share", "exposed ms")
    table = plain_table("  rests on", *figures, "where", right=figures)
    for share in shares(result):
        table.add_row(
            f"  {share.label}",
            _ms(share.ticks),
            f"{100 * share.ticks / path.step_time_ticks:.2f} %",
            _ms(share.exposed_ticks) if share.stretches else "",
            where_text(result, share),
        )
    out.print(table)
    if memory_text(result):
        out.print(f"  {memory_text(result)}", markup=False)
    right = ("step time ms", "gain")
    table = plain_table("  one more of", *right, "proven", "change", right=right)
    for more in relaxed:
        table.add_row(f"  {_MORE[more.name]}", *_more_cells(result, more), more.change)
    out.print()
    out.print(table)


def _more_cells(result: Result, more: Relaxed) -> tuple[str, str, str]:
    if more.step_time_ticks is None:
        return "", "", "not solved"
    known = result.path.step_time_ticks if result.path else 0
    gain = (
        f"{show_us(ticks_to_us(more.gain_ticks))} ({100 * more.gain_ticks / known:.3f} %)"
        if more.gain_ticks
        else "0"
    )
    possible = show_us(ticks_to_us(more.possible_ticks))
    verdict = {
        "gains": f"at least {show_us(ticks_to_us(more.proven_ticks))}, at most {possible}",
        "gains nothing": "gains nothing",
        "nothing provable": f"at most {possible}",
    }[more.verdict]
    return _ms(more.step_time_ticks), gain, verdict


def binding_json(result: Result, relaxed: Sequence[Relaxed]) -> dict[str, Any]:
    """Return for programs the stretches of the critical path, and the gain from one more of each
    thing.
    """
    assert result.path is not None
    stretches = [
        {
            "group": result.problem.streams[s.stream],
            "where": str(s.where),
            "begin_us": ticks_to_us(s.begin_ticks),
            "end_us": ticks_to_us(s.end_ticks),
            "exposed_us": ticks_to_us(s.exposed_ticks),
            "transfers": len(s.transfers),
            "cause": str(s.cause),
        }
        for s in result.path.stretches
    ]
    return {"stretches": stretches, "one_more": {more.name: _more_json(more) for more in relaxed}}


def _more_json(more: Relaxed) -> dict[str, Any]:
    def us(ticks: int | None) -> float | None:
        return None if ticks is None else ticks_to_us(ticks)

    return {
        "change": more.change,
        "verdict": more.verdict,
        "step_time_us": us(more.step_time_ticks),
        "bound_us": us(more.bound_ticks),
        "gain_us": us(more.gain_ticks),
        "proven_gain_us": us(more.proven_ticks),
        "possible_gain_us": us(more.possible_ticks),
    }


def print_infeasible(out: Console, name: str, why: Infeasibility) -> None:
    """Print the caps that clash, the least value of each alone, and the tensors alive where memory
    is short.
    """
    how = (
        "no schedule fits (proven)"
        if why.proven
        else "no schedule was found that fits (not proven that none does)"
    )
    out.print(f"{name}: {how}", markup=False)
    for clash in why.clashes:
        flags = " and ".join(FLAG_OF_CAP[cap] for cap in clash)
        out.print(
            f"  {flags} cannot be kept" + (" together" if len(clash) > 1 else ""), markup=False
        )
    out.print()
    figures = ("stated", "needs")
    table = plain_table("  cap", *figures, "with the others as they are", right=figures)
    for relaxation in why.relaxations:
        table.add_row(
            f"  {FLAG_OF_CAP[relaxation.cap]}",
            _value(relaxation.cap, relaxation.stated),
            *_need_cells(relaxation),
        )
    out.print(table)
    if why.places:
        out.print(
            "\n  where memory is short, with every buffer held as briefly as possible:",
            markup=False,
        )
    for k, place in enumerate(why.places):
        out.print(
            f"  {place.node}: {show_bytes(place.live_bytes)} alive" + (", of it" if k == 0 else ""),
            markup=False,
        )
        alive = Table.grid(padding=(0, 2))
        alive.add_column(justify="right", min_width=14)
        alive.add_column()
        for what, count, size in place.alive if k == 0 else ():
            alive.add_row(
                show_bytes(size), f"{what}" + (f" ({count} tensors)" if count > 1 else "")
            )
        out.print(alive)


def _need_cells(relaxation: Relaxation) -> tuple[str, str]:
    too = (
        f"; {' and '.join(FLAG_OF_CAP[cap] for cap in relaxation.lifted)} must be relaxed, too"
        if relaxation.lifted
        else ""
    )
    bound = _value(relaxation.cap, relaxation.bound)
    if relaxation.least is None:
        return "unknown", f"proven to need {bound} or more{too}"
    proven = (
        "proven: no lower value fits"
        if relaxation.proven
        else f"known to fit; proven to need {bound} or more"
    )
    return _value(relaxation.cap, relaxation.least), proven + too


def _value(cap: str, value: int) -> str:
    return show_bytes(value) if cap.endswith("bytes") else str(value)


def _ms(ticks: int) -> str:
    return f"{ticks_to_us(ticks) / 1000:,.3f}"


def explain_infeasible(
    result: Result,
    every: Sequence[Result] = (),
    stated: Callable[[str, int], str] = _as_flag,
    step_bytes: int = 0,
) -> str:
    """Return why no schedule keeps the caps: which clash, at which nodes, and the least
    values that fit, memory only as far as the device has it.

    The values fit all graphs of ``every``, which have the same caps, and memory also a step that
    needs ``step_bytes``. ``stated`` returns the text that states a cap, by its field and value.
    """
    why = result.answer.infeasibility
    if why is None:
        raise ApschedError(f"{result.problem.name}: no schedule was found, and no reason")
    together = any(r.lifted for r in why.relaxations)
    needed = [*(_least(other) for other in every), {"memory_cap_bytes": step_bytes}]
    fitting = [
        (cap, max([value, *(values[cap] for values in needed if cap in values)]))
        for cap, value in why.least
    ]
    possible = [
        (cap, value)
        for cap, value in fitting
        if cap != "memory_cap_bytes" or result.account is None or value <= result.account.left_bytes
    ]
    if together and len(possible) < len(why.least):
        possible = []
    least = [
        f"{stated(cap, value)}{f' ({show_bytes(value)})' if cap.endswith('bytes') else ''}"
        for cap, value in possible
    ]
    joined = (" and " if together else " or ").join(least)
    return f"{result.problem.name}: {why.message}" + (f"; try {joined}" if least else "")


def explain_in_job(
    result: Result, outside_bytes: int = 0, step_bytes: int = 0, without_plan: str = WITHOUT_PLAN
) -> str:
    """As :func:`explain_infeasible`, for the settings of a job, with the account of the device and
    the remedies if it is short of memory. ``outside_bytes`` of its step lie outside of the graph,
    and the step is known to fit ``step_bytes``. ``without_plan`` are the words for a plan that the
    user did not state.
    """
    account = account_in_words(result)
    text = explain_infeasible(result, stated=_as_setting, step_bytes=step_bytes)
    text = text.replace(WITHOUT_PLAN, without_plan)
    if outside_bytes and not account:
        text += (
            f". {show_bytes(outside_bytes)} of the memory cap are outside of this graph: shards of"
            " kept parameters, gradients of other micro-batches"
        )
    return text + (f"; {account}; {_NEEDS_LESS}" if account else "")


def _least(result: Result) -> dict[str, int]:
    """Return the least value of each cap that is known to fit ``result``, where it does not."""
    why = result.answer.infeasibility
    return {} if why is None else dict(why.least)
