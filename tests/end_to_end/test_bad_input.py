"""Whatever is wrong with SOURCE, a table, an option or a schedule file: one clear line, exit 2, no
traceback, no file left behind.
"""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from apsched.atomic_files import StagedFile, stage_file
from apsched.graph.graph_file import load_graph
from apsched.problem.build import build_problem
from tests.conftest import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a case finds good files and writes broken ones."""

    folder: Path
    good: Path
    """A graph file that can be read (forward)."""
    backward: Path

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file into the folder of the case."""
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def graph_with(self, name: str, change: Callable[[dict], None]) -> Path:
        """Write a graph file whose content is changed."""
        content = json.loads(gzip.decompress(self.good.read_bytes()))
        change(content)
        return self.write(name, gzip.compress(json.dumps(content).encode()))

    def schedule_with(self, **changes: object) -> Path:
        """Write a schedule file of the good graph in the order as captured, with changes."""
        problem = build_problem(load_graph(self.good))
        data: dict[str, object] = {
            "format": "apsched-schedule",
            "version": 1,
            "graph": {
                "name": problem.name,
                "hash": problem.graph_hash,
                "num_nodes": problem.num_nodes,
            },
            "costs": {"cluster": "h100"},
            "caps": {},
            "result": {},
            "buckets": [],
            "steps": [f"{i} {name}" for i, name in enumerate(problem.node_names)],
        }
        return self.write("schedule.json", json.dumps({**data, **changes}))


Case = Callable[[Place], list[object]]
REPRO = """import torch
class Repro(torch.nn.Module):
    def forward(self, primals_1):
        {body}
def load_args(reader):
    buf0 = reader.storage(None, 512)
    reader.tensor(buf0, (8, 16), is_leaf=True)
mod = Repro()
"""


def _option(*options: object) -> Case:
    return lambda at: ["solve", at.good, *options]


def _preset(*options: object) -> Case:
    return lambda at: ["solve", "llama3-debug", *options]


def _function(body: str, name: str = "build") -> Case:
    def case(at: Place) -> list[object]:
        at.write("job_of_mine.py", body)
        return ["solve", f"job_of_mine:{name}"]

    return case


SOURCES: dict[str, tuple[Case, str]] = {
    "nothing of that name": (
        lambda at: ["solve", "no-such-thing"],
        "found 'no-such-thing', which is none",
    ),
    "a misspelt preset": (lambda at: ["solve", "lama3-8b"], "did you mean llama3-8b?"),
    "an empty name": (lambda at: ["solve", ""], "expected"),
    "a directory": (
        lambda at: ["solve", at.folder],
        "expected graphs that torch wrote, found none",
    ),
    "an empty graph file": (
        lambda at: ["solve", at.write("e.graph", b"")],
        "e.graph: expected a graph file of apsched",
    ),
    "another file": (
        lambda at: ["solve", at.write("e.graph", b"\x7fELF" * 100)],
        "e.graph: expected a graph file of apsched",
    ),
    "a graph file cut short": (
        lambda at: ["solve", at.write("cut.graph", at.good.read_bytes()[:900])],
        "cut.graph: the graph file is broken",
    ),
    "a zipped file of something else": (
        lambda at: ["solve", at.write("z.graph", gzip.compress(b'{"format": "weights"}'))],
        "this is a file of something else",
    ),
    "a graph file of a newer apsched": (
        lambda at: ["solve", at.graph_with("new.graph", lambda c: c.update(version=99))],
        "written by a newer apsched",
    ),
    "a graph file without nodes": (
        lambda at: ["solve", at.graph_with("no.graph", lambda c: c.pop("nodes"))],
        "'nodes'",
    ),
    "a graph file with an edge to nowhere": (
        lambda at: [
            "solve",
            at.graph_with(
                "edge.graph",
                lambda c: c["edges"].append({"source": 1, "target": 10**6, "kind": "data"}),
            ),
        ],
        "expected ranks of two nodes",
    ),
    "a graph file with a negative duration": (
        lambda at: [
            "solve",
            at.graph_with("neg.graph", lambda c: c["nodes"][60].update(duration_us=-1.0)),
        ],
        "neg.graph",
    ),
    "a Python file that is no repro": (
        lambda at: ["solve", at.write("job.py", "print('hello')\n")],
        "job.py",
    ),
    "an empty Python file": (lambda at: ["solve", at.write("job.py", "")], "job.py"),
    "a repro without load_args": (
        lambda at: [
            "solve",
            at.write("r.py", REPRO.format(body="return (primals_1,)").split("def load_args")[0]),
        ],
        "load_args",
    ),
    "a repro that is no Python": (
        lambda at: ["solve", at.write("r.py", REPRO.format(body="return (primals_1,"))],
        "r.py:",
    ),
    "a repro with an unknown operator": (
        lambda at: [
            "solve",
            at.write(
                "r.py",
                REPRO.format(body="x = torch.ops.aten.no_such_op.default(primals_1); return (x,)"),
            ),
        ],
        "no_such_op",
    ),
    "a function of a missing module": (
        lambda at: ["solve", "no_such_module_of_mine:build"],
        "found no module no_such_module_of_mine",
    ),
    "a function that is not there": (
        _function("def build():\n    pass\n", "biuld"),
        "did you mean build?",
    ),
    "a function without a name": (lambda at: ["solve", "os:"], "expected package.module:function"),
    "a function that raises": (
        _function("def build():\n    raise KeyError('lr')\n"),
        "the function raised KeyError: 'lr'",
    ),
    "a function that returns no module": (
        _function("def build():\n    return 3\n"),
        "expected a tuple (module, inputs)",
    ),
    "a function whose module is no Python": (_function("def build(:\n"), "SyntaxError"),
    "a function that exits": (
        _function("import sys\ndef build():\n    sys.exit(7)\n"),
        "SystemExit",
    ),
}

