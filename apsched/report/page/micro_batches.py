"""The section of a report on a step of several micro-batches in a row."""

from collections.abc import Mapping
from html import escape
from typing import Any

from apsched.names import mark_of, name_of
from apsched.quantities import show_bytes, show_gap, show_us
from apsched.report.answer.accumulation import SECTIONS
from apsched.report.answer.kept_words import kept_count, kept_in_words, summed_count
from apsched.report.page.table import table

ANCHOR = "micro-batches"


def micro_batches_section(step: Mapping[str, Any]) -> str:
    """Return the section on the micro-batches; ``step`` is the entry ``accumulate`` of
    ``--json``.
    """
    cards = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(text)}</span></div>"
        for value, text in (
            (show_us(step["step_time_us"]), f"{step['num_micro_batches']} micro-batches"),
            (
                show_gap(step["gap"]),
                f"gap to the bound over the choices of {show_us(step['bound_us'])}",
            ),
            (
                show_bytes(step["peak_memory_bytes"]),
                f"peak memory, cap {show_bytes(step['memory_cap_bytes'])}",
            ),
        )
    )
    lists = "".join(
        f"<li>{words}: {escape(kept_in_words(chosen, _names(step, mark)))}</li>"
        for mark, words in SECTIONS.items()
        if (chosen := [name_of(e) for e in step["choice"] if mark_of(e) == mark])
    )
    return f"""<section class="graph" id="{ANCHOR}" aria-labelledby="{ANCHOR}-head">
<h2 id="{ANCHOR}-head">Micro-batches in a row</h2>
<div class="figures">{cards}</div>
<ul>{lists}</ul>
{_micro_batches(step)}
{_choices(step)}
{_along_caps(step)}
</section>"""


def _names(step: Mapping[str, Any], mark: str) -> list[str]:
    return [name_of(entry) for entry in step["entries"] if mark_of(entry) == mark]


def _micro_batches(step: Mapping[str, Any]) -> str:
    """Return the graphs and times of each micro-batch."""
    rows = [
        (
            str(one["count"]),
            *(
                f"{n}: {show_us(us)}"
                for n, us in zip(one["graphs"], one["step_time_us"], strict=True)
            ),
        )
        for one in step["micro_batches"]
    ]
    made = table(("micro-batches", "forward", "backward"), rows)
    return f"<h3>In order</h3>\n<div class=wide>{made}</div>"


def _choices(step: Mapping[str, Any]) -> str:
    """Return the choices that people make beside the one of the answer."""
    solved = [
        (name, *_cells(one), "yes" if one["fits"] else "no")
        for name, one in (*step["baselines"].items(), ("apsched", step))
    ]
    excluded = [
        (name, *_count_cells(one), f"≥ {show_us(one['bound_us'])}", "", "not solved")
        for name, one in step.get("excluded", {}).items()
    ]
    rows = [*solved[:-1], *excluded, solved[-1]]
    head = ("choice", *_HEAD, "fits the cap")
    return f"<h3>Choices</h3>\n<div class=wide>{table(head, rows, best=len(rows) - 1)}</div>"


def _along_caps(step: Mapping[str, Any]) -> str:
    """Return memory against step time along memory caps, if these were solved."""
    along = [one for one in step.get("along_caps", ()) if one["fits"]]
    if not along:
        return ""
    rows = [(show_bytes(one["memory_cap_bytes"]), *_cells(one)) for one in along]
    made = table(("memory cap", *_HEAD), rows)
    return f"<h3>Memory against step time</h3>\n<div class=wide>{made}</div>"


_HEAD = ("kept", "stay gathered", "reduced once", "step", "peak memory")


def _cells(choice: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        *_count_cells(choice),
        show_us(choice["step_time_us"]) if choice["fits"] else "",
        show_bytes(choice["peak_memory_bytes"]) if choice["fits"] else "",
    )


def _count_cells(choice: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        kept_count(choice["num_kept"], choice["num_in_node"]),
        str(choice["num_held"]),
        summed_count(choice["num_summed"], choice.get("num_shards_summed", 0)),
    )
