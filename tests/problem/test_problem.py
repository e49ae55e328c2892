"""Properties of a problem's nodes, and refused problems."""

import random
from dataclasses import replace

import pytest

from apsched.config import Caps
from apsched.errors import InputError
from apsched.problem.problem import Problem, check_problem
from apsched.schedule.schedule import as_captured
from apsched.schedule.verify import verify
from tests.helpers.problems.by_hand import ByHand
from tests.helpers.problems.strategies import random_problem

KIB = 1024
TRAVEL = "a prologue is compute before the start, an epilogue compute after the wait"


def hsdp() -> Problem:
    """A cast gather for b; b's gradient is scattered, then reduced over the replicas, then cast."""
    hand = ByHand()
    w = hand.input("w", 2 * KIB, kept=True)
    a = hand.compute("a", 1, size=KIB)
    cast = hand.compute("cast", 1, w, size=KIB)
    ag = hand.start("all_gather", "ag", cast, KIB, 2 * KIB, prologue=(cast,))
    view = hand.view("view", hand.wait("ag_wait", ag))
    b = hand.compute("b", 1, a, view, size=2 * KIB)
    c = hand.compute("c", 1, b, view, size=KIB)
    rs = hand.start("reduce_scatter", "rs", b, 2 * KIB, KIB)
    ar = hand.start("all_reduce", "ar", hand.wait("rs_wait", rs), KIB, KIB, group="replicas")
    finish = hand.compute("finish", 1, hand.wait("ar_wait", ar), size=KIB)
    hand.collectives[2]["epilogue"] = (finish,)
    return hand.output(c, finish)


def names(problem: Problem, nodes: tuple[int, ...]) -> list[str]:
    return [problem.node_names[node] for node in nodes]


def test_the_compute_is_compute_that_does_not_travel() -> None:
    problem = hsdp()
    assert names(problem, problem.compute_order) == ["a", "b", "c"]
    assert sorted(names(problem, tuple(problem.travels))) == ["cast", "finish"]


def test_needs_are_found_through_views_and_other_collectives() -> None:
    problem = hsdp()
    assert [names(problem, needs) for needs in problem.needs] == [["b", "c"], [], []]


def test_a_collective_that_feeds_another_needs_what_that_one_needs() -> None:
    hand = ByHand()
    first = hand.start("all_gather", "first", hand.input("w", KIB), KIB, KIB)
    second = hand.start("all_gather", "second", hand.wait("w1", first), KIB, KIB)
    problem = hand.output(hand.compute("a", 1, hand.wait("w2", second)))
    assert [names(problem, needs) for needs in problem.needs] == [["a"], ["a"]]


def test_successors_and_kept_bytes() -> None:
    problem = hsdp()
    a = problem.node_names.index("a")
    assert names(problem, problem.successors[a]) == ["b"]
    assert problem.kept_bytes == 2 * KIB
    assert problem.collective_of_node[problem.node_names.index("rs_wait")] == 1


def test_random_problems_are_valid_and_run_as_captured() -> None:
    """The generator that the other tests rest on: a few hundred seeds, every kind of collective
    among them.
    """
    kinds = set()
    for seed in range(300):
        problem = random_problem(random.Random(seed), max_collectives=8, max_compute=6)
        check_problem(problem)
        assert verify(problem, as_captured(problem.num_nodes), Caps()) == ()
        assert 1 <= len(problem.collectives) <= 8
        kinds |= {
            (problem.keys[c.key].kind, c.on_path, bool(c.prologue), bool(c.epilogue))
            for c in problem.collectives
        }
    assert kinds == {
        ("all_gather", False, True, False),
        ("all_gather", False, False, False),
        ("reduce_scatter", False, False, True),
        ("reduce_scatter", False, False, False),
        ("all_reduce", False, False, True),
        ("all_reduce", False, False, False),
        *(
            (kind, True, False, False)
            for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
        ),
    }


def _collective(problem: Problem, c: int, **fields) -> Problem:
    changed = list(problem.collectives)
    changed[c] = replace(changed[c], **fields)
    return replace(problem, collectives=tuple(changed))


def _storage(problem: Problem, s: int, **fields) -> Problem:
    changed = list(problem.storages)
    changed[s] = replace(changed[s], **fields)
    return replace(problem, storages=tuple(changed))


@pytest.mark.parametrize(
    ("breach", "message"),
    [
        (lambda p: replace(p, modules=()), "modules has 0 entries for 14 nodes"),
        (
            lambda p: replace(p, predecessors=((3,), *p.predecessors[1:])),
            "node w: predecessors must come before it in the captured order",
        ),
        (
            lambda p: replace(p, duration_ticks=(-1, *p.duration_ticks[1:])),
            "durations must not be negative",
        ),
        (lambda p: _storage(p, 0, size_bytes=-1), "storage 0 has a negative size"),
        (
            lambda p: _storage(p, 0, birth=99),
            "storage 0 is allocated by node 99, which does not exist",
        ),
        (lambda p: _storage(p, 0, uses=(3, 2)), "storage 0: uses must be nodes in ascending order"),
        (lambda p: _storage(p, 1, uses=(2,)), "storage 1: the first use must be its birth"),
        (lambda p: _collective(p, 0, wait=2), "collective ag: the wait must follow the start"),
        (lambda p: _collective(p, 0, wait=6), "collective ag: start or wait has the wrong kind"),
        (lambda p: _collective(p, 0, key=9), "collective ag: key 9 does not exist"),
        (lambda p: _collective(p, 0, input_storage=99), "collective ag: a storage does not exist"),
        (lambda p: _collective(p, 0, input_bytes=-1), "collective ag: negative bytes"),
        (lambda p: _collective(p, 0, prologue=(0,)), f"collective ag: {TRAVEL}"),
        (lambda p: _collective(p, 2, epilogue=(1,)), f"collective ar: {TRAVEL}"),
        (
            lambda p: _collective(p, 0, input_storage=1),
            "collective ag: the start must use its input and its output",
        ),
        (lambda p: _storage(p, 3, uses=(3,)), "collective ag: the wait must use the output"),
        (
            lambda p: _storage(p, 2, uses=(2, 3)),
            "collective ag: the wait must use the input that it holds",
        ),
        (
            lambda p: _storage(p, 3, birth=-1),
            "collective ag: in a bucket it cannot write where it reads",
        ),
        (
            lambda p: replace(p, collectives=p.collectives[::-1]),
            "collectives must be ordered by their start node",
        ),
        (
            lambda p: replace(p, collectives=p.collectives[1:]),
            "node ag: a start node must belong to a collective",
        ),
    ],
)
def test_broken_problems_are_refused(breach, message: str) -> None:
    with pytest.raises(InputError) as error:
        check_problem(breach(hsdp()))
    assert str(error.value) == f"not a valid problem: {message}"
