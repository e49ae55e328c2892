"""``apsched report``: a run, or a study, as one HTML file."""

import argparse
from pathlib import Path
from typing import TextIO

from apsched.artifacts.solved_run import load_run
from apsched.cli.output import write_one
from apsched.errors import InputError
from apsched.quantities import parse_share
from apsched.report.page import report_page
from apsched.study.report.frontier import DEFAULT_SLOWDOWN
from apsched.study.report.pages import frontiers_of_run, study_page_of
from apsched.study.store import FILE


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Read the run or the study, check it, and write the page."""
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
