"""The cache: what was written is what is read or nothing, whatever happens to the directory or to
who writes.
"""

import errno
import json
import logging
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from apsched.cli.main import main
from apsched.compiler.ranks.cache import Cache, default_directory
from tests.helpers.processes import WORKERS

WORKER = WORKERS / "ranks/cache_worker.py"
A, B, C, D = (letter * 64 for letter in "abcd")


def bodies(cache: Cache, *digests: str) -> list[bytes | None]:
    return [cache.read(digest) for digest in digests]


def test_what_was_written_is_read(tmp_path):
    cache = Cache(directory=tmp_path / "new" / "folder")
    assert cache.read(A) is None
    assert cache.write(A, b"one")
    assert cache.write(B, b"\n\0two")
    assert cache.write(A, b"other")
    assert bodies(cache, A, B, C) == [b"other", b"\n\0two", None]
    assert [entry.digest for entry in cache.entries()] in ([A, B], [B, A])


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "foreign", "longer"])
def test_a_damaged_file_is_nothing_until_it_is_replaced(tmp_path, caplog, damage):
    cache = Cache(directory=tmp_path)
    cache.write(A, b"x" * 1000)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    changed = {
        "cut": whole[:-1],
        "flipped": whole[:-1] + b"y",
        "emptied": b"",
        "foreign": b"PK\3\4" * 50,
        "longer": whole + b"x",
    }
    path.write_bytes(changed[damage])
    with caplog.at_level(logging.WARNING):
        assert cache.read(A) is None
    assert "is damaged" in caplog.text
    cache.write(A, b"again")
    assert cache.read(A) == b"again"


def test_an_answer_under_another_name_is_not_trusted_by_its_name_alone(tmp_path):
    """Whoever reads verifies the answer; the checksum only says that nobody cut it."""
    cache = Cache(directory=tmp_path)
    cache.write(A, b"one")
    os.rename(tmp_path / f"{A}.answer", tmp_path / f"{B}.answer")
    assert bodies(cache, A, B) == [None, b"one"]


def test_what_was_used_least_recently_goes_first(tmp_path):
    cache = Cache(directory=tmp_path, limit_bytes=4_000)
    for age, digest in enumerate((C, B, A)):
        cache.write(digest, bytes(1000))
        os.utime(tmp_path / f"{digest}.answer", (age, age))
    assert cache.read(C) is not None  # used now, and so the youngest
    cache.write(D, bytes(1000))
    assert [digest for digest in (A, B, C, D) if cache.read(digest) is not None] == [A, C, D]
    assert sum(entry.size_bytes for entry in cache.entries()) <= 4_000


def test_leftovers_of_killed_writers_go_when_they_are_old(tmp_path):
    cache = Cache(directory=tmp_path)
    old, new, foreign = (tmp_path / name for name in (f".{A}.x1.tmp", f".{B}.x2.tmp", ".mine.tmp"))
    for path in (old, new, foreign):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    cache.write(A, b"one")
    assert (old.exists(), new.exists(), foreign.exists()) == (False, True, True)
    assert cache.clear()[0] == 1
    assert [path.name for path in tmp_path.iterdir()] == [".mine.tmp"]


@pytest.mark.parametrize("left", [b"\xff\0\xfe", b"\0" * 64, b"", b"a" * 5000])
def test_a_damaged_name_of_the_latest_answer_is_no_answer_and_goes(tmp_path, left):
    """A disk that lost power leaves such bytes; they stop no job that writes an answer later."""
    cache = Cache(directory=tmp_path)
    damaged = tmp_path / f"{A}.latest"
    damaged.write_bytes(left)
    os.utime(damaged, (0, 0))
    assert cache.latest(A) is None
    assert cache.write(B, b"two")
    assert cache.read(B) == b"two"
    assert not damaged.exists()


def test_the_default_directory(monkeypatch):
    monkeypatch.setenv("APSCHED_CACHE", "here")
    assert default_directory() == Path("here")
    monkeypatch.delenv("APSCHED_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "there")
    assert default_directory() == Path("there/apsched")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_directory() == Path.home() / ".cache" / "apsched"


def worker(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(WORKER), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_read_only_directory_stops_nobody(tmp_path):
    """Written by root, used by somebody else, who may only read."""
    Cache(directory=tmp_path).write(A, b"theirs")
    for path in (tmp_path, *tmp_path.parents):
        if path.owner() == tmp_path.owner() and len(path.parts) > 2:
            path.chmod(0o755)
    tmp_path.chmod(0o555)
    ran = worker("read-only", tmp_path, A, B)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {"read": "theirs", "kept": False, "again": None}
    assert "is left as it is" in ran.stderr


def test_a_full_disk_stops_nobody(tmp_path):
    """A file system of 64 KiB where this process may make one, else a limit on the size of
    files.
    """
    ran = worker("full", tmp_path, A, B)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "small": True,
        "large": False,
        "read": "small",
        "large read": None,
        "left": [f"{A}.answer"],
    }
    assert "is left as it is" in ran.stderr


@pytest.mark.alone
def test_a_writer_killed_a_hundred_times_leaves_whole_answers(tmp_path):
    ran = worker("killed", tmp_path, 100, random.Random(0).random())
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["killed"] == 100
    assert found["read"] > 0
    assert found["wrong"] == []
    assert found["unfinished"] > 0, (
        "some were killed in the midst of writing, or this proves nothing"
    )


@pytest.mark.alone
def test_writers_at_the_same_time(tmp_path):
    """Four processes write the same three answers, over and over, in a directory that holds two of
    them; all readers see whole ones.
    """
    ran = worker("crowd", tmp_path, 4, 150)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["wrong"] == []
    assert found["read"] > 100
    assert found["bytes"] <= found["limit"]


def command(*arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "apsched", "cache", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_command_lists_and_clears(tmp_path):
    cache = Cache(directory=tmp_path)
    for age, digest in enumerate((B, A)):
        cache.write(digest, bytes(2000))
        os.utime(tmp_path / f"{digest}.answer", (age, age))
    where = ("--cache", str(tmp_path))
    listed = json.loads(command("list", *where, "--json"))
    assert [answer["digest"] for answer in listed["answers"]] == [A, B]
    shown = command("list", *where).splitlines()
    assert shown[0].startswith(f"{tmp_path}: 2 answers, 4.")
    assert [line.split()[0] for line in shown[2:]] == [A[:16], B[:16]]
    assert json.loads(command("clear", *where, "--json"))["removed"] == 2
    assert command("list", *where).strip().endswith("0 answers, 0 B")


def test_clearing_a_cache_that_cannot_be_written_fails(tmp_path, monkeypatch, capsys):
    def read_only(path, missing_ok=False):
        raise OSError(errno.EROFS, "Read-only file system")

    Cache(directory=tmp_path).write(A, bytes(2000))
    monkeypatch.setattr("pathlib.Path.unlink", read_only)
    assert main(["cache", "clear", "--cache", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert "removed 0 answers" in out
    assert "expected answers that can be removed, found 1 that cannot be" in err
