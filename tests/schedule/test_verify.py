"""``verify`` accepts what keeps every rule, and names each kind of breach."""

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from apsched.config import Caps
from apsched.kinds import NodeKind
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Bucket, Schedule, Step, StepKind, as_captured
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from tests.helpers.oracle import best_schedule
from tests.helpers.problems.by_hand import ByHand, schedule
from tests.helpers.problems.strategies import a_problem

KIB = 1024


def gathers_and_reductions() -> Problem:
    """Two gathers that b and c need, an on-path all-reduce between a and b, two reductions of b's
    and c's gradients.
    """
    hand = ByHand()
    u, v = hand.input("u", KIB, kept=True), hand.input("v", 2 * KIB, kept=True)
    a = hand.compute("a", 1, size=KIB)
    ar = hand.start("all_reduce", "ar", a, KIB, KIB, on_path=True, bucketable=False)
    war = hand.wait("war", ar)
    gu = hand.start("all_gather", "gu", u, KIB, 2 * KIB)
    b = hand.compute("b", 1, war, hand.wait("wu", gu), size=KIB)
    rb = hand.start("reduce_scatter", "rb", b, KIB, KIB // 2)
    gv = hand.start("all_gather", "gv", v, 2 * KIB, 4 * KIB)
    c = hand.compute("c", 1, b, hand.wait("wv", gv), size=2 * KIB)
    wrb = hand.wait("wrb", rb)
    rc = hand.start("reduce_scatter", "rc", c, 2 * KIB, KIB)
    return hand.output(wrb, hand.wait("wrc", rc))


BUCKETED = "u v in:0 start:0 a ar war wait:0 out:gu b out:gv c in:1 start:1 wait:1 output"
FOLLOW = (
    "bucket {}: copy-in, start and wait are at steps {}, {} and {}; they must follow each other"
)
ALONE = "u v a ar war gu wu b rb gv wv c wrb rc wrc output"


def found(
    text: str, *buckets: str, caps: Caps | None = None, max_compute_move: int = 0
) -> tuple[str, ...]:
    problem = gathers_and_reductions()
    return verify(
        problem, schedule(problem, text, *buckets), caps or Caps(max_compute_move=max_compute_move)
    )


def test_valid_schedules_pass() -> None:
    assert found(ALONE) == ()
    assert found(BUCKETED, "gu gv", "rb rc") == ()
    assert found(BUCKETED, "gv gu", "rc rb") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ALONE.replace(" war", ""), "step war is missing"),
        (ALONE + " b", "step b is there too often, or does not belong"),
        (ALONE.replace("wu b", "b wu"), "b comes before wu, which it depends on"),
        (ALONE.replace("gu wu", "wu gu"), "wu comes before gu, which it depends on"),
        (ALONE.replace("b rb", "rb b"), "rb comes before b, which it depends on"),
        (ALONE.replace("a ar war", "ar a war"), "ar comes before a, which it depends on"),
        ("output " + ALONE.removesuffix(" output"), "output comes before wrc, which it depends on"),
    ],
)
def test_nodes_are_complete_and_in_order(text: str, message: str) -> None:
    assert message in found(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BUCKETED.replace("in:0 start:0", "start:0 in:0"), FOLLOW.format(0, 3, 2, 7)),
        (
            BUCKETED.replace("wait:0 out:gu", "out:gu wait:0"),
            "bucket 0: gu is copied out before the wait",
        ),
        (BUCKETED.replace("out:gu b", "b out:gu"), "b comes before wu, which it depends on"),
        (
            BUCKETED.replace("c in:1 start:1", "in:1 c start:1"),
            "bucket 1: the copy-in comes before c, whose result it copies",
        ),
        (
            BUCKETED.replace("c in:1 start:1", "in:1 start:1 c"),
            "rc comes before c, which it depends on",
        ),
        (BUCKETED.replace("start:1 wait:1", "wait:1 start:1"), FOLLOW.format(1, 12, 14, 13)),
        (BUCKETED.replace("out:gv ", ""), "step copy-out of gv is missing"),
        (BUCKETED.replace("in:0 ", ""), "step copy-in 0 is missing"),
        (BUCKETED.replace("wait:1 ", ""), "step wait 1 is missing"),
        (BUCKETED + " gu", "step gu is there too often, or does not belong"),
        (BUCKETED + " out:rb", "step copy-out of rb is there too often, or does not belong"),
    ],
)
def test_steps_of_buckets_are_complete_and_in_order(text: str, message: str) -> None:
    assert message in found(text, "gu gv", "rb rc")


