"""What the benchmarks of a GPU do, on the CPU and at debug size: every schedule runs, and
allocates what was predicted; surfaces of a job train on gloo.
"""

import json
from dataclasses import asdict

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.capture.fake_world import world
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.models.build import build
from apsched.models.preset_capture import capture_built
from benchmarks.device import measure as device
from benchmarks.device import reserve, surfaces
from benchmarks.device.conditions import Conditions
from benchmarks.device.measure import NO_GPU, main, markdown
from benchmarks.device.network import Network, on_network
from benchmarks.device.steps import ALONE, step_times

SMALL = [
    "--device",
    "cpu",
    "--preset",
    "llama3-debug",
    "--mesh",
    "fsdp=8",
    "--seq",
    "32",
    "--cluster",
    "cpu",
    "--budget",
    "0.05",
]


@pytest.fixture(scope="module")
def found() -> dict:
    torch.set_num_threads(1)
    return device.measured(
        "llama3-debug",
        device.MeshSpec.parse("fsdp=8"),
        32,
        cluster="cpu",
        budget=0.05,
        device=torch.device("cpu"),
    )


def test_every_schedule_allocates_what_was_predicted(found):
    names = {
        "as_captured",
        "transformer_block",
        "greedy_bytes",
        "greedy_bytes_span",
        "torch",
        "apsched",
    }
    assert {(row["schedule"], row["graph"]) for row in found["peaks"]} == {
        (n, g) for n in names for g in ("forward", "backward")
    }
    for row in found["peaks"]:
        assert row["predicted_bytes"] == row["measured_bytes"] > 0, row


def test_operators_and_copies_of_buckets_are_timed(found):
    rows = {row["name"]: row for row in found["classes"]}
    assert rows["aten::mm"]["num_nodes"] > 20
    assert sum(name.startswith("bucket: ") for name in rows) >= 2, "copy-in and copy-out"
    assert all(row["measured_us"] > 0 for row in rows.values())
    assert found["launch_us"]["measured"] is None
    text = markdown(found)
    assert all(name in text for name in rows)


def test_every_schedule_has_a_predicted_step(found):
    rows = {(row["schedule"], row["graph"]): row for row in found["steps"]}
    assert {name for name, _ in rows} == {ALONE, *(row["schedule"] for row in found["peaks"])}
    for (name, graph), row in rows.items():
        assert row["replayed_us"] is row["by_host_us"] is None, "no GPU, no time"
        alone = rows[ALONE, graph]["predicted_us"]
        if name == ALONE:
            assert row["predicted_us"] == row["compute_us"]
        assert row["predicted_us"] >= min(alone, row["compute_us"]), (name, graph)
        if name not in (ALONE, "torch"):  # whose graph has operators that were not timed
            assert row["predicted_us"] >= rows["apsched", graph]["predicted_us"]
        assert f"| {name} | {graph} |" in markdown(found)


def test_no_schedule_is_predicted_to_be_faster():
    """Torch's neither: with all operators priced by formulas."""
    with world(8):
        built = build("llama3-debug", mesh=device.MeshSpec.parse("fsdp=8"), seq_len=32)
        capture = capture_built(built)
        formulas = ClusterCostModel(load_cluster("cpu"), capture.group_ranks, fused=False)
        modules = device._schedules(capture, formulas, capture.group_ranks, 0.05, [])
        found = step_times(
            capture.graphs, modules, formulas, capture.group_ranks, torch.device("cpu")
        )
    least = {row.graph: row.predicted_us for row in found if row.schedule == "apsched"}
    others = [row for row in found if row.schedule not in (ALONE, "apsched")]
    assert {"torch", "as_captured"} <= {row.schedule for row in others}
    assert all(row.predicted_us >= least[row.graph] for row in others)


def test_conditions_of_a_step_are_a_table_of_a_gpu(found):
    assert found["conditions"] == [], "a CPU has none"
    one = Conditions(
        graph="forward", alone_us=5e4, cold_us=6e4, busy_us=7e4, cold_and_busy_us=8.5e4
    )
    row = "| forward | 50.00 | 60.00 | 70.00 | 85.00 |"
    assert row in markdown({**found, "conditions": [asdict(one)]})
    assert "cold caches" not in markdown(found)


def test_numbers_are_saved_one_by_one(found, tmp_path, monkeypatch):
    def stopped(*_, save, **__):
        save({"steps": [1]})
        raise KeyboardInterrupt

    monkeypatch.setattr(device, "measured", stopped)
    out = tmp_path / "found.json"
    with pytest.raises(KeyboardInterrupt):
        main([*SMALL, "--out", str(out)])
    assert json.loads(out.read_text()) == {"steps": [1]}


