"""Files appear whole or not at all."""

import os
import stat

import pytest

from apsched.atomic_files import stage_file, write_atomic
from apsched.errors import InputError


def test_writes_and_replaces(tmp_path):
    path = tmp_path / "a.json"
    write_atomic(path, b"old")
    os.chmod(path, 0o640)
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(
        InputError,
        match=(
            r"absent/a\.json: expected a place to write to, found: No such file or directory;"
            r" choose"
        ),
    ):
        write_atomic(tmp_path / "absent" / "a.json", b"")


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(InputError, match="expected the name of a file to write, found a directory"):
        write_atomic(tmp_path, b"")


def test_a_device_is_written_to_and_stays_a_device(tmp_path):
    """Root could rename a file over a device: ``-o /dev/null`` must not replace it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomic(pipe, b"new")
        assert os.read(reading, 10) == b"new"
    finally:
        os.close(reading)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


def test_a_device_in_a_directory_of_files_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="file to write, found a device or a pipe"):
        stage_file(tmp_path / "pipe", b"new")


def test_a_full_device_is_an_error(tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(InputError, match="No space left on device"):
        write_atomic(tmp_path / "full", b"new")


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_atomic(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"new"


def test_what_was_there_stays_when_writing_fails(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomic(path, b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_an_interrupt_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "a.json", b"new")
    assert list(tmp_path.iterdir()) == []
