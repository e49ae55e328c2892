"""The score of a run, and what no test notices, as text."""

from collections import Counter
from typing import Any

NOTICED = frozenset({"killed", "timeout"})


def counted(record: dict[str, Any]) -> Counter[str]:
    """Return how many faults came out how, at last."""
    return Counter(entry["rounds"][-1]["outcome"] for entry in record["mutants"])


def table(record: dict[str, Any]) -> str:
    """Return the score of ``record`` at first and at last, by part, and the faults that no test
    notices with their verdict (``why``), as Markdown.
    """
    entries = record["mutants"]
    lines = [
        "# Faults that the tests notice",
        "",
        f"Written by `python -m tests.mutation --table`: {len(entries)} faults, seed"
        f" {record['seed']}. {record.get('remark', '')}".rstrip(),
        "",
        "| part | faults | noticed at first | at last | equivalent | gone | heuristic | left |",
        "| :-- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    parts = sorted({_part(entry) for entry in entries})
    lines += [_row(part, [e for e in entries if _part(e) == part]) for part in parts]
    lines += [_row("all", entries), ""]
    lines += ["| noticed at last by kind | faults | share |", "| :-- | --: | --: |"]
    for kind in sorted({entry["kind"] for entry in entries}):
        mine = [entry for entry in entries if entry["kind"] == kind]
        noticed = sum(is_noticed(entry) for entry in mine)
        lines.append(f"| {kind} | {len(mine)} | {noticed / len(mine):.0%} |")
    lines += [
        "",
        "## What no test of this run notices",
        "",
        "| where | fault | verdict |",
        "| :-- | :-- | :-- |",
    ]
    for entry in entries:
        if not is_noticed(entry):
            fault = f"{entry['kind']}: `{_cell(entry['before'])}` to `{_cell(entry['after'])}`"
            where = f"{entry['file']}:{entry['line']} `{entry['function']}`"
            lines.append(f"| {where} | {fault} | {entry.get('why', 'not judged')} |")
    lines += ["", "## Noticed since the first round", ""]
    for entry in entries:
        if is_noticed(entry) and not _at_first(entry):
            by = entry["rounds"][-1]["by"]
            lines.append(
                f"- {entry['file']}:{entry['line']} {entry['kind']} `{_cell(entry['before'])}`:"
                f" `{by}`"
            )
    return "\n".join(lines) + "\n"


def _row(part: str, entries: list[dict[str, Any]]) -> str:
    first, last = sum(map(_at_first, entries)), sum(map(is_noticed, entries))
    unnoticed = Counter(_verdict(e) for e in entries if not is_noticed(e))
    judged = [unnoticed[verdict] for verdict in ("equivalent", "gone", "heuristic")]
    left = len(entries) - last - sum(judged)
    return f"| {' | '.join(map(str, (part, len(entries), first, last, *judged, left)))} |"


def is_equivalent(entry: dict[str, Any]) -> bool:
    """Whether its verdict is that no test can notice it."""
    return _verdict(entry) == "equivalent"


def _verdict(entry: dict[str, Any]) -> str:
    """Return the first word of its verdict: ``equivalent``, ``gone`` (the code is no more),
    ``heuristic`` (other schedules are tried, and no promise rests on which) or ``left``.
    """
    return str(entry.get("why", "")).split(":")[0]


def is_noticed(entry: dict[str, Any]) -> bool:
    """Whether a test notices it at last."""
    return entry["rounds"][-1]["outcome"] in NOTICED


def _at_first(entry: dict[str, Any]) -> bool:
    """Whether tests notice it that are older than the run."""
    return any(r["outcome"] in NOTICED and not r.get("new") for r in entry["rounds"])


def _part(entry: dict[str, Any]) -> str:
    return str(entry["file"].rsplit("/", 1)[0])


def _cell(text: str) -> str:
    return (text if len(text) <= 80 else text[:77] + "...").replace("|", "\\|")
