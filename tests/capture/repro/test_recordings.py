"""Directories and logs that torch writes: every graph is found once, pair by pair, with bounds on
what is looked at.
"""

from pathlib import Path

import pytest

from apsched.capture.captured import Capture
from apsched.capture.repro import recordings
from apsched.capture.repro.reader import read_repro
from apsched.capture.repro.recordings import recorded_graphs
from apsched.errors import InputError
from apsched.graph.export.provenance import gradients_returned
from apsched.kinds import NodeKind
from apsched.unpack import LIMIT_VARIABLE
from tests.helpers.graphs.recorded import RUN, debug_directory, trace_log

DATA = Path(__file__).parent / "data"
FORWARD = (DATA / "dtensor_forward.py.txt").read_text()
BACKWARD = (DATA / "dtensor_backward.py.txt").read_text()
WIDER = (
    FORWARD.replace("(8, 128)", "(16, 128)").replace("4096", "8192").replace("[8, 4]", "[16, 4]")
)
SILENT = """
class Repro(torch.nn.Module):
    def forward(self, arg0_1):
        x = torch.ops.my_library.of_an_optimizer.default(arg0_1)
        return (x,)

def load_args(reader):
    reader.symint(3)
mod = Repro()
"""


@pytest.fixture(autouse=True)
def _default_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)


def names(capture: Capture) -> list[list[str]]:
    return [[node.name for node in graph.module.graph.nodes] for graph in capture.graphs]


def alone(*files: str) -> list[list[str]]:
    return [names(read_repro(DATA / f"{file}.py.txt"))[0] for file in files]


def test_debug_directory_is_a_pair(tmp_path: Path) -> None:
    graphs = {"model__0_forward_1.0": FORWARD, "model__0_backward_3.1": BACKWARD}
    debug_directory(tmp_path, graphs)
    for folder in (tmp_path, tmp_path / RUN, tmp_path / "torch_compile_debug"):
        capture = read_repro(folder)
        assert [graph.name for graph in capture.graphs] == ["forward", "backward"]
        assert names(capture) == alone("dtensor_forward", "dtensor_backward")
        assert (capture.group_sizes, capture.notes) == ({"0": 64}, ())


def test_backward_names_the_inputs_that_get_a_gradient() -> None:
    """Its second value is ``None``: that input, the batch, gets none; nor does forward."""
    both = {"forward": "fsdp_forward", "backward": "fsdp_backward"}
    found = {
        name: read_repro(DATA / f"{file}.py.txt").graphs[0].gradient_inputs
        for name, file in both.items()
    }
    assert found == {
        "forward": (),
        "backward": ("primals_1", "primals_3", "primals_4", "primals_5"),
    }
    backward = read_repro(DATA / "fsdp_backward.py.txt").graphs[0]
    output = backward.module.graph.output_node()
    assert gradients_returned(backward, [output], [NodeKind.OUTPUT]) == found["backward"]


def test_trace_log_is_a_pair(tmp_path: Path) -> None:
    """By its directory, by itself, and under the name that tlparse gives it."""
    log = trace_log(
        tmp_path / "dedicated_log_torch_trace_rank_0_x1.log", [(0, FORWARD), (0, BACKWARD)]
    )
    raw = tmp_path / "tlparse" / "raw.log"
    raw.parent.mkdir()
    raw.write_text(log.read_text())
    for source in (log, raw, raw.parent, tmp_path):
        capture = read_repro(source)
        assert [graph.name for graph in capture.graphs] == ["forward", "backward"]
        assert names(capture) == alone("dtensor_forward", "dtensor_backward")


def test_fault_in_a_log_is_named_by_its_line_of_the_log(tmp_path: Path) -> None:
    log = trace_log(tmp_path / "raw.log", [(0, FORWARD.replace("aten.addmm.", "aten.admm.", 1))])
    row = next(k for k, line in enumerate(log.read_text().splitlines(), 1) if "aten.admm" in line)
    with pytest.raises(InputError, match=rf"raw\.log:{row}: .*aten\.admm"):
        read_repro(log)


def test_tlparse_directory(tmp_path: Path) -> None:
    for name, text in (("fx_graph_runnable_7", FORWARD), ("fx_graph_runnable_12", BACKWARD)):
        path = tmp_path / "-_0_0_0" / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        (path.parent / "aot_joint_graph_2.txt").write_text("class GraphModule")
    trace_log(tmp_path / "raw.log", [(0, FORWARD), (0, BACKWARD)])
    capture = read_repro(tmp_path)
    assert [graph.name for graph in capture.graphs] == ["forward", "backward"]
    assert names(read_repro(path)) == alone("dtensor_backward")


