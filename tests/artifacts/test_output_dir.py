"""An answer that was found is never lost because a file cannot be written."""

import json
import signal
from pathlib import Path

import pytest

from apsched.artifacts import output_dir as out_files
from apsched.artifacts.output_dir import replaced_run, write_files, write_or_rescue
from apsched.atomic_files import StagedFile, stage_file
from apsched.errors import InputError
from tests.conftest import Run

FILES = {"a.json": b"one", "b.json": b"two"}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where new temporary directories are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(out_files.tempfile, "tempdir", str(folder))
    return folder


def test_files_that_cannot_be_written_go_elsewhere(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "out" / "b.json").mkdir(parents=True)
    with pytest.raises(InputError, match="found a directory"):
        write_files(tmp_path / "out", FILES)
    written, wrong = write_or_rescue(tmp_path / "out", FILES)
    (rescued,) = temporary.iterdir()
    assert {path.name: path.read_bytes() for path in written} == FILES
    assert {path.parent for path in written} == {rescued}
    assert wrong.endswith(
        "b.json: expected the name of a file to write, found a directory; the files are in"
        f" {rescued} instead"
    )


def test_nothing_is_said_where_nothing_is_wrong(tmp_path: Path, temporary: Path) -> None:
    assert write_or_rescue(tmp_path / "out", FILES) == (
        (tmp_path / "out" / "a.json", tmp_path / "out" / "b.json"),
        "",
    )
    assert list(temporary.iterdir()) == []


def test_where_nothing_can_be_written_it_is_said(tmp_path: Path, temporary: Path) -> None:
    temporary.rmdir()
    (tmp_path / "out").write_bytes(b"a file")
    written, wrong = write_or_rescue(tmp_path / "out", FILES)
    assert written == ()
    assert (
        "choose another place with -o; nor could they be written to a temporary directory" in wrong
    )


def test_the_answer_is_printed_and_kept_where_its_place_is_taken(
    run: Run, debug_graphs: dict[str, Path], tmp_path: Path, temporary: Path
) -> None:
    (tmp_path / "out" / "forward.schedule.json").mkdir(parents=True)
    ran = run("solve", debug_graphs["forward"], "--budget", "0.1", "-o", "out", "--json")
    (rescued,) = temporary.iterdir()
    assert ran.code == 2
    assert [error.endswith(f"the files are in {rescued} instead") for error in ran.errors] == [True]
    assert json.loads(ran.stdout) == json.loads((rescued / "result.json").read_text())
    assert run("report", rescued).code == 0


@pytest.mark.parametrize("stage", ["rewrite", "dump_module"])
def test_the_schedule_is_kept_where_the_module_cannot_be_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def fail(*arguments: object) -> None:
        raise LookupError("no group of that name")

    monkeypatch.setattr(
        *{
            "rewrite": ("apsched.artifacts.solved_files.rewrite", fail),
            "dump_module": ("apsched.artifacts.module_file.dump_module", fail),
        }[stage]
    )
    ran = run(
        "solve",
        "llama3-debug",
        "--mesh",
        "fsdp=4",
        "--seq",
        "64",
        "--budget",
        "0.1",
        "--direction",
        "forward",
        "-o",
        "out",
    )
    assert ran.code == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "forward.graph",
        "forward.schedule.json",
        "result.json",
    ]
    assert ran.errors == [
        "apsched: error: forward.py: the rewritten module cannot be written: unexpected"
        " LookupError: no group of that name (a bug of apsched); the schedule is in"
        " forward.schedule.json"
    ]
    assert "files in out: forward.graph, forward.schedule.json, result.json" in ran.stdout
    assert "solved from a graph file" not in ran.stdout
    assert (
        json.loads((tmp_path / "out" / "result.json").read_text())["graphs"][0]["step_time_us"] > 0
    )


def test_where_one_file_fails_those_that_were_there_stay_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory is never half of one run and half of another."""
    write_files(tmp_path, {"a.json": b"old a", "b.json": b"old b"})
    calls = []

    def stage(path: Path, content: bytes) -> StagedFile:
        calls.append(path)
        if len(calls) > 1:
            raise InputError("No space left on device")
        return stage_file(path, content)

    monkeypatch.setattr("apsched.artifacts.output_dir.stage_file", stage)
    with pytest.raises(InputError, match="No space left"):
        write_files(tmp_path, {"a.json": b"new a", "b.json": b"new b"})
    found = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert found == {"a.json": b"old a", "b.json": b"old b"}


def test_an_interrupt_between_two_files_leaves_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_place = StagedFile.put_in_place

    def interrupted(self: StagedFile) -> None:
        put_in_place(self)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(StagedFile, "put_in_place", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_files(tmp_path / "out", FILES)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == FILES
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_replaced_run_with_other_options_is_named(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(
        json.dumps({"source": "a", "options": {"--mesh": "fsdp=4", "--seq": 64}})
    )
    before = {"--mesh": "fsdp=4", "--seq": 64}
    assert replaced_run(tmp_path, "a", before, is_stated=True) == ""
    note = replaced_run(tmp_path, "a", {"--mesh": "fsdp=4"}, is_stated=True)
    assert note.endswith("were replaced: a --mesh fsdp=4 --seq 64")
    note = replaced_run(tmp_path, "b", before, is_stated=False)
    assert note.endswith("were replaced: a --mesh fsdp=4 --seq 64; -o keeps the files of both")
    options = {"--hint": ["u0=3", "u1=4"], "--bitwise": True}
    (tmp_path / "result.json").write_text(json.dumps({"source": "a", "options": options}))
    note = replaced_run(tmp_path, "a", {}, is_stated=True)
    assert note.endswith("were replaced: a --hint u0=3 --hint u1=4 --bitwise")  # as they are typed


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"source": 1}'])
def test_a_broken_run_is_replaced_without_a_note(tmp_path: Path, content: str) -> None:
    (tmp_path / "result.json").write_text(content)
    assert replaced_run(tmp_path, "a", {}, is_stated=False) == ""
    assert replaced_run(tmp_path / "none", "a", {}, is_stated=False) == ""


def test_files_of_an_earlier_answer_go_with_it(tmp_path: Path, temporary: Path) -> None:
    """Only those that ``solve`` writes, and only where another answer takes their place."""
    of_answer = ("forward.graph", "backward-2.schedule.json", "joint.py", "kept.txt")
    others = ("trace.json", "report.html", "my.py", "forward.txt", "costs.toml")
    for name in (*of_answer, *others):
        (tmp_path / "out" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "out" / name).write_bytes(b"before")
    (tmp_path / "out" / "backward.py").mkdir()  # of the user
    others = (*others, "backward.py")
    new = {"result.json": b"{}", "forward.graph": b"new"}

    def left() -> set[str]:
        return {path.name for path in (tmp_path / "out").iterdir()}

    write_or_rescue(tmp_path / "out", new)
    assert left() == {"result.json", *of_answer, *others}  # of no answer that is known
    write_or_rescue(tmp_path / "out", {"costs.toml": b"new"})
    assert left() == {"result.json", *of_answer, *others}
    assert write_or_rescue(tmp_path / "out", new)[1] == ""
    assert left() == {"result.json", "forward.graph", *others}
    assert (tmp_path / "out" / "forward.graph").read_bytes() == b"new"
