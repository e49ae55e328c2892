"""A file of measured costs on a graph file: prices that match nothing are reported, impossible ones
refused.
"""

from pathlib import Path

import pytest

from apsched.costs.clusters.cluster import load_cluster
from apsched.costs.measured import MeasuredCosts, Price, Transfers
from apsched.costs.measured_file import dump_costs
from apsched.graph.graph_file import load_graph
from apsched.graph.reprice import unmatched
from tests.conftest import Run

H100 = load_cluster("h100")
HEAD = 'format = "apsched costs"\nversion = 1\ndevice = "d"\ncluster = "h100"\n'


def transfers(num_ranks: int, num_nodes: int) -> Transfers:
    return Transfers(
        kind="reduce_scatter",
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        source="profile",
        points=((4096, 20.0),),
    )


def costs(*of_transfers: Transfers, **others: object) -> MeasuredCosts:
    return MeasuredCosts(device="d", cluster="h100", transfers=of_transfers, **others)


def test_a_file_of_which_nothing_matches_is_noted(
    run: Run, debug_graphs: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "c.toml").write_bytes(dump_costs(costs(transfers(64, 8))))
    for command in ("solve", "compare", "explain", "audit"):
        ran = run(command, debug_graphs["backward"], "--costs", "c.toml", "--budget", "0")
        assert ran.code == 0, ran.stderr
        assert (
            "no price of c.toml matches: it has 0 operations and reduce_scatter on 64 ranks of 8"
            " nodes; the graphs have other operations and all_gather on 4 ranks of 1 node,"
            " reduce_scatter on 4 ranks of 1 node;"
        ) in " ".join(ran.stdout.split())
    (tmp_path / "c.toml").write_bytes(dump_costs(costs(transfers(4, 1))))
    ran = run("solve", debug_graphs["backward"], "--costs", "c.toml", "--budget", "0")
    assert "no price of" not in ran.stdout


def test_a_capture_notes_it_too(run: Run, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(dump_costs(costs(transfers(64, 8))))
    model = ["llama3-debug", "--mesh", "fsdp=4", "--seq", "64", "--layers", "1"]
    ran = run("compare", *model, "--direction", "backward", "--costs", "c.toml", "--budget", "0")
    assert ran.code == 0, ran.stderr
    note = "note: no price of c.toml matches: it has 0 operations"
    assert note in " ".join(ran.stdout.split())
    ran = run("capture", *model, "--costs", "c.toml", "-o", "step.graph")
    assert ran.code == 0, ran.stderr
    assert note in " ".join(ran.stdout.split())


def test_one_operation_or_launch_matches(debug_graphs: dict[str, Path]) -> None:
    dags = [load_graph(debug_graphs["backward"])]
    records = [dags[0].nodes[rank]["record"] for rank in range(dags[0].number_of_nodes())]
    operation = next(r.operation for r in records if r.operation and r.collective is None)
    price = Price(time_us=1.0, source="profile")
    assert not unmatched(costs(compute={operation: price}), "c", dags, H100)
    assert not unmatched(costs(launch_us={"reduce_scatter": 1.0}), "c", dags, H100)
    (note,) = unmatched(costs(compute={"f()": price}, copies=((1, 1.0),)), "c", dags, H100)
    assert "matches, except those of copies: it has 1 operation and no transfers;" in note


def test_contention_of_compute_that_a_profile_has_measured_counts_twice(
    run: Run, debug_graphs: dict[str, Path], tmp_path: Path
) -> None:
    """So it is worth a warning where it is on, and nothing advises it where it is off; by formula
    it is the other way round.
    """
    dag = load_graph(debug_graphs["backward"])
    records = [dag.nodes[rank]["record"] for rank in range(dag.number_of_nodes())]
    operation = next(r.operation for r in records if r.operation and r.collective is None)
    warned = {}
    for source in ("profile", "measured"):
        price = Price(time_us=1.0, source=source)
        (tmp_path / "c.toml").write_bytes(dump_costs(costs(compute={operation: price})))
        for contention in ("none", "links", "compute"):
            options = ("--costs", "c.toml", "--contention", contention, "--budget", "0")
            ran = run("solve", debug_graphs["backward"], *options)
            assert ran.code == 0, ran.stderr
            warned[source, contention] = (
                "counts contention twice" in " ".join(ran.stderr.split()),
                "contention of compute is off" in " ".join(ran.stdout.split()),
            )
    assert warned == {
        ("profile", "none"): (False, False),
        ("profile", "links"): (False, False),
        ("profile", "compute"): (True, False),
        ("measured", "none"): (False, True),
        ("measured", "links"): (False, True),
        ("measured", "compute"): (False, False),
    }


@pytest.mark.parametrize(
    "text", ["copies = [[1, 8e10]]\n", "points = [[1, 1.0], [2, 8e10]]\n"], ids=["copies", "points"]
)
def test_times_that_no_curve_can_hold_are_refused(
    run: Run, debug_graphs: dict[str, Path], tmp_path: Path, text: str
) -> None:
    transfer = '[[transfers]]\nkind = "reduce_scatter"\nranks = 4\nnodes = 1\nsource = "profile"\n'
    where = "" if text.startswith("copies") else transfer
    (tmp_path / "c.toml").write_text(HEAD + where + text)
    ran = run("solve", debug_graphs["backward"], "--costs", "c.toml", "--budget", "0")
    assert ran.code == 2
    assert "must fit into 64 bits" in ran.errors[0]
    assert "correct the measured times and bandwidths" in ran.errors[0]


@pytest.mark.parametrize(
    ("option", "name"),
    [("--costs", "the costs"), ("--collectives", "the tables of collectives")],
)
def test_an_empty_path_is_named_as_such(
    run: Run, debug_graphs: dict[str, Path], option: str, name: str
) -> None:
    ran = run("solve", debug_graphs["backward"], option, "")
    assert ran.code == 2
    assert f"{name}: expected the path of a file, found an empty path" in ran.errors[0]


def test_an_empty_name_of_a_cluster_is_not_the_default(run: Run) -> None:
    ran = run("solve", "llama3-debug", "--cluster", "")
    assert ran.code == 2
    assert "expected the name of a cluster or the path of a .toml file, found ''" in ran.errors[0]


def test_a_graph_file_is_no_trace_and_the_error_is_one(
    run: Run, debug_graphs: dict[str, Path]
) -> None:
    graph = debug_graphs["backward"]
    for trace, expected in (
        (
            graph,
            f"{graph}: expected a Chrome trace with traceEvents, as torch.profiler's"
            " export_chrome_trace writes; found a file of 'apsched graph'; state such a file",
        ),
        ("", "the trace: expected the path of a file, found an empty path"),
    ):
        ran = run("calibrate", "--trace", trace, "--graph", graph, "-o", "costs.toml")
        assert ran.code == 2
        assert expected in ran.errors[0]
        assert "InputError" not in ran.stderr