class Recorded(Network):
    """Notes what is launched and waited for."""

    def __init__(self):
        super().__init__(device=torch.device("cpu"))
        self.events = []

    def transfer(self, outputs, group, duration_us):
        self.events.append(("launch", group, duration_us))
        return len(self.events)

    def arrived(self, end):
        self.events.append(("wait", end))


def test_a_wait_waits_for_its_own_launch():
    ops = torch.ops._c10d_functional

    def two(x):
        first = ops.all_gather_into_tensor(x, 2, "0")
        a, b = ops.all_gather_into_tensor_coalesced([x, x + 1], 2, "0")
        return ops.wait_tensor(b) + ops.wait_tensor(first) + ops.wait_tensor(a)

    with world(2):
        graph = make_fx(two, tracing_mode="fake")(torch.ones(2))
        starts = [n.name for n in graph.graph.nodes if "all_gather" in str(n.target)]
        network = Recorded()
        running = on_network(graph, network, {starts[0]: ("dp", 1.5), starts[1]: ("tp", 2.5)})
        assert running(torch.ones(2)).shape == (4,)
    assert network.events == [
        ("launch", "dp", 1.5),
        ("launch", "tp", 2.5),
        ("wait", 2),
        ("wait", 1),
        ("wait", 2),
    ]


@pytest.mark.ranks
def test_surfaces_train_bit_for_bit_on_processes(capsys):
    assert surfaces.main(["--device", "cpu", "--surfaces", "^(fsdp2|ddp)$"]) == 0
    said = capsys.readouterr().out
    assert "| fsdp2 | yes | 0 | 0.0 |" in said
    assert "| ddp | yes | 0 | 0.0 |" in said


@pytest.mark.ranks
def test_a_surface_that_fails_is_named(capsys):
    """A preset has no model on a mesh that does not divide its heads: each process rank stops."""
    found = ["--device", "cpu", "--mesh", "tp=3", "--surfaces", "^ddp$", "--timeout", "120"]
    assert surfaces.main(found) == 1
    said = capsys.readouterr().out
    assert "| all surfaces ran | NO |" in said
    assert "tp must divide the 4 key-value heads" in said or "multiple of tp" in said


def test_surfaces_without_a_gpu_say_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert surfaces.main([]) == 0
    assert capsys.readouterr().out.strip() == NO_GPU


def test_a_peak_that_is_off_is_an_exit_status(found, monkeypatch, capsys):
    monkeypatch.setattr(device, "measured", lambda *_, **__: found)
    assert main([*SMALL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    first, *others = found["peaks"]
    wrong = {
        **found,
        "peaks": [{**first, "measured_bytes": first["measured_bytes"] * 102 // 100}, *others],
    }
    monkeypatch.setattr(device, "measured", lambda *_, **__: wrong)
    assert main(SMALL) == 1


def test_without_a_gpu_it_says_so_and_estimates_nothing(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 0
    assert capsys.readouterr().out.strip() == NO_GPU
    assert main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"skipped": NO_GPU}


def test_a_step_of_each_schedule_runs_for_the_reserve():
    with world(8):
        built = build("llama3-debug", mesh=device.MeshSpec.parse("fsdp=8"), seq_len=32)
        capture = capture_built(built)
        schedules = reserve.schedules(capture, budget=0.05)
        assert set(schedules) == {"as_captured", "fastest", "least memory"}
        for pair in schedules.values():
            step = reserve.GraphStep(capture, pair, torch.device("cpu"))
            step()
            assert len(step.parameters) == len(step.optimizer.state) == 21
            assert all(parameter.grad is None for parameter in step.parameters)


def test_the_least_limit_is_found_between_peak_and_reserved_bytes(monkeypatch):
    """An allocator that needs 7 % more than the tensors."""
    monkeypatch.setattr(reserve, "unlimited", lambda step, device: (1_000_000, 1_200_000))
    monkeypatch.setattr(
        reserve, "runs_within", lambda step, limit_bytes, device: limit_bytes >= 1_070_000
    )
    row = reserve.measured("a step", "default", lambda: None, torch.device("cpu"))
    assert row.peak_bytes == 1_000_000
    assert 1_070_000 <= row.least_bytes <= 1_072_500
    assert 0.065 < row.share < 0.068
    monkeypatch.setattr(reserve, "runs_within", lambda step, limit_bytes, device: True)
    row = reserve.measured("a step", "default", lambda: None, torch.device("cpu"))
    assert (row.least_bytes, row.share) == (1_000_000, 0.0)


def test_without_a_gpu_there_is_no_reserve(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert reserve.main([]) == 0
    assert capsys.readouterr().out.strip() == NO_GPU


def test_a_wrong_case_is_wrong_use(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert reserve.main(["--case", "llama3-8b:fsdp=64"]) == 2
    assert "expected PRESET:MESH:SEQ:LAYERS, found 'llama3-8b:fsdp=64'" in capsys.readouterr().err
