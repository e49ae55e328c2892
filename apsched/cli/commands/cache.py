"""``apsched cache``: lists or clears the cache of answers."""

import argparse
from pathlib import Path
from typing import Any, TextIO

from apsched.cli.arguments import add_json, add_option, add_verb
from apsched.errors import InputError
from apsched.quantities import show_bytes


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs, "cache", "list or clear the cache of answers that jobs keep (docs/jobs.md)", run
    )
    parser.add_argument("what", metavar="WHAT", choices=("list", "clear"), help="list or clear")
    add_option(
        parser,
        "--cache",
        "DIR",
        "its directory (default: $APSCHED_CACHE, else apsched in the user's cache directory)",
    )
    add_json(parser)


def run(args: argparse.Namespace, stdout: TextIO) -> None:
    """List the answers in the cache, used most recently first, or remove them all."""
    import time
    from dataclasses import asdict

    from apsched.compiler.ranks.cache import Cache, default_directory
    from apsched.report.console import console, plain_table, print_json

    cache = Cache(
        directory=Path(args.cache).expanduser() if args.cache is not None else default_directory()
    )
    where = str(cache.directory)
    if args.what == "clear":
        num_answers, size_bytes, num_left = cache.clear()
        if args.json:
            print_json(stdout, directory=where, removed=num_answers, bytes=size_bytes)
        else:
            print(f"{where}: removed {num_answers} answers, {show_bytes(size_bytes)}", file=stdout)
        if num_left:
            raise InputError(
                f"{where}: expected answers that can be removed, found {num_left} that cannot be;"
                " make the directory writable, or state another one with --cache"
            )
        return
    entries, distrusted = cache.entries(), cache.distrusted()
    if args.json:
        answers = [asdict(entry) for entry in entries]
        print_json(stdout, directory=where, distrusted=distrusted, answers=answers)
        return
    if distrusted:
        print(f"no bound of these answers is believed: {distrusted}", file=stdout)
    total = show_bytes(sum(entry.size_bytes for entry in entries))
    print(f"{where}: {len(entries)} answers, {total}", file=stdout)
    if not entries:
        return
    table = plain_table("answer", "size", "last used", right=("size",))
    for entry in entries:
        table.add_row(
            entry.digest[:16],
            show_bytes(entry.size_bytes),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_s)),
        )
    console(stdout).print(table)