def test_several_compilations_are_numbered_in_their_order(tmp_path: Path) -> None:
    """Equal ones once; those without a collective left out, whatever operators they have."""
    graphs = {
        "model__10_forward_11.10": WIDER,
        "model__2_forward_3.2": FORWARD,
        "model__2_backward_4.11": BACKWARD,
        "model__3_forward_5.3": FORWARD,
        "model__3_backward_6.12": BACKWARD,
        "model__4_inference_0.4": SILENT,
    }
    debug_directory(tmp_path, graphs)
    capture = read_repro(tmp_path)
    found = [graph.name for graph in capture.graphs]
    assert found == ["forward-1", "backward-1", "forward-2"]
    left_out, *places = capture.notes
    assert left_out == "left out, without a collective: 1 graphs"
    assert [place.split(":")[0] for place in places] == found
    assert "model__10_forward_11.10" in places[2]


def test_compilations_of_one_log_are_told_apart(tmp_path: Path) -> None:
    log = trace_log(tmp_path / "raw.log", [(0, FORWARD), (1, WIDER), (0, BACKWARD), (2, SILENT)])
    capture = read_repro(log.parent)
    assert "of_an_optimizer" not in str(names(capture))
    assert [graph.name for graph in capture.graphs] == ["forward-1", "backward-1", "forward-2"]


def test_a_function_that_was_compiled_again_is_noted(tmp_path: Path) -> None:
    """For other shapes only one of both runs in a step; equal ones count once."""
    log = tmp_path / "raw.log"
    trace_log(log, [((0, 0), FORWARD), ((0, 0), BACKWARD), ((0, 1), FORWARD)])
    assert recorded_graphs(log).notes == ()
    trace_log(log, [((0, 0), FORWARD), ((0, 0), BACKWARD), ((0, 1), WIDER)])
    (note,) = recorded_graphs(log).notes
    assert note.startswith("1 compilation is of a function compiled before")
    for name, text in (("-_0_0_0", FORWARD), ("-_0_1_0", WIDER), ("-_1_0_0", SILENT)):
        path = tmp_path / "parsed" / name / "fx_graph_runnable_7.txt"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert recorded_graphs(tmp_path / "parsed").notes[-1] == note
    assert recorded_graphs(tmp_path / "parsed" / "-_0_1_0").notes == ()


def test_graphs_made_outside_of_torch_compile_are_noted(tmp_path: Path) -> None:
    """A module of AutoParallel runs such graphs, and its trace has them twice."""
    log, outside = tmp_path / "raw.log", (None, None)
    trace_log(log, [(outside, FORWARD), (outside, BACKWARD)])
    assert recorded_graphs(log).notes == ()
    trace_log(log, [(outside, FORWARD), (outside, BACKWARD), (0, WIDER)])
    (note,) = recorded_graphs(log).notes
    assert note.startswith("2 of 3 graphs were made outside of torch.compile")


def test_graphs_of_one_process_rank_and_of_the_newest_run(tmp_path: Path) -> None:
    for rank, text in ((3, WIDER), (1, FORWARD), (2, WIDER)):
        trace_log(tmp_path / f"dedicated_log_torch_trace_rank_{rank}_y.log", [(0, text)])
    found = recorded_graphs(tmp_path)
    assert found.notes == ("graphs of process rank 1; 2 others wrote here, too",)
    assert [graph.text for graph in found.graphs] == [FORWARD]
    runs = tmp_path / "runs"
    debug_directory(runs, {"model__0_forward_1.0": FORWARD})
    debug_directory(runs, {"model__0_forward_1.0": WIDER}, RUN.replace("2026_01", "2026_02"))
    found = recorded_graphs(runs)
    assert [graph.text for graph in found.graphs] == [WIDER]
    assert "1 other run is here" in found.notes[0]


def test_logs_of_two_runs_in_one_directory_are_noted(tmp_path: Path) -> None:
    """A job traced twice without a change counts once; a changed one counts in addition."""
    name = "dedicated_log_torch_trace_rank_0_{}.log"
    trace_log(tmp_path / name.format("a"), [(0, FORWARD)])
    second = tmp_path / name.format("b")
    trace_log(second, [(0, FORWARD)])
    assert recorded_graphs(tmp_path).notes == ()
    trace_log(second, [(0, WIDER)])
    found = recorded_graphs(tmp_path)
    assert len(found.graphs) == 2
    assert found.notes == (
        "graphs of 2 logs, each of another run or process, count as one step; for one of them hand"
        f" in its log, such as {second}",
    )


