"""Exit status and one line on stderr where stdout or stderr is a closed pipe, a full disk or an
ASCII terminal, and where a command is interrupted.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from apsched.errors import SelfCheckError
from tests.conftest import Run

FULL = Path("/dev/full")
APSCHED = (sys.executable, "-m", "apsched")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [("clusters",), ("clusters", "--json"), ("solve", "--help")])
def test_a_full_disk_behind_stdout_is_an_error_in_one_line(words: tuple[str, ...]) -> None:
    with FULL.open("w") as full:
        done = subprocess.run([*APSCHED, *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "apsched: error: cannot read or write: [Errno 28] No space left on device\n"
    )


@pytest.mark.parametrize("words", [("clusters",), ("--help",)])
def test_a_reader_that_has_enough_is_no_error(words: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([*APSCHED, *words], stdout=writing, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_stderr_changes_no_exit_status() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([*APSCHED, "solve", "no-such-source"], stderr=writing)
    finally:
        os.close(writing)
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("closed", "status", "stderr"),
    [(">&-", 2, "apsched: error: cannot write: stdout is closed\n"), ("2>&-", 0, "")],
)
def test_a_closed_stream_is_no_bug(closed: str, status: int, stderr: str) -> None:
    """The shell closes the stream, so that Python starts without it."""
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m apsched models {closed}', sys.executable],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (status, stderr)


def test_an_ascii_terminal_gets_ascii() -> None:
    code = (
        "import sys; from apsched.cli.streams import make_encodable;"
        "make_encodable(sys.stdout); print('7 µs ≤ 8 µs … \\u4e2d \\udc80')"
    )
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=ascii_only, capture_output=True)
    assert done.stdout == b"7 us <= 8 us ... ? ?\n"


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (SelfCheckError("forward: 7 != 8"), 1)]
)
def test_an_interrupt_and_a_failed_check_have_a_status_of_their_own(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int
) -> None:
    def stop(*args: object) -> None:
        raise error

    monkeypatch.setattr(sys.modules["apsched.cli.main"], "_run", stop)
    ran = run("clusters")
    assert ran.code == status
    assert "bug" not in ran.stderr
    assert ran.stderr.startswith("apsched: ")


def test_an_interrupt_reaches_the_caller_through_cp_sat() -> None:
    """CP-SAT by itself takes Ctrl-C and returns what it has."""
    code = """
import os, signal, threading
from ortools.sat.python import cp_model
from apsched.solver.cpsat.model import _solved
model = cp_model.CpModel()
at = [model.new_int_var(0, 10_000, f"{k}") for k in range(60)]
spans = [model.new_fixed_size_interval_var(x, 37 + k * k % 29, f"s{k}") for k, x in enumerate(at)]
model.add_cumulative(spans, [2 + k % 7 for k in range(60)], 11)
model.minimize(sum((1 + k % 5) * x for k, x in enumerate(at)))
solver = cp_model.CpSolver()
solver.parameters.num_workers = 1
solver.parameters.max_time_in_seconds = 60
threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    _solved(solver, model)
except KeyboardInterrupt:
    raise SystemExit(130)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=50)
    assert done.returncode == 130
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("command", ["compare", "merge", "export"])
def test_a_command_on_studies_has_a_help_of_its_own(
    run: Run, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with pytest.raises(SystemExit) as left:
        run("study", command, "--help")
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: apsched study {command} ")
    assert "--vary" not in text


@pytest.mark.parametrize("command", ["solve", "study"])
def test_meshes_are_in_the_help_a_line_each(
    run: Run, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with pytest.raises(SystemExit):
        run(command, "--help")
    lines = capsys.readouterr().out.splitlines()
    for axis in ("fsdp=64 ", "replicate=64", "replicate=4,fsdp=16", "fsdp=16,tp=8", "fsdp=64,ep=8"):
        assert any(text.startswith(f"  {axis}") for text in lines), axis
    assert max(map(len, lines)) <= 80


def test_an_unknown_option_names_the_help_of_its_command(run: Run) -> None:
    for words, command in (
        (("solve", "llama3-8b", "--memory-capp", "12GiB"), "apsched solve"),
        (("study", "merge", "a", "b", "--outt", "c"), "apsched study merge"),
    ):
        ran = run(*words)
        assert ran.code == 2
        assert ran.stderr.endswith(f"(`{command} --help` lists all options)\n")


def test_a_shell_completes_flags_and_commands(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    for typed, expected in (("apsched so", "solve"), ("apsched solve --memory-c", "--memory-cap")):
        found = tmp_path / "found"
        asked = {
            **os.environ,
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(found),
            "COMP_LINE": typed,
            "COMP_POINT": str(len(typed)),
        }
        done = subprocess.run(APSCHED, env=asked, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert expected in found.read_text()


def test_exit_130_is_in_the_help(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--help")
    assert "130 interrupted" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--memory-cap", "-5GiB", "expected bytes such as 60GiB"),
        ("--time-slack", "-1%", "expected a share between 0 and 1"),
        ("--reserve", "-.5", "expected a share between 0 and 1"),
    ],
)
def test_a_negative_value_has_the_error_of_its_option(run: Run, flag, value, message) -> None:
    ran = run("solve", "llama3-debug", "--mesh", "fsdp=2", flag, value)
    assert ran.code == 2
    assert f"{flag}: {message}" in ran.stderr
    assert f"found '{value}'" in ran.stderr
