"""The page of a run with parameters that are kept from forward to backward."""

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from shutil import copytree

import pytest

from apsched.artifacts.solved_run import SolvedRun, load_run
from apsched.cli.main import main
from apsched.problem.storage_origins import KEPT_ACROSS, storages_of
from apsched.quantities import show_bytes, show_us
from apsched.report.page import report_page
from apsched.report.page.columns import page_data
from apsched.report.page.kept import kept_section
from apsched.schedule.memory import lifetimes


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kept")
    words = ["solve", "llama3-debug", "--mesh", "fsdp=8", "--seq", "64", "--layers", "2"]
    words += ["--budget", "0", "--keep", "auto", "--frontier", "2", "-o", str(directory)]
    assert main(words) == 0
    return directory


@pytest.fixture(scope="module")
def solved(directory: Path) -> SolvedRun:
    return load_run(directory)


def test_the_section_has_every_choice_and_what_is_kept(solved: SolvedRun, directory: Path) -> None:
    keep = json.loads((directory / "result.json").read_text())["keep"]
    page = report_page(solved).decode()
    assert '<section class="graph" id="kept"' in page
    assert '<a href="#kept">kept</a>' in page
    for name, choice in {**keep["baselines"], "apsched": keep}.items():
        row = page[page.index(f'<th scope="row">{name}</th>') :]
        assert f"<td>{show_us(choice['step_time_us'])}</td>" in row[: row.index("</tr>")]
    assert keep["excluded"]
    for name, choice in keep["excluded"].items():
        assert choice["bound_us"] >= keep["step_time_us"]
        row = page[page.index(f'<th scope="row">{name}</th>') :]
        row = row[: row.index("</tr>")]
        assert f"<td>≥ {show_us(choice['bound_us'])}</td>" in row
        assert "<td>not solved</td>" in row
    assert f"<b>{len(keep['kept'])} of {len(keep['parameters'])}</b>" in page
    assert "backend(budget=0.0, keep='auto')" in unescape(page)
    assert page.count("<h3>Memory against step time</h3>") == 1
    assert "kept gathered up to" in page


def test_choices_that_the_memory_cannot_hold_have_a_row(solved: SolvedRun) -> None:
    assert solved.keep is not None
    too_large = {"huge": {"num_kept": 3, "num_in_node": 0, "kept_bytes": 2**40}}
    section = kept_section({**solved.keep, "too_large": too_large})
    row = section[section.index('<th scope="row">huge</th>') :]
    row = row[: row.index("</tr>")]
    assert "<td>1.00 TiB</td>" in row
    assert "<td>no</td>" in row


def test_bytes_of_kept_tensors_have_a_label_of_their_own(solved: SolvedRun) -> None:
    """At the end of forward and at the beginning of backward they are exactly the bytes kept."""
    assert solved.keep is not None
    data = page_data(solved)
    label = data["strings"].index(KEPT_ACROSS)
    kept_bytes = solved.keep["kept_bytes"]
    for shown, last in zip(data["graphs"], (True, False), strict=True):
        assert shown["kept_across"] == label
        for order in shown["orders"]:
            lives = order["lives"]
            at = len(order["steps"]["live"]) - 1 if last else 0
            alive = sum(
                size
                for name, first, end, size in zip(
                    lives["label"], lives["first"], lives["last"], lives["bytes"], strict=True
                )
                if name == label and first <= at <= end
            )
            assert alive == kept_bytes > 0


def test_a_tensor_that_is_kept_is_one_storage(solved: SolvedRun) -> None:
    for graph in solved.graphs:
        problem = graph.result.problem
        storages = storages_of(problem, graph.kept_tensors)
        assert len(storages) == len(graph.kept_tensors) > 0
        lives = {life.storage for life in lifetimes(problem, graph.after)}
        assert storages <= lives
    assert storages_of(problem, ["no node"]) == frozenset()


def test_runs_without_the_choice_have_no_section(solved: SolvedRun) -> None:
    graphs = tuple(replace(graph, kept_tensors=()) for graph in solved.graphs)
    page = report_page(replace(solved, keep=None, graphs=graphs)).decode()
    assert 'id="kept"' not in page
    assert all(not g["kept_across"] for g in page_data(replace(solved, graphs=graphs))["graphs"])


@pytest.mark.slow
def test_one_graph_of_both_has_the_section_and_its_kept_tensors(tmp_path: Path) -> None:
    words = ["solve", "llama3-debug", "--mesh", "fsdp=8", "--seq", "64", "--layers", "2"]
    words += ["--direction", "joint", "--budget", "0", "--frontier", "2"]
    assert main([*words, "-o", str(tmp_path / "joint")]) == 0
    report = json.loads((tmp_path / "joint/result.json").read_text())
    joint, (name,) = report["keep_joint"], [g["name"] for g in report["graphs"]]
    assert joint["kept"]
    assert len(joint["tensors"][name]) == len(joint["kept"])
    assert joint["bound_us"] <= joint["step_time_us"]
    run = load_run(tmp_path / "joint")
    (graph,) = run.graphs
    across = storages_of(graph.result.problem, graph.kept_tensors)
    assert sum(graph.result.problem.storages[s].size_bytes for s in across) == joint["kept_bytes"]
    page = report_page(run).decode()
    assert "kept gathered up to" in page
    assert "torch.compile(model" not in page, "it makes two graphs"
    (line,) = re.findall(r"register\((.*)\)", unescape(page))
    assert line == "budget=0.0, keep='auto'"
    section = page[
        page.index('id="kept"') : page.index("<h3>Choices for forward and backward apart")
    ]
    assert "gap to the bound over the choices" in section
    for label, choice in {**joint["compared"], "apsched": joint}.items():
        row = section[section.index(f'<th scope="row">{label}</th>') :]
        sign, time = ("", "step_time_us") if choice["fits"] else ("≥ ", "bound_us")
        assert f"<td>{sign}{show_us(choice[time])}</td>" in row[: row.index("</tr>")]
    along = section[section.index("<h3>Memory against step time") :]
    tight, loose = joint["along_caps"]
    assert tight["step_time_us"] > loose["step_time_us"]
    for one in (tight, loose):
        row = along[along.index(f'<th scope="row">{show_bytes(one["memory_cap_bytes"])}</th>') :]
        assert f"<td>{show_us(one['step_time_us'])}</td>" in row[: row.index("</tr>")]


@pytest.mark.slow
def test_a_stated_choice_of_one_graph_has_no_other_to_compare(tmp_path: Path) -> None:
    words = ["solve", "llama3-debug", "--mesh", "fsdp=8", "--seq", "64", "--layers", "2"]
    words += ["--direction", "joint", "--keep", "all", "--budget", "0"]
    assert main([*words, "-o", str(tmp_path / "all")]) == 0
    page = report_page(load_run(tmp_path / "all")).decode()
    assert "gap to the bound over schedules with this choice" in page
    assert "<h3>Choices" not in page


@pytest.mark.parametrize(
    ("part", "content"),
    [("options", "x"), ("keep", []), ("keep", {"a": 1}), ("kept_bytes", "x")],
)
def test_a_result_file_with_other_content_is_named(
    directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    part: str,
    content: object,
) -> None:
    copytree(directory, tmp_path / "run")
    file = tmp_path / "run" / "result.json"
    answers = json.loads(file.read_text())
    (answers["keep"] if part == "kept_bytes" else answers)[part] = content
    file.write_text(json.dumps(answers))
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "page.html")]) == 2
    error = capsys.readouterr().err
    assert f"{file}: expected the answers of this version of apsched, found" in error
    assert "solve again" in error
    assert not (tmp_path / "page.html").exists()
