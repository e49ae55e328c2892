"""``apsched study``: a grid of questions, answered once and kept."""

import argparse
from typing import Any, TextIO

from apsched.cli.arguments import (
    SLOWDOWN_HELP,
    SOURCE_HELP,
    Run,
    add_command,
    add_groups,
    add_json,
    add_option,
    add_out,
    add_verb,
    explain_meshes,
)


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "study",
        "answer a grid of questions: a memory/time frontier, other meshes, clusters, options;"
        " resumes after an interruption",
        run,
    )
    parser.add_argument("source", metavar="SOURCE", help=SOURCE_HELP)
    add_groups(parser, "source", "costs")
    add_json(parser)
    add_groups(
        parser, "caps", "device memory", "search", "compute", "plan", "contention", "scenarios"
    )
    add_groups(parser, "whole step", "accumulation", "process groups")
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
    explain_meshes(parser)
    _add_commands(parser)


def _add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the commands on existing studies."""
    compare = add_command(
        parser,
        "compare",
        "put the answers of two studies to the same questions side by side, and print whether the"
        " bounds prove a difference",
        _on_studies("compare"),
    )
    compare.add_argument("studies", metavar="DIR", nargs="*", help="the directories of two studies")
    add_option(compare, "--ignore", "NAME", "an option that may differ", several=True)
    add_json(compare)
    merge = add_command(
        parser,
        "merge",
        "make one study of several; of two answers to one question the better stays",
        _on_studies("merge"),
    )
    merge.add_argument("studies", metavar="DIR", nargs="*", help="directories of studies")
    add_out(merge, "DIR", "directory of the study to make, or to add to")
    export = add_command(
        parser,
        "export",
        "write a study as one flat table: .csv, or .parquet with the extra apsched[parquet]",
        _on_studies("export"),
    )
    export.add_argument("studies", metavar="DIR", nargs="*", help="the directory of a study")
    add_out(export, "FILE", "the file to write; its ending is the format")
    parser.epilog = (
        "commands on existing studies (each has --help):\n"
        "  apsched study compare A B            two studies, side by side\n"
        "  apsched study merge A B -o C         one study of several\n"
        f"  apsched study export A -o FILE.csv   one flat table\n\n{parser.epilog}"
    )


def _on_studies(name: str) -> Run:
    """Return the function of a command on existing studies."""

    def run(args: argparse.Namespace, stdout: TextIO) -> None:
        from apsched.cli.study_files import ACTIONS

        ACTIONS[name](args, args.studies, stdout)

    return run


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Answer all that is open of the grid, and print all of it."""
    from apsched.cli.study_grid import run_grid, run_what_if

    (run_what_if if args.what_if else run_grid)(args, stdout)
