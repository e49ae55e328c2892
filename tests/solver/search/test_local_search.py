"""Search: its work does not grow with the problem, moves keep partitions whole, and what a tight
cap finds a looser one keeps.
"""

import random
from dataclasses import replace

import numpy as np
import pytest

from apsched.config import Caps, SolveOptions
from apsched.names import part_of
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.partition import Pricer
from apsched.solver.arrays.problem_arrays import problem_arrays
from apsched.solver.program.evaluate import evaluate
from apsched.solver.reorder.min_memory import least_memory
from apsched.solver.search.front import Front
from apsched.solver.search.launch_policy import Policy
from apsched.solver.search.local_search import Search, kept_as_near
from apsched.solver.search.neighbourhood import CHANGE, CUT, JOIN, Move, TriedMoves, apply
from apsched.solver.search.start_partitions import families
from tests.helpers.problems.by_hand import ByHand, line
from tests.helpers.problems.strategies import (
    layered_problem,
    problem_for_coalescing,
    random_problem,
)


def searched(num_layers: int, max_evaluations: int) -> Search:
    problem = layered_problem(random.Random(3), num_layers=num_layers)
    search = Search(
        instance=Instance.of(problem, Caps()),
        report=lambda stage, ticks: None,
        max_evaluations=max_evaluations,
        floor_bytes=least_memory(problem)[0],
    )
    search.portfolio()
    return search


def test_the_number_of_evaluations_does_not_grow_with_the_problem() -> None:
    """Each costs time in proportion to the nodes, so that the time of a search grows no faster than
    they do.
    """
    few, many = searched(3, 1_500), searched(24, 1_500)
    assert len(many.instance.arrays.kind) >= 5 * len(few.instance.arrays.kind)
    assert many.evaluations <= 1.5 * few.evaluations
    for search in (few, many):
        search.improve(0)
        assert search.evaluations <= 1_500 + 50  # a move may need a few to keep the memory cap


def test_a_search_that_begins_again_evaluates_no_start_twice() -> None:
    short = searched(6, 1_500)
    longer = short.again(6_000)
    longer.portfolio()
    assert longer.evaluations == 0
    assert longer.best is not None
    assert longer.best.value == short.best.value
    # under other caps, or around another order, the same starts have other figures
    assert longer.known_starts
    assert not longer.within(Caps(max_prefetch=5), 100).known_starts
    assert not longer.around(short.instance, 100).known_starts


def test_several_starts_lead_to_better_ends_than_one() -> None:
    """At the same number of evaluations, summed over problems."""
    one = several = 0
    for seed in range(8):
        problem = layered_problem(random.Random(seed), num_layers=8)
        for spread in (False, True):
            search = Search(
                instance=Instance.of(problem, Caps()),
                report=lambda stage, ticks: None,
                max_evaluations=2_000,
                floor_bytes=0,
            )
            search.portfolio()
            search._is_spread = not spread
            search.improve(0)
            one, several = (
                one + (0 if spread else search.step_time_ticks),
                several + (search.step_time_ticks if spread else 0),
            )
    assert several < one


def test_a_move_is_tried_again_only_where_a_bucket_of_it_has_changed() -> None:
    tried = TriedMoves(num_collectives=6)
    labels = np.array([0, 0, 2, 2, 4, 5])
    join = Move(kind=JOIN, of=np.array([0]), to=np.array([2]))
    other = Move(kind=JOIN, of=np.array([4]), to=np.array([5]))
    layers = Move(kind=JOIN, of=np.array([0, 2]), to=np.array([2, 4]))
    assert tried.is_new(join, labels, "layout")
    assert tried.is_new(other, labels, "layout")
    assert not tried.is_new(join, labels, "layout")
    assert tried.is_new(layers, labels, "layout")
    assert tried.is_new(layers, labels, "layout")
    changed = np.array([0, 0, 2, 3, 4, 5])  # bucket 2 is cut
    assert tried.is_new(join, changed, "layout")
    assert not tried.is_new(other, changed, "layout")
    assert tried.is_new(other, changed, "another layout")


