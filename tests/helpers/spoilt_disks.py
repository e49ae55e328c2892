"""Directories on disks where nothing can be written: a small file system where this user may mount
one, else a directory without rights.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def mounted(directory: Path, options: str) -> Iterator[None]:
    """Mount an empty file system at ``directory``, which is made; without the right to do so,
    nobody may write there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    done = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)], capture_output=True
        ).returncode
        == 0
    )
    if not done:
        directory.chmod(0o555)
    try:
        yield
    finally:
        if done:
            subprocess.run(["umount", str(directory)], check=True)


@contextmanager
def read_only_disk(directory: Path) -> Iterator[None]:
    """A file system that can only be read."""
    with mounted(directory, "ro,size=64k"):
        yield


@contextmanager
def full_disk(directory: Path) -> Iterator[None]:
    """A file system without a free byte."""
    with mounted(directory, "size=64k"):
        try:
            with (directory / "filler").open("wb", buffering=0) as filler:
                while filler.write(bytes(4096)):
                    pass
        except OSError:
            pass  # that is the point
        yield
