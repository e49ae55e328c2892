"""Every tick of a step has one owner, and each stretch of transfers the cause that the order
shows.
"""

import random
from itertools import pairwise

import pytest

from apsched.config import Caps
from apsched.problem.problem import Problem
from apsched.schedule.analysis.critical_path import Cause, CriticalPath, Where, critical_path
from apsched.schedule.schedule import as_captured
from apsched.schedule.simulate import simulate
from tests.helpers.problems.by_hand import ByHand, line, schedule
from tests.helpers.problems.random_schedules import random_schedule
from tests.helpers.problems.strategies import random_caps, random_problem


def path_of(problem: Problem, order: str, caps: Caps | None = None) -> CriticalPath:
    found = schedule(problem, order)
    return critical_path(problem, found, simulate(problem, found), caps or Caps())


@pytest.mark.parametrize("seed", range(60))
def test_shares_add_up_to_the_step_time(seed: int) -> None:
    """Also where all is exposed, or nothing is; no stretch is more exposed than it is long; exposed
    time is on the path.
    """
    rng = random.Random(seed)
    problem = random_problem(rng, max_collectives=8, max_compute=6)
    caps = random_caps(rng, problem)
    for order in (as_captured(problem.num_nodes), *(random_schedule(problem, s) for s in range(6))):
        timeline = simulate(problem, order)
        path = critical_path(problem, order, timeline, caps)
        assert (
            path.compute_ticks + path.overhead_ticks + sum(s.ticks for s in path.stretches)
            == timeline.step_time_ticks
        )
        assert all(0 <= s.exposed_ticks <= s.ticks for s in path.stretches)
        assert sum(s.exposed_ticks for s in path.stretches) <= timeline.exposed_ticks
        ends = [(s.begin_ticks, s.end_ticks) for s in path.stretches]
        assert all(a[1] <= b[0] for a, b in pairwise(ends)), "in order of time"


def two_layers() -> ByHand:
    """A gather of 30 ticks for each of two nodes of 100, and a reduction of 40 of what the second
    makes.
    """
    b = ByHand(prices={"all_gather": line(30), "reduce_scatter": line(40)})
    x = b.input("x", 512)
    for i in range(2):
        shard = b.input(f"s{i}", 512, kept=True)
        x = b.compute(
            f"c{i}",
            100,
            x,
            b.wait(f"w{i}", b.start("all_gather", f"ag{i}", shard, 512, 1024, launch_ticks=2)),
            size=2048,
        )
    b.end = b.wait("wr", b.start("reduce_scatter", "rs", x, 2048, 512))  # type: ignore[attr-defined]
    return b


def test_head_compute_and_tail() -> None:
    """The second gather runs beside the first node: it is not on the path."""
    b = two_layers()
    problem = b.output(b.end)  # type: ignore[attr-defined]
    path = path_of(problem, "x s0 s1 ag0 ag1 w0 c0 w1 c1 rs wr output")
    assert (path.step_time_ticks, path.compute_ticks, path.overhead_ticks) == (272, 200, 2)
    assert [
        (s.where, s.cause, s.begin_ticks, s.end_ticks, s.exposed_ticks) for s in path.stretches
    ] == [
        (Where.HEAD, Cause.START, 2, 32, 28),
        (Where.TAIL, Cause.DATA, 232, 272, 40),
    ]


@pytest.mark.parametrize(
    ("caps", "cause"),
    [
        (Caps(), Cause.CHOICE),
        (Caps(memory_cap_bytes=5500), Cause.MEMORY),
        (Caps(memory_cap_bytes=5632), Cause.CHOICE),
        (Caps(in_flight_cap_bytes=1023), Cause.IN_FLIGHT),
        (Caps(max_prefetch=0), Cause.PREFETCH),
        (Caps(max_prefetch=1), Cause.CHOICE),
    ],
)
def test_why_a_gather_does_not_start_sooner(caps: Caps, cause: Cause) -> None:
    """Launched right before its need: before the first node it would hold 1024 bytes beside 4608
    there.
    """
    b = two_layers()
    problem = b.output(b.end)  # type: ignore[attr-defined]
    order = schedule(problem, "x s0 s1 ag0 w0 c0 ag1 w1 c1 rs wr output")
    timeline = simulate(problem, order)
    at = next(k for k, s in enumerate(order.steps) if problem.node_names[s.index] == "c0")
    assert timeline.live_bytes[at] == 4608
    path = critical_path(problem, order, timeline, caps)
    second = path.stretches[1]
    assert (second.where, second.cause, second.begin_ticks, second.exposed_ticks) == (
        Where.MIDDLE,
        cause,
        134,
        30,
    )
    assert (second.at_step == at) == (cause is not Cause.CHOICE)
    assert (path.full_step == at) == (cause is Cause.MEMORY)


def test_a_stream_that_is_busy() -> None:
    """Three gathers at once: the third is late because of the two before it."""
    b = ByHand(prices={"all_gather": line(200)})
    x = b.input("x", 512)
    for i in range(3):
        shard = b.input(f"s{i}", 512, kept=True)
        x = b.compute(
            f"c{i}",
            100,
            x,
            b.wait(f"w{i}", b.start("all_gather", f"ag{i}", shard, 512, 1024)),
            size=512,
        )
    path = path_of(b.output(x), "x s0 s1 s2 ag0 ag1 ag2 w0 c0 w1 c1 w2 c2 output")
    assert path.step_time_ticks == 700
    assert [(s.where, s.cause, s.transfers, s.exposed_ticks) for s in path.stretches] == [
        (Where.HEAD, Cause.START, (0,), 200),
        (Where.MIDDLE, Cause.STREAM, (1, 2), 200),
    ]
