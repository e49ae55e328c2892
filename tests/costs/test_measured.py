"""Measured costs: the file, the median over process ranks, and the cost model."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apsched.costs.checked import checked
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.costs.measured import (
    MeasuredCosts,
    Price,
    Transfers,
    completed,
    fitted_bytes_per_us,
    merged,
    rising,
)
from apsched.costs.measured_file import dump_costs, load_costs
from apsched.costs.measured_model import MeasuredCostModel, load_cost_model
from apsched.costs.model import CostModel, measured_bytes
from apsched.costs.network.table import load_table
from apsched.errors import InputError

CPU = load_cluster("cpu")
ADD = "aten::add(float32[4]) -> float32[4]"
MM = 'aten::mm(float32[2,2], float32[2,2]{1,2}) -> "quoted\\'
COSTS = MeasuredCosts(
    device="a device",
    cluster="cpu",
    compute={
        ADD: Price(time_us=3.25, source="profile"),
        MM: Price(time_us=100.0, source="measured"),
    },
    transfers=(
        Transfers(
            kind="all_gather",
            num_ranks=4,
            num_nodes=1,
            source="profile",
            points=((1000, 10.0), (2000, 12.0)),
            bytes_per_us=500.0,
        ),
        Transfers(
            kind="all_reduce", num_ranks=4, num_nodes=2, source="measured", points=((512, 7.125),)
        ),
    ),
    launch_us={"all_gather": 48.1},
    copies=((1024, 1.5), (4096, 3.0)),
)


def _add(size: int = 4) -> torch.fx.Node:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(size)
    node = graph.call_function(torch.ops.aten.add.Tensor, (x, 1))
    node.meta["val"] = torch.empty(size)
    return node


def test_the_file_comes_back_as_it_was(tmp_path):
    path = tmp_path / "costs.toml"
    path.write_bytes(dump_costs(COSTS))
    assert load_costs(path) == COSTS
    assert dump_costs(load_costs(path)) == path.read_bytes()
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # a byte order mark
    assert load_costs(path) == COSTS


@given(st.floats(0, 1e9, allow_nan=False))
def test_a_time_is_kept_to_the_nanosecond(tmp_path_factory, time_us):
    path = tmp_path_factory.mktemp("costs") / "costs.toml"
    path.write_bytes(
        dump_costs(
            MeasuredCosts(
                device="", cluster="cpu", compute={"f()": Price(time_us=time_us, source="profile")}
            )
        )
    )
    assert load_costs(path).compute["f()"].time_us == pytest.approx(time_us, abs=5.1e-4)


TRANSFERS = '{good}\n[[transfers]]\nkind = "all_gather"\nranks = 1\nnodes = 1\nsource = "profile"'
BROKEN = {
    'format = "apsched graph"': "expected format = \"apsched costs\", found 'apsched graph'",
    'format = "apsched costs"\nversion = 3': r"written by a newer apsched \(version 3",
    'format = "apsched costs"\nversion = 1\ncluster = "cpu"': (
        "expected device to be a text, found None"
    ),
    "{good}\nbandwidth = 3": "costs: expected the keys format, .*, found bandwidth",
    "{good}\n[compute.guessed]": "compute: expected the keys profile, measured, found guessed",
    '{good}\n[compute.profile]\n"f()" = -1': (
        r"'f\(\)': expected a finite number, 0 or more; found -1"
    ),
    '{good}\n[compute.profile]\n"f()" = 1\n[compute.measured]\n"f()" = 2': (
        r"'f\(\)' has two prices"
    ),
    "{good}\n[launch_us]\nall_gathre = 1": (
        "launch_us: expected a kind among .*, found 'all_gathre'"
    ),
    TRANSFERS.replace("ranks = 1", "ranks = 0")
    + "\npoints = [[1, 1]]": "ranks to be a whole number from 1",
    TRANSFERS + "\npoints = [[2, 1], [1, 1]]": "must increase; found 1 after 2",
    TRANSFERS: "transfers 0: expected points",
    TRANSFERS.replace("nodes = 1", "nodes = 2")
    + "\npoints = [[1, 1]]": "expected at most as many nodes as ranks; found 2 and 1",
    f"{TRANSFERS}\npoints = [[1, 1]]" + TRANSFERS.replace("{good}", "") + "\npoints = [[1, 2]]": (
        "transfers 1: all_gather of 1 ranks on 1 nodes has an entry already; keep one"
    ),
    "{good}\n[launch_us]\nall_gather = 1e16": "expected at most a day, in microseconds; found 1e",
    "{good}\ncopies = [[1, 0]]": "times above 0",
    "{good}\n[launch_us]\nall_gather = 1" + "0" * 400: "expected a finite number, 0 or more",
    "{good}\ncopies = [[1, 1], [1" + "0" * 400 + ", 2]]": "bytes must be a whole number from 1 to",
    TRANSFERS.replace("ranks = 1", "ranks = 1" + "0" * 400)
    + "\npoints = [[1, 1]]": "ranks to be a whole number from 1 to 1048576, found 1",
    **{
        f"{TRANSFERS}\npoints = [[1, 1]]\ngb_per_s = {found}": (
            f"transfers 0: gb_per_s must be in GB/s, .* between 1e-06 and 1e.06; found {found}"
        )
        for found in ("1e-300", "1e-09", "0", "10000000")
    },
    "{good}\n[": "expected TOML as `apsched calibrate` writes it",
}


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_what_is_wrong_with_a_file_is_said(tmp_path, text):
    path = tmp_path / "costs.toml"
    path.write_text(
        text.replace(
            "{good}", 'format = "apsched costs"\nversion = 1\ndevice = "d"\ncluster = "cpu"'
        )
    )
    with pytest.raises(InputError, match=f"costs.toml: .*{BROKEN[text]}"):
        load_costs(path)


def test_a_fitted_bandwidth_can_be_read_again():
    for points in (((1, 1.0), (2, 8e10)), ((1, 1.0), (2**50, 1.0 + 1e-9))):
        transfers = Transfers(
            kind="all_gather",
            num_ranks=4,
            num_nodes=1,
            source="profile",
            points=points,
            bytes_per_us=fitted_bytes_per_us(points),
        )
        costs = MeasuredCosts(device="d", cluster="cpu", transfers=(transfers,))
        assert "gb_per_s = " in dump_costs(costs).decode()
        assert 1e-3 <= transfers.bytes_per_us <= 1e9


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"cannot read the costs .*absent\.toml: No such file"):
        load_costs(tmp_path / "absent.toml")


def test_what_was_measured_goes_first_then_the_formulas():
    groups = {"dp": range(4), "far": (0, 1, 8, 9)}
    formulas = ClusterCostModel(CPU, groups)
    model = MeasuredCostModel(COSTS, formulas, groups)
    assert isinstance(model, CostModel)
    assert (model.compute_us(_add(4)), model.cost_source(_add(4))) == (3.25, "profile")
    assert (model.compute_us(_add(5)), model.cost_source(_add(5))) == (
        formulas.compute_us(_add(5)),
        "formula",
    )
    assert model.collective_us("all_gather", "dp", 4, 1000) == 10
    assert model.collective_us("all_gather", "dp", 4, 8000) == pytest.approx(
        12 + 6000 / 500
    )  # by the fitted bandwidth
    assert model.collective_source("all_gather", "dp", 4) == "profile"
    assert model.collective_source("all_reduce", "far", 4) == "measured"
    for kind, group in (
        ("all_gather", "far"),
        ("all_reduce", "dp"),
        ("reduce_scatter", "dp"),
    ):  # groups of another shape, another kind
        assert model.collective_source(kind, group, 4) == "formula"
        assert model.collective_us(kind, group, 4, 1000) == formulas.collective_us(
            kind, group, 4, 1000
        )
        assert model.measured_bytes(kind, group, 4) == ()
    for stated in (model, checked(model)):
        assert {1000, 2000} <= set(measured_bytes(stated, "all_gather", "dp", 4))


def test_between_messages_far_apart_time_is_a_line():
    """And not one on logarithmic axes, as in a table, which would say 28 us for 64 KiB here."""
    transfers = Transfers(
        kind="all_gather",
        num_ranks=4,
        num_nodes=1,
        source="profile",
        points=((4096, 20.0), (2**20, 41.0)),
    )
    model = MeasuredCostModel(
        MeasuredCosts(device="d", cluster="cpu", transfers=(transfers,)), ClusterCostModel(CPU)
    )
    for size_bytes in (4096, 5000, 65536, 300_000, 2**20):
        expected = 20 + 21 * (size_bytes - 4096) / (2**20 - 4096)
        assert model.collective_us("all_gather", "dp", 4, size_bytes) == pytest.approx(
            expected, rel=2e-3
        )


def test_below_the_smallest_message_a_transfer_takes_the_time_of_the_smallest(tmp_path):
    """An upper bound, as `docs/calibration.md` states it, of costs and of tables alike."""
    points = ((4096, 20.0), (8192, 21.0))
    transfers = Transfers(
        kind="all_gather", num_ranks=4, num_nodes=1, source="profile", points=points
    )
    costs = MeasuredCosts(device="d", cluster="cpu", transfers=(transfers,))
    path = tmp_path / "t.csv"
    rows = [f"all_gather,4,{size_bytes},{time_us}\n" for size_bytes, time_us in points]
    path.write_text("kind,group_size,size_bytes,time_us\n" + "".join(rows))
    for model in (
        MeasuredCostModel(costs, ClusterCostModel(CPU)),
        ClusterCostModel(CPU, None, load_table(path)),
    ):
        for size_bytes in (1, 512, 4096):
            assert model.collective_us("all_gather", "dp", 4, size_bytes) == 20.0


def test_a_file_becomes_a_cost_model(tmp_path):
    path = tmp_path / "costs.toml"
    path.write_bytes(dump_costs(COSTS))
    model = load_cost_model(path, {"dp": range(4)})
    assert (
        model.cluster.name,
        model.compute_us(_add(4)),
        model.collective_us("all_gather", "dp", 4, 1000),
    ) == ("cpu", 3.25, 10)
    assert load_cost_model(path, cluster="a100").cluster.name == "a100"


def test_a_table_of_the_users_goes_before_measured_transfers(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("kind,group_size,size_bytes,time_us\nall_gather,4,1000,77\n")
    model = MeasuredCostModel(COSTS, ClusterCostModel(CPU, None, load_table(path)))
    assert (
        model.collective_us("all_gather", "dp", 4, 1000),
        model.collective_source("all_gather", "dp", 4),
    ) == (77, "table")
    assert model.measured_bytes("all_gather", "dp", 4) == (1000,)


def test_launches_and_copies_of_any_size():
    model = MeasuredCostModel(COSTS, ClusterCostModel(CPU))
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2048, dtype=torch.uint8)
    launch = graph.call_function(
        torch.ops._c10d_functional.all_gather_into_tensor.default, (x, 4, "dp")
    )
    launch.meta["val"] = torch.empty(8192, dtype=torch.uint8)
    copy = graph.call_function(torch.ops.aten.clone.default, (x,))
    copy.meta["val"] = torch.empty(2048, dtype=torch.uint8)
    assert (model.compute_us(launch), model.cost_source(launch)) == (48.1, "profile")
    assert (model.compute_us(copy), model.cost_source(copy)) == (2.0, "measured")
    assert [COSTS.copy_us(size) for size in (1, 1024, 4096, 8192)] == [1.5, 1.5, 3.0, 6.0]


def _rank(add_us: float, gather_us: float) -> MeasuredCosts:
    transfers = Transfers(
        kind="all_gather", num_ranks=2, num_nodes=1, source="measured", points=((1000, gather_us),)
    )
    return MeasuredCosts(
        device="d",
        cluster="cpu",
        compute={ADD: Price(time_us=add_us, source="measured")},
        transfers=(transfers,),
        launch_us={"all_gather": gather_us},
        copies=((64, add_us),),
    )


def test_ranks_agree_on_the_median_in_whatever_order_they_come():
    parts = [_rank(3, 30), _rank(1, 50), _rank(100, 40)]
    found = {dump_costs(merged(list(order))) for order in itertools.permutations(parts)}
    assert len(found) == 1
    costs = merged(parts)
    assert costs.compute[ADD].time_us == 3
    assert costs.transfers[0].points == ((1000, 40),)
    assert (costs.launch_us, costs.copies) == ({"all_gather": 40}, ((64, 3),))


def test_costs_of_different_devices_are_not_merged():
    with pytest.raises(
        InputError, match=r"device and cluster are the same; found d \(cpu\), e \(cpu\)"
    ):
        merged([_rank(1, 1), MeasuredCosts(device="e", cluster="cpu")])


@given(st.lists(st.tuples(st.floats(0.1, 100), st.integers(1, 9)), min_size=1, max_size=8))
def test_times_are_made_to_rise_and_keep_their_sum(given_points):
    points = [(2**k, time_us) for k, (time_us, _) in enumerate(given_points)]
    weights = [weight for _, weight in given_points]
    times = [time_us for _, time_us in rising(points, weights)]
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(times))
    total = sum(time_us * weight for (_, time_us), weight in zip(points, weights, strict=True))
    assert sum(t * w for t, w in zip(times, weights, strict=True)) == pytest.approx(total)
    if [t for _, t in points] == sorted(t for _, t in points):
        assert times == pytest.approx([t for _, t in points])


def test_one_bad_point_does_not_bend_the_fit():
    points = tuple(
        (size, 10 + size / 200 + (90 if size == 3000 else 0)) for size in range(1000, 9000, 1000)
    )
    assert fitted_bytes_per_us(points) == pytest.approx(200)
    assert fitted_bytes_per_us(((5, 1.0),)) is None
    assert fitted_bytes_per_us(((5, 2.0), (6, 1.0))) is None


def test_a_profile_is_completed_by_what_was_measured_of_what_did_not_run():
    def gathers(source, *points):
        return Transfers(
            kind="all_gather",
            num_ranks=2,
            num_nodes=1,
            source=source,
            points=points,
            bytes_per_us=2.0,
        )

    reductions = Transfers(
        kind="reduce_scatter", num_ranks=2, num_nodes=1, source="measured", points=((8, 9.0),)
    )
    profiled = MeasuredCosts(
        device="cpu",
        cluster="cpu",
        compute={ADD: Price(time_us=5.0, source="profile")},
        transfers=(gathers("profile", (100, 40.0), (200, 50.0)),),
        launch_us={"all_gather": 30.0},
    )
    measured = MeasuredCosts(
        device="cpu, 1 thread",
        cluster="cpu",
        compute={
            ADD: Price(time_us=3.0, source="measured"),
            MM: Price(time_us=100.0, source="measured"),
        },
        transfers=(
            gathers("measured", (100, 10.0), (200, 20.0), (400, 45.0), (800, 100.0)),
            reductions,
        ),
        launch_us={"all_gather": 10.0, "reduce_scatter": 12.0},
        copies=((1024, 1.5),),
    )
    both = completed(profiled, measured)
    assert {operation: price.time_us for operation, price in both.compute.items()} == {
        ADD: 5.0,
        MM: 100.0,
    }
    assert dict(both.launch_us) == {"all_gather": 30.0, "reduce_scatter": 12.0}
    assert both.copies == measured.copies
    in_job, alone = both.transfers
    # in its place a message takes longer than alone; a larger one never less than a smaller one
    assert in_job.points == ((100, 40.0), (200, 47.5), (400, 47.5), (800, 100.0))
    assert alone == reductions
    assert completed(profiled, replace(measured, transfers=())).transfers == profiled.transfers


def test_sizes_of_a_profile_are_kept_and_files_without_stay_version_1(tmp_path):
    costs = MeasuredCosts(device="cpu", cluster="cpu", sizes={"u10": 3, "u2": 6144})
    text = dump_costs(costs).decode()
    assert "version = 2\n" in text
    assert text.endswith("u2 = 6144\nu10 = 3\n")
    path = tmp_path / "costs.toml"
    path.write_text(text)
    assert load_costs(path) == costs
    assert merged([costs, replace(costs, sizes={"u2": 6146})]).sizes == {"u2": 6145, "u10": 3}
    assert completed(costs, replace(costs, sizes={})).sizes == costs.sizes
    assert b"version = 1\n" in dump_costs(replace(costs, sizes={}))
    for wrong in ("-1", "true", "2.5", '"x"'):
        path.write_text(text.replace("6144", wrong))
        with pytest.raises(InputError, match="sizes: expected whole numbers"):
            load_costs(path)
