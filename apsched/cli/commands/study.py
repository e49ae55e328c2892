"""``apsched study``: a grid of questions, answered once and kept."""

import argparse
from typing import Any, TextIO

from apsched.cli.arguments import (
    SLOWDOWN_HELP,
    SOURCE_HELP,
    add_groups,
    add_json,
    add_option,
    add_out,
    add_verb,
)
from apsched.errors import InputError


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "study",
        "answer a grid of questions: a memory/time frontier, other meshes, clusters, options;"
        " resumes after an interruption",
        run,
    )
    text = f"{SOURCE_HELP}; or compare A B, merge A B, export DIR, for existing studies"
    parser.add_argument("source", metavar="SOURCE", nargs="+", help=text)
    add_groups(parser, "source", "costs")
    add_json(parser)
    add_groups(
        parser, "caps", "device memory", "search", "compute", "plan", "contention", "scenarios"
    )
    add_groups(parser, "process groups")
    grid = parser.add_argument_group("study")
    text = (
        "an option and its values: seq=2048,8192, memory_cap=floor..none:20,"
        " mesh=fsdp=64|fsdp=8,tp=8 (docs/studies.md); may be given again"
    )
    add_option(grid, "--vary", "NAME=VALUES", text, several=True)
    text = (
        "a direct answer: network=2x, compute=0.8x, ranks=4096 or memory=-10GiB, alone or several"
        " at once"
    )
    add_option(grid, "--if", "NAME=VALUE", text, several=True, dest="what_if")
    grid.add_argument(
        "--full",
        action="store_true",
        help="solve at every memory cap, without results of other caps",
    )
    add_option(grid, "--slowdown", "SHARE", SLOWDOWN_HELP)
    add_option(grid, "--ignore", "NAME", "of compare: an option that may differ", several=True)
    add_option(grid, "--jobs", "N", "processes on this machine (default: one a core)")
    text = (
        "dask://host:port: the workers of a Dask cluster (extra apsched[dask]); they need no torch"
    )
    add_option(grid, "--engine", "ADDRESS", text)
    add_out(
        parser,
        "DIR",
        "directory of the study; an earlier run in it is resumed (default:"
        " apsched-out/study-SOURCE)",
    )


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Answer all that is open of the grid, and print all of it; or do something with studies that
    are there.
    """
    from apsched.cli.study_files import ACTIONS
    from apsched.cli.study_grid import ask_what_if, run_grid

    words = args.source
    if words[0] in ACTIONS:
        ACTIONS[words[0]](args, words[1:], stdout)
        return
    if len(words) > 1:
        raise InputError(
            f"expected one SOURCE, or {', '.join(ACTIONS)} and studies; found {words[0]!r} and"
            f" {words[1]!r}"
        )
    args = argparse.Namespace(**{**vars(args), "source": words[0]})
    (ask_what_if if args.what_if else run_grid)(args, stdout)
