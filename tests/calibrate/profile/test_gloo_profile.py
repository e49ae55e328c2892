"""A real job of two gloo processes, profiled and measured: what must hold however busy the machine
is.

How well costs foretell steps that they were not made of is measured by ``python -m
benchmarks.calibration``, not here: it takes a machine that does nothing else.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apsched.artifacts.solved_run import load_run
from apsched.calibrate.profile.messages import KIND_OF_NAME
from apsched.calibrate.profile.predict import predicted
from apsched.calibrate.profile.profile import profile_costs
from apsched.calibrate.profile.trace import load_trace
from apsched.costs.clusters.cluster import load_cluster
from apsched.graph.graph_file import load_graph
from apsched.kinds import NodeKind
from apsched.report.trace import FIRST_GROUP_STREAM, FIRST_PROCESS
from apsched.report.trace import trace as trace_of
from apsched.units import TICKS_PER_US
from tests.conftest import Run
from tests.helpers.perfetto_engine import loaded, needs_engine, tick_read
from tests.helpers.processes import WORKERS, run_processes

pytestmark = pytest.mark.ranks

CPU = load_cluster("cpu")
WORLD_SIZE = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return the files of the job; one start of two processes."""
    folder = tmp_path_factory.mktemp("gloo")
    run_processes(WORKERS / "ranks/gloo_worker.py", folder, WORLD_SIZE, timeout_s=300)
    return folder


@pytest.fixture(scope="module")
def dags(folder):
    return [load_graph(folder / f"step.{name}.graph") for name in ("forward", "backward")]


@pytest.fixture(scope="module")
def traces(folder):
    return [load_trace(folder / f"trace.{rank}.json") for rank in range(WORLD_SIZE)]


@pytest.fixture(scope="module")
def reports(folder):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


def test_every_node_and_every_transfer_is_found(dags, traces):
    profile = profile_costs(dags, traces, CPU, "cpu")
    assert profile.costs.device == "cpu"
    assert profile.missing == ()
    assert profile.num_matched == profile.num_nodes > 250
    assert profile.num_steps == 16
    assert sum(entry.share for entry in profile.unmatched) < 0.5
    sizes = {
        (r.collective.kind, r.collective.size_bytes)
        for dag in dags
        for r in (dag.nodes[rank]["record"] for rank in range(dag.number_of_nodes()))
        if r.kind is NodeKind.START
    }
    assert {(t.kind, size) for t in profile.costs.transfers for size, _ in t.points} == sizes
    assert {(t.num_ranks, t.num_nodes) for t in profile.costs.transfers} == {(2, 1)}
    assert set(profile.costs.launch_us) == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("step", range(3))
def test_the_costs_of_a_step_add_up_to_that_step(dags, traces, step):
    """Every moment belongs to somebody, so what one step of one process rank says gives the time of
    that step again.
    """
    for trace in traces:
        profile = profile_costs(
            dags, [replace(trace, steps=trace.steps[step : step + 1])], CPU, "cpu"
        )
        prediction = predicted(dags, profile.costs, CPU)
        (group,) = profile.transfer_us
        # to the nanosecond that ticks are, a few hundred times
        assert prediction.compute_us == pytest.approx(profile.compute_us, abs=2)
        assert profile.step_us == pytest.approx(
            profile.compute_us
            + profile.transfer_us[group]
            + sum(e.share for e in profile.unmatched) * profile.step_us,
            rel=1e-3,
        )
        assert prediction.transfer_us[group] == pytest.approx(profile.transfer_us[group], abs=2)
        # each wait follows its start in the captured order, so nothing overlaps
        assert prediction.step_us == pytest.approx(
            profile.compute_us + profile.transfer_us[group], abs=4
        )


def test_the_command_reads_traces_and_solve_takes_the_costs(folder, run: Run, tmp_path):
    costs = tmp_path / "costs.toml"
    traces = [
        argument
        for rank in range(WORLD_SIZE)
        for argument in ("--trace", str(folder / f"trace.{rank}.json"))
    ]
    ran = run(
        "calibrate", *traces, "--graph", str(folder / "step.graph"), "-o", str(costs), "--json"
    )
    assert ran.code == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert (report["nodes_matched"], report["missing"], report["device"]) == (
        report["nodes"],
        [],
        "cpu",
    )
    assert set(report["streams"]) == {"step", "compute stream", "stream of group 0"}
    ran = run(
        "audit",
        str(folder / "step.graph"),
        "--costs",
        str(costs),
        "--memory-cap",
        "none",
        "--budget",
        "1",
        "--json",
    )
    assert ran.code == 0, ran.stderr
    captured = json.loads(ran.stdout)["audit"]
    assert [graph["graph"]["costs"] for graph in captured] == [{"profile": 1.0}] * 2
    said = sum(graph["step_time_us"] for graph in captured)
    assert said == pytest.approx(
        report["streams"]["step"]["predicted_us"], abs=2
    )  # files keep nanoseconds


def test_the_report_for_people_names_the_file(folder, run: Run, tmp_path):
    costs = tmp_path / "costs.toml"
    ran = run(
        "calibrate",
        "--trace",
        str(folder / "trace.0.json"),
        "--graph",
        str(folder / "step.graph"),
        "-o",
        str(costs),
    )
    assert ran.code == 0, ran.stderr
    assert "compute stream" in ran.stdout
    assert f"costs of cpu in {costs}; use them with --costs {costs}" in ran.stdout


def test_all_process_ranks_agree_on_what_they_measured(reports):
    """Equal costs, byte for byte, and so the same schedule, although each rank measured for
    itself.
    """
    assert reports[0]["costs"] == reports[1]["costs"]
    assert reports[0]["order"] == reports[1]["order"]
    for report in reports:
        assert report["exact"]
        assert report["shares"]["measured"] > 0.99
        assert report["compute_again"] == report["compute"]  # known from before: not measured again


