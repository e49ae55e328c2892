"""``apsched solve --solver milp``: who solved stands in the table, and what it cannot do is refused
before anything runs.
"""

import json
from pathlib import Path

import pytest

from tests.conftest import Run

SMALL = (
    "llama3-debug",
    "--mesh",
    "fsdp=4",
    "--seq",
    "64",
    "--layers",
    "1",
    "--direction",
    "forward",
    "--memory-cap",
    "none",
)


def test_it_solves_within_its_limit_and_the_bound_names_it(run: Run, tmp_path: Path) -> None:
    """A span of 0 leaves every collective alone: few columns; the round trip is exact whoever
    solved.
    """
    ran = run(
        "solve",
        *SMALL,
        "--solver",
        "milp",
        "--time-limit",
        "5",
        "--max-topo-span",
        "0",
        "--json",
        "-o",
        "out",
    )
    assert ran.code == 0, ran.stderr
    (graph,) = json.loads(ran.stdout)["graphs"]
    assert graph["status"] in ("optimal", "feasible")
    assert graph["round_trip_exact"] is True
    assert 0 < graph["bound_us"] <= graph["step_time_us"]
    said = json.loads((tmp_path / "out" / "forward.schedule.json").read_text())["result"]
    assert said["bound_source"]  # the MILP's, or where casts travel what holds for all schedules
    assert said["solved_by"] in ("milp (PULP_CBC_CMD)", *graph["baselines"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--solver", "cpsat"), "--solver: expected cp-sat, milp or milp:NAME"),
        (("--solver", "milp:"), "--solver: expected cp-sat, milp or milp:NAME"),
        (
            ("--solver", "milp:CPC"),
            "expected the name of a PuLP solver, found 'CPC'; those that run here:",
        ),
        (
            ("--solver", "milp", "--time-limit", "0"),
            "time_limit_s: expected a finite number of seconds above 0",
        ),
        (("--solver", "milp", "--time-limit", "soon"), "--time-limit: expected a finite number"),
        (
            ("--solver", "milp", "--max-compute-move", "5"),
            "the milp keeps compute as captured; expected 0, found '5'",
        ),
        (
            ("--solver", "milp", "--second-group"),
            "--second-group: the milp solves on the groups of the graph",
        ),
        (("--time-limit", "5"), "--time-limit: it limits --solver milp"),
    ],
)
def test_what_it_cannot_do_is_refused(run: Run, options: tuple[str, ...], message: str) -> None:
    ran = run("solve", *SMALL, *options)
    assert ran.code == 2
    assert message in ran.stderr


def test_a_graph_that_is_too_large_is_refused_with_what_to_do(run: Run) -> None:
    ran = run("solve", *SMALL, "--solver", "milp")
    assert ran.code == 2
    assert "at most 4000 possible buckets" in ran.stderr
    assert "choose --solver cp-sat" in ran.stderr
