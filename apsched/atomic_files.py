"""Files appear whole or not at all; digests of content are names."""

import contextlib
import hashlib
import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from apsched.errors import InputError

MOST_NAME_BYTES = 128
"""Most bytes of a name from a file: file systems accept it with the parts that apsched adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFile:
    """Content that is on the disk under another name, beside the place where it belongs."""

    path: Path
    temporary: Path

    def put_in_place(self) -> None:
        """Give the content its name; InputError where that cannot be done."""
        try:
            os.chmod(self.temporary, _permissions(self.path))
            os.replace(self.temporary, self.path)
        except OSError as error:
            raise _cannot_write(self.path, error) from None
        _sync_directory(self.path.parent)

    def discard(self) -> None:
        """Remove the content, unless it is in place."""
        with contextlib.suppress(OSError):
            os.unlink(self.temporary)


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Run the body whole: an interrupt (Ctrl-C) during it is raised at its end."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # no interrupt is raised in this thread
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(*came[0])


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` to ``path`` so that no reader sees a part of it; InputError where the place
    cannot be written. A link stays, and its target gets the content. A device or a pipe, such as
    ``/dev/stdout``, is written to, and not replaced by a file.
    """
    if _is_device(Path(path)):
        _write_to_device(Path(path), data)
        return
    staged = stage_file(os.path.realpath(path), data)
    try:
        staged.put_in_place()
    finally:
        staged.discard()


def stage_file(path: str | os.PathLike[str], data: bytes) -> StagedFile:
    """Write ``data`` to a temporary file next to ``path``, which stays unchanged; InputError if
    that fails.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path}: expected the name of a file to write, found a directory")
    if _is_device(path):
        raise InputError(f"{path}: expected the name of a file to write, found a device or a pipe")
    try:
        descriptor, temporary = tempfile.mkstemp(
            prefix=f".{path.name[:64]}.", suffix=".tmp", dir=path.parent
        )
    except OSError as error:
        raise _cannot_write(path, error) from None
    staged = StagedFile(path=path, temporary=Path(temporary))
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        staged.discard()
        raise _cannot_write(path, error) from None
    except BaseException:
        staged.discard()
        raise
    return staged


def one_component(name: str, what: str) -> str:
    """Return ``name``, which comes from a file and becomes part of a path; ``InputError``, whose
    message begins with ``what``, if it is more than one component of a path, or cannot be one.
    """
    fits = name not in ("", ".", "..") and name.isprintable() and not {"/", "\\"} & {*name}
    if not fits or len(name.encode()) > MOST_NAME_BYTES:
        shown = name if len(name) <= MOST_NAME_BYTES else name[:MOST_NAME_BYTES] + "..."
        raise InputError(
            f"{what}: expected a name that can be part of the name of a file (printable, without /"
            f" and \\, at most {MOST_NAME_BYTES} bytes), found {shown!r}; write the file again with"
            " another name, and do not trust a file from an unknown source"
        )
    return name


def digest(content: Mapping[str, Any] | bytes) -> str:
    """Return a short digest: 24 hexadecimal digits."""
    data = content if isinstance(content, bytes) else json.dumps(content, sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()[:24]


def _is_device(path: Path) -> bool:
    """Return whether ``path`` exists and is neither a file nor a directory."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _write_to_device(path: Path, data: bytes) -> None:
    """Write ``data`` to the device or pipe ``path``; InputError if that fails."""
    try:
        with path.open("wb") as file:
            file.write(data)
    except BrokenPipeError:  # its reader has enough
        return
    except OSError as error:
        raise _cannot_write(path, error) from None


def _permissions(path: Path) -> int:
    """Return the mode of the file that is replaced, or the mode of a newly opened file."""
    with contextlib.suppress(OSError):
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _sync_directory(directory: Path) -> None:
    """Make the new name durable where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _cannot_write(path: Path, error: OSError) -> InputError:
    return InputError(
        f"{path}: expected a place to write to, found: {error.strerror or error}; choose an"
        " existing directory that can be written"
    )