def test_without_a_way_or_with_two_the_command_says_so(run: Run):
    for arguments in ((), ("--trace", "t.json", "--measure")):
        ran = run("calibrate", *arguments, "--graph", "llama3-debug", "-o", "costs.toml")
        assert ran.code == 2
        assert (
            "expected --trace FILE (a profile of a job) or --measure (this device), and not both"
            in ran.stderr
        )


def _events(content: bytes) -> list[dict[str, Any]]:
    return list(json.loads(content)["traceEvents"])


@pytest.mark.parametrize(
    ("name", "matched"), [("solved.0.json", "solved"), ("trace.0.json", "as captured")]
)
def test_a_run_is_laid_beside_the_real_job(run: Run, folder: Path, name: str, matched: str) -> None:
    """Both traces in one: nothing of either is lost or collides, and each graph begins its
    transfers when the job does.

    The job that ran the rewritten graphs has the collectives of the schedules in their order, by
    its own profile; the one that did not, those of the order as captured.
    """
    ran = run("trace", folder / "run", "--beside", folder / name, "-o", "both.json", "--json")
    assert ran.code == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert said["matched"] == matched
    solved = load_run(folder / "run")
    real, ours, both = (
        _events((folder / name).read_bytes()),
        _events(trace_of(solved)),
        _events(Path("both.json").read_bytes()),
    )
    assert both[: len(real)] == real
    assert len(both) == len(real) + len(ours)
    assert not {event["pid"] for event in real} & {event["pid"] for event in ours}
    flows = [
        {(event["cat"], event["id"]) for event in some if event["ph"] in "sf"}
        for some in (real, ours)
    ]
    assert not flows[0] & flows[1]

    (step,) = (event for event in real if event["name"] == f"ProfilerStep#{said['step']}")
    within = [
        e
        for e in real
        if str(e["name"]).startswith("gloo:") and step["ts"] <= e["ts"] < step["ts"] + step["dur"]
    ]
    happened = [
        e for e in sorted(within, key=lambda e: float(e["ts"])) if e["name"] != "gloo:barrier"
    ]
    kinds = [KIND_OF_NAME[e["name"].removeprefix("gloo:")] for e in happened]
    promised, first = [], 0
    for g in range(2):
        pid = FIRST_PROCESS + 2 * g + (matched == "solved")
        sent = [
            e
            for e in both[len(real) :]
            if e["pid"] == pid and e["ph"] == "X" and e["tid"] >= FIRST_GROUP_STREAM
        ]
        assert sent[0]["ts"] == pytest.approx(happened[first]["ts"], abs=0.01)
        promised += [KIND_OF_NAME[e["args"]["Collective name"]] for e in sent]
        first += len(sent)
    on_gloo = {"reduce_scatter": "all_reduce"}  # which gloo runs in its place
    assert kinds == [on_gloo.get(kind, kind) for kind in promised]


@needs_engine
def test_perfetto_reads_a_run_beside_the_real_job(run: Run, folder: Path) -> None:
    """Nothing of the job is lost that its profile alone has, and nothing of the run that its trace
    alone has, arrows included.
    """
    ran = run("trace", folder / "run", "--beside", folder / "solved.0.json", "-o", "both.json")
    assert ran.code == 0, ran.stderr
    assert run("trace", folder / "run", "-o", "ours.json").code == 0
    counts = """
        select count(*) as slices, sum(dur) as busy_ns, sum(depth) as depth,
            (select count(*) from flow) as arrows,
            (select sum(value) from stats where severity in ('error', 'data_loss')) as bad
        from slice join thread_track on slice.track_id = thread_track.id
    """
    found = []
    for path in (folder / "solved.0.json", Path("ours.json"), Path("both.json")):
        with loaded(path) as processor:
            (row,) = processor.query(counts)
            found.append((row.bad, row.depth, row.slices, row.busy_ns, row.arrows))
    job, ours, both = found
    assert ours[:2] == (0, 0)  # nothing bad, no slice within another
    assert min(ours[2:]) > 0
    assert both == tuple(of_job + of_ours for of_job, of_ours in zip(job, ours, strict=True))


def test_a_profile_of_something_else_is_said_to_be_one(run: Run, folder: Path) -> None:
    """Other collectives: end to end from the begin of the step, and the answer says so; a step that
    is not there is refused.
    """
    events = [
        e
        for e in _events((folder / "solved.0.json").read_bytes())
        if not str(e["name"]).startswith("gloo:")
    ]
    Path("other.json").write_text(json.dumps(events))
    ran = run("trace", folder / "run", "--beside", "other.json", "-o", "both.json")
    assert ran.code == 0, ran.stderr
    assert "other collectives than this run" in ran.stdout
    (begin,) = (e["ts"] for e in events if e["name"] == "ProfilerStep#2")
    ours = min(
        e["ts"]
        for e in _events(Path("both.json").read_bytes())
        if e["ph"] == "X" and e["pid"] == FIRST_PROCESS
    )
    assert tick_read(ours) == round(
        begin * TICKS_PER_US
    )  # floats themselves may differ: some lie half a tick too high
    ran = run("trace", folder / "run", "--beside", "other.json", "--step", "77")
    assert ran.code == 2
    assert "it has 1, 2" in ran.errors[0]
    Path("none.json").write_text('{"traceEvents": [{"ph": "X", "ts": "soon", "dur": 1}]}')
    ran = run("trace", folder / "run", "--beside", "none.json")
    assert ran.code == 2
    assert "expected events as torch.profiler writes them" in ran.errors[0]
