"""Functions of the commands that write one file of a run, or print answers."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from apsched.errors import InfeasibleError

if TYPE_CHECKING:
    from apsched.pipeline.result import Result
    from apsched.pipeline.what_fits import Trial


def write_one(
    args: argparse.Namespace,
    content: bytes,
    what: str,
    name: str,
    how: str,
    stdout: TextIO,
    **more: Any,
) -> None:
    """Write ``content`` to ``-o`` (else to ``name`` in the directory of the run), and print its
    path between ``what``, the name of the content, and ``how``, the way to open it.

    ``more`` is for ``--json``.
    """
    from apsched.atomic_files import write_atomic
    from apsched.report.console import console, print_json

    target = Path(args.out or Path(args.run_directory) / name)
    write_atomic(target, content)
    if args.json:
        print_json(stdout, file=str(target), bytes=len(content), **more)
    else:
        console(stdout).print(
            f"{what} in {target} ({len(content) / 1e6:.2f} MB): {how}", markup=False
        )


def refuse_infeasible(
    results: "Sequence[Result]",
    *,
    source: str,
    cluster: str,
    stdout: TextIO,
    as_json: bool,
    trials: "Sequence[Trial]" = (),
    of_step: str = "",
) -> None:
    """Raise ``InfeasibleError`` where a graph has no schedule, with the caps, the least values
    that fit, the nodes that need them, and the other options that were tried; or with the message
    ``of_step``, if the graphs are parts of a step.
    """
    from dataclasses import asdict

    from apsched.report.answer.account import memory_hint
    from apsched.report.console import print_json
    from apsched.report.explanation import explain_infeasible
    from apsched.report.summary import report_json

    without = [result for result in results if result.best is None]
    if not without:
        return
    if as_json:
        tried = {"tried": [{**asdict(t), "fits": t.fits} for t in trials]} if trials else {}
        print_json(stdout, **report_json(source, cluster, results), **tried)
    if of_step:
        raise InfeasibleError(of_step)
    hint = memory_hint(results, trials)
    raise InfeasibleError("; ".join([*hint, *(explain_infeasible(r, without) for r in without)]))