def test_a_member_is_in_one_bucket_once() -> None:
    problem = gathers_and_reductions()
    valid = schedule(problem, BUCKETED, "gu gv", "rb rc")
    twice = replace(
        valid,
        buckets=(
            Bucket((*valid.buckets[0].members, valid.buckets[0].members[0])),
            valid.buckets[1],
        ),
    )
    assert "gu is a member of two buckets" in verify(problem, twice, Caps())


def test_a_bucket_has_two_members_and_they_exist() -> None:
    assert "bucket 0 has 1 members; a bucket has at least two" in found(
        ALONE.replace("gu wu", "in:0 start:0 wait:0 out:gu"), "gu"
    )
    problem = gathers_and_reductions()
    valid = schedule(problem, BUCKETED, "gu gv", "rb rc")
    foreign = replace(valid, buckets=(Bucket((0, 99)), valid.buckets[1]))
    assert verify(problem, foreign, Caps()) == ("bucket 0 names a collective that does not exist",)


def test_members_share_their_key_and_may_be_bucketed() -> None:
    mixed = "u v a ar war b in:0 start:0 wait:0 out:gv c rc wrc output"
    problem = gathers_and_reductions()
    text = mixed.replace("war b", "war gu wu b")
    assert "bucket 0: members differ in group, kind, reduce op, dtype or device" in verify(
        problem, schedule(problem, text, "gv rb"), Caps()
    )
    alone = replace(
        problem, collectives=tuple(replace(c, bucketable=False) for c in problem.collectives)
    )
    assert "bucket 0: gu cannot share a launch" in verify(
        alone, schedule(alone, BUCKETED, "gu gv", "rb rc"), Caps()
    )


def test_no_member_is_an_ancestor_of_another() -> None:
    """The second gather reads what the first one gathered."""
    hand = ByHand()
    first = hand.start("all_gather", "first", hand.input("u", KIB), KIB, 2 * KIB)
    second = hand.start("all_gather", "second", hand.wait("w1", first), 2 * KIB, 4 * KIB)
    problem = hand.output(hand.wait("w2", second))
    order = schedule(problem, "u in:0 start:0 wait:0 out:first out:second output", "first second")
    assert "second comes before w1, which it depends on" in verify(problem, order, Caps())


def test_the_output_comes_last() -> None:
    """Also what leads to no output comes before it."""
    hand = ByHand()
    a = hand.compute("a", 1, size=KIB)
    hand.compute("dead", 1, a)
    problem = hand.output(a)
    assert verify(problem, schedule(problem, "a dead output"), Caps()) == ()
    assert verify(problem, schedule(problem, "a output dead"), Caps()) == (
        "output is not the last step",
    )


def test_compute_nodes_keep_their_place_unless_moves_are_allowed() -> None:
    hand = ByHand()
    nodes = [hand.compute(name, 1) for name in "abc"]
    problem = hand.output(*nodes)
    moved = schedule(problem, "c a b output")
    assert verify(problem, moved, Caps()) == (
        "a moved by 1 compute nodes, more than 0",
        "b moved by 1 compute nodes, more than 0",
        "c moved by 2 compute nodes, more than 0",
    )
    assert verify(problem, moved, Caps(max_compute_move=1)) == (
        "c moved by 2 compute nodes, more than 1",
    )
    assert verify(problem, moved, Caps(max_compute_move=2)) == ()


def test_prologue_and_epilogue_travel_freely() -> None:
    """The cast before a gather and what finishes a reduction have no place among the compute
    nodes.
    """
    hand = ByHand()
    a = hand.compute("a", 1, size=KIB)
    cast = hand.compute("cast", 1, hand.input("w", KIB), size=KIB)
    ag = hand.start("all_gather", "ag", cast, KIB, KIB, prologue=(cast,))
    b = hand.compute("b", 1, a, hand.wait("wait", ag))
    problem = hand.output(b)
    assert verify(problem, schedule(problem, "w cast ag a wait b output"), Caps()) == ()


