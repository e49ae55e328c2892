"""Caps that clash are a minimal set, and the least that would do is that of exhaustive search."""

import random
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.result import Infeasibility
from apsched.solver import solve, with_reasons
from apsched.solver.arrays.instance import Instance
from apsched.solver.compute_move_cap import moving_where_it_pays
from apsched.solver.infeasible.clashing_caps import FeasibilityOracle, stated
from apsched.solver.infeasible.explain import explain
from apsched.solver.requested import solve_requested
from apsched.solver.search.local_search import Search
from tests.helpers.claims import judged
from tests.helpers.oracle import best_schedule, least_memory
from tests.helpers.problems.by_hand import ByHand, line
from tests.helpers.problems.layered import Layer, layered
from tests.helpers.problems.strategies import random_caps, random_problem


def infeasible_cases(num_seeds: int) -> list[tuple[int, Problem, Caps]]:
    """Return random problems with caps of which exhaustive search says that nothing keeps them."""
    found = []
    for seed in range(num_seeds):
        rng = random.Random(seed)
        problem = random_problem(rng, max_collectives=4, max_compute=4)
        caps = random_caps(rng, problem)
        if rng.random() < 0.5 and caps.memory_cap_bytes is not None:
            caps = replace(caps, memory_cap_bytes=caps.memory_cap_bytes * 3 // 4)
        if rng.random() < 0.3 and caps.in_flight_cap_bytes is not None:
            caps = replace(caps, in_flight_cap_bytes=caps.in_flight_cap_bytes // 3)
        if best_schedule(problem, caps) is None:
            found.append((seed, problem, caps))
    return found


CASES = infeasible_cases(60)


@pytest.mark.parametrize(
    ("seed", "problem", "caps"), CASES, ids=[str(seed) for seed, _, _ in CASES]
)
def test_clashes_are_minimal_and_the_least_values_are_exact(
    seed: int, problem: Problem, caps: Caps
) -> None:
    """Each clash alone cannot be kept, and without any one of its caps it can; with the least value
    it can, with one less it cannot.
    """
    why = explain(Instance.of(problem, caps), SolveOptions())
    assert why.clashes
    if problem.travels and not why.proven:
        return  # exhaustive search is of the normal form, which is not all there is
    assert why.proven

    def only(names: tuple[str, ...]) -> Caps:
        return Caps(**{name: getattr(caps, name) for name in names})

    for clash in why.clashes:
        assert best_schedule(problem, only(clash)) is None
        for name in clash:
            assert best_schedule(problem, replace(only(clash), **{name: None})) is not None
    assert [r.cap for r in why.relaxations] == list(why.caps)
    for r in why.relaxations:
        others = replace(caps, **dict.fromkeys(r.lifted))
        assert r.stated == getattr(caps, r.cap) < r.bound
        assert r.proven or problem.travels, r
        if not r.proven:
            continue
        assert r.least == r.bound
        assert best_schedule(problem, replace(others, **{r.cap: r.least})) is not None
        assert best_schedule(problem, replace(others, **{r.cap: r.least - 1})) is None
        if r.cap == "memory_cap_bytes":
            assert r.least == least_memory(problem, others)


def test_there_are_cases_of_each_sort() -> None:
    """Memory alone, in flight alone, and both."""
    caps = {
        frozenset(explain(Instance.of(problem, caps), SolveOptions()).clashes)
        for _, problem, caps in CASES
    }
    assert {frozenset({("memory_cap_bytes",)}), frozenset({("in_flight_cap_bytes",)})} <= caps
    assert any(len(clashes) > 1 for clashes in caps)


def early_and_late() -> Problem:
    """An on-path gather makes 512 bytes of 8 KiB, which the node between needs no more: early is
    better, the prefetch cap says late.
    """
    b = ByHand(prices={"reduce_scatter": line(10)})
    x = b.input("x", 512)
    big = b.compute("big", 10, x, size=8192)
    small = b.wait(
        "w", b.start("reduce_scatter", "rs", big, 8192, 512, on_path=True, bucketable=False)
    )
    y = b.compute("y", 10, x, size=8192)
    return b.output(b.compute("z", 10, small, y, size=512))


def test_caps_that_clash_only_together() -> None:
    """Launched before y the result is 1 node early; launched behind y, both large results are alive
    at y.
    """
    problem = early_and_late()
    enough = least_memory(problem, Caps())
    assert enough is not None
    caps = Caps(memory_cap_bytes=enough, max_prefetch=0, max_topo_span=1000)
    result = solve(problem, caps)
    why = result.infeasibility
    assert why is not None
    assert why.clashes == (("memory_cap_bytes", "max_prefetch"),)
    assert "max_topo_span" in stated(caps)
    assert {r.cap: (r.least, r.proven) for r in why.relaxations} == {
        "memory_cap_bytes": (least_memory(problem, Caps(max_prefetch=0)), True),
        "max_prefetch": (1, True),
    }
    assert why.message.startswith("no schedule fits: no schedule keeps memory cap of")


def test_what_is_alive_is_all_that_is_alive() -> None:
    """The figures of a place add up; layers are told together."""
    problem = early_and_late()
    why = explain(
        Instance.of(problem, Caps(memory_cap_bytes=1024)),
        SolveOptions(),
    )
    assert why.places
    for place in why.places:
        assert sum(size for _, _, size in place.alive) == place.live_bytes > 1024
    assert why.places[0].node in why.nodes


@pytest.mark.parametrize("search_alone", [False, True])
def test_the_reasons_are_found_once_and_only_on_request(
    monkeypatch: pytest.MonkeyPatch, search_alone: bool
) -> None:
    """Orders of the compute are searched apart where it stays as captured, but not explained."""
    calls = []

    def counted(*args: Any) -> Infeasibility:
        calls.append(args)
        return explain(*args)

    monkeypatch.setattr("apsched.solver.answer.explain", counted)
    caps = Caps(memory_cap_bytes=1024, max_compute_move=5)
    problem = layered([Layer(ticks=(40, 60))] * 3, backward=True, ticks=(70, 1))
    assert moving_where_it_pays(problem, caps) != caps
    found = solve_requested(problem, caps, search_alone=search_alone)
    assert found.best is None
    assert (found.infeasibility is None, found.is_final) == (search_alone, not search_alone)
    assert len(calls) == (not search_alone)


@pytest.mark.parametrize("max_compute_move", [0, 5])
def test_reasons_that_were_left_out_are_those_of_the_whole_solve(
    monkeypatch: pytest.MonkeyPatch, max_compute_move: int
) -> None:
    """Of a large problem the memory bound excludes every schedule, so nothing is searched; only
    the reasons are added, and compute as captured is not looked at first.
    """
    monkeypatch.setattr(sys.modules["apsched.solver.solve"], "is_small", lambda *_: False)
    caps = Caps(memory_cap_bytes=1024, max_compute_move=max_compute_move)
    problem = layered([Layer(ticks=(40, 60))] * 3, backward=True, ticks=(70, 1))
    whole = solve_requested(problem, caps)
    with monkeypatch.context() as unsearched:
        unsearched.setattr(Search, "portfolio", None)
        solved = Mock(wraps=solve)
        unsearched.setattr("apsched.solver.requested.solve_any", solved)
        found = solve_requested(problem, caps, search_alone=True)
        assert solved.call_count == 1
        assert found.lacks_reasons
        assert with_reasons(found, problem, caps, SolveOptions()) == whole


def test_a_large_problem_is_judged_by_construction_and_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What neither decides stays open: the clash is then not proven, and the value that is known
    has a bound beside it.
    """
    for module in ("infeasible.clashing_caps", "reorder.min_memory"):
        monkeypatch.setattr(sys.modules[f"apsched.solver.{module}"], "is_small", lambda *_: False)
    problem = early_and_late()
    oracle = FeasibilityOracle(Instance.of(problem), SolveOptions())
    assert oracle(Caps(memory_cap_bytes=0))[0] is False
    assert oracle(Caps())[0] is True
    enough = least_memory(problem, Caps())
    assert enough is not None
    caps = Caps(memory_cap_bytes=enough, max_prefetch=0)
    assert oracle(caps)[0] is None
    why = explain(Instance.of(problem, caps), SolveOptions())
    assert not why.proven
    assert why.message.startswith("no schedule fits: no schedule was found that keeps")
    for r in why.relaxations:
        assert r.least is None or r.bound <= r.least


def test_what_a_move_of_one_place_makes_possible_is_possible() -> None:
    """Each large result is used at once where two nodes change places; as captured both are alive
    together.
    """
    b = ByHand()
    x = b.input("x", 512)
    large = [b.compute(f"large{i}", 1, x, size=8192) for i in range(2)]
    problem = b.output(*(b.compute(f"used{i}", 1, y, size=512) for i, y in enumerate(large)))
    oracle = FeasibilityOracle(Instance.of(problem), SolveOptions())
    caps = Caps(memory_cap_bytes=8192 + 4 * 512)
    assert [oracle(replace(caps, max_compute_move=most))[0] for most in (0, 1)] == [False, True]


def test_the_collectives_that_are_larger_than_the_cap_in_flight_are_named() -> None:
    b = ByHand()
    gathered = [
        b.wait(
            f"w{i}",
            b.start("all_gather", f"ag{i}", b.input(f"s{i}", 512, kept=True), 512, size),
        )
        for i, size in enumerate((1024, 4096))
    ]
    problem = b.output(b.compute("k", 1, *gathered, size=512))
    why = explain(Instance.of(problem, Caps(in_flight_cap_bytes=2048)), SolveOptions())
    assert why.proven
    assert why.nodes == ("ag1",)


@pytest.mark.parametrize("seed", [300, 10299, 10441, 10493, 11164])
def test_a_cap_that_is_not_proven_too_small_is_no_bound(seed: int) -> None:
    """A schedule that the search did not find keeps it, and the answer does not deny that."""
    _, broken = judged(seed)
    assert broken == []
