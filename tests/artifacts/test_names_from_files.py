"""What a file calls something is one component of a path, or it is refused: no file says where
another one is written or read.
"""

import gzip
import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apsched.atomic_files import one_component
from apsched.errors import InputError
from apsched.graph.graph_file import load_graph, save_graph
from apsched.pipeline.cost_choice import CostChoice, read_costs
from apsched.study.rows import FILE
from tests.conftest import Run

LEADING_ELSEWHERE = [
    "../../x",
    "/tmp/x",
    "a/b",
    "a\\b",
    "..",
    ".",
    "",
    "a\nb",
    "a\0b",
    "x" * 129,
    "\u20ac" * 50,
]


def changed(path: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Write the graph file ``path`` with a change to ``target``."""
    content = json.loads(gzip.decompress(path.read_bytes()))
    change(content)
    target.write_bytes(gzip.compress(json.dumps(content).encode()))
    return target


def everything_below(folder: Path) -> set[Path]:
    return {*folder.rglob("*")}


@pytest.mark.parametrize("name", ["forward", "step 3 (fwd)", "x" * 128, "\u20ac" * 42, "..."])
def test_one_component_is_taken(name: str) -> None:
    assert one_component(name, "x") == name


@pytest.mark.parametrize("name", LEADING_ELSEWHERE)
def test_anything_else_is_refused(name: str) -> None:
    with pytest.raises(
        InputError,
        match=r"^name of x: expected a name that can be part of the name of a file .*found '",
    ):
        one_component(name, "name of x")


@pytest.mark.parametrize(
    "command",
    [
        ["solve", "--budget", "0.1", "-o", "in/out"],
        ["capture", "-o", "in/x.graph"],
        ["study", "-o", "in/s"],
    ],
)
@pytest.mark.parametrize("name", ["../../escaped", "{tmp}/escaped", "a/b"])
def test_the_name_of_a_graph_does_not_say_where_files_go(
    run: Run, debug_graphs: dict[str, Path], tmp_path: Path, command: list[str], name: str
) -> None:
    (tmp_path / "in").mkdir()
    name = name.format(tmp=tmp_path)
    foreign = changed(
        debug_graphs["forward"], tmp_path / "foreign.graph", lambda c: c["graph"].update(name=name)
    )
    before = everything_below(tmp_path)
    ran = run(command[0], foreign, *command[1:])
    assert ran.code == 2
    assert f"{foreign}: name of the graph: expected a name that can be part" in ran.errors[0]
    assert {p.name for p in everything_below(tmp_path) - before} <= {
        "s",
        FILE,
        f"{FILE}-shm",
        f"{FILE}-wal",
        "graphs",
        "schedules",
    }


def test_such_a_graph_is_not_written_either(debug_graphs: dict[str, Path], tmp_path: Path) -> None:
    dag = load_graph(debug_graphs["forward"])
    dag.graph["name"] = "a/b"
    with pytest.raises(InputError, match="name of the graph"):
        save_graph(dag, tmp_path / "x.graph")


def test_two_graphs_of_one_name_would_be_one_file(
    run: Run, debug_graphs: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("forward", "backward"):
        changed(
            debug_graphs[name],
            tmp_path / f"step.{name}.graph",
            lambda c: c["graph"].update(name="same"),
        )
    ran = run("solve", "step.graph", "--budget", "0.1", "-o", "out")
    assert ran.code == 2
    assert (
        "expected graphs of different names, as files are named by them; found same, same"
        in ran.errors[0]
    )


def test_names_with_blanks_are_read_back(
    run: Run, debug_graphs: dict[str, Path], tmp_path: Path
) -> None:
    def with_blanks(content: dict[str, Any]) -> None:
        content["graph"]["name"] = "my graph"
        for k, node in enumerate(content["nodes"]):
            node["name"] = f"{node['name']} number {k}" if k % 2 else f" {node['name']}"

    foreign = changed(debug_graphs["backward"], tmp_path / "foreign.graph", with_blanks)
    assert run("solve", foreign, "--budget", "0.1", "-o", "out", "--direction", "both").code == 0
    assert " copy_out" not in (
        schedule := (tmp_path / "out" / "my graph.schedule.json").read_text()
    )
    assert '"copy_out ' in schedule, "steps of every form"
    for command in (
        ["report", "out"],
        ["trace", "out"],
        ["apply", foreign, "out/my graph.schedule.json", "-o", "applied"],
    ):
        ran = run(*command)
        assert (ran.code, ran.errors) == (0, [])


def test_a_run_names_no_other_folder(run: Run, debug_run: Path, tmp_path: Path) -> None:
    shutil.copytree(debug_run, tmp_path / "run" / "deep")
    file = tmp_path / "run" / "deep" / "result.json"
    for path in debug_run.glob("forward.*"):
        shutil.copy(path, tmp_path / "run" / path.name)
    content = json.loads(file.read_text())
    content["graphs"][0]["name"] = "../forward"
    file.write_text(json.dumps(content))
    ran = run("report", "run/deep")
    assert ran.code == 2
    assert (
        "run/deep/result.json: name of a graph: expected a name that can be part" in ran.errors[0]
    )


@pytest.fixture(scope="module")
def study(debug_graphs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from apsched.cli import main

    folder = tmp_path_factory.mktemp("study") / "s"
    source = str(debug_graphs["forward"])
    assert (
        main(
            [
                "study",
                source,
                "--budget",
                "0.1",
                "--vary",
                "memory_cap=none",
                "--jobs",
                "1",
                "-o",
                str(folder),
            ]
        )
        == 0
    )
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("update graphs set file = '../planted'", "expected a file in graphs/, found '../planted'"),
        (
            "update graphs set file = 'graphs/../../planted'",
            "file in graphs/: expected a name that can be part",
        ),
        (
            "update results set schedule = '/planted'",
            "expected a file in schedules/, found '/planted'",
        ),
        (
            "update results set schedule = 'schedules/../../planted'",
            "file in schedules/: expected a name that can be part",
        ),
        (
            (
                "pragma foreign_keys = off; update points set point_id = '../../x'; update results"
                " set point_id = '../../x'"
            ),
            "name of a point",
        ),
    ],
)
def test_a_study_names_no_file_elsewhere(
    run: Run, study: Path, tmp_path: Path, change: str, said: str
) -> None:
    for name in ("a", "b"):
        shutil.copytree(study, tmp_path / name)
    (tmp_path / "planted").write_bytes(b"secret")
    with sqlite3.connect(tmp_path / "b" / FILE) as db:
        db.executescript(change)
    for command in (["study", "merge", "a", "b", "-o", "both"], ["report", "b"]):
        ran = run(*command)
        assert ran.code == 2
        assert said in ran.errors[0]
    assert (tmp_path / "planted").read_bytes() == b"secret"


def test_a_file_of_costs_names_a_cluster_beside_it_or_one_that_ships(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    costs = inside / "costs.toml"
    for name, where in (("mine.toml", inside), ("other.toml", tmp_path)):
        (where / name).write_text('base = "h100"\nname = "mine"\n')
    text = (
        'format = "apsched costs"\nversion = 1\ndevice = "x"\ncluster = "{}"\nlaunch_us ='
        " {{}}\ncopies = []\ncompute = {{}}\n"
    )
    for cluster in ("h100", "mine.toml"):
        costs.write_text(text.format(cluster))
        assert read_costs(CostChoice(costs=str(costs))).cluster.name in ("h100", "mine")
    costs.write_text(text.format("../other.toml"))
    with pytest.raises(
        InputError,
        match=(
            r"costs\.toml: cluster: expected a name .*found '\.\./other\.toml'.*; or state the"
            r" cluster"
        ),
    ):
        read_costs(CostChoice(costs=str(costs)))
    assert read_costs(CostChoice(costs=str(costs), cluster="../other.toml")).cluster.name == "mine"
