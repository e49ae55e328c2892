"""A plan that breaks a cap is an answer that names the rule and the least cap that would do."""

import re
from dataclasses import replace

import pytest

from apsched.config import Caps, SolveOptions
from apsched.problem.plan.apply import restricted
from apsched.problem.plan.rules import Plan, Rule
from apsched.problem.restriction import Restriction
from apsched.solver import solve
from apsched.solver.infeasible.clashing_plan import plan_clashes
from tests.helpers.problems.by_hand import ByHand
from tests.helpers.problems.by_hand_plans import gathers_and_reductions
from tests.helpers.problems.random_plans import named

PAIR = Rule(match=r".*w[01]", group=True)
EARLY = Rule(match=r".*w3", forbid=True, prefetch=3)


@pytest.mark.parametrize(
    ("rule", "caps", "least", "said"),
    [
        (
            PAIR,
            Caps(bucket_cap_bytes=4095),
            ("bucket_cap_bytes", 4096),
            "4096 bytes in one bucket, more than bucket_cap_bytes of 4095",
        ),
        (
            PAIR,
            Caps(in_flight_cap_bytes=4000),
            ("in_flight_cap_bytes", 4096),
            "4096 bytes in flight at once",
        ),
        (PAIR, Caps(max_topo_span=0), ("max_topo_span", 1), "1 ranks in one bucket"),
        (
            EARLY,
            Caps(max_prefetch=2),
            ("max_prefetch", 3),
            "a launch 3 compute nodes ahead, more than max_prefetch of 2",
        ),
    ],
)
def test_the_rule_and_the_least_cap_are_named(
    rule: Rule, caps: Caps, least: tuple[str, int], said: str
) -> None:
    problem = restricted(named(gathers_and_reductions()), Plan((rule,)))
    why = solve(problem, caps, SolveOptions(budget=1.0)).infeasibility
    assert why is not None
    assert why.least == (least,)
    assert said in why.message
    assert f"rule 1 ({rule})" in why.message
    name, value = least
    assert solve(problem, Caps(**{name: value}), SolveOptions(budget=1.0)).best is not None


def test_a_memory_cap_that_would_do_without_the_plan() -> None:
    problem = restricted(named(gathers_and_reductions()), Plan((Rule(match=r".*w[0-3]", start=0),)))
    planned = solve(problem, Caps()).floor_memory_bytes
    why = solve(
        problem, Caps(memory_cap_bytes=planned - 512), SolveOptions(budget=1.0)
    ).infeasibility
    assert why is not None
    assert why.least == (("memory_cap_bytes", planned),)
    assert re.search(r"without the plan [\d.]+ \w+ is enough", why.message)


def test_what_shares_the_launch_may_be_needed_a_move_later() -> None:
    """Compute may move by one place: a launch at slot 3 serves a gather that is needed by the node
    before it as captured, and behind it where that has moved; so the later need may be far away.
    """
    b = ByHand()
    x = b.input("x", 512)
    gathers = [
        b.start("all_gather", f"ag{i}", b.input(f"s{i}", 512, kept=True), 512, 1024)
        for i in range(2)
    ]
    waits = [b.wait(f"w{i}", start) for i, start in enumerate(gathers)]
    needs = {2: waits[0], 9: waits[1]}
    nodes = [
        b.compute(f"k{k}", 1, x, *([needs[k]] if k in needs else []), size=512) for k in range(10)
    ]
    problem = b.output(*nodes)
    planned = replace(problem.collectives[1], restriction=Restriction(start_slots=(3, 3)))
    problem = replace(problem, collectives=(problem.collectives[0], planned))
    caps = Caps(max_prefetch=4, max_compute_move=1)
    assert plan_clashes(problem, caps) == ()
    (clash,) = plan_clashes(problem, replace(caps, max_compute_move=0))
    assert (clash.cap, clash.least) == ("max_prefetch", 9 - 3)


def test_compute_that_may_move_stays_behind_what_it_takes() -> None:
    """A chain: the node that needs the gather can come no sooner than as captured."""
    b = ByHand()
    gather = b.start("all_gather", "ag", b.input("s", 512, kept=True), 512, 1024)
    wait = b.wait("w", gather)
    x = b.input("x", 512)
    for k in range(10):
        x = b.compute(f"k{k}", 1, x, *([wait] if k == 8 else []), size=512)
    problem = b.output(x)
    planned = replace(problem.collectives[0], restriction=Restriction(start_slots=(2, 2)))
    problem = replace(problem, collectives=(planned,))
    caps = Caps(max_prefetch=4, memory_cap_bytes=2**20)
    for moves in (None, 200):
        (clash,) = plan_clashes(problem, replace(caps, max_compute_move=moves))
        assert (clash.cap, clash.least) == ("max_prefetch", 8 - 2)
        why = solve(problem, replace(caps, max_compute_move=moves)).infeasibility
        assert why is not None
        assert why.proven
        assert why.clashes == (("max_prefetch",),)
        assert "a launch at least 6 compute nodes ahead" in why.message
        assert "memory" not in why.message


def test_a_memory_cap_with_no_part_in_a_clash_that_is_not_proven_is_not_named() -> None:
    """Each gather may share a launch with one that is needed sooner: that is not ruled out."""
    b = ByHand()
    x = b.input("x", 512)
    waits = [
        b.wait(
            f"w{i}", b.start("all_gather", f"ag{i}", b.input(f"s{i}", 512, kept=True), 512, 1024)
        )
        for i in range(12)
    ]
    for k in range(60):
        x = b.compute(f"k{k}", 1, x, *waits[k // 5 : k // 5 + 1], size=512)
    plan = Plan((Rule(match=r".*(w6|w9)", prefetch=18),))
    problem = restricted(named(b.output(x)), plan)
    caps = Caps(max_prefetch=4, memory_cap_bytes=2**30)
    assert plan_clashes(problem, caps) == ()
    why = solve(problem, caps, SolveOptions(budget=0.0)).infeasibility
    assert why is not None
    assert why.least[0][0] == "max_prefetch"
    assert why.clashes == (("max_prefetch",),)
    assert "memory" not in why.message
    assert "rule 1 (" in why.message
