"""``apsched explain`` as a user runs it: what the step time rests on, what one more buys, and why
nothing fits.
"""

import json
from pathlib import Path

import pytest

from tests.conftest import Run

KEYS = {"stretches", "one_more", "rests_on", "step_time_us", "bound_us"}


def test_what_the_step_time_rests_on(
    run: Run, tmp_path: Path, debug_graphs: dict[str, Path]
) -> None:
    """Shares add up; each thing is said to buy something, nothing, or why it was not solved. No
    file is written.
    """
    ran = run("explain", debug_graphs["backward"], "--budget", "0")
    assert ran.code == 0, ran.stderr
    for word in (
        "rests on",
        "compute",
        "launches, copies, casts",
        "one more of",
        "memory, 1 GiB",
        "network, 1 Gb/s",
        "prefetch, 1 layer",
    ):
        assert word in ran.stdout, word
    assert "no prefetch cap is set, so none binds" in " ".join(ran.stdout.split())
    assert max(len(line) for line in ran.stdout.splitlines()) <= 140
    assert not list(tmp_path.iterdir())
    graph = json.loads(run("explain", debug_graphs["backward"], "--budget", "0", "--json").stdout)[
        "graphs"
    ][0]
    assert set(graph) >= KEYS
    rests = graph["rests_on"]
    total = (
        rests["compute_us"] + rests["launches_copies_us"] + sum(t["us"] for t in rests["transfers"])
    )
    assert total == pytest.approx(graph["step_time_us"])
    assert set(graph["one_more"]) == {"memory", "network", "prefetch"}
    assert graph["one_more"]["memory"]["proven_gain_us"] <= graph["one_more"]["memory"]["gain_us"]
    assert graph["one_more"]["prefetch"] == {
        "change": "no prefetch cap is set, so none binds",
        "verdict": "not solved",
        "step_time_us": None,
        "bound_us": None,
        "gain_us": 0.0,
        "proven_gain_us": 0.0,
        "possible_gain_us": 0.0,
    }


def test_solve_says_it_in_a_line(run: Run, debug_graphs: dict[str, Path]) -> None:
    ran = run("solve", debug_graphs["backward"], "--budget", "0")
    assert [
        line
        for line in ran.stdout.splitlines()
        if line.startswith("  rests on: ") and "compute " in line
    ]


def test_why_nothing_fits(run: Run, debug_graphs: dict[str, Path]) -> None:
    """Two caps that each cannot be kept: both are named with what they need, and with both of these
    it works.
    """
    caps = ("--memory-cap", "64KiB", "--in-flight-cap", "1KiB", "--budget", "0")
    ran = run("explain", debug_graphs["forward"], *caps)
    assert ran.code == 1
    assert len(ran.errors) == 1
    for word in (
        "no schedule fits (proven)",
        "--memory-cap cannot be kept",
        "--in-flight-cap cannot be kept",
        "alive, of it",
        "proven: no",
    ):
        assert word in ran.stdout, word
    ran = run("explain", debug_graphs["forward"], *caps, "--json")
    assert ran.code == 1
    why = json.loads(ran.stdout)["graphs"][0]["infeasibility"]
    assert why["clashes"] == [["memory_cap_bytes"], ["in_flight_cap_bytes"]]
    assert why["relaxations"]["memory_cap_bytes"]["lifted"] == ["in_flight_cap_bytes"]
    assert (
        sum(entry["bytes"] for entry in why["places"][0]["alive"]) == why["places"][0]["live_bytes"]
    )
    least = why["least"]
    enough = (
        "--memory-cap",
        least["memory_cap_bytes"],
        "--in-flight-cap",
        least["in_flight_cap_bytes"],
    )
    assert run("solve", debug_graphs["forward"], *enough, "--budget", "0").code == 0
    assert (
        run(
            "solve",
            debug_graphs["forward"],
            *enough[:3],
            least["in_flight_cap_bytes"] - 1,
            "--budget",
            "0",
        ).code
        == 1
    )


def test_a_cap_that_is_not_the_cause_is_not_named(run: Run, debug_graphs: dict[str, Path]) -> None:
    ran = run(
        "explain",
        debug_graphs["forward"],
        "--memory-cap",
        "64KiB",
        "--bucket-cap",
        "1MiB",
        "--max-topo-span",
        "50",
        "--budget",
        "0",
    )
    assert ran.code == 1
    assert "--memory-cap" in ran.stdout
    assert "--bucket-cap" not in ran.stdout
    assert "--max-topo-span" not in ran.stdout


def test_the_network_is_not_known(run: Run, tmp_path: Path, debug_graphs: dict[str, Path]) -> None:
    """A graph file names its cluster; where that does not ship, nothing is said of the network."""
    from apsched.graph.graph_file import load_graph, save_graph

    dag = load_graph(debug_graphs["forward"])
    dag.graph["cluster"] = "mine"
    save_graph(dag, tmp_path / "mine.graph")
    more = json.loads(
        run("explain", "mine.graph", "--memory-cap", "none", "--budget", "0", "--json").stdout
    )["graphs"][0]["one_more"]
    assert more["network"]["verdict"] == "not solved"
    assert "cluster is not known" in more["network"]["change"]
    assert more["memory"]["change"] == "no memory cap is set"


def test_under_a_plan(run: Run, tmp_path: Path, debug_graphs: dict[str, Path]) -> None:
    """A rule that alone breaks a cap is named."""
    (tmp_path / "plan.toml").write_text(
        "[[rule]]\nmatch = 'layers.0.*'\ngroup = true\nkind = 'all_gather'\n"
    )
    ran = run(
        "explain",
        debug_graphs["forward"],
        "--plan",
        "plan.toml",
        "--bucket-cap",
        "1KiB",
        "--budget",
        "0",
    )
    assert ran.code == 1, ran.stderr
    assert "--bucket-cap cannot be kept" in ran.stdout
    assert "rule 1" in ran.errors[0]
    assert run("explain", debug_graphs["forward"], "--plan", "plan.toml", "--budget", "0").code == 0
