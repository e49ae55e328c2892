"""A profile of a job with NCCL: every node finds its kernels, every message its size and group, and
what is left is listed.
"""

import io
import json
from dataclasses import replace

import pytest

from apsched.calibrate.profile.messages import Message, is_nccl, message_of
from apsched.calibrate.profile.predict import predicted
from apsched.calibrate.profile.profile import profile_costs
from apsched.calibrate.profile.trace import Work, load_trace
from apsched.capture.fake_world import world
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.errors import InputError
from apsched.graph.export.export import export_graph
from apsched.kinds import NodeKind
from apsched.models.mesh import MeshSpec
from apsched.models.preset_capture import capture_preset
from apsched.report.calibration import print_profile
from tests.helpers.graphs.kineto import KinetoTrace, run_node

H100 = load_cluster("h100")
RANKS = 16  # two nodes


def price_us(record):
    """Times that no formula gives: a message of S bytes takes 20 us + S / 100 bytes per us, an
    operator as long as its name.
    """
    if record.collective is not None:
        return 20 + record.collective.size_bytes / 100
    return len(record.operation) + len(record.operation.partition("(")[0]) / 8


@pytest.fixture(scope="module")
def dags():
    with world(RANKS):
        capture = capture_preset("llama3-debug", mesh=MeshSpec.parse(f"fsdp={RANKS}"), seq_len=64)
        costs = ClusterCostModel(H100, capture.group_ranks)
        return [
            export_graph(graph, costs, group_ranks=capture.group_ranks, cluster_name="h100")
            for graph in capture.graphs
        ]


def records_of(dags):
    return [dag.nodes[rank]["record"] for dag in dags for rank in range(dag.number_of_nodes())]


def traced(
    dags,
    *,
    num_steps=3,
    skip=lambda record: False,
    slow_step=-1,
    extra=(),
    metadata_on_kernels=True,
    ranks=RANKS,
):
    trace = KinetoTrace(metadata_on_kernels=metadata_on_kernels)

    def step(number):
        for record in records_of(dags):
            if not skip(record):
                run_node(
                    trace,
                    record,
                    lambda r: price_us(r) * (10 if number == slow_step else 1),
                    list(range(ranks)),
                )
        for kernel, duration_us in extra:
            trace.operator(
                "aten::_foreach_add_",
                [[[64], [64]]],
                ["TensorList"],
                [(kernel, duration_us, 7, {})],
            )

    for number in range(num_steps):
        trace.step(number, lambda number=number: step(number))
    return trace


@pytest.mark.parametrize("metadata_on_kernels", [True, False], ids=["on kernels", "on operators"])
def test_every_node_finds_its_kernels_and_every_message_its_size(
    dags, tmp_path, metadata_on_kernels
):
    trace = load_trace(
        traced(dags, metadata_on_kernels=metadata_on_kernels).save(tmp_path / "t.json")
    )
    profile = profile_costs(dags, [trace], H100, "h100")
    assert (profile.num_matched, profile.missing, profile.unmatched) == (profile.num_nodes, (), ())
    assert profile.costs.device == "NVIDIA H100 80GB HBM3"
    for record in records_of(dags):
        if record.kind is NodeKind.COMPUTE:
            assert profile.costs.compute[record.operation].time_us == pytest.approx(
                price_us(record)
            )
    assert {(t.kind, t.num_ranks, t.num_nodes) for t in profile.costs.transfers} == {
        ("all_gather", 16, 2),
        ("reduce_scatter", 16, 2),
    }
    for transfers in profile.costs.transfers:
        assert transfers.bytes_per_us == pytest.approx(100)
        for size_bytes, time_us in transfers.points:
            assert time_us == pytest.approx(20 + size_bytes / 100)
    sizes = {
        (r.collective.kind, r.collective.size_bytes)
        for r in records_of(dags)
        if r.collective is not None
    }
    assert {(t.kind, size) for t in profile.costs.transfers for size, _ in t.points} == sizes


def test_what_was_predicted_is_what_was_profiled(dags, tmp_path):
    profile = profile_costs(
        dags, [load_trace(traced(dags).save(tmp_path / "t.json"))], H100, "h100"
    )
    prediction = predicted(dags, profile.costs, H100)
    compute = sum(price_us(r) for r in records_of(dags) if r.kind is NodeKind.COMPUTE)
    launches = sum(r.duration_us for r in records_of(dags) if r.kind is NodeKind.START)
    assert profile.compute_us == pytest.approx(compute)
    assert prediction.compute_us == pytest.approx(
        compute + launches, rel=1e-4
    )  # launches have no kernels, the cluster's price stays
    (group,) = profile.transfer_us
    assert prediction.transfer_us[group] == pytest.approx(
        profile.transfer_us[group], rel=0.01
    )  # tables are drawn on logarithmic axes
    assert prediction.unpriced_us == 0


