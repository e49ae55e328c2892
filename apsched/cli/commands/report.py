"""``apsched report``: a run, or a study, as one HTML file."""

import argparse
from pathlib import Path
from typing import Any, TextIO

from apsched.cli.arguments import SLOWDOWN_HELP, add_option, add_out, add_run, add_verb
from apsched.cli.output import write_one
from apsched.errors import InputError
from apsched.quantities import parse_share


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "report",
        "show a run as one HTML file: timeline, memory, buckets, baselines, certificate",
        run,
    )
    add_run(parser, "output directory of `apsched solve -o DIR`, or the directory of a study")
    text = "a study of the same graphs; the page shows its frontiers, too"
    add_option(parser, "--study", "DIR", text)
    text = (
        "of a study: show this point in detail, by its name or a prefix of it; may be given again"
        " (default: the fastest of each frontier)"
    )
    add_option(parser, "--point", "NAME", text, several=True)
    add_option(parser, "--slowdown", "SHARE", SLOWDOWN_HELP)
    add_out(parser, "FILE", "the page (default: report.html in DIR)")


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Read the run or the study, check it, and write the page."""
    from apsched.artifacts.solved_run import load_run
    from apsched.report.page import report_page
    from apsched.study.report.frontier import DEFAULT_SLOWDOWN
    from apsched.study.report.pages import frontiers_of_run, study_page_of
    from apsched.study.rows import FILE

    directory = Path(args.run_directory)
    slowdown = parse_share(args.slowdown or DEFAULT_SLOWDOWN, "--slowdown")
    if (directory / FILE).is_file() and not (directory / "result.json").is_file():
        if args.study is not None:
            raise InputError(f"--study: {directory} is a study itself; leave it out")
        page = report_page(*study_page_of(directory, args.point, slowdown))
    else:
        if args.point:
            raise InputError(
                f"--point: it chooses among the points of a study, and {directory} is none; leave"
                " it out"
            )
        study = (
            Path(args.study)
            if args.study is not None
            else directory
            if (directory / FILE).is_file()
            else None
        )
        solved = load_run(directory)
        page = report_page(
            solved, frontiers_of_run(solved, study, slowdown) if study is not None else ()
        )
    write_one(args, page, "report", "report.html", "one file, open it in a browser", stdout)
