"""``apsched audit``: somebody's schedule, what is exposed in it and why, and what would help it,
each change simulated.
"""

import json
from pathlib import Path

import pytest

from apsched.config import Caps
from apsched.graph.graph_file import load_graph
from apsched.problem.build import build_problem
from apsched.problem.problem import Problem
from apsched.schedule.analysis.stalls import StallCause, exposed
from apsched.schedule.schedule import Schedule, Step, StepKind
from apsched.schedule.score import score
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.solver import best_changes
from tests.conftest import Run
from tests.helpers.problems.by_hand import ByHand, line


def test_the_order_as_captured(run: Run, debug_graphs: dict[str, Path]) -> None:
    """Stalls add up to what is exposed; every change makes the one before it faster, and the last
    comes near the solver.
    """
    ran = run("audit", debug_graphs["backward"], "--budget", "0")
    assert ran.code == 0, ran.stderr
    for word in (
        "above the bound",
        "exposed, ",
        "waited for at once",
        "changes that would help most",
        "1. ",
        "launch instead of",
    ):
        assert word in ran.stdout, word
    found = json.loads(run("audit", debug_graphs["backward"], "--budget", "0", "--json").stdout)[
        "audit"
    ][0]
    assert sum(stall["stall_us"] for stall in found["exposed"]) == pytest.approx(
        found["exposed_us"]
    )
    steps = [found["step_time_us"], *(change["step_time_us"] for change in found["changes"])]
    assert 2 <= len(steps) <= 4
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] >= found["bound_us"]


def test_changes_are_schedules_that_keep_the_caps(debug_graphs: dict[str, Path]) -> None:
    problem = build_problem(load_graph(debug_graphs["backward"]))
    caps = Caps(memory_cap_bytes=700 * 1024)
    steps = tuple(Step(StepKind.NODE, i) for i in range(problem.num_nodes))
    now = score(problem, "now", Schedule(buckets=(), steps=steps), caps)
    changes = best_changes(problem, caps, now, now.peak_memory_bytes)
    assert changes
    for change in changes:
        assert not verify(problem, change.scored.schedule, caps)
        assert (
            simulate(problem, change.scored.schedule).step_time_ticks
            == change.scored.step_time_ticks
            < now.step_time_ticks
        )
        now = change.scored


def test_a_schedule_of_somebody_else(
    run: Run, debug_graphs: dict[str, Path], tmp_path: Path
) -> None:
    """Its own figures are audited, not those of the order as captured; of another graph it is
    refused with what differs.
    """
    assert (
        run(
            "solve",
            debug_graphs["backward"],
            "--budget",
            "0",
            "--bucket-cap",
            "20KiB",
            "--max-prefetch",
            "4",
            "-o",
            "out",
        ).code
        == 0
    )
    claimed = json.loads((tmp_path / "out" / "backward.schedule.json").read_text())["result"]
    audited = (
        "audit",
        debug_graphs["backward"],
        "--budget",
        "0",
        "--schedule",
        "out/backward.schedule.json",
    )
    found = json.loads(run(*audited, "--json").stdout)["audit"][0]
    assert (found["schedule"], found["step_time_us"], found["num_launches"]) == (
        "given",
        claimed["step_time_us"],
        claimed["num_launches"],
    )
    assert found["changes"][0]["step_time_us"] < claimed["step_time_us"]
    assert "the schedule" in run(*audited).stdout
    ran = run(
        "audit",
        debug_graphs["forward"],
        "--budget",
        "0",
        "--schedule",
        "out/backward.schedule.json",
    )
    assert ran.code == 2
    assert "belongs to another graph" in ran.errors[0]


