"""The parser of all verbs, each from its file. Values stay text here; ``options.py`` reads them."""

import argparse
import os

from apsched import __version__
from apsched.cli.arguments import EPILOG, Parser
from apsched.cli.commands import (
    apply,
    audit,
    cache,
    calibrate,
    capture,
    compare,
    explain,
    listings,
    report,
    solve,
    study,
    trace,
)

_VERBS = (
    *(solve, audit, compare, explain, apply, capture),
    *(calibrate, study, cache, report, trace, listings),
)


def complete_for_shell(parser: argparse.ArgumentParser) -> None:
    """Print the completions that a shell requests and exit, if it does (``_ARGCOMPLETE`` is set)
    and argcomplete is installed (extra ``apsched[completion]``).
    """
    if "_ARGCOMPLETE" not in os.environ:
        return
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(parser)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs; ``args.run(args, stdout)`` runs the one that was chosen."""
    parser = Parser(
        prog="apsched",
        description=(
            "The fastest communication schedule of distributed training that fits the memory, "
            "with a proof of how far it can be from the best."
        ),
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"apsched {__version__}")
    verbs = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=Parser
    )
    for verb in _VERBS:
        verb.add_parser(verbs)
    return parser
