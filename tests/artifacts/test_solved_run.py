"""What ``apsched solve`` wrote comes back as the answer that it gave, and files that do not belong
together are refused.
"""

import json
import re
from pathlib import Path

import pytest

from apsched.artifacts.schedule_file import dump_schedule
from apsched.artifacts.solved_run import load_run
from apsched.config import Caps, SolveOptions
from apsched.errors import InputError
from apsched.graph.graph_file import load_graph
from apsched.pipeline.result import result_of
from apsched.problem.build import build_problem
from apsched.problem.second_group import with_second_groups
from apsched.report.page.columns import page_data
from apsched.report.summary import graph_json, report_json
from apsched.schedule.schedule import as_captured
from apsched.schedule.simulate import simulate
from apsched.solver import solve
from tests.conftest import Run


def _without_times(graph: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in json.loads(json.dumps(graph)).items() if key != "seconds"}


def test_a_run_comes_back_as_it_was_answered(debug_run: Path) -> None:
    """Not one figure of ``--json`` is lost: the answer read back says the same."""
    said = json.loads((debug_run / "result.json").read_text())
    found = load_run(debug_run)
    assert (found.source, found.cluster) == (said["source"], said["cluster"])
    assert [_without_times(graph_json(graph.result)) for graph in found.graphs] == [
        _without_times(graph) for graph in said["graphs"]
    ]
    assert found.graphs[0].versions["apsched"]


def test_contention_and_plans_come_back(
    run: Run, debug_graphs: dict[str, Path], tmp_path: Path
) -> None:
    """The schedule is replayed on the machine it was solved for, else its figures would not fit."""
    plan = tmp_path / "plan.toml"
    plan.write_text("[[rule]]\nmatch = 'layers\\.0\\..*'\nforbid = true\n")
    ran = run(
        "solve",
        debug_graphs["forward"],
        "--contention",
        "links,compute=1.2,transfers=1.1,latency=3",
        "--plan",
        plan,
        "--budget",
        "0.1",
        "-o",
        "out",
    )
    assert ran.code == 0, ran.stderr
    (graph,) = load_run("out").graphs
    (said,) = json.loads(Path("out/result.json").read_text())["graphs"]
    assert _without_times(graph_json(graph.result)) == _without_times(said)
    assert graph.result.problem.contention is not None
    assert len(graph.result.problem.rules) == 1


def test_second_groups_come_back(debug_graphs: dict[str, Path], tmp_path: Path) -> None:
    """Gathers on a group of their own are replayed there, and the order as captured on the groups
    that the graph has.
    """
    problem = build_problem(load_graph(debug_graphs["backward"]))
    second = with_second_groups(problem)
    assert second is not None
    result = result_of(
        second, Caps(), solve(second, Caps(), SolveOptions(budget=0.1)), cluster="h100", seconds={}
    )
    (tmp_path / "backward.graph").write_bytes(debug_graphs["backward"].read_bytes())
    (tmp_path / "backward.schedule.json").write_bytes(dump_schedule(result))
    (tmp_path / "result.json").write_text(json.dumps(report_json("mine", "h100", [result])))
    (graph,) = load_run(tmp_path).graphs
    assert len(graph.result.problem.streams) == 2
    assert graph.result.best is not None
    assert graph.result.best.step_time_ticks == simulate(second, graph.after).step_time_ticks
    order, _ = page_data(load_run(tmp_path))["graphs"][0]["orders"]
    assert order["step_time"] == simulate(problem, as_captured(problem.num_nodes)).step_time_ticks
    assert set(order["transfers"]["stream"]) == {0}


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(
        InputError,
        match=(
            r"expected a directory that `apsched solve -o DIR` wrote, found no readable"
            r" result\.json"
        ),
    ):
        load_run(tmp_path)


@pytest.mark.parametrize("key", ["step_time_us", "peak_memory_bytes", "num_launches"])
def test_figures_are_not_taken_on_trust(debug_run: Path, tmp_path: Path, key: str) -> None:
    report = json.loads((debug_run / "result.json").read_text())
    report["graphs"][0][key] += 1
    for file in debug_run.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "result.json").write_text(json.dumps(report))
    with pytest.raises(
        InputError,
        match=(
            r"expected files of one run, found a forward\.schedule\.json that gives .*; solve again"
        ),
    ):
        load_run(tmp_path)


def test_a_run_of_an_older_version_is_refused(debug_run: Path, tmp_path: Path) -> None:
    report = json.loads((debug_run / "result.json").read_text())
    del report["graphs"][0]["bound_source"]
    for file in debug_run.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "result.json").write_text(json.dumps(report))
    with pytest.raises(InputError, match=re.escape("found no 'bound_source'; solve again")):
        load_run(tmp_path)