@pytest.mark.parametrize("edit", ["reversed", "no_members", "coalesced", "missing"])
def test_an_order_that_cannot_run_is_refused(
    run: Run, debug_graphs: dict[str, Path], tmp_path: Path, edit: str
) -> None:
    """Its figures mean nothing, and it breaks no cap; the stalls of some ended with a KeyError."""
    solve = ("solve", debug_graphs["forward"], "--budget", "0", "-o", "out")
    assert run(*solve).code == 0
    file = tmp_path / "out" / "forward.schedule.json"
    data = json.loads(file.read_text())
    match edit:
        case "reversed":
            data["steps"].reverse()
        case "no_members":
            data["buckets"][0]["members"] = []
        case "coalesced":  # the steps are those of a flat bucket
            data["buckets"][0]["form"] = "coalesced"
        case "missing":
            del data["steps"][50]
    file.write_text(json.dumps(data))
    ran = run("audit", debug_graphs["forward"], "--budget", "0", "--schedule", file)
    assert ran.code == 2
    assert "forward.schedule.json: not a schedule of this graph: " in ran.errors[0]


def test_a_schedule_with_second_groups(
    run: Run, debug_graphs: dict[str, Path], tmp_path: Path
) -> None:
    """It is audited on its own groups, whose communicators take memory of the device. The error
    advised to use an option that audit does not have.
    """
    solve = ("solve", debug_graphs["backward"], "--budget", "0", "--second-group", "-o", "out")
    assert run(*solve, "--memory-cap", "floor").code == 0
    file = tmp_path / "out" / "backward.schedule.json"
    assert "second_groups" in file.read_text()
    claimed = json.loads(file.read_text())["result"]
    audit = ("audit", debug_graphs["backward"], "--budget", "0", "--schedule", file, "--json")
    ran = run(*audit, "--memory-cap", "floor")
    assert ran.code == 0, ran.stderr
    (found,) = json.loads(ran.stdout)["audit"]
    for figure in ("step_time_us", "peak_memory_bytes", "num_launches"):
        assert found[figure] == claimed[figure]
    assert found["fits"]
    (found,) = json.loads(run(*audit).stdout)["audit"]
    graph = found["graph"]
    assert graph["device_memory"]["more_communicators"] == 1
    assert graph["memory_cap_bytes"] == graph["device_memory"]["left_bytes"]


def steps_of(problem: Problem, *names: str) -> Schedule:
    return Schedule(
        buckets=(),
        steps=tuple(Step(StepKind.NODE, problem.node_names.index(name)) for name in names),
    )


def program() -> Problem:
    """Two gathers of 30 ticks on one stream, compute of 10 before each use."""
    b = ByHand(prices={"all_gather": line(30)})
    p, q, x = b.input("p", 512), b.input("q", 512), b.input("x", 512)
    s = b.start("all_gather", "s", p, 512, 1024)
    t = b.start("all_gather", "t", q, 512, 1024)
    c = b.compute("c", 10, x, size=512)
    d = b.compute("d", 10, c, b.wait("ws", s), size=512)
    return b.output(b.compute("e", 10, d, b.wait("wt", t), size=512))


def test_why_a_wait_stalls() -> None:
    """One is launched 10 ticks of compute ahead, the other stands behind it on the stream; or each
    right before its need.
    """
    problem = program()
    ahead = steps_of(problem, "p", "q", "x", "s", "t", "c", "ws", "d", "wt", "e", "output")
    late = steps_of(problem, "p", "q", "x", "c", "s", "ws", "d", "t", "wt", "e", "output")
    found = {e.name: e for e in exposed(problem, ahead, simulate(problem, ahead))}
    assert {
        name.split()[-1]: (e.stall_ticks, e.why, e.hidden_ticks, e.queued_ticks)
        for name, e in found.items()
    } == {
        "s": (20, StallCause.SHORT, 10, 0),
        "t": (20, StallCause.QUEUE, 20, 30),
    }
    stalls = exposed(problem, late, simulate(problem, late))
    assert [(e.stall_ticks, e.why) for e in stalls] == [(30, StallCause.AT_ONCE)] * 2
