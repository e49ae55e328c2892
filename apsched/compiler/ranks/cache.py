"""Answers kept in a directory that many jobs may share: one file for each answer, named by a digest
of its inputs.

    apsched-answer 1 <sha256 of the rest> <bytes of the rest>\n<rest>

A file appears whole or not at all, and is read only where its checksum holds. An error of the
directory stops no job: the job logs it, and solves the graph. Where the bytes exceed the limit, the
least recently used files are deleted first.
"""

import contextlib
import hashlib
import logging
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from apsched.atomic_files import write_atomic
from apsched.errors import ApschedError

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "APSCHED_CACHE"
DEFAULT_LIMIT_BYTES = 1 << 30
_SUFFIX = ".answer"
_LATEST = ".latest"
"""Of a file that names an answer: the one for a problem that was written last, whatever its
caps.
"""
_MAGIC = b"apsched-answer 1"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\..*\.tmp")
_OTHERS_WRITE = 0o022
"""Of a mode: the group or all may write. A proof is as good as the one who may write it."""
_OLD_S = 3600.0
"""Age beyond which a half-written file has no writer any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One answer in the cache."""

    digest: str
    size_bytes: int
    used_s: float
    """When it was last used, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """The answers in one directory."""

    directory: Path
    limit_bytes: int = DEFAULT_LIMIT_BYTES

    def read(self, digest: str) -> bytes | None:
        """Return the content that was written under ``digest``; ``None`` if there is none, or none
        that can be trusted.
        """
        path = self._path(digest)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning(
                "cache %s cannot be read (%s); solving instead", path, error.strerror or error
            )
            return None
        head, _, body = content.partition(b"\n")
        if head != _head(body):
            logger.warning("cache %s is damaged; solving again, and replacing it", path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return body

    def distrusted(self, digest: str = "") -> str:
        """Return why proofs that the cache has (under ``digest``, if stated) are not believed;
        empty where only this user can write them.

        A checksum proves that a file is complete, not who wrote it.
        """
        for path in (self.directory, *([self._path(digest)] if digest else [])):
            try:
                known = path.stat()
            except OSError:
                continue  # there is nothing to believe
            if known.st_uid != os.geteuid():
                return (
                    f"{path} belongs to user {known.st_uid}, not to user {os.geteuid()}, who runs"
                    " this; use a directory of your own"
                )
            if known.st_mode & _OTHERS_WRITE:
                mode = f"{known.st_mode & 0o777:o}"
                return (
                    f"other users may write to {path} (mode {mode}); take that from them (chmod -R"
                    f" go-w {self.directory}), or use another"
                )
        return ""

    def write(self, digest: str, body: bytes) -> bool:
        """Keep ``body`` under ``digest``; return whether it is kept. Never raises for a directory
        that cannot be written.
        """
        path = self._path(digest)
        try:
            self.directory.mkdir(mode=0o777 & ~_OTHERS_WRITE, parents=True, exist_ok=True)
            write_atomic(path, _head(body) + b"\n" + body)
            path.chmod(path.stat().st_mode & 0o777 & ~_OTHERS_WRITE)
            self.shrink(keep=digest)
        except (OSError, ApschedError) as error:
            logger.warning("cache %s is left as it is: %s", self.directory, error)
            return False
        return True

    def latest(self, problem: str) -> bytes | None:
        """Return the answer for the problem of digest ``problem`` that was written last, under any
        caps; ``None`` where that is gone.
        """
        try:
            named = _named_in(self.directory / f"{problem}{_LATEST}")
        except OSError:
            return None
        return self.read(named) if named else None

    def note_latest(self, problem: str, digest: str) -> None:
        """Have :meth:`latest` find the answer under ``digest`` for ``problem``."""
        try:
            write_atomic(self.directory / f"{problem}{_LATEST}", digest.encode())
        except (OSError, ApschedError) as error:
            logger.warning("cache %s is left as it is: %s", self.directory, error)

    def entries(self) -> tuple[Entry, ...]:
        """Return all entries, used most recently first."""
        found = []
        for path in self._files(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):  # another process may remove it meanwhile
                known = path.stat()
                if _DIGEST.fullmatch(path.name.removesuffix(_SUFFIX)):
                    found.append(
                        Entry(
                            digest=path.name.removesuffix(_SUFFIX),
                            size_bytes=known.st_size,
                            used_s=known.st_mtime,
                        )
                    )
        return tuple(sorted(found, key=lambda e: (-e.used_s, e.digest)))

    def shrink(self, keep: str = "") -> None:
        """Remove the least recently used entries beyond the limit (``keep`` is the last to go), and
        files of killed writers.
        """
        total = 0
        for entry in sorted(self.entries(), key=lambda e: e.digest != keep):
            total += entry.size_bytes
            if total > self.limit_bytes:
                self._remove(self._path(entry.digest))
        for path in (*self._unfinished(), *self._names()):
            with contextlib.suppress(OSError):
                old = time.time() - path.stat().st_mtime > _OLD_S
                if old and not (path.suffix == _LATEST and self._has(_named_in(path))):
                    self._remove(path)

    def clear(self) -> tuple[int, int, int]:
        """Remove all answers and the files that killed writers left; return the number of removed
        answers, the number of their bytes, and the number of answers that could not be removed.
        """
        found = self.entries()
        gone = [entry for entry in found if self._remove(self._path(entry.digest))]
        for path in (*self._unfinished(), *self._names()):
            self._remove(path)
        num_left = sum(self._has(entry.digest) for entry in found)
        return len(gone), sum(entry.size_bytes for entry in gone), num_left

    def _has(self, digest: str) -> bool:
        return bool(digest) and self._path(digest).exists()

    def _path(self, digest: str) -> Path:
        return self.directory / f"{digest}{_SUFFIX}"

    def _files(self, pattern: str) -> list[Path]:
        try:
            return sorted(self.directory.glob(pattern))
        except OSError:
            return []

    def _names(self) -> list[Path]:
        return [path for path in self._files(f"*{_LATEST}") if _DIGEST.fullmatch(path.stem)]

    def _unfinished(self) -> list[Path]:
        return [path for path in self._files(".*.tmp") if _UNFINISHED.fullmatch(path.name)]

    def _remove(self, path: Path) -> bool:
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            logger.warning("cache %s cannot be removed (%s)", path, error.strerror or error)
            return False
        return True


def default_directory() -> Path:
    """Return ``$APSCHED_CACHE``, else ``apsched`` in the user's directory for caches
    (``$XDG_CACHE_HOME``, else ``~/.cache``).
    """
    if stated := os.environ.get(DIRECTORY_VARIABLE):
        return Path(stated)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "apsched"


def _named_in(path: Path) -> str:
    """Return the digest of the answer that the file at ``path`` names; empty where a disk that lost
    bytes left something else there.
    """
    text = path.read_bytes().decode("ascii", errors="replace")
    return text if _DIGEST.fullmatch(text) else ""


def _head(body: bytes) -> bytes:
    return b"%s %s %d" % (_MAGIC, hashlib.sha256(body).hexdigest().encode(), len(body))
