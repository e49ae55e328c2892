"""Runs one command; every error is one line on stderr and an exit code."""

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TextIO

from apsched.cli.streams import drop, make_encodable
from apsched.errors import ApschedError, InfeasibleError, RoundTripError, SelfCheckError
from apsched.unpack import unpacked_limit

EXIT_DONE, EXIT_NO_ANSWER, EXIT_WRONG_USE, EXIT_INTERRUPTED = 0, 1, 2, 130
DEBUG_VARIABLE = "APSCHED_DEBUG"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv``; return 0 (done, or the reader of stdout has enough), 1 (no
    schedule fits, or a check of the answer fails), 2 (wrong use, output that cannot be written, or
    a bug of apsched) or 130 (interrupted).

    Output of captured models, torch and the solver goes to stderr, so that stdout has the answer
    and nothing else.
    """
    if sys.stderr is None:  # closed by the caller: the exit status counts
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    if (answer := sys.stdout) is None:
        return _fail("cannot write: stdout is closed", EXIT_WRONG_USE)
    try:
        make_encodable(answer)
        make_encodable(sys.stderr)
        _run(argv, answer)
    except (InfeasibleError, RoundTripError, SelfCheckError) as error:
        return _fail(error, EXIT_NO_ANSWER)
    except ApschedError as error:
        return _fail(error, EXIT_WRONG_USE)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED, kind="")
    except BrokenPipeError:
        drop(answer)  # its reader has enough
        return EXIT_DONE
    except OSError as error:
        drop(answer)  # what is left in its buffer would fail again at exit
        return _fail(f"cannot read or write: {error}", EXIT_WRONG_USE)
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return _fail(
            f"unexpected {what} (a bug of apsched; {DEBUG_VARIABLE}=1 shows the traceback)",
            EXIT_WRONG_USE,
        )
    return EXIT_DONE


def _run(argv: Sequence[str] | None, answer: TextIO) -> None:
    """Run the command; its output has left the buffer when this returns."""
    # takes time, in which an interrupt may come
    from apsched.cli.parser import build_parser, complete_for_shell

    try:
        parser = build_parser()
        complete_for_shell(parser)
        args = parser.parse_args(argv)
        with redirect_stdout(sys.stderr), unpacked_limit(getattr(args, "unpacked_limit", None)):
            args.run(args, answer)
    except SystemExit:  # of --help and --version
        answer.flush()
        raise
    except BaseException:  # whose exit status counts, whether or not stdout can be written
        try:
            answer.flush()
        except OSError:
            drop(answer)
        raise
    answer.flush()


def _fail(error: object, code: int, *, kind: str = "error: ") -> int:
    """Print ``error`` as one line; a closed stderr changes no exit status."""
    try:
        if os.environ.get(DEBUG_VARIABLE) and isinstance(error, Exception):
            import traceback

            traceback.print_exception(error)
        text = " ".join(str(error).split())
        print(f"apsched: {kind}{text}", file=sys.stderr, flush=True)
    except OSError:
        drop(sys.stderr)  # what is left in its buffer would fail again at exit
    return code
