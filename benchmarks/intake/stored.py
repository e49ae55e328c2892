"""Outcomes of cases as a JSON file, so that a survey may run in parts."""

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.intake.case import CaseOutcome, GraphOutcome


def read(path: Path) -> dict[tuple[str, str], CaseOutcome]:
    """Return the outcomes in ``path`` by group and name; none where there is no such file. Raises
    ``ValueError`` for a file of another form.
    """
    if not path.exists():
        return {}
    try:
        found = [_outcome(fields) for fields in json.loads(path.read_text())["cases"]]
    except (KeyError, TypeError, ValueError) as error:
        message = f"{path.name}: expected outcomes that --results wrote, found {error!r}"
        raise ValueError(message) from error
    return {(outcome.group, outcome.name): outcome for outcome in found}


def write(path: Path, outcomes: Iterable[CaseOutcome], versions: str) -> None:
    """Write outcomes, in whole or not at all."""
    cases = [dataclasses.asdict(outcome) for outcome in outcomes]
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps({"versions": versions, "cases": cases}, indent=1) + "\n")
    os.replace(part, path)


def _outcome(fields: dict[str, Any]) -> CaseOutcome:
    graphs = tuple(GraphOutcome(**graph) for graph in fields["graphs"])
    return CaseOutcome(**{**fields, "graphs": graphs})
