"""The section of a report on the whole step: the choices solved, and the kept parameters."""

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from apsched.names import is_in_node, name_of
from apsched.quantities import show_bytes, show_gap, show_us
from apsched.report.answer.kept_words import kept_count, kept_in_words, told_apart
from apsched.report.page.table import table

ANCHOR = "kept"


def kept_section(keep: Mapping[str, Any]) -> str:
    """Return the section on the parameters kept from forward to backward; ``keep`` is the entry of
    that name in ``--json``.
    """
    return _section(keep, "the choices", f"{_choices(keep)}\n{_frontier(keep, _HEAD, _cells)}")


def joint_section(joint: Mapping[str, Any], apart: Mapping[str, Any] | None) -> str:
    """Return the section on the parameters kept in one graph of forward and backward; both are the
    entries ``keep_joint`` and ``keep_apart`` in ``--json``.
    """
    if apart is None:
        return _section(joint, "schedules with this choice", "")
    rows = [
        (name, *_joint_cells(choice))
        for name, choice in (*joint["compared"].items(), ("apsched", joint))
    ]
    compared = table(("choice", *_JOINT_HEAD, "fits the cap"), rows, best=len(rows) - 1)
    tables = (
        f"<h3>Choices in one graph</h3>\n<div class=wide>{compared}</div>\n"
        f"{_frontier(joint, _JOINT_HEAD, lambda one: _joint_cells(one)[:-1])}\n"
        f"{_choices(apart, 'Choices for forward and backward apart')}"
    )
    return _section(joint, "the choices", tables)


def _joint_cells(choice: Mapping[str, Any]) -> tuple[str, ...]:
    count = kept_count(choice["num_kept"], choice["num_in_node"])
    size = show_bytes(choice["kept_bytes"])
    if choice["fits"]:
        peak = show_bytes(choice["peak_memory_bytes"])
        return count, size, show_us(choice["step_time_us"]), peak, "yes"
    if choice["is_solved"]:
        return count, size, "", "", "no"
    return count, size, f"≥ {show_us(choice['bound_us'])}", "", "not solved"


def _section(keep: Mapping[str, Any], bound_over: str, tables: str) -> str:
    """Return the section on the answer ``keep``, with ``tables`` at its end; its bound is that over
    ``bound_over``.
    """
    names, kept = keep["parameters"], keep["kept"]
    whole = [entry for entry in kept if not is_in_node(entry)]
    in_node = [name_of(entry) for entry in kept if is_in_node(entry)]
    again = sorted({*names} - {*whole} - {*in_node})
    cards = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>"
        for value, what in (
            (show_us(keep["step_time_us"]), "forward and backward"),
            (
                show_gap(keep["gap"]),
                f"gap to the bound over {bound_over} of {show_us(keep['bound_us'])}",
            ),
            (
                show_bytes(keep["peak_memory_bytes"]),
                f"peak memory, cap {show_bytes(keep['memory_cap_bytes'])}",
            ),
            (f"{len(whole)} of {len(names)}", "gathered parameters kept"),
            *([(str(len(in_node)), "resharded in their node")] if in_node else []),
            (show_bytes(keep["kept_bytes"]), "kept from forward to backward"),
        )
    )
    lists = "".join(
        f"<li>{verb}: {escape(kept_in_words(some, names))}</li>"
        for verb, some in (
            ("kept", whole),
            ("resharded in their node", in_node),
            ("gathered again", again),
        )
        if some or verb != "resharded in their node"
    )
    return f"""<section class="graph" id="{ANCHOR}" aria-labelledby="{ANCHOR}-head">
<h2 id="{ANCHOR}-head">Kept from forward to backward</h2>
<div class="figures">{cards}</div>
<ul>{lists}</ul>
{tables}
</section>"""


def _choices(keep: Mapping[str, Any], title: str = "Choices") -> str:
    """Return the choices that people make beside the one of the answer."""
    solved = [
        (name, *_cells(choice), "yes" if choice["fits"] else "no")
        for name, choice in (*keep["baselines"].items(), ("apsched", keep))
    ]
    excluded = [
        (name, *_unsolved_cells(choice, f"≥ {show_us(choice['bound_us'])}", "not solved"))
        for name, choice in keep.get("excluded", {}).items()
    ]
    too_large = [
        (name, *_unsolved_cells(choice, "", "no"))
        for name, choice in keep.get("too_large", {}).items()
    ]
    rows = [*solved[:-1], *excluded, *too_large, solved[-1]]
    head = ("choice", *_HEAD, "fits the cap")
    return f"<h3>{title}</h3>\n<div class=wide>{table(head, rows, best=len(rows) - 1)}</div>"


def _frontier(
    keep: Mapping[str, Any],
    figures: tuple[str, ...],
    cells: Callable[[Mapping[str, Any]], tuple[str, ...]],
) -> str:
    """Return memory against step time: along memory caps where these were solved, else of the
    choices that were. ``cells`` gives the ``figures`` of one of them.
    """
    along = [one for one in keep.get("along_caps", ()) if one["fits"]]
    found = along or keep.get("frontier", ())
    if len(found) < 2 and not along:
        return ""
    names = keep["parameters"]
    rows = [
        (
            show_bytes(one["memory_cap_bytes"]) if along else show_bytes(one["peak_memory_bytes"]),
            *cells(one),
            words,
        )
        for one, words in zip(found, told_apart([o["kept"] for o in found], names), strict=True)
    ]
    head = ("memory cap" if along else "memory", *figures, "kept parameters")
    made = table(head, rows, text=(len(head) - 1,))
    return f"<h3>Memory against step time</h3>\n<div class=wide>{made}</div>"


def _unsolved_cells(choice: Mapping[str, Any], time: str, fits: str) -> tuple[str, ...]:
    return (
        kept_count(choice["num_kept"], choice["num_in_node"]),
        show_bytes(choice["kept_bytes"]),
        *("", "", time, "", fits),
    )


_HEAD = ("kept", "kept bytes", "forward", "backward", "step", "peak memory")
_JOINT_HEAD = ("kept", "kept bytes", "step", "peak memory")


def _cells(choice: Mapping[str, Any]) -> tuple[str, ...]:
    times = (choice[key] for key in ("forward_us", "backward_us", "step_time_us"))
    peak = choice["peak_memory_bytes"]
    return (
        kept_count(choice["num_kept"], choice["num_in_node"]),
        show_bytes(choice["kept_bytes"]),
        *("" if us is None else show_us(us) for us in times),
        "" if peak is None else show_bytes(peak),
    )