def test_a_bucket_has_no_casts_and_a_lone_gather_has_its_own() -> None:
    hand = ByHand()
    w, x = hand.input("w", KIB), hand.input("x", KIB)
    starts = [
        hand.compute(f"cast_{name}", 1, source, size=KIB) for name, source in (("w", w), ("x", x))
    ]
    gathers = [
        hand.start(
            "all_gather",
            f"ag_{k}",
            cast,
            KIB,
            KIB,
            prologue=(cast,),
            cast=(cast,),
            cast_bytes=2 * KIB,
        )
        for k, cast in enumerate(starts)
    ]
    problem = hand.output(
        hand.compute("b", 1, *(hand.wait(f"wait_{k}", start) for k, start in enumerate(gathers)))
    )
    shared = "w x in:0 start:0 wait:0 out:ag_0 out:ag_1 b output"
    assert verify(problem, schedule(problem, shared, "ag_0 ag_1"), Caps()) == ()
    assert (
        "cast_w is there too often"
        in verify(
            problem, schedule(problem, shared.replace("in:0", "cast_w in:0"), "ag_0 ag_1"), Caps()
        )[0]
    )
    late = verify(
        problem,
        schedule(problem, "w in:0 x start:0 wait:0 out:ag_0 out:ag_1 b output", "ag_0 ag_1"),
        Caps(),
    )
    assert "cast_x comes before x, which it depends on" in late
    alone = schedule(problem, "w x ag_0 cast_x ag_1 wait_0 wait_1 b output")
    assert "step cast_w is missing" in verify(problem, alone, Caps())


def test_views_of_a_cast_go_with_it_into_the_copy_in() -> None:
    hand = ByHand()
    shards, gathers = [hand.input(name, KIB, kept=True) for name in "wx"], []
    for k, shard in enumerate(shards):
        cast = hand.compute(f"cast_{k}", 1, shard, size=KIB)
        view = hand.view(f"view_{k}", cast)
        more = {"prologue": (cast,), "cast": (cast, view), "cast_bytes": 2 * KIB}
        gathers.append(hand.start("all_gather", f"ag_{k}", view, KIB, KIB, **more))
    waits = [hand.wait(f"wait_{k}", start) for k, start in enumerate(gathers)]
    problem = hand.output(hand.compute("b", 1, *waits))
    shared = "w x in:0 start:0 wait:0 out:ag_0 out:ag_1 b output"
    assert verify(problem, schedule(problem, shared, "ag_0 ag_1"), Caps()) == ()


@pytest.mark.parametrize(
    ("cap", "value", "message"),
    [
        (
            "memory_cap_bytes",
            14 * KIB - 1,
            "14336 live bytes at copy-out of gv, more than the cap of 14335",
        ),
        (
            "bucket_cap_bytes",
            6 * KIB - 1,
            "bucket 0 has 6144 bytes, more than the bucket cap of 6143",
        ),
        ("max_topo_span", 4, "bucket 1 spans 5 ranks, more than the topo-span cap of 4"),
        (
            "in_flight_cap_bytes",
            7 * KIB - 1,
            "7168 in-flight bytes at ar, more than the cap of 7167",
        ),
        ("max_prefetch", 0, "gu is launched 1 compute nodes ahead, more than 0"),
    ],
)
def test_caps_hold_to_the_unit(cap: str, value: int, message: str) -> None:
    """One unit more and the schedule passes.

    In KiB: 3 kept, gathered buffer 6 until out:gv, b 1, copy of gv 4 make 14 at out:gv; the launch
    of gu stands before a, its need b after. In flight at ar: the bucket's 6 and ar's 1.
    """
    wrong = found(BUCKETED, "gu gv", "rb rc", caps=Caps(**{cap: value}))
    assert wrong == (message,)
    assert found(BUCKETED, "gu gv", "rb rc", caps=Caps(**{cap: value + 1})) == ()


def test_a_collective_larger_than_the_bucket_cap_stays_alone() -> None:
    assert found(ALONE, caps=Caps(bucket_cap_bytes=1)) == ()


def _valid(problem: Problem) -> Schedule:
    best = best_schedule(problem, Caps())
    assert best is not None
    return best.schedule


