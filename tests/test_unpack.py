"""A small file cannot fill the memory: every reader stops at a limit on unpacked bytes, which the
error says how to raise.
"""

import gzip
import os
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from apsched.artifacts.schedule_file import load_schedule
from apsched.calibrate.profile.trace import load_trace
from apsched.compiler.ranks.answer_codec import parse_answer
from apsched.errors import InputError
from apsched.graph.graph_file import load_graph
from apsched.unpack import LIMIT_VARIABLE, unpacked, unpacked_limit, unpacked_limit_bytes
from tests.conftest import Run

MIB = 1 << 20
SPACES = b" " * (256 * MIB)
READERS: dict[str, tuple[Callable[[], bytes], Callable[[Path], object]]] = {
    "graph": (lambda: gzip.compress(SPACES, 1), load_graph),
    "trace": (lambda: gzip.compress(SPACES, 1), load_trace),
    "plain trace": (lambda: SPACES[: 64 * MIB], load_trace),
    "schedule": (lambda: SPACES[: 64 * MIB], load_schedule),
    "answer": (lambda: zlib.compress(SPACES, 1), lambda path: parse_answer(path.read_bytes())),
}
SAID = (
    r"expected at most 1048576 bytes \(1\.00 MiB\), found a file .*more; .*--unpacked-limit BYTES"
    r" .*APSCHED_UNPACKED_LIMIT=BYTES in"
)


@pytest.mark.parametrize("kind", READERS)
def test_a_bomb_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    content, read = READERS[kind]
    path = tmp_path / "bomb"
    path.write_bytes(content())
    monkeypatch.setenv(LIMIT_VARIABLE, "1MiB")
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=SAID):
            read(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16 * MIB


def test_the_limit_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = gzip.compress(b"x" * 700) + gzip.compress(b"y" * 300)  # of two members
    monkeypatch.setenv(LIMIT_VARIABLE, "1000")
    assert unpacked(packed) == b"x" * 700 + b"y" * 300
    monkeypatch.setenv(LIMIT_VARIABLE, "999")
    with pytest.raises(InputError, match="expected at most 999 bytes"):
        unpacked(packed)


def test_the_limit_is_stated_in_the_environment_or_for_one_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)
    assert unpacked_limit_bytes() == 1 << 30
    with unpacked_limit("2GiB"):
        assert unpacked_limit_bytes() == 2 << 30
    assert LIMIT_VARIABLE not in os.environ
    monkeypatch.setenv(LIMIT_VARIABLE, "3GiB")
    with unpacked_limit(None):
        assert unpacked_limit_bytes() == 3 << 30
    with unpacked_limit("2GiB"):
        assert unpacked_limit_bytes() == 2 << 30
    assert unpacked_limit_bytes() == 3 << 30
    monkeypatch.setenv(LIMIT_VARIABLE, "much")
    with pytest.raises(
        InputError,
        match=r"APSCHED_UNPACKED_LIMIT: expected a number of bytes such as 60GiB.*found 'much'",
    ):
        unpacked_limit_bytes()


def test_commands_take_the_limit(run: Run, debug_graphs: dict[str, Path], debug_run: Path) -> None:
    graph = debug_graphs["forward"]
    for command in (
        ["solve", graph, "--budget", "0.1"],
        ["report", debug_run, "-o", "report.html"],
    ):
        refused = run(*command, "--unpacked-limit", "4kB")
        assert refused.code == 2
        assert len(refused.errors) == 1
        assert "expected at most 4000 bytes (3.91 KiB), found a file" in refused.errors[0]
        assert run(*command, "--unpacked-limit", "40MB").code == 0
    wrong = run("solve", graph, "--unpacked-limit", "much")
    assert wrong.errors[0].startswith(
        "apsched: error: --unpacked-limit: expected a number of bytes such as 60GiB"
    )
