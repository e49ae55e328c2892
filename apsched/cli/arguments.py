"""Options of the verbs: from the table (:mod:`apsched.options_table`), and the few that several
verbs share. Imports no slow module.
"""

import argparse
import re
import sys
from collections.abc import Callable
from textwrap import fill
from typing import Any, NoReturn, TextIO

from apsched.config import Option, Unit
from apsched.errors import InputError
from apsched.options_table import BY_NAME, in_group

SOURCE_HELP = (
    "a preset (`apsched models`), hf:CONFIG.json, package.module:function, a file or directory that"
    " torch wrote when it traced a job, or a graph file"
)
EPILOG = (
    "exit status: 0 done, 1 no schedule fits the caps or a check of the answer fails, 2 wrong use"
    " or output that cannot be written, 130 interrupted (Ctrl-C)"
)
SLOWDOWN_HELP = (
    "report the least memory whose step is slower than the fastest by at most this (default: 2%%)"
)

_WITHOUT_HEADING = ("buckets", "process groups")

MESHES = """\
meshes (--mesh), axis=size with commas between them; sizes are process ranks:
  fsdp=64              parameters are sharded over 64: FSDP (also dp=64)
  replicate=64         64 copies, gradients are all-reduced: DDP (also ddp=64)
  replicate=4,fsdp=16  4 copies, each sharded over 16: HSDP (also hsdp=4x16)
  fsdp=16,tp=8         matrix products are split over 8: tensor parallelism
  fsdp=64,ep=8         experts are split over 8 of the 64: expert parallelism
"""
"""The lines of ``--help`` about meshes."""
_HELP_WIDTH = 79

Run = Callable[[argparse.Namespace, TextIO], None]


# argparse takes what matches for a value, and the option has an error about it: -5GiB, -1%
_NEGATIVE = re.compile(r"-\.?\d")


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are :class:`InputError`: one line, as of everything else."""

    def __init__(self, **stated: Any) -> None:
        super().__init__(**stated)
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        self.description = fill(self.description or "", _HELP_WIDTH)
        self.epilog = fill(self.epilog or "", _HELP_WIDTH)
        self._negative_number_matcher = _NEGATIVE
        self.commands: dict[str, Parser] = {}
        """Commands of this command, in addition to its own action: ``study compare``."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as the command that the first word names, if there is one; unknown arguments are an
        error of this command, whose ``--help`` lists the known ones.
        """
        if args and args[0] in self.commands:
            return self.commands[args[0]].parse_known_args(args[1:], namespace)
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print ``message``; argparse would hide that it could not be written."""
        if message:
            (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        """Raise the error of the command line."""
        raise InputError(f"{message} (`{self.prog} --help` lists all options)")


def add_verb(verbs: Any, name: str, text: str, run: Run) -> argparse.ArgumentParser:
    """Return the parser of a new verb; ``run(args, stdout)`` runs it."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add SOURCE and its options."""
    parser.add_argument("source", metavar="SOURCE", help=SOURCE_HELP)
    add_groups(parser, "source")
    explain_meshes(parser)


def explain_meshes(parser: argparse.ArgumentParser) -> None:
    """Put a line for each form of mesh at the end of the help."""
    parser.epilog = f"{MESHES}\n{parser.epilog}"


def add_command(parser: argparse.ArgumentParser, name: str, text: str, run: Run) -> "Parser":
    """Return the parser of a command of the command that ``parser`` is; ``run(args, stdout)`` runs
    it.
    """
    assert isinstance(parser, Parser)
    command = Parser(
        prog=f"{parser.prog} {name}",
        description=text[0].upper() + text[1:] + ".",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    command.set_defaults(run=run)
    parser.commands[name] = command
    return command


def add_groups(parser: argparse.ArgumentParser, *groups: str) -> None:
    """Add the options of these groups of the table."""
    for name in groups:
        group = parser if name in _WITHOUT_HEADING else parser.add_argument_group(name)
        for option in in_group(name):
            _add(group, option)


def _add(group: Any, option: Option) -> None:
    text = option.help.replace("%", "%%")
    if option.unit is Unit.SWITCH:
        group.add_argument(option.flag, action="store_true", help=text)
    elif option.several:
        group.add_argument(
            option.flag,
            metavar=option.metavar,
            action="append",
            default=[],
            help=text,
            dest=option.name,
        )
    else:
        default = option.default if option.unit is Unit.TEXT else None  # texts stay as typed
        group.add_argument(option.flag, metavar=option.metavar, help=text, default=default)


def add_option(
    group: Any, flag: str, metavar: str, text: str, *, several: bool = False, **more: Any
) -> None:
    """Add an option of one verb alone."""
    if several:
        more |= {"action": "append", "default": []}
    group.add_argument(flag, metavar=metavar, help=text, **more)


def add_inductor(parser: argparse.ArgumentParser, *, default: bool) -> None:
    """Add ``--inductor`` and ``--no-inductor``."""
    for option in in_group("baselines"):
        shown = "yes" if default else "no"
        parser.add_argument(
            option.flag,
            action=argparse.BooleanOptionalAction,
            default=default,
            help=f"{option.help} (default: {shown})",
        )


def add_out(
    parser: argparse.ArgumentParser, metavar: str, text: str, *, required: bool = False
) -> None:
    """Add ``-o``."""
    parser.add_argument("-o", "--out", metavar=metavar, help=text, required=required)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on stdout, and nothing else"
    )


def add_run(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the directory of a run."""
    parser.add_argument("run_directory", metavar="DIR", help=text)
    _add(parser, BY_NAME["unpacked_limit"])
    add_json(parser)