@pytest.mark.parametrize("seed", range(20))
def test_a_move_changes_what_it_says(seed: int) -> None:
    rng = random.Random(seed)
    size = 9
    labels = np.arange(size)
    place = np.array(rng.sample(range(size), size))
    for _ in range(30):
        kind, of, to = rng.choice((JOIN, CUT, CHANGE)), rng.randrange(size), rng.randrange(size)
        moved = apply(labels, kind, np.array([of]), np.array([to]), place)
        before = [{c for c in range(size) if labels[c] == label} for label in labels]
        after = [{c for c in range(size) if moved[c] == label} for label in moved]
        assert [
            min(bucket) for bucket in after
        ] == moved.tolist()  # a bucket is named by its lowest member
        if kind == JOIN:
            expected = before[of] | before[to]
        elif kind == CUT:
            expected = {c for c in before[of] if place[c] >= place[of]}
        else:
            expected = before[to] | {of}
        assert after[of] == expected
        others = before[of] | before[to] if kind != CUT else before[of]
        assert all(after[c] == before[c] for c in range(size) if c not in others)
        labels = moved


@pytest.mark.parametrize("seed", range(12))
def test_what_is_found_under_tighter_prefetch_is_laid_out_the_same(seed: int) -> None:
    """Where the cap allows more, launches that were late stay late: earlier ones may take memory
    that is not there.
    """
    problem = random_problem(random.Random(seed), max_collectives=30, max_compute=30)
    small = problem_arrays(problem)
    caps = Caps(
        memory_cap_bytes=least_memory(problem, options=SolveOptions(budget=0.1))[0], max_prefetch=6
    )
    search = Search(
        instance=Instance(problem=problem, arrays=small, caps=caps),
        report=lambda *_: None,
        max_evaluations=300,
        floor_bytes=0,
    )
    tight = replace(caps, max_prefetch=2)
    below = replace(search.within(tight, 300), front=Front())
    below.portfolio()
    if below.best is not None:
        below.improve(0)
    for found in below.front:
        search.best = kept_as_near(found.candidate, tight)
        assert evaluate(small, search.program()) == found.candidate.figures


def test_a_cap_on_prefetch_starts_from_buckets_of_several_blocks() -> None:
    """What starts late hides little, so that fewer and larger buckets win, which search does not
    come to by single moves.
    """
    problem = layered_problem(random.Random(0), num_layers=16)
    small = problem_arrays(problem)
    block = [part_of(c.module) for c in problem.collectives]

    def most_blocks(caps: Caps) -> set[int]:
        partitions = [
            labels.tolist()
            for labels in families(Pricer(Instance(problem=problem, arrays=small)), caps)
        ]
        return {
            max(len({block[c] for c in range(len(block)) if labels[c] == b}) for b in set(labels))
            for labels in partitions
        }

    assert {2, 3, 4} <= most_blocks(Caps(max_prefetch=9))


def test_once_enough_is_found_no_other_form_is_tried() -> None:
    problem = problem_for_coalescing(random.Random(1))
    search = Search(
        instance=Instance.of(problem), report=lambda *_: None, max_evaluations=400, floor_bytes=0
    )
    search.portfolio()
    assert search.instance.arrays.coalesces.any()
    before = search.evaluations
    search._other_forms(search.step_time_ticks)
    assert search.evaluations == before
    search._other_forms(0)
    assert search.evaluations > before


def test_memory_is_lowered_to_what_one_gather_ahead_takes() -> None:
    """Five layers of 100 ticks, each with a gather of 64 KiB in 100: the next has to be on its way
    beside each, so two results are alive. Launched as early as can be all five are.
    """
    hand = ByHand(prices={"all_gather": line(100)})
    shards = [hand.input(f"s{k}", 512, kept=True) for k in range(5)]
    at = hand.compute("head", 100, hand.input("x", 512), size=512)
    for k, shard in enumerate(shards):
        wait = hand.wait(f"w{k}", hand.start("all_gather", f"ag{k}", shard, 512, 2**16))
        at = hand.compute(f"c{k}", 100, at, wait, size=512)
    search = Search(
        instance=Instance.of(hand.output(at)),
        report=lambda *_: None,
        max_evaluations=400,
        floor_bytes=0,
    )
    early = Policy(lead=np.inf, copy_out_early=True)
    search.best = search.evaluate(np.arange(5), early, None)
    assert search.best is not None
    assert search.best.figures.peak_memory_bytes > 5 * 2**16
    search.lower_memory(600)
    assert search.best.figures.step_time_ticks == 600
    assert 2 * 2**16 < search.best.figures.peak_memory_bytes < 3 * 2**16
