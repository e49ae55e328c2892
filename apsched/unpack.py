"""Reads files up to a limit on the bytes that they unpack to, so that a small file cannot fill the
memory.

A few megabytes of gzip can hold gigabytes. Files are unpacked piece by piece, and refused at the
first byte beyond the limit, which ``--unpacked-limit`` or ``$APSCHED_UNPACKED_LIMIT`` raises;
processes that a command starts inherit it.
"""

import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from apsched.errors import InputError
from apsched.quantities import parse_bytes, show_bytes

LIMIT_VARIABLE = "APSCHED_UNPACKED_LIMIT"
LIMIT_FLAG = "--unpacked-limit"
DEFAULT_LIMIT_BYTES = 1 << 30
GZIP_MAGIC = b"\x1f\x8b"
_PIECE_BYTES = 1 << 20


def unpacked_limit_bytes() -> int:
    """Return the limit on unpacked bytes of one file: ``$APSCHED_UNPACKED_LIMIT``, else 1 GiB."""
    stated = os.environ.get(LIMIT_VARIABLE)
    return parse_bytes(stated, LIMIT_VARIABLE) if stated else DEFAULT_LIMIT_BYTES


@contextmanager
def unpacked_limit(stated: str | None) -> Iterator[None]:
    """Run the body with the limit that ``--unpacked-limit`` states; ``None`` keeps the limit.
    ``InputError`` if it is no size.
    """
    if stated is None:
        yield
        return
    parse_bytes(stated, LIMIT_FLAG)
    before = os.environ.get(LIMIT_VARIABLE)
    os.environ[LIMIT_VARIABLE] = stated
    try:
        yield
    finally:
        if before is None:
            del os.environ[LIMIT_VARIABLE]
        else:
            os.environ[LIMIT_VARIABLE] = before


def read_within(path: str | os.PathLike[str]) -> bytes:
    """Return the content of the file ``path``; ``InputError`` if it is larger than the limit.
    Raises ``OSError``.
    """
    with open(path, "rb") as file:
        return _up_to(file.read, "a file of")


def unpacked(data: bytes) -> bytes:
    """Return the unpacked gzip ``data``; ``InputError`` if it is larger than the limit.

    Raises ``EOFError``, ``OSError`` or ``zlib.error`` where the data are broken or cut off.
    """
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        return _up_to(file.read, "a file that unpacks to")


def unpacked_zlib(data: bytes) -> bytes:
    """As :func:`unpacked`, of one zlib stream."""
    limit_bytes = unpacked_limit_bytes()
    inflate = zlib.decompressobj()
    found = inflate.decompress(data, limit_bytes + 1)
    if len(found) > limit_bytes:
        raise _too_large("a file that unpacks to", limit_bytes)
    if not inflate.eof:
        raise EOFError("the data end too early")
    return found


def _up_to(read: Callable[[int], bytes], what: str) -> bytes:
    limit_bytes = unpacked_limit_bytes()
    pieces, size_bytes = [], 0
    while piece := read(_PIECE_BYTES):
        pieces.append(piece)
        size_bytes += len(piece)
        if size_bytes > limit_bytes:
            raise _too_large(what, limit_bytes)
    return b"".join(pieces)


def _too_large(what: str, limit_bytes: int) -> InputError:
    return InputError(
        f"expected at most {limit_bytes} bytes ({show_bytes(limit_bytes)}), found {what} more; if"
        f" you trust where it comes from, raise the limit: {LIMIT_FLAG} BYTES on the command line,"
        f" or {LIMIT_VARIABLE}=BYTES in the environment"
    )
