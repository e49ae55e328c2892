"""``apsched trace``: the timelines of a run for Perfetto, alone or beside a profile of the job."""

import argparse
from typing import Any, TextIO

from apsched.cli.arguments import add_option, add_out, add_run, add_verb
from apsched.cli.output import write_one
from apsched.errors import InputError
from apsched.quantities import parse_count

_HOW = "open it in ui.perfetto.dev"
_NO_MATCH = (
    "{} of the job has other collectives than this run in either order, so graphs are laid end to"
    " end from its begin"
)


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "trace",
        "write the timelines of a run for Perfetto, alone or with a profile of the job",
        run,
    )
    add_run(parser, "output directory of `apsched solve -o DIR`")
    text = (
        "a trace that torch.profiler exported of the job: write both into one file, aligned where"
        " the job runs each graph"
    )
    add_option(parser, "--beside", "FILE", text)
    text = (
        "the step of that trace to align with, as its profiler counted (default: the last whole"
        " one)"
    )
    add_option(parser, "--step", "N", text)
    add_out(parser, "FILE", "the trace (default: trace.json in DIR)")


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Read the run, check it, and write the trace."""
    from apsched.artifacts.solved_run import load_run
    from apsched.report.trace import trace
    from apsched.report.trace_beside_profile import trace_beside

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
