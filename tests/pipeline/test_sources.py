"""Forms of SOURCE, and the names of its graphs."""

import json
import os
from pathlib import Path

import pytest

from apsched.errors import InputError
from apsched.names import direction_named
from apsched.pipeline.cost_choice import CostChoice
from apsched.pipeline.load import loaded
from apsched.pipeline.sources import SourceKind, SourceRequest, classify, graph_file_set
from apsched.progress import Progress
from tests.conftest import Run
from tests.helpers.graphs.recorded import debug_directory, trace_log

DATA = Path(__file__).parents[1] / "capture" / "repro" / "data"
FORWARD, BACKWARD, SMALL = (
    (DATA / f"{name}.py.txt").read_text()
    for name in ("fsdp_forward", "fsdp_backward", "dtensor_forward")
)
GRAPHS = {
    "model__0_forward_1.0": FORWARD,
    "model__0_backward_3.2": BACKWARD,
    "model__1_forward_2.1": SMALL,
}
NAMES = ["forward-1", "backward-1", "forward-2"]


@pytest.mark.parametrize("flag", ["--mesh", "--ac"])
def test_an_empty_text_is_not_the_default(run: Run, flag: str) -> None:
    ran = run("compare", "llama3-debug", flag, "")
    assert ran.code == 2
    assert f"{flag}: expected a text such as" in ran.errors[0]


def test_what_torch_wrote_is_told_by_its_place_and_name(tmp_path: Path) -> None:
    debug_directory(tmp_path, GRAPHS)
    log = trace_log(tmp_path / "dedicated_log_torch_trace_k2.log", [(0, SMALL)])
    text = tmp_path / "fx_graph_runnable_3.txt"
    text.write_text(SMALL)
    for source in (tmp_path, log, text, next(tmp_path.rglob("*.py"))):
        assert classify(str(source)) is SourceKind.REPRO
    with pytest.raises(InputError, match="found '', which is none"):
        classify("")


def test_a_pipe_is_no_source(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match=r"SOURCE: expected a file.*pipe.*write a file first"):
        classify(str(tmp_path / "pipe"))


@pytest.mark.parametrize(
    "command", [["solve", "--budget", "0"], ["study", "--vary", "budget=0"], ["apply"]]
)
def test_output_does_not_hide_its_source(
    run: Run, debug_graphs: dict[str, Path], tmp_path: Path, command: list[str]
) -> None:
    """A joint name of several graph files is free, but a directory of that name would be read."""
    for name, file in debug_graphs.items():
        (tmp_path / f"l8.{name}.graph").write_bytes(file.read_bytes())
    name, *options = command
    schedules = ["x.schedule.json"] if name == "apply" else []
    found = run(name, "l8.graph", *schedules, *options, "-o", "./l8.graph")
    assert found.code == 2, found.stderr
    assert "-o: expected another name than that of SOURCE, found l8.graph" in found.stderr
    assert not (tmp_path / "l8.graph").exists()


def test_graphs_of_a_directory_know_their_direction(tmp_path: Path) -> None:
    """By its name every node of a numbered backward graph runs in backward, also before the first
    that depends on a gradient.
    """
    debug_directory(tmp_path, GRAPHS)
    request = SourceRequest(source=str(tmp_path))
    with loaded(request, CostChoice(), "both", Progress(quiet=True)) as source:
        assert [graph.problem.name for graph in source.graphs] == NAMES
        for graph in source.graphs:
            runs = {record["record"].direction for _, record in graph.dag.nodes(data=True)}
            assert runs == {direction_named(graph.problem.name)}
    with loaded(request, CostChoice(), "forward", Progress(quiet=True)) as source:
        assert [graph.problem.name for graph in source.graphs] == ["forward-1", "forward-2"]


