"""``apsched cache``: what the cache of answers holds, and how to empty it."""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from rich.table import Table

from apsched.compiler.ranks.cache import Cache, default_directory
from apsched.quantities import show_bytes
from apsched.report.summary import console


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """List the answers in the cache, used most recently first, or remove them all."""
    cache = Cache(
        directory=Path(args.cache).expanduser() if args.cache is not None else default_directory()
    )
    if args.what == "clear":
        num_answers, size_bytes = cache.clear()
        if args.json:
            print(
                json.dumps(
                    {
                        "schema": 1,
                        "directory": str(cache.directory),
                        "removed": num_answers,
                        "bytes": size_bytes,
                    }
                ),
                file=stdout,
            )
        else:
            print(
                f"{cache.directory}: removed {num_answers} answers, {show_bytes(size_bytes)}",
                file=stdout,
            )
        return
    entries, distrusted = cache.entries(), cache.distrusted()
    if args.json:
        shown = [asdict(entry) for entry in entries]
        print(
            json.dumps(
                {
                    "schema": 1,
                    "directory": str(cache.directory),
                    "distrusted": distrusted,
                    "answers": shown,
                }
            ),
            file=stdout,
        )
        return
    if distrusted:
        print(f"no bound of these answers is believed: {distrusted}", file=stdout)
    print(
        f"{cache.directory}: {len(entries)} answers,"
        f" {show_bytes(sum(entry.size_bytes for entry in entries))}",
        file=stdout,
    )
    if not entries:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("answer")
    table.add_column("size", justify="right")
    table.add_column("last used")
    for entry in entries:
        table.add_row(
            entry.digest[:16],
            show_bytes(entry.size_bytes),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_s)),
        )
    console(stdout).print(table)
