"""``apsched trace``: the timelines of a run for Perfetto, alone or beside a profile of the job."""

import argparse
from typing import TextIO

from apsched.artifacts.solved_run import load_run
from apsched.cli.output import write_one
from apsched.errors import InputError
from apsched.quantities import parse_count
from apsched.report.trace import trace
from apsched.report.trace_beside_profile import trace_beside

_HOW = "open it in ui.perfetto.dev"
_NO_MATCH = (
    "{} of the job has other collectives than this run in either order, so graphs are laid end to"
    " end from its begin"
)


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Read the run, check it, and write the trace."""
    if args.beside is None and args.step is not None:
        raise InputError("--step: it chooses a step of the trace that --beside names; leave it out")
    solved = load_run(args.run_directory)
    if args.beside is None:
        write_one(args, trace(solved), "trace", "trace.json", _HOW, stdout)
        return
    both = trace_beside(
        solved, args.beside, None if args.step is None else parse_count(args.step, "--step")
    )
    which = "the trace" if both.step is None else f"step {both.step}"
    how = (
        f"{which} of the job has the collectives {both.matched}, and is laid beside by them"
        if both.matched
        else _NO_MATCH.format(which)
    )
    write_one(
        args,
        both.content,
        "trace",
        "trace.json",
        f"{_HOW}; {how}",
        stdout,
        step=both.step,
        matched=both.matched or None,
    )
