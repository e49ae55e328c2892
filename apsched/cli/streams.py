"""Standard streams that take every character, and that can be given up."""

import codecs
import os
from typing import TextIO

_ASCII = {"µ": "u", "…": "...", "≤": "<=", "≥": ">=", "→": "->"}
_HANDLER = "apsched"


def make_encodable(stream: TextIO) -> None:
    """Let ``stream`` replace characters that its encoding lacks (an ASCII terminal has no µ) in
    place of an error.
    """
    codecs.register_error(_HANDLER, _replaced)
    if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
        reconfigure(errors=_HANDLER)


def drop(stream: TextIO) -> None:
    """Discard the buffer of ``stream`` and all later output; streams without a file descriptor stay
    as they are.
    """
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(_ASCII.get(letter, "?") for letter in letters), error.end