def test_what_is_not_matched_is_listed_with_its_share(dags, tmp_path):
    gone = next(
        r.operation
        for r in records_of(dags)
        if r.kind is NodeKind.COMPUTE and r.operation.startswith("aten::mm(")
    )
    num_gone = sum(r.operation == gone for r in records_of(dags))
    trace = traced(
        dags,
        skip=lambda r: r.operation == gone,
        extra=[("adam_kernel", 5000.0), ("clip_kernel", 10.0)],
    )
    profile = profile_costs(dags, [load_trace(trace.save(tmp_path / "t.json"))], H100, "h100")
    assert profile.missing == ((gone, num_gone),)
    assert gone not in profile.costs.compute
    assert [entry.name for entry in profile.unmatched] == ["adam_kernel", "clip_kernel"]
    assert profile.unmatched[0].share == pytest.approx(5000 / profile.step_us)
    assert predicted(dags, profile.costs, H100).unpriced_us > 0


def test_a_disturbed_step_counts_for_nothing(dags, tmp_path):
    quiet = profile_costs(
        dags, [load_trace(traced(dags, num_steps=4).save(tmp_path / "a.json"))], H100, "h100"
    )
    noisy = profile_costs(
        dags,
        [load_trace(traced(dags, num_steps=4, slow_step=2).save(tmp_path / "b.json"))],
        H100,
        "h100",
    )
    assert (noisy.num_steps, noisy.num_used) == (4, 2)
    assert noisy.costs.compute.keys() == quiet.costs.compute.keys()
    for operation, price in quiet.costs.compute.items():
        assert noisy.costs.compute[operation].time_us == pytest.approx(price.time_us)


