"""What commands share that make one file of a run."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from apsched.atomic_files import write_atomic
from apsched.errors import InfeasibleError
from apsched.pipeline.result import Result
from apsched.report.explanation import explain_infeasible
from apsched.report.summary import console, report_json


def write_one(
    args: argparse.Namespace,
    content: bytes,
    what: str,
    name: str,
    how: str,
    stdout: TextIO,
    **more: Any,
) -> None:
    """Write ``content`` to ``-o`` (else to ``name`` in the directory of the run), and say so:
    ``what`` it is, and ``how`` to open it.

    ``more`` is for ``--json``.
    """
    target = Path(args.out or Path(args.run_directory) / name)
    write_atomic(target, content)
    if args.json:
        print(
            json.dumps({"schema": 1, "file": str(target), "bytes": len(content), **more}),
            file=stdout,
        )
    else:
        console(stdout).print(
            f"{what} in {target} ({len(content) / 1e6:.2f} MB): {how}", markup=False
        )


def refuse_infeasible(
    results: Sequence[Result], *, source: str, cluster: str, stdout: TextIO, as_json: bool
) -> None:
    """Raise ``InfeasibleError`` where a graph has no schedule, with the caps, the least that would
    do and the nodes that need it.
    """
    without = [result for result in results if result.best is None]
    if not without:
        return
    if as_json:
        print(json.dumps(report_json(source, cluster, results)), file=stdout)
    raise InfeasibleError("; ".join(explain_infeasible(result) for result in without))