@given(a_problem(), st.randoms(use_true_random=False))
@settings(max_examples=80)
def test_every_mutation_of_a_valid_schedule_is_rejected(
    problem: Problem, rng: random.Random
) -> None:
    """Dropped, doubled and foreign steps; a step moved ahead of what it needs; members twice,
    elsewhere or of another key.
    """
    valid = _valid(problem)
    assert verify(problem, valid, Caps()) == ()
    mutation = rng.choice(
        (
            _drop,
            _double,
            _foreign,
            _move_before_its_need,
            _member_twice,
            _member_elsewhere,
            _swap_compute,
        )
    )
    broken = mutation(problem, valid, rng)
    assume(broken is not None)
    assert verify(problem, broken, Caps()) != (), mutation.__name__


@given(a_problem(), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_caps_are_rejected_exactly_below_what_the_schedule_needs(
    problem: Problem, rng: random.Random
) -> None:
    schedule = rng.choice((_valid(problem), as_captured(problem.num_nodes)))
    timeline = simulate(problem, schedule)
    for cap, needed in (
        ("memory_cap_bytes", timeline.peak_memory_bytes),
        ("in_flight_cap_bytes", timeline.peak_in_flight_bytes),
    ):
        assert verify(problem, schedule, Caps(**{cap: needed})) == ()
        if needed:
            assert len(verify(problem, schedule, Caps(**{cap: needed - 1}))) == 1


def _drop(problem: Problem, valid: Schedule, rng: random.Random) -> Schedule:
    k = rng.randrange(len(valid.steps))
    return replace(valid, steps=valid.steps[:k] + valid.steps[k + 1 :])


def _double(problem: Problem, valid: Schedule, rng: random.Random) -> Schedule:
    k = rng.randrange(len(valid.steps))
    return replace(valid, steps=(*valid.steps[: k + 1], *valid.steps[k:]))


def _foreign(problem: Problem, valid: Schedule, rng: random.Random) -> Schedule:
    step = Step(rng.choice(tuple(StepKind)), problem.num_nodes + rng.randrange(3))
    k = rng.randrange(len(valid.steps))
    return replace(valid, steps=(*valid.steps[:k], step, *valid.steps[k:]))


def _move_before_its_need(problem: Problem, valid: Schedule, rng: random.Random) -> Schedule | None:
    """Swap a node with one that it depends on."""
    at = {step: k for k, step in enumerate(valid.steps)}
    pairs = [
        (Step(StepKind.NODE, p), Step(StepKind.NODE, n))
        for n, before in enumerate(problem.predecessors)
        for p in before
    ]
    pairs += [
        (Step(a, b), Step(a + 1, b))
        for b in range(len(valid.buckets))
        for a in (StepKind.COPY_IN, StepKind.START)
    ]
    pairs = [(a, b) for a, b in pairs if a in at and b in at]
    if not pairs:
        return None
    a, b = (at[step] for step in rng.choice(pairs))
    steps = list(valid.steps)
    steps[a], steps[b] = steps[b], steps[a]
    return replace(valid, steps=tuple(steps))


def _member_twice(problem: Problem, valid: Schedule, rng: random.Random) -> Schedule | None:
    if not valid.buckets:
        return None
    b = rng.randrange(len(valid.buckets))
    members = valid.buckets[b].members
    return _with_bucket(valid, b, (*members, rng.choice(members)))


def _member_elsewhere(problem: Problem, valid: Schedule, rng: random.Random) -> Schedule | None:
    """Replace a member by a collective outside of the bucket."""
    if not valid.buckets:
        return None
    b = rng.randrange(len(valid.buckets))
    others = [c for c in range(len(problem.collectives)) if c not in valid.buckets[b].members]
    if not others:
        return None
    return _with_bucket(valid, b, (*valid.buckets[b].members[1:], rng.choice(others)))


def _with_bucket(valid: Schedule, b: int, members: tuple[int, ...]) -> Schedule:
    return replace(valid, buckets=(*valid.buckets[:b], Bucket(members), *valid.buckets[b + 1 :]))


def _swap_compute(problem: Problem, valid: Schedule, rng: random.Random) -> Schedule | None:
    at = [
        k
        for k, s in enumerate(valid.steps)
        if s.kind is StepKind.NODE and s.index in problem.compute_order
    ]
    assert all(problem.kinds[valid.steps[k].index] is NodeKind.COMPUTE for k in at)
    j = rng.randrange(len(at) - 1)
    steps = list(valid.steps)
    steps[at[j]], steps[at[j + 1]] = steps[at[j + 1]], steps[at[j]]
    return replace(valid, steps=tuple(steps))