def test_backward_on_a_thread_of_its_own_and_operators_inside_others(dags, tmp_path):
    """Eager jobs: aten::linear calls the aten::mm of the graph; autograd runs on another thread."""
    trace = traced(dags, num_steps=1)
    ops = [e for e in trace.events if e["cat"] == "cpu_op"]
    for event in ops[len(ops) // 2 :]:
        event["tid"] = 9999
    for event in [e for e in ops if e["name"] == "aten::mm"]:
        outer = {
            "ts": event["ts"] - 0.5,
            "dur": event["dur"] + 1,
            "name": "aten::linear",
            "args": {"External id": 10**6},
        }
        trace.events.append(event | outer)
    profile = profile_costs(dags, [load_trace(trace.save(tmp_path / "t.json"))], H100, "h100")
    assert (profile.num_matched, profile.missing, profile.unmatched) == (profile.num_nodes, (), ())


def test_the_launch_of_an_all_reduce_has_the_price_of_its_copy(tmp_path):
    """A functional all-reduce copies its input on the compute stream first: that belongs to the
    start node.
    """
    with world(2):
        capture = capture_preset(
            "llama3-debug", mesh=MeshSpec.parse("replicate=2"), seq_len=64, num_layers=1
        )
        costs = ClusterCostModel(H100, capture.group_ranks)
        dags = [
            export_graph(graph, costs, group_ranks=capture.group_ranks, cluster_name="h100")
            for graph in capture.graphs
        ]
    starts = [r for r in records_of(dags) if r.kind is NodeKind.START]
    assert starts
    profile = profile_costs(
        dags, [load_trace(traced(dags, ranks=2).save(tmp_path / "t.json"))], H100, "h100"
    )
    for record in starts:
        assert profile.costs.compute[record.operation].time_us == pytest.approx(
            3.5 + H100.launch_us
        )


def test_waiting_for_late_ranks_is_told_where_all_ranks_were_profiled(dags, tmp_path):
    """The second rank comes 50 us late to everything: the first one waits, its transfers take 50 us
    longer.
    """
    paths = [traced(dags).save(tmp_path / "late.json"), tmp_path / "early.json"]
    waiting = traced(dags)
    for event in waiting.events:
        if event["cat"] == "kernel" and event["name"].startswith("nccl"):
            event["dur"] += 50
    waiting.save(paths[1])
    profile = profile_costs(dags, [load_trace(path) for path in paths], H100, "h100")
    alone = profile_costs(dags, [load_trace(paths[0])], H100, "h100")
    num_starts = sum(r.kind is NodeKind.START for r in records_of(dags))
    (group,) = profile.transfer_us
    assert profile.late_share == pytest.approx(
        25 * num_starts / (alone.transfer_us[group] + 25 * num_starts)
    )
    assert alone.late_share is None


def test_a_host_that_launches_late_leaves_the_device_idle(dags, tmp_path):
    """The last kernel of the trace begins 100 ms later."""
    busy = traced(dags)
    late = traced(dags)
    by_step = max(e["ts"] for e in late.events if e["cat"] == "kernel")
    for event in late.events:
        if event["cat"] == "kernel" and event["ts"] == by_step:
            event["ts"] += 100_000
    found, idle = (
        profile_costs(dags, [load_trace(t.save(tmp_path / "t.json"))], H100, "h100")
        for t in (busy, late)
    )
    assert found.idle_us is not None
    assert idle.idle_us is not None
    assert idle.idle_us > 10_000 + found.idle_us
    out = io.StringIO()
    print_profile(idle, predicted(dags, idle.costs, H100), "c.toml", out, as_json=False)
    share = 100 * idle.idle_us / idle.step_us
    assert f"the device is idle for {share:.1f} % of the measured step" in " ".join(
        out.getvalue().split()
    )


def test_the_same_steps_of_one_process_rank_are_refused(dags, tmp_path):
    trace = load_trace(traced(dags).save(tmp_path / "t.json"))
    with pytest.raises(InputError, match=r"found the same file: .*t\.json and .*t\.json"):
        profile_costs(dags, [trace, trace], H100, "h100")
    copies = [replace(trace, path=name, rank=1) for name in ("a", "b")]
    with pytest.raises(InputError, match="found the same steps of process rank 1 twice: a and b"):
        profile_costs(dags, copies, H100, "h100")
    assert profile_costs(dags, [copies[0], replace(copies[1], rank=0)], H100, "h100").num_steps == 6
    later = traced(dags)
    for event in later.events:
        if "ts" in event:
            event["ts"] += 1e9
    others = replace(load_trace(later.save(tmp_path / "later.json")), rank=1)
    found = profile_costs(dags, [copies[0], others], H100, "h100")
    assert found.num_steps == 6, "other steps of the same process rank"


def test_collectives_of_an_eager_job_are_known_by_their_messages(dags, tmp_path):
    """c10d's own operators instead of functional ones: no start node is matched, its message is."""
    trace = traced(dags)
    for event in trace.events:
        if event["name"].startswith("_c10d_functional::"):
            event["name"] = "c10d::" + event["name"].partition("::")[2]
    profile = profile_costs(dags, [load_trace(trace.save(tmp_path / "t.json"))], H100, "h100")
    assert profile.missing == ()
    assert {(t.kind, t.num_ranks, t.num_nodes) for t in profile.costs.transfers} == {
        ("all_gather", 16, 2),
        ("reduce_scatter", 16, 2),
    }


def test_other_collectives_than_those_of_the_graph_are_counted(dags, tmp_path):
    trace = traced(dags, num_steps=2)
    profile = profile_costs(dags, [load_trace(trace.save(tmp_path / "t.json"))], H100, "h100")
    assert profile.other_collectives == ()
    num = sum(
        r.kind is NodeKind.START and r.collective.kind == "all_gather" for r in records_of(dags)
    )
    gathers = [
        e
        for e in trace.events
        if e["cat"] == "kernel" and e["args"].get("Collective name") == "_allgather_base"
    ]
    for event in gathers[:: len(gathers) // 2]:  # one of each step
        trace.events.remove(event)
    profile = profile_costs(dags, [load_trace(trace.save(tmp_path / "t.json"))], H100, "h100")
    assert profile.other_collectives == (("all_gather", num - 1, num),)


def test_kernels_that_no_operator_launched_are_listed(dags, tmp_path):
    trace = traced(dags, num_steps=1)
    kernel = next(e for e in trace.events if e["cat"] == "kernel")
    trace.events.append(
        kernel | {"name": "triton_poi_fused_0", "dur": 77.0, "args": {"device": 0, "stream": 7}}
    )
    profile = profile_costs(dags, [load_trace(trace.save(tmp_path / "t.json"))], H100, "h100")
    assert [entry.name for entry in profile.unmatched] == ["triton_poi_fused_0"]
    assert profile.unmatched[0].share == pytest.approx(77 / profile.step_us)


def _nccl(**args):
    said = {
        "Collective name": "_allgather_base",
        "In msg nelems": 100,
        "Out msg nelems": 6400,
        "Group size": 64,
        "dtype": "BFloat16",
    }
    return Work(
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        0.0,
        1.0,
        1,
        {**said, **args},
    )


@pytest.mark.parametrize(
    ("args", "kind", "size_bytes", "ranks"),
    [
        ({}, "all_gather", 12_800, range(64)),
        (
            {"Process Group Ranks": "[0, 8, 16, 24, ...]"},
            "all_gather",
            12_800,
            range(0, 512, 8),
        ),  # cut off where long
        ({"Process Group Ranks": [5, 7], "Group size": 2}, "all_gather", 12_800, (5, 7)),
        (
            {"Collective name": "_reduce_scatter_base", "dtype": "Float"},
            "reduce_scatter",
            400,
            range(64),
        ),
        ({"Collective name": "reduce_scatter_tensor_coalesced"}, "reduce_scatter", 200, range(64)),
        ({"Collective name": "allreduce", "dtype": "Double"}, "all_reduce", 800, range(64)),
        ({"Collective name": "all_to_allv"}, "all_to_all", 200, range(64)),
        ({"Collective name": "allgather_into_tensor_coalesced"}, "all_gather", 12_800, range(64)),
    ],
)
def test_messages_count_bytes_once(args, kind, size_bytes, ranks):
    kernel = _nccl(**args)
    assert is_nccl(kernel)
    assert message_of(kernel, None) == Message(kind=kind, size_bytes=size_bytes, ranks=tuple(ranks))


@pytest.mark.parametrize(
    "args",
    [
        {"Collective name": "send"},
        {"dtype": "QInt8"},
        {"In msg nelems": 0, "Out msg nelems": 0},
        {"Group size": None},
    ],
)
def test_messages_that_say_too_little_are_left_out(args):
    assert message_of(_nccl(**args), None) is None


def test_a_trace_of_something_else_is_refused(dags, tmp_path):
    trace = KinetoTrace()
    trace.step(0, lambda: trace.operator("aten::relu", [[3]], ["float"], [("relu", 1.0, 7, {})]))
    with pytest.raises(
        InputError,
        match=(
            r"other\.json: none of the \d+ nodes of the graph is in it; is it a trace of this model"
        ),
    ):
        profile_costs(dags, [load_trace(trace.save(tmp_path / "other.json"))], H100, "h100")


def test_steps_must_be_marked(dags, tmp_path):
    trace = traced(dags, num_steps=2)
    trace.events = [e for e in trace.events if not e["name"].startswith("ProfilerStep")]
    with pytest.raises(
        InputError, match=r"the graph is in it 2 times, but no steps are marked; .* call prof.step"
    ):
        profile_costs(dags, [load_trace(trace.save(tmp_path / "t.json"))], H100, "h100")
    alone = traced(dags, num_steps=1)
    alone.events = [e for e in alone.events if not e["name"].startswith("ProfilerStep")]
    assert (
        profile_costs(dags, [load_trace(alone.save(tmp_path / "one.json"))], H100, "h100").missing
        == ()
    )


def test_traces_of_several_devices_are_refused(dags, tmp_path):
    trace = traced(dags, num_steps=1)
    traces = [
        load_trace(trace.save(tmp_path / f"{name}.json", device=name)) for name in ("A100", "H100")
    ]
    with pytest.raises(
        InputError, match="traces must come from one kind of device; found A100, H100"
    ):
        profile_costs(dags, traces, H100, "h100")


def test_a_graph_file_of_an_older_version_is_refused(dags, tmp_path):
    trace = load_trace(traced(dags, num_steps=1).save(tmp_path / "t.json"))
    old = dags[0].copy()
    for rank in range(old.number_of_nodes()):
        old.nodes[rank]["record"] = replace(old.nodes[rank]["record"], operation="")
    with pytest.raises(InputError, match="format 5 has"):
        profile_costs([old], [trace], H100, "h100")


BROKEN = {
    "nothing": ("", r"t\.json: expected a Chrome trace \(JSON\)"),
    "a number": ("3", "expected a Chrome trace, found int"),
    "no events": ("{}", "with traceEvents"),
    "no operators": ('{"traceEvents": []}', "no operators in it"),
    "no shapes": (
        json.dumps(
            {
                "traceEvents": [
                    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1, "args": {}}
                ]
            }
        ),
        "record_shapes=True",
    ),
    "cut off": (None, "broken or cut off"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_with_a_trace_is_said(tmp_path, name):
    text, message = BROKEN[name]
    path = tmp_path / "t.json"
    path.write_bytes(b"\x1f\x8b\x08\x00" if text is None else text.encode())
    with pytest.raises(InputError, match=message):
        load_trace(path)