OPTIONS: dict[str, tuple[Case, str]] = {
    "a mesh without sizes": (_preset("--mesh", "fsdp"), "a mesh is a list of axis=size"),
    "an unknown mesh axis": (
        _preset("--mesh", "pp=4"),
        "name some of them); found 'pp' in 'pp=4'",
    ),
    "an axis of no ranks": (_preset("--mesh", "fsdp=0"), "must be at least 1; found 0"),
    "a mesh axis given twice": (_preset("--mesh", "fsdp=2,fsdp=4"), "given twice"),
    "ep that does not divide fsdp": (_preset("--mesh", "fsdp=4,ep=3"), "must divide it"),
    "tp that does not divide the heads": (_preset("--mesh", "fsdp=2,tp=3"), "tp"),
    "a mesh for a graph file": (
        _option("--mesh", "fsdp=4"),
        "--mesh chooses how a preset is built",
    ),
    "a sequence length for a graph file": (
        _option("--seq", "128"),
        "--seq chooses how a preset is built",
    ),
    "micro-batches for a graph file": (
        _option("--micro-batches", "2"),
        "--micro-batches chooses how a preset is built",
    ),
    "no micro-batch": (_preset("--micro-batches", "0"), "expected a whole number from 1"),
    "a way to reduce one micro-batch": (
        _preset("--reduce", "each"),
        "--reduce each is about several micro-batches",
    ),
    "a way to reduce that is none": (_preset("--reduce", "twice"), "expected once, each or auto"),
    "layers for a function": (
        lambda at: ["solve", "os:getcwd", "--layers", "2"],
        "--layers chooses how a preset is built",
    ),
    "no tokens": (_preset("--seq", "0"), "--seq: expected a whole number from 1"),
    "tokens in words": (_preset("--seq", "many"), "--seq: expected a whole number"),
    "half a sequence": (_preset("--batch", "0.5"), "--batch: expected a whole number"),
    "no layers": (
        _preset("--mesh", "fsdp=2", "--layers", "0"),
        "--layers: expected a whole number from 1",
    ),
    "unknown checkpointing": (
        _preset("--mesh", "fsdp=2", "--ac", "sometimes"),
        "activation_checkpoint must be",
    ),
    "an unknown cluster": (_preset("--cluster", "h1000"), "did you mean 'h100'?"),
    "a cluster file that is missing": (
        _preset("--cluster", "mine.toml"),
        "cannot read the cluster file mine.toml",
    ),
    "a cluster file that is no TOML": (
        lambda at: ["solve", "llama3-debug", "--cluster", at.write("c.toml", "name = [")],
        "not a TOML file",
    ),
    "a cluster file with a key missing": (
        lambda at: ["solve", "llama3-debug", "--cluster", at.write("c.toml", 'name = "x"')],
        "is missing",
    ),
    "another cluster for a graph file": (
        _option("--cluster", "a100"),
        "its costs are those of 'h100'",
    ),
    "a table that is missing": (_preset("--collectives", "t.csv"), "t.csv"),
    "a table that is empty": (
        lambda at: ["solve", "llama3-debug", "--collectives", at.write("t.csv", "")],
        "t.csv",
    ),
    "a table of something else": (
        lambda at: [
            "solve",
            "llama3-debug",
            "--collectives",
            at.write("t.csv", "date,price\n2020-01-01,3\n"),
        ],
        "t.csv",
    ),
    "a table with a negative time": (
        lambda at: [
            "solve",
            "llama3-debug",
            "--collectives",
            at.write("t.csv", "kind,group_size,size_bytes,time_us\nall_gather,4,1024,-3\n"),
        ],
        "t.csv, line 2",
    ),
    "a table for a graph file": (
        lambda at: [
            "solve",
            at.good,
            "--collectives",
            at.write(
                "t.csv",
                "kind,group_size,size_bytes,time_us\nall_gather,4,1024,3\nall_gather,4,2048,4\n",
            ),
        ],
        "--collectives cannot change",
    ),
    "an unknown direction": (
        _option("--direction", "sideways"),
        "--direction: expected forward, backward, both or joint",
    ),
    "a direction that is not there": (
        _option("--direction", "backward"),
        "expected a backward graph, found forward",
    ),
    "a memory cap in words": (_option("--memory-cap", "plenty"), "--memory-cap: expected bytes"),
    "a negative memory cap": (_option("--memory-cap", "-5GiB"), "--memory-cap"),
    "a cap below the floor": (
        _option("--memory-cap", "floor-1GiB"),
        "--memory-cap: expected bytes",
    ),
    "a floor plus nothing": (
        _option("--memory-cap", "floor+"),
        "--memory-cap: expected a number of bytes",
    ),
    "a bucket cap in parsecs": (
        _option("--bucket-cap", "5 parsecs"),
        "--bucket-cap: expected a number of bytes",
    ),
    "half a rank of span": (
        _option("--max-topo-span", "1.5"),
        "--max-topo-span: expected a whole number",
    ),
    "a negative prefetch": (
        _option("--max-prefetch", "-1"),
        "--max-prefetch: expected a whole number",
    ),
    "a move of half a node": (
        _option("--max-compute-move", "0.5"),
        "--max-compute-move: expected a whole number",
    ),
    "an empty in-flight cap": (
        _option("--in-flight-cap", ""),
        "--in-flight-cap: expected a number of bytes",
    ),
    "twice as slow": (_option("--time-slack", "200%"), "--time-slack: expected a share"),
    "a slack in words": (_option("--time-slack", "some"), "--time-slack: expected a share"),
    "an endless budget": (_option("--budget", "inf"), "--budget: expected a finite number"),
    "a negative seed": (_option("--seed", "-1"), "--seed: expected a whole number"),
    "an enormous seed": (_option("--seed", str(2**40)), "--seed: expected a whole number"),
    "an option that does not exist": (
        _option("--bucket_cap_mb", "25"),
        "unrecognized arguments: --bucket_cap_mb",
    ),
    "an option cut short": (_option("--mem", "1GiB"), "unrecognized arguments: --mem"),
    "an option without its value": (_option("--seed"), "argument --seed: expected one argument"),
    "no source": (lambda at: ["solve"], "the following arguments are required: SOURCE"),
    "no command": (lambda at: [], "required: COMMAND"),
    "an unknown command": (lambda at: ["resolve"], "invalid choice: 'resolve'"),
    "a file for a directory": (
        lambda at: ["solve", at.good, "-o", at.write("out", "x")],
        "is a file; choose another place with -o",
    ),
    "a directory in a file": (
        lambda at: ["solve", at.good, "-o", at.write("out", "x") / "deep"],
        "is a file; choose another place with -o",
    ),
    "a directory for a graph file": (
        lambda at: ["capture", at.good, "-o", at.folder],
        "found the directory",
    ),
    "a graph file called .py": (
        lambda at: ["capture", at.good, "-o", "x.py"],
        "which would be read as Python",
    ),
    "a graph file nowhere": (lambda at: ["capture", at.good], "required: -o"),
}

