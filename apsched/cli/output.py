"""What commands share that make one file of a run."""

import argparse
import json
from pathlib import Path
from typing import Any, TextIO

from apsched.files import write_atomic
from apsched.report import console


def write_one(args: argparse.Namespace, content: bytes, what: str, name: str, how: str, stdout: TextIO, **more: Any) -> None:
    """Write ``content`` to ``-o`` (else to ``name`` in the directory of the run), and say so: ``what`` it is, and ``how`` to open it.

    ``more`` is for ``--json``.
    """
    target = Path(args.out or Path(args.run_directory) / name)
    write_atomic(target, content)
    if args.json:
        print(json.dumps({"schema": 1, "file": str(target), "bytes": len(content), **more}), file=stdout)
    else:
        console(stdout).print(f"{what} in {target} ({len(content) / 1e6:.2f} MB): {how}", markup=False)
