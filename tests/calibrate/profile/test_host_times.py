"""A step of a job on a CPU, by hand: who owns which moment."""

import pytest

from apsched.calibrate.profile.host_times import host_times
from apsched.calibrate.profile.match import Matched, Pair, Place
from apsched.calibrate.profile.trace import HostOp, Trace, Work
from apsched.graph.records import CollectiveRecord, NodeRecord
from apsched.kinds import NodeKind

START, WAIT, COMPUTE = NodeKind.START, NodeKind.WAIT, NodeKind.COMPUTE


def _record(rank: int, kind: NodeKind, wait: int) -> NodeRecord:
    collective = CollectiveRecord(
        kind="all_gather",
        group="dp",
        group_size=2,
        reduce_op="",
        dtype="float32",
        device="cpu",
        input_bytes=4,
        output_bytes=8,
        size_bytes=8,
        wait=wait,
        on_path=False,
        bucketable=True,
        holds_input=True,
        num_members=1,
    )
    return NodeRecord(
        name=f"n{rank}",
        rank=rank,
        op="call_function",
        target="",
        kind=kind,
        duration_us=0.0,
        cost_source="formula",
        allocates=(),
        reads=(),
        writes=(),
        aliases=(),
        frees=(),
        module="",
        direction="forward",
        dtype="float32",
        role="",
        signature="",
        collective=collective if kind is START else None,
    )


def times_of(nodes, transfers=(), others=()):
    """Nodes: kind, begin, end, and of a start the rank of its wait; transfers: rank of the start,
    begin, end; others: begin, end.
    """
    spans = [(begin, end) for _, begin, end, *_ in nodes] + list(others)
    ops = tuple(HostOp("op", "op", begin, end, -1, -1, {}) for begin, end in spans)
    trace = Trace(
        path="", device="cpu", on_gpu=False, steps=(), marked=True, ops=ops, kernels=(), gloo=()
    )
    pairs = tuple(
        Pair(Place(0, _record(k, node[0], node[3] if len(node) > 3 else -1), ""), k)
        for k, node in enumerate(nodes)
    )
    matched = Matched(pairs=pairs, unmatched=tuple(range(len(nodes), len(ops))))
    works = {
        start: Work("gloo:all_gather", begin, end - begin, -1, {})
        for start, begin, end in transfers
    }
    return host_times(trace, matched, works)


def test_an_operator_owns_the_way_to_it():
    """Python and views from 10 to 13 belong to what follows."""
    times = times_of([(COMPUTE, 0, 10), (COMPUTE, 13, 20)])
    assert times.compute_us == {0: 10, 1: 10}
    assert times.graph_us == {0: 20}


def test_work_of_others_belongs_to_nobody():
    times = times_of([(COMPUTE, 0, 10), (COMPUTE, 19, 20)], others=[(12, 17)])
    assert times.compute_us == {0: 10, 1: 5}
    assert times.graph_us == {0: 20}


def test_a_transfer_waited_for_at_once_lasts_until_the_host_goes_on():
    """Launched until 5, transferred from 8 to 30, the host awake at 33."""
    times = times_of([(START, 0, 5, 1), (WAIT, 6, 33), (COMPUTE, 35, 40)], [(0, 8, 30)])
    assert times.compute_us == {0: 5, 2: 7}
    assert times.transfer_us == {0: 28}
    assert times.graph_us == {0: 40}


def test_a_transfer_that_runs_while_its_launch_is_held_up_counts_once():
    """The launch ends at 25, because the transfer (8 to 22) took its core; what follows 22 is the
    host's.
    """
    times = times_of([(START, 0, 25, 1), (WAIT, 26, 28), (COMPUTE, 30, 40)], [(0, 8, 22)])
    assert times.compute_us == {0: 8, 2: 18}
    assert times.transfer_us == {0: 14}
    assert times.graph_us == {0: 40}


@pytest.mark.parametrize(
    ("end_us", "transfer_us", "after_us"), [(18, 12, 15), (26, 24, 5)], ids=["hidden", "exposed"]
)
def test_a_transfer_behind_compute(end_us, transfer_us, after_us):
    """Transferred from 6 on; the wait stands from 25 to 30: it only waits where the transfer ends
    in it.
    """
    times = times_of(
        [(START, 0, 6, 2), (COMPUTE, 6, 20), (WAIT, 25, 30), (COMPUTE, 30, 35)], [(0, 8, end_us)]
    )
    assert times.compute_us == {0: 6, 1: 14, 3: after_us}
    assert times.transfer_us == {0: transfer_us}


def test_transfers_of_a_group_run_one_after_the_other():
    times = times_of(
        [(START, 0, 5, 2), (START, 5, 10, 3), (WAIT, 10, 40), (WAIT, 40, 60)],
        [(0, 6, 38), (1, 12, 58)],
    )
    assert times.transfer_us == {0: 35, 1: 20}
    assert times.graph_us == {0: 60}
