"""``--if``: a direct answer, proven where bounds allow it, and refused where it makes no sense."""

import json
from pathlib import Path

import pytest

from apsched.costs.clusters.cluster import load_cluster
from apsched.errors import InputError
from apsched.graph.graph_file import load_graph
from apsched.kinds import NodeKind
from apsched.pipeline.cost_choice import CostChoice
from apsched.pipeline.solve_graph import SolveRequest
from apsched.pipeline.sources import SourceRequest
from apsched.quantities import MemoryCap
from apsched.study.report.what_if import cap_then, parse_what_if, then
from apsched.study.setting import Setting
from apsched.study.speeds import Speeds, at_speeds
from tests.conftest import Run

SMALL = ("--budget", "0", "--jobs", "1", "--json")


def setting(source: str = "llama3-debug", mesh: str | None = None) -> Setting:
    request = SourceRequest(source=source, mesh=mesh)
    return Setting(request=request, costs=CostChoice(), direction="both", search=SolveRequest())


def asked(run: Run, graph: Path, *what: str) -> dict[str, object]:
    ran = run(
        "study", graph, *(word for text in what for word in ("--if", text)), *SMALL, "-o", "s"
    )
    assert ran.code == 0, ran.stderr
    (found,) = json.loads(ran.stdout)["graphs"]
    return found


def test_compute(run: Run, debug_graphs: dict[str, Path]) -> None:
    """Half the speed is proven to be longer, twice the speed to be shorter; what is proven is no
    more than what is found.
    """
    slower, faster = (
        asked(run, debug_graphs["backward"], "compute=0.5x"),
        asked(run, debug_graphs["backward"], "compute=2x"),
    )
    assert (slower["verdict"], faster["verdict"]) == ("longer", "shorter")
    for found in (slower, faster):
        least, gain, most = (
            float(str(found[name])) for name in ("least_gain_us", "gain_us", "most_gain_us")
        )
        assert least <= gain <= most
        assert least == pytest.approx(found["now"]["bound_us"] - found["then"]["step_time_us"])  # type: ignore[index]
        assert most == pytest.approx(found["now"]["step_time_us"] - found["then"]["bound_us"])  # type: ignore[index]


def test_less_memory(run: Run, debug_graphs: dict[str, Path]) -> None:
    """Less memory is no faster; too little is said with what would do."""
    roomy = ("--memory-cap", "1100KiB")
    ran = run(
        "study", debug_graphs["backward"], "--if", "memory=-400KiB", *roomy, *SMALL, "-o", "s"
    )
    (found,) = json.loads(ran.stdout)["graphs"]
    assert found["then"]["memory_cap_bytes"] == 700 * 1024
    assert found["gain_us"] <= 0
    ran = run(
        "study",
        debug_graphs["backward"],
        "--if",
        "memory=-1000KiB",
        *roomy,
        "--budget",
        "0",
        "--jobs",
        "1",
        "-o",
        "s",
    )
    assert ran.code == 1
    assert "nothing fits then: --memory-cap needs" in ran.stdout


def test_nothing_changes_on_one_node(run: Run, debug_graphs: dict[str, Path]) -> None:
    found = asked(run, debug_graphs["backward"], "network=2x")
    assert found["verdict"] == "nothing changes"
    assert found["notes"] == ["network: no group leaves its node, so nothing changes"]


def test_ranks_are_those_of_a_preset(run: Run, debug_graphs: dict[str, Path]) -> None:
    """A preset is captured again with another mesh; a graph file holds shards of one size, and says
    so.
    """
    ran = run(
        "study",
        "llama3-debug",
        "--mesh",
        "fsdp=4",
        "--seq",
        "64",
        "--direction",
        "forward",
        "--if",
        "ranks=8",
        *SMALL,
        "-o",
        "s",
    )
    assert ran.code == 0, ran.stderr
    (found,) = json.loads(ran.stdout)["graphs"]
    assert (found["now"]["described"]["mesh"], found["then"]["described"]["mesh"]) == (
        "fsdp=4",
        "fsdp=8",
    )
    assert found["then"]["peak_memory_bytes"] < found["now"]["peak_memory_bytes"]
    ran = run("study", debug_graphs["backward"], "--if", "ranks=8", *SMALL, "-o", "s")
    assert ran.code == 2
    assert "holds the shards" in ran.errors[0]


def test_meshes_are_scaled_along_fsdp() -> None:
    what_if = parse_what_if(["ranks=128"])
    for before, after in (
        ("fsdp=64", "fsdp=128"),
        ("fsdp=8,tp=8", "fsdp=16,tp=8"),
        ("replicate=64", "replicate=128"),
        (None, "fsdp=128"),
    ):
        assert then(setting(mesh=before), what_if).request.mesh == after
    with pytest.raises(InputError, match="multiple of 24"):
        then(setting(mesh="fsdp=8,tp=24"), what_if)


def test_memory_caps() -> None:
    less = parse_what_if(["memory=-10GiB"])
    assert cap_then(None, less, 80 * 2**30) == MemoryCap(size_bytes=70 * 2**30)
    assert cap_then(
        MemoryCap(size_bytes=2**30, above_floor=True), parse_what_if(["memory=+1GiB"]), None
    ) == MemoryCap(size_bytes=2 * 2**30, above_floor=True)
    for cap, memory in ((None, None), (MemoryCap(), 1), (MemoryCap(size_bytes=2**30), None)):
        with pytest.raises(InputError, match="--if memory"):
            cap_then(cap, less, memory)


@pytest.mark.parametrize(
    "text",
    [
        "network",
        "network=fast",
        "speed=2x",
        "memory=10GiB",
        "ranks=0",
        "network=0x",
        "network=2x,network=3x",
    ],
)
def test_what_is_wrong_is_said(text: str) -> None:
    with pytest.raises(InputError, match="--if"):
        parse_what_if([text])


def test_speeds_change_what_they_name(debug_graphs: dict[str, Path]) -> None:
    """Compute and copies, not launches; transfers between nodes, not those inside one."""
    dag = load_graph(debug_graphs["backward"])
    fast, _ = at_speeds(dag, Speeds(compute=2.0), load_cluster())
    for rank in range(dag.number_of_nodes()):
        before, after = dag.nodes[rank]["record"], fast.nodes[rank]["record"]
        assert after.duration_us == (
            before.duration_us / 2 if before.kind is NodeKind.COMPUTE else before.duration_us
        )
    curves = {
        name for name, curve in dag.graph["curves"].items() if fast.graph["curves"][name] != curve
    }
    assert curves == {"copy"}
    dag.graph["group_ranks"] = {
        name: tuple(range(0, 8 * len(ranks), 8)) for name, ranks in dag.graph["group_ranks"].items()
    }
    fast, notes = at_speeds(dag, Speeds(network=2.0), load_cluster())
    changed = {
        name for name, curve in dag.graph["curves"].items() if fast.graph["curves"][name] != curve
    }
    assert changed
    assert all(
        name.startswith(("all_gather:", "reduce_scatter:", "all_reduce:")) for name in changed
    )
    assert all(
        fast.graph["curves"][name](2**30) < dag.graph["curves"][name](2**30) for name in changed
    )
    assert "latency kept" in notes[0]
