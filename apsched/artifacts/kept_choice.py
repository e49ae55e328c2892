"""The parameters that an answer keeps from forward to backward, read beside its schedule files: a
replay has to keep the same.
"""

import json
from collections.abc import Iterable
from os import PathLike
from pathlib import Path

from apsched.artifacts.solved_run import RESULT_FILE
from apsched.errors import InputError
from apsched.pipeline.sources import SourceKind, classify
from apsched.whole_step.keep_request import KEPT_FILE, KeepRequest, keep_request

_ENTRIES = (
    ("keep", "kept"),
    ("keep_joint", "kept"),
    ("accumulate", "choice"),
    ("keep_apart", "kept"),
)
"""Entries of a result with a choice of parameters, and the key of their names; joint graphs of
earlier versions have only ``keep_apart``.
"""


def kept_for(source: str, schedules: Iterable[str | PathLike[str]], label: str) -> KeepRequest:
    """As :func:`kept_beside`, for the graphs of ``source``; nothing for graph files, which an
    answer writes with its choice made.
    """
    if classify(source) is SourceKind.GRAPH_FILE:
        return KeepRequest()
    return kept_beside(schedules, label)


def kept_beside(schedules: Iterable[str | PathLike[str]], label: str) -> KeepRequest:
    """Return the choice of the answers to which ``schedules`` belong: files of ``apsched solve
    -o``, or their directories. A directory has it in ``result.json``, or without that file in
    ``kept.txt``; with neither nothing is kept.

    ``label`` is the option that states a choice. ``InputError`` where two answers differ in it.
    """
    found: dict[tuple[str, ...], Path] = {}
    for path in map(Path, schedules):
        folder = path if path.is_dir() else path.parent
        found.setdefault(_names_in(folder, label), folder)
    if len(found) > 1:
        first, second, *_ = found.values()
        raise InputError(
            f"{label}: expected schedules of one answer, found that {first} and {second} keep"
            f" different parameters; state {label}"
        )
    return keep_request(next(iter(found), ()) or None, label)


def _names_in(folder: Path, label: str) -> tuple[str, ...]:
    try:
        report = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        file = folder / KEPT_FILE
        return keep_request(file, label).entries if file.is_file() else ()
    for entry, key in _ENTRIES:
        step = report.get(entry) if isinstance(report, dict) else None
        names = step.get(key) if isinstance(step, dict) else None
        if isinstance(names, list):
            return tuple(map(str, names))
    return ()
