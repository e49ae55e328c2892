"""``apsched report``: a run as one HTML file."""

import argparse
import json
from pathlib import Path
from typing import TextIO

from apsched.files import write_atomic
from apsched.report import console
from apsched.report_page import report_page
from apsched.run_files import load_run


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Read the run, check it, and write the page."""
    target = Path(args.out or Path(args.run_directory) / "report.html")
    page = report_page(load_run(args.run_directory))
    write_atomic(target, page)
    if args.json:
        print(json.dumps({"schema": 1, "file": str(target), "bytes": len(page)}), file=stdout)
    else:
        console(stdout).print(f"report in {target} ({len(page) / 1e6:.2f} MB): one file, open it in a browser", markup=False)