SCHEDULES: dict[str, tuple[Case, str]] = {
    "no schedule": (lambda at: ["apply", at.good], "required: SCHEDULE"),
    "a schedule that is missing": (
        lambda at: ["apply", at.good, "s.json"],
        "cannot read the schedule file s.json",
    ),
    "an empty schedule": (
        lambda at: ["apply", at.good, at.write("s.json", "")],
        "s.json: expected a schedule file, found broken JSON",
    ),
    "a schedule cut short": (
        lambda at: ["apply", at.good, at.write("s.json", at.schedule_with().read_bytes()[:500])],
        "found broken JSON",
    ),
    "a schedule of something else": (
        lambda at: ["apply", at.good, at.write("s.json", "[1, 2]")],
        "expected a schedule file of apsched",
    ),
    "a graph file as schedule": (
        lambda at: ["apply", at.good, at.good],
        "found something that is no JSON text",
    ),
    "a schedule of a newer apsched": (
        lambda at: ["apply", at.good, at.schedule_with(version=7)],
        "found version 7; update apsched",
    ),
    "a schedule of another graph": (
        lambda at: ["apply", at.backward, at.schedule_with()],
        (
            "the schedule belongs to another graph: name 'forward' there, 'backward' here; number"
            " of nodes"
        ),
    ),
    "a schedule without steps": (
        lambda at: ["apply", at.good, at.schedule_with(steps=[])],
        "is missing",
    ),
    "a schedule with a step of no meaning": (
        lambda at: ["apply", at.good, at.schedule_with(steps=["run it"])],
        "found 'run it'",
    ),
    "a schedule over its own cap": (
        lambda at: ["apply", at.good, at.schedule_with(caps={"memory_cap_bytes": 1})],
        "more than the cap of 1",
    ),
    "a bucket of nothing": (
        lambda at: [
            "apply",
            at.good,
            at.schedule_with(buckets=[{"members": [{"rank": 0, "node": "primals_1"}]}]),
        ],
        "expected a start node of the graph",
    ),
    "two schedules for one graph": (
        lambda at: ["apply", at.good, at.schedule_with(), at.schedule_with()],
        "found two for the same one",
    ),
}