def test_graph_files_of_a_directory_are_one_source(run: Run, tmp_path: Path) -> None:
    debug_directory(tmp_path / "traced", GRAPHS)
    (tmp_path / "step.forward-x.graph").touch()
    written = run("capture", "traced", "-o", "step.graph")
    assert written.code == 0, written.stderr
    files = graph_file_set(tmp_path / "step.graph")
    assert [file.name for file in files] == [f"step.{name}.graph" for name in NAMES]
    solved = run("solve", "step.graph", "--budget", "0", "--direction", "backward", "--json")
    assert [graph["name"] for graph in json.loads(solved.stdout)["graphs"]] == ["backward-1"]


def test_solve_a_directory(run: Run, tmp_path: Path) -> None:
    """Each graph has files of its own, and says where it comes from."""
    debug_directory(tmp_path / "traced", GRAPHS)
    solved = run("solve", "traced", "--budget", "0", "-o", "out")
    assert solved.code == 0, solved.stderr
    assert solved.stdout.count("is exact to the tick and to the byte") == 3
    assert "backward-1: traced/torch_compile_debug/run_2026" in solved.stdout
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {f"{name}.schedule.json" for name in NAMES} < written
    captured = run("capture", "traced", "-o", "step.graph")
    assert captured.code == 0, captured.stderr
    assert "note: backward-1: traced/torch_compile_debug/run_2026" in captured.stdout


def test_two_micro_batches_are_solved_from_the_command_line(run: Run) -> None:
    preset = ("llama3-debug", "--mesh", "fsdp=2,tp=2", "--seq", "2048", "--layers", "1")
    several = (*preset, "--micro-batches", "2", "--direction", "forward", "--budget", "0")
    solved = run("solve", *several, "--json", "-o", "out")
    assert solved.code == 0, solved.stderr
    (graph,) = json.loads(solved.stdout)["graphs"]
    assert graph["micro_batches"] == 2
    assert graph["round_trip_exact"]
    assert graph["step_time_us"] <= graph["baselines"]["in_a_row"]["step_time_us"]
    assert "2 micro-batches: " in run("compare", *several, "--no-inductor").stdout


def test_groups_of_a_mesh_are_named_by_their_axes() -> None:
    request = SourceRequest(source="llama3-debug", mesh="replicate=2,fsdp=4", seq_len=32)
    with loaded(request, CostChoice(), "backward", Progress(quiet=True)) as source:
        (graph,) = source.graphs
        axes = {(0, 1, 2, 3): "fsdp (4 process ranks)", (0, 4): "replicate (2 process ranks)"}
        assert len(graph.problem.streams) == 2
        assert source.notes[0] == ", ".join(
            f"group {name} is mesh axis {axes[tuple(graph.group_ranks[name])]}"
            for name in graph.problem.streams
        )


def test_groups_of_another_mesh_have_their_process_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_mesh.py").write_text(
        "import torch\nfrom torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.fsdp import fully_shard\n\n\ndef build():\n"
        "    mesh = init_device_mesh('cpu', (2, 4), mesh_dim_names=('dp', 'cp'))\n"
        "    model = fully_shard(torch.nn.Linear(8, 8), mesh=mesh['dp'])\n"
        "    return model, torch.zeros(4, 8)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    request = SourceRequest(source="own_mesh:build", mesh="fsdp=8")
    with loaded(request, CostChoice(), "forward", Progress(quiet=True)) as source:
        (group,) = source.graphs[0].problem.streams
        assert source.notes[0] == f"group {group} has process ranks 0, 4"


def test_tokens_of_a_step_are_those_of_all_micro_batches(run: Run) -> None:
    def rate(*words: str) -> float:
        source = ("llama3-debug", "--mesh", "fsdp=4", "--seq", "64", "--layers", "1")
        ran = run("solve", *source, "--keep", "none", "--budget", "0", "-o", "out", *words)
        assert ran.code == 0, ran.stderr
        step_us = sum(
            g["step_time_us"] for g in json.loads(Path("out/result.json").read_text())["graphs"]
        )
        (line,) = (text for text in ran.stdout.splitlines() if "tokens/s" in text)
        return float(line.split()[0].replace(",", "")) * step_us / 1e6

    assert rate("--micro-batches", "2") == pytest.approx(2 * rate(), rel=0.01)
