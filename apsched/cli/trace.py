"""``apsched trace``: the timelines of a run for Perfetto."""

import argparse
import json
from pathlib import Path
from typing import TextIO

from apsched.files import write_atomic
from apsched.report import console
from apsched.run_files import load_run
from apsched.trace_file import trace


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """Read the run, check it, and write the trace."""
    target = Path(args.out or Path(args.run_directory) / "trace.json")
    content = trace(load_run(args.run_directory))
    write_atomic(target, content)
    if args.json:
        print(json.dumps({"schema": 1, "file": str(target), "bytes": len(content)}), file=stdout)
    else:
        console(stdout).print(f"trace in {target} ({len(content) / 1e6:.2f} MB): open it in ui.perfetto.dev", markup=False)