CASES = {**SOURCES, **OPTIONS, **SCHEDULES}


def _files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("name", CASES)
def test_one_clear_line(
    name: str,
    run: Run,
    tmp_path: Path,
    debug_graphs: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit 2, one line that says what is wrong, nothing on stdout, and the directory as it was."""
    monkeypatch.delitem(sys.modules, "job_of_mine", raising=False)
    make, message = CASES[name]
    args = make(
        Place(folder=tmp_path, good=debug_graphs["forward"], backward=debug_graphs["backward"])
    )
    before = _files(tmp_path)
    ran = run(*args)
    assert ran.code == 2, ran
    assert ran.stdout == ""
    assert len(ran.errors) == 1, ran.stderr
    assert message in ran.errors[0]
    assert "Traceback" not in ran.stderr
    assert "a bug of apsched" not in ran.stderr
    assert _files(tmp_path) == before


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 30


def test_a_directory_that_cannot_be_written(
    run: Run, tmp_path: Path, debug_graphs: dict[str, Path]
) -> None:
    """Said before the work, not after it."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if os.access(closed, os.W_OK):
        monkey = pytest.MonkeyPatch()  # root may write anywhere
        monkey.setattr(os, "access", lambda path, mode: False)
        ran = run("solve", debug_graphs["forward"], "-o", closed / "deep")
        monkey.undo()
    else:
        ran = run("solve", debug_graphs["forward"], "-o", closed / "deep")
    assert ran.code == 2
    assert "cannot be written; choose another place with -o" in ran.errors[0]
    assert "solve" not in ran.stderr.replace(ran.errors[0], "")


def test_a_disk_that_is_full_leaves_nothing(
    run: Run, tmp_path: Path, debug_graphs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files written before the failure go again, and the directories made for them."""
    import apsched.artifacts.output_dir as out_files

    written = []

    def write(path: Path, data: bytes) -> StagedFile:
        if written:
            raise OSError(28, "No space left on device")
        written.append(path)
        return stage_file(path, data)

    monkeypatch.setattr(out_files, "stage_file", write)
    ran = run("solve", debug_graphs["forward"], "-o", tmp_path / "a" / "b")
    assert ran.code == 2
    assert written
    assert _files(tmp_path) == set()


def test_as_a_process() -> None:
    """A shell sees the exit status and one line, no traceback of any thread."""
    command = [sys.executable, "-m", "apsched", "solve", "llama3-debug", "--mesh", "fsdp=0"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "APSCHED_DEBUG": ""},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert [line for line in done.stderr.splitlines() if "error" in line] == [
        "apsched: error: the size of mesh axis 'fsdp' must be at least 1; found 0"
    ]
    assert "Traceback" not in done.stderr


def test_a_bug_is_one_line_and_a_hint(
    run: Run, debug_graphs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected error has no traceback either, unless the user requests it."""
    import apsched.solver

    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("nobody\nforesaw this")

    monkeypatch.setattr(apsched.solver, "solve_requested", broken)
    ran = run("solve", debug_graphs["forward"])
    assert ran.code == 2
    assert ran.errors == [
        "apsched: error: unexpected ZeroDivisionError: nobody foresaw this (a bug of apsched;"
        " APSCHED_DEBUG=1 shows the traceback)"
    ]
    monkeypatch.setenv("APSCHED_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        run("solve", debug_graphs["forward"])
