"""A process group whose size nothing says: every surface names what to do, and takes it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import apsched
from apsched.capture.captured import CapturedGraph
from apsched.capture.fake_world import world
from apsched.compiler.schedule_graph import schedule_graph
from apsched.compiler.settings import Settings
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.problem.build import build_problem
from apsched.writeback.hold_order import hold_order
from tests.conftest import Run
from tests.helpers.graphs.toy_graphs import captured_function, toy_inputs, toy_step

ADVICE = r"size of process group 'mine'.*group_ranks=\{name: ranks\}.*--group-ranks NAME=0-7"
STATED = {"mine": [0, 8]}
FILE = """
class Repro(torch.nn.Module):
    def forward(self, primals_1):
        c = torch.ops._c10d_functional.all_reduce.default(primals_1, 'sum', 'mine')
        w = torch.ops._c10d_functional.wait_tensor.default(c)
        return (w,)

def load_args(reader):
    buf0 = reader.storage(None, 512)
    reader.tensor(buf0, (8, 16), is_leaf=True)
mod = Repro()
"""


@pytest.fixture
def captured() -> Iterator[CapturedGraph]:
    """A graph of two process ranks with an all-reduce on a group that does not run here."""
    with world(2) as running:
        step = toy_step(next(iter(running.group_ranks)), 2, on_path="mine")
        yield captured_function(step, toy_inputs(2, 2, process_rank=0), parameters=2)


def test_optimize_and_the_backend(captured: CapturedGraph) -> None:
    gm = captured.module
    for surface in (apsched.optimize, lambda gm, **more: schedule_graph(gm, Settings(**more))):
        with pytest.raises(apsched.InputError, match=ADVICE):
            surface(gm)
        result = surface(gm, group_ranks=STATED).meta["apsched_result"]
        assert result.round_trip_exact
        assert ("mine", 2) in {(key.group, key.group_size) for key in result.problem.keys}
        with pytest.raises(
            apsched.InputError, match="group_ranks: expected distinct process ranks"
        ):
            surface(gm, group_ranks={"mine": [0, 0]})
    assert apsched.backend(group_ranks=STATED)


def test_export_and_what_holds_the_order(captured: CapturedGraph) -> None:
    model = ClusterCostModel(load_cluster("h100"))
    with pytest.raises(apsched.InputError, match=ADVICE):
        apsched.export_graph(captured, model)
    with pytest.raises(apsched.InputError, match=ADVICE):
        hold_order(captured.module)
    stated = {"mine": (0, 8)}
    dag = apsched.export_graph(captured, model, group_ranks=stated)
    assert dag.graph["group_ranks"] == stated
    assert hold_order(captured.module, group_ranks=stated)


def test_the_graph_goes_before_what_is_stated(captured: CapturedGraph) -> None:
    """Its gathers say 2; ranks of 256 are left out, and change no price."""
    group = next(
        key
        for key in (n.args[2] for n in captured.module.graph.nodes if "all_gather" in str(n.target))
    )
    many = {"mine": (0, 8), group: tuple(range(256))}
    cluster = load_cluster("h100")
    dag = apsched.export_graph(captured, ClusterCostModel(cluster, many), group_ranks=many)
    plain = apsched.export_graph(
        captured, ClusterCostModel(cluster, {"mine": (0, 8)}), group_ranks={"mine": (0, 8)}
    )
    assert dag.graph["group_ranks"] == {"mine": (0, 8)}
    assert build_problem(dag) == build_problem(plain)


def test_solve_knows_which_ranks_share_a_link(captured: CapturedGraph) -> None:
    """Two groups on one node share its links; with one across nodes they do not."""
    cluster = load_cluster("h100")
    ranks = {"mine": (0, 1)}
    dag = apsched.export_graph(
        captured, ClusterCostModel(cluster, ranks), group_ranks=ranks, cluster_name="h100"
    )
    found = [
        apsched.solve(dag, contention="links", budget=0, group_ranks=stated).problem.contention
        for stated in (None, STATED)
    ]
    assert found[0] != found[1]


def test_command_line(run: Run, tmp_path: Path) -> None:
    """A file and a directory of torch's; the advice is followed as it is printed."""
    folder = tmp_path / "model__0_forward_1.0"
    folder.mkdir()
    file = folder / "fx_graph_runnable.py"
    file.write_text(FILE)
    for source in (file, folder):
        refused = run("solve", source, "--budget", "0")
        assert refused.code == 2
        assert re.search(ADVICE, refused.errors[0])
        done = run("solve", source, "--budget", "0", "--group-ranks", "mine=0-7", "-o", "out")
        assert done.code == 0, done.stderr
        assert "is exact to the tick" in done.stdout
    near = run("audit", file, "--group-ranks", "mine=0-1", "--json", "--budget", "0")
    far = run("audit", file, "--group-ranks", "mine=0,8", "--json", "--budget", "0")
    assert near.code == far.code == 0
    assert near.stdout != far.stdout
    for wrong in ("mine", "mine=", "mine=a", "=0-7", "mine=0-7:0", "mine=1,1"):
        assert "--group-ranks: expected" in run("solve", file, "--group-ranks", wrong).errors[0]


def test_options_of_graphs_say_nothing_about_presets(run: Run) -> None:
    for flag, value in (("--group-ranks", "0=0-7"), ("--import", "my_ops")):
        refused = run("solve", "llama3-debug", flag, value)
        assert refused.code == 2
        assert f"{flag} is about graphs that torch wrote and functions" in refused.errors[0]
    assert (
        "--import: expected the name of a module" in run("solve", "x", "--import", "a b").errors[0]
    )
