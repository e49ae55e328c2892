"""Which resource binds where, and from where on more bucketing no longer pays; by hand, and on a
real graph.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from apsched.config import Caps, SolveOptions
from apsched.graph.graph_file import load_graph
from apsched.problem.build import build_problem
from apsched.problem.plan.apply import restricted
from apsched.problem.plan.module_buckets import NO_BUCKETS
from apsched.problem.plan.rules import Plan
from apsched.schedule.analysis.metrics import without_buckets_ticks
from apsched.schedule.schedule import as_captured
from apsched.schedule.simulate import simulate
from apsched.solver import solve
from apsched.study.report.across import Line, along_json, along_text, alongs, stops_at
from apsched.study.report.binding import binding, bindings, binds_text, bucketing, bucketing_text
from apsched.study.report.frontier import frontier_json
from apsched.study.rows import Point
from apsched.study.worker import Outcome
from tests.helpers.graph_row import GRAPH
from tests.helpers.problems.by_hand import ByHand
from tests.helpers.problems.by_hand import line as price_line

GIB = 2**30


def point(
    cap_gib: int | None,
    step_us: int,
    launches: int,
    *,
    compute: int = 100,
    network: int = 0,
    full: str | None = None,
) -> Point:
    path = {
        "compute_us": float(compute),
        "launches_copies_us": 3.0,
        "transfers": [
            {"group": "dp", "where": where, "us": network / 2, "exposed_us": 0.0}
            for where in ("head", "middle")
        ],
        "memory_full_at": full,
    }
    report: dict[str, Any] = {
        "rests_on": path,
        "chosen": {"bucket_bytes": 100 if launches < 9 else 0},
        "without_buckets_us": 150.0,
    }
    cap = None if cap_gib is None else cap_gib * GIB
    outcome = Outcome(
        status="feasible",
        how="solved",
        memory_cap_bytes=cap,
        step_ticks=step_us * 1000,
        bound_ticks=90_000,
        bound_source="",
        peak_memory_bytes=cap or 50 * GIB,
        num_launches=launches,
        floor_memory_bytes=0,
        floor_bound_bytes=0,
        report=report,
        solved_floor_bytes=0,
        solved_peak_bytes=0,
        schedule=None,
        seconds=1.0,
    )
    return Point(
        point_id=f"{cap_gib}",
        graph=replace(GRAPH, num_collectives=9),
        memory_cap="",
        described={"time_slack": 0.01},
        outcome=outcome,
        run_id="",
        schedule=None,
    )


FRONTIER = (
    point(10, 200, 9, compute=90, network=100, full="mm"),
    point(20, 160, 5, compute=90, network=60, full="mm"),
    point(
        30, 121, 4, full="mm"
    ),  # 0.8 % above the loosest: within the slack, so memory no longer binds
    point(None, 120, 3, compute=50, network=66),
)


def test_memory_binds_where_a_looser_cap_is_faster() -> None:
    assert [found.resource for found in bindings(FRONTIER)] == [
        "memory",
        "memory",
        "compute",
        "network of group dp",
    ]
    assert [found.largest for found in bindings(FRONTIER)] == [
        "network of group dp",
        "compute",
        "compute",
        "network of group dp",
    ]
    assert (
        bindings(FRONTIER)[0].share == 100 / 193
    )  # head and busy stretches of a group are one resource
    assert str(bindings(FRONTIER)[0]) == "memory, network of group dp 52 %"
    expected = (
        "binds: memory from 10.00 GiB to 20.00 GiB; compute at 30.00 GiB; network of group dp"
        " without a cap"
    )
    assert binds_text(FRONTIER) == expected


def test_alone_memory_binds_where_a_gather_does_not_fit() -> None:
    """Nothing looser is known: a stall behind a gather that has no room says it."""
    assert binding(FRONTIER[2]).resource == "memory"
    assert (
        binding(
            replace(FRONTIER[2], outcome=replace(FRONTIER[2].outcome, memory_cap_bytes=None))
        ).resource
        == "compute"
    )


def test_where_more_bucketing_stops_paying() -> None:
    """Fewer launches pay as long as they are faster by more than the slack, which the last one is
    not.
    """
    found = bucketing(FRONTIER)
    assert found.stops is FRONTIER[2]
    assert found.with_buckets == FRONTIER[1:]
    assert [found.proven_us(point) for point in FRONTIER] == [0.0, 0.0, 29.0, 30.0]
    assert (
        bucketing_text(FRONTIER)
        == "buckets pay at 3 of 4 caps; not at 10.00 GiB; the largest that pays anywhere has 100 B;"
        " no step without buckets is below 150.00 µs (proven); more bucketing no longer pays"
        " from 30.00 GiB on (3 to 4 launches)"
    )
    once = [replace(p, outcome=replace(p.outcome, num_launches=1)) for p in FRONTIER]
    assert bucketing_text(once).endswith("(1 launch)")
    said = frontier_json(FRONTIER, 0.02)
    assert said is not None
    assert said["bucketing"]["no_more_pays_from"] == "30"
    assert [stretch["resource"] for stretch in said["binds"]] == [
        "memory",
        "compute",
        "network of group dp",
    ]
    assert said["least_memory"]["peak_memory_bytes"] == 30 * GIB
    assert bucketing_text(FRONTIER[:1]) == "buckets pay nowhere: no schedule found has one"


def line(value: str, found: Point, axis: str) -> Line:
    return Line(labels={axis: value, "seq": "2048"}, graph="backward", points=(found,), expected=1)


def test_what_buckets_are_worth_along_ranks_and_bucket_caps() -> None:
    """Proven savings and launches at each number of process ranks; the bucket cap beyond which
    nothing is faster.
    """
    (ranks,) = alongs(
        [line("fsdp=8", point(None, 160, 9), "mesh"), line("fsdp=64", point(None, 120, 3), "mesh")]
    )
    assert (
        along_text(ranks)
        == "buckets along mesh (backward, seq 2048): fsdp=8: 9 launches of 9; fsdp=64: 3 launches"
        " of 9, at least 30.00 µs saved; they do not pay at fsdp=8"
    )
    (once,) = alongs([line(mesh, point(None, 120, 1), "mesh") for mesh in ("fsdp=8", "fsdp=64")])
    assert "fsdp=8: 1 launch of 9" in along_text(once)
    bare = [replace(p, graph=replace(p.graph, num_collectives=0)) for p in FRONTIER[:2]]
    assert alongs([line(mesh, p, "mesh") for mesh, p in zip(("a", "b"), bare, strict=True)]) == ()
    caps = [
        line(f"{k}MB", point(None, step, 5), "bucket_cap")
        for k, step in ((1, 160), (10, 130), (100, 129), (1000, 130))
    ]
    (along,) = alongs(caps)
    assert stops_at(along) == "10MB"  # 0.8 % less is within the slack
    assert along_json(along)["larger_no_longer_pay_from"] == "10MB"


def test_without_buckets_either_the_compute_stream_or_a_group_is_busy_that_long() -> None:
    """Two gathers of 10 on one group and one on another, launched for 3 each, beside compute of 8
    and of 20.
    """
    for compute_ticks, expected in ((8, 20), (20, 29)):
        b = ByHand(prices={"all_gather": price_line(10)})
        starts = [
            b.start("all_gather", name, b.input(f"{name}_in", 512), 512, 1024, launch_ticks=3)
            for name in ("one", "two")
        ]
        starts.append(
            b.start(
                "all_gather",
                "three",
                b.input("three_in", 512),
                512,
                1024,
                launch_ticks=3,
                group="other",
            )
        )
        waits = [b.wait(f"{b.names[start]}_wait", start) for start in starts]
        assert without_buckets_ticks(b.output(b.compute("mm", compute_ticks), *waits)) == expected


def test_no_schedule_without_buckets_beats_the_bound(debug_graphs: dict[str, Path]) -> None:
    """Solved under a plan that forbids buckets, a step is at least as long as proven; with buckets
    it is shorter.
    """
    problem = build_problem(load_graph(debug_graphs["backward"]))
    problem = replace(
        problem, duration_ticks=tuple(ticks // 20 for ticks in problem.duration_ticks)
    )  # a network that binds
    bound = without_buckets_ticks(problem)
    alone = simulate(problem, as_captured(problem.num_nodes))
    assert (
        alone.compute_ticks < bound == sum(t.end_ticks - t.begin_ticks for t in alone.transfers)
    )  # one group
    best = {
        plan: solve(restricted(problem, plan), Caps(), SolveOptions(budget=0.0)).best
        for plan in (NO_BUCKETS, Plan())
    }
    bare, bucketed = best[NO_BUCKETS], best[Plan()]
    assert bare is not None
    assert bucketed is not None
    assert not bare.schedule.buckets or all(
        len(bucket.members) == 1 for bucket in bare.schedule.buckets
    )
    assert bucketed.step_time_ticks < bound <= bare.step_time_ticks
