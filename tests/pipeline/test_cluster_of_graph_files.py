"""A graph file holds the cluster that priced it: another cluster of the same name changes nothing
without a word.
"""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from apsched.api import solve
from apsched.costs.clusters.cluster import (
    Cluster,
    cluster_of_content,
    cluster_text,
    content_of,
    differing_key,
    load_cluster,
)
from apsched.errors import InputError
from apsched.graph.graph_file import from_bytes, load_graph, save_graph, to_bytes
from apsched.graph.identity import graph_hash
from apsched.pipeline.cost_choice import cluster_of_graphs
from tests.conftest import Run

H100 = load_cluster("h100")
BF16 = "bf16 = 989.4"


def priced_by(graph: Path, cluster: Cluster | None, to: Path) -> Path:
    """Write ``graph`` to ``to`` as one that ``cluster`` priced."""
    dag = load_graph(graph)
    dag.graph["priced_by"] = cluster
    save_graph(dag, to)
    return to


@pytest.fixture
def own(debug_graphs: dict[str, Path], tmp_path: Path) -> Path:
    """A graph file priced by an own cluster that keeps the name of its template."""
    inter_node = replace(H100.inter_node, gbit_per_s_per_rank=3.0)
    device = replace(H100.device, memory_bytes=30_000_000_000)
    mine = replace(
        H100, device=device, inter_node=inter_node, ranks_per_node=1, compute_slowdown=2.0
    )
    return priced_by(debug_graphs["backward"], mine, tmp_path / "backward.graph")


def test_an_edited_cluster_of_the_same_name_is_refused(
    run: Run, debug_graphs: dict[str, Path], tmp_path: Path
) -> None:
    text = cluster_text("h100")
    assert BF16 in text
    (tmp_path / "same.toml").write_text(text.replace("description = ", "description = 'mine' # "))
    (tmp_path / "m.toml").write_text(text.replace(BF16, "bf16 = 0.5"))
    graph = debug_graphs["backward"]
    ran = run("solve", graph, "--cluster", "./same.toml", "--budget", "0")
    assert ran.code == 0, ran.stderr
    for command in (["solve"], ["explain"], ["study", "--vary", "cluster=./m.toml"]):
        stated = [] if command[0] == "study" else ["--cluster", "./m.toml"]
        name, *rest = command
        ran = run(name, graph, *rest, *stated, "--budget", "0")
        assert ran.code == 2
        (error,) = ran.errors
        assert "its costs are those of a cluster 'h100' with device.peak_tflops.bf16" in error
        assert "= 989.4, and ./m.toml has device.peak_tflops.bf16 = 0.5" in error
        assert "capture it again with --cluster ./m.toml" in error


def test_memory_and_network_are_those_of_the_cluster_in_the_file(run: Run, own: Path) -> None:
    ran = run("explain", own, "--budget", "0")
    assert ran.code == 0, ran.stderr
    assert "3 -> 4 Gb/s" in ran.stdout
    ran = run("solve", own, "--budget", "0", "--json")
    assert ran.code == 0, ran.stderr
    (found,) = json.loads(ran.stdout)["graphs"]
    assert 20_000_000_000 < found["memory_cap_bytes"] < 30_000_000_000


def test_a_study_takes_the_network_of_the_cluster_in_the_file(run: Run, own: Path) -> None:
    options = ["--budget", "0", "--jobs", "1", "--json", "-o", "s"]
    ran = run("study", own, "--if", "network=2x", *options)
    assert ran.code == 0, ran.stderr
    (found,) = json.loads(ran.stdout)["graphs"]
    assert "network: no group leaves its node, so nothing changes" not in found["notes"]


def test_the_contention_of_a_dag_is_that_of_its_cluster(own: Path) -> None:
    dag = load_graph(own)
    found = solve(dag, budget=0, contention="compute").problem.contention
    assert found == solve(dag, budget=0, contention="compute=2").problem.contention
    dag.graph["priced_by"] = None
    by_name = solve(dag, budget=0, contention="compute").problem.contention
    assert by_name == solve(dag, budget=0, contention="compute=1.19").problem.contention != found


def test_an_export_holds_its_cluster_and_no_hash_changes(debug_graphs: dict[str, Path]) -> None:
    data = debug_graphs["forward"].read_bytes()
    dag = from_bytes(data)
    assert dag.graph["priced_by"] == H100
    assert to_bytes(dag) == data
    without = dag.copy()
    without.graph["priced_by"] = None
    assert graph_hash(without) == graph_hash(dag)


def test_a_file_of_an_earlier_version_is_known_by_name(
    run: Run, debug_graphs: dict[str, Path], tmp_path: Path
) -> None:
    old = priced_by(debug_graphs["forward"], None, tmp_path / "old.graph")
    dag = load_graph(old)
    assert dag.graph["priced_by"] is None
    assert cluster_of_graphs(None, [dag]) == H100
    ran = run("solve", old, "--cluster", "h100", "--budget", "0")
    assert ran.code == 0, ran.stderr
    ran = run("solve", old, "--cluster", "a100", "--budget", "0")
    assert ran.code == 2
    assert "its costs are those of 'h100'; capture it again for 'a100'" in ran.errors[0]


def test_graphs_of_two_clusters_of_one_name_have_none(debug_graphs: dict[str, Path]) -> None:
    dags = [load_graph(debug_graphs[name]) for name in ("forward", "backward")]
    assert cluster_of_graphs(None, dags) == H100
    dags[0].graph["priced_by"] = replace(H100, ranks_per_node=4)
    assert cluster_of_graphs(None, dags) is None


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"name": "other"}, "expected the cluster 'h100' as priced_by, found 'other'"),
        ({"ranks_per_node": 0}, "priced_by: ranks_per_node must be finite and above 0"),
        ({"colour": 1}, "priced_by: unknown key 'colour'"),
    ],
)
def test_a_broken_cluster_in_a_file_is_named(
    debug_graphs: dict[str, Path], change: dict[str, object], error: str
) -> None:
    content = orjson.loads(gzip.decompress(debug_graphs["forward"].read_bytes()))
    content["graph"]["priced_by"] |= change
    with pytest.raises(InputError, match=error):
        from_bytes(gzip.compress(orjson.dumps(content)))


def test_clusters_go_through_their_keys() -> None:
    for name in ("h100", "mi300x", "cpu", "gb200-nvl72"):
        cluster = load_cluster(name)
        assert cluster_of_content(content_of(cluster), name) == cluster
    assert differing_key(H100, replace(H100, description="mine")) is None
    assert differing_key(H100, replace(H100, launch_us=7.0)) == ("launch_us", H100.launch_us, 7.0)
