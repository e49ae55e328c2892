"""Runs one command; every error is one line on stderr and an exit code."""

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

from apsched.cli.parser import build_parser
from apsched.errors import ApschedError, InfeasibleError, RoundTripError
from apsched.unpack import unpacked_limit

EXIT_DONE, EXIT_NO_ANSWER, EXIT_WRONG_USE, EXIT_INTERRUPTED = 0, 1, 2, 130
DEBUG_VARIABLE = "APSCHED_DEBUG"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv``; return 0 (done), 1 (no schedule fits, or a rewritten graph is
    not what was claimed) or 2 (wrong use, or a bug of apsched).

    What captured models, torch or the solver print goes to stderr, so that stdout has the answer
    and nothing else.
    """
    answer = sys.stdout
    try:
        args = build_parser().parse_args(argv)
        with redirect_stdout(sys.stderr), unpacked_limit(getattr(args, "unpacked_limit", None)):
            args.run(args, answer)
        answer.flush()
    except (InfeasibleError, RoundTripError) as error:
        return _fail(error, EXIT_NO_ANSWER)
    except ApschedError as error:
        return _fail(error, EXIT_WRONG_USE)
    except KeyboardInterrupt:
        print("apsched: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # the reader of our stdout has closed the pipe
        return EXIT_DONE
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return _fail(
            f"unexpected {what} (a bug of apsched; {DEBUG_VARIABLE}=1 shows the traceback)",
            EXIT_WRONG_USE,
        )
    return EXIT_DONE


def _fail(error: object, code: int) -> int:
    """Print ``error`` as one line."""
    if os.environ.get(DEBUG_VARIABLE) and isinstance(error, Exception):
        import traceback

        traceback.print_exception(error)
    print("apsched: error:", " ".join(str(error).split()), file=sys.stderr, flush=True)
    return code