def test_debug_directories_of_several_ranks(tmp_path: Path) -> None:
    """TORCH_COMPILE_DEBUG=1 writes a run for each process rank, and a trace of each rank beside
    the runs. The graphs of ranks may differ (each takes its own part of a gradient), and so do
    those of an older run: the run of the lowest rank is taken by the process of its log.
    """
    older, own, other = "2026_01_02_03_04_05_1-pid_5", "2026_02_02-pid_6", "2026_02_03-pid_7"
    logs = tmp_path / "torch_compile_debug" / "tlparse"
    second = FORWARD.replace("4096", "8192")
    for run, rank, process, text in (
        (older, 0, 5, WIDER),
        (own, 0, 6, FORWARD),
        (other, 1, 7, second),
    ):
        graphs = {"model__0_forward_1.0": text}
        debug_directory(tmp_path, graphs, f"torch_compile_debug/run_{run}")
        log = logs / f"dedicated_log_torch_trace_rank_{rank}_{process}.log"
        trace_log(log, [(0, text)], process=process)
    found = recorded_graphs(tmp_path)
    assert [graph.text for graph in found.graphs] == [FORWARD]
    assert found.notes == (
        "graphs of process rank 0; 1 other wrote here, too",
        f"graphs of run_{own}; 2 other runs are here",
    )


def test_a_rank_without_graphs_names_the_log_of_another(tmp_path: Path) -> None:
    (tmp_path / "dedicated_log_torch_trace_rank_0_a.log").write_text("")
    other = tmp_path / "dedicated_log_torch_trace_rank_1_b.log"
    trace_log(other, [(0, FORWARD)])
    with pytest.raises(InputError, match="found none in the files of the lowest") as raised:
        recorded_graphs(tmp_path)
    assert str(raised.value).endswith(f"such as {other}")


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    debug_directory(tmp_path / "elsewhere", {"model__0_forward_1.0": FORWARD})
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "up").symlink_to(tmp_path / "elsewhere")
    (folder / "fx_graph_runnable.py").symlink_to(DATA / "dtensor_forward.py.txt")
    with pytest.raises(InputError, match="expected graphs that torch wrote, found none"):
        read_repro(folder)


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    debug_directory(tmp_path, {"model__0_forward_1.0": FORWARD, "model__1_forward_2.1": WIDER})
    monkeypatch.setattr(recordings, "MAX_GRAPHS", 1)
    with pytest.raises(InputError, match=r"at most 1 graphs, found 2; hand in one of its files"):
        read_repro(tmp_path)
    monkeypatch.setattr(recordings, "MAX_ENTRIES", 5)
    with pytest.raises(InputError, match="at most 5 files and directories, found more"):
        read_repro(tmp_path)
    monkeypatch.undo()
    monkeypatch.setenv(LIMIT_VARIABLE, str(len(FORWARD) + 100))
    with pytest.raises(InputError, match=r"graphs of at most \d+ bytes together"):
        read_repro(tmp_path)
    monkeypatch.setenv(LIMIT_VARIABLE, "100")
    with pytest.raises(InputError, match=r"fx_graph_runnable\.py: expected at most 100 bytes"):
        read_repro(tmp_path)


def test_one_name_of_groups_of_two_sizes_is_refused(tmp_path: Path) -> None:
    other = WIDER.replace("'size': 64", "'size': 32")
    debug_directory(tmp_path, {"model__0_forward_1.0": FORWARD, "model__1_forward_3.1": other})
    with pytest.raises(InputError, match=r"expected process group '0' to have 64 .*found 32"):
        read_repro(tmp_path)


def test_that_no_graph_has_a_collective_is_noted(tmp_path: Path) -> None:
    debug_directory(tmp_path, {"model__0_backward_3.1": BACKWARD})
    (note,) = read_repro(tmp_path).notes
    assert note.startswith("no graph has a collective, so that nothing can be scheduled")


def test_an_answer_of_apsched_is_no_graph_of_torch(tmp_path: Path) -> None:
    (tmp_path / "forward.graph").write_text("{}")
    with pytest.raises(
        InputError, match=r"a graph file of this directory, such as .*/forward\.graph"
    ):
        recorded_graphs(tmp_path)
