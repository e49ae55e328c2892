"""The whole formulation of small problems, by hand: where it starts, and what later objectives may
cost.
"""

import random
from dataclasses import replace

import pytest

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.result import SolvedBy
from apsched.solver import solve
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.reordered import Orders
from apsched.solver.cpsat.compute_order import in_any_order
from apsched.solver.cpsat.model import Exact, ExactModel
from apsched.solver.reorder.min_memory import floated_model, horizon_ticks, is_small
from tests.helpers.problems.by_hand import ByHand, line
from tests.helpers.problems.layered import Layer, layered
from tests.helpers.problems.strategies import layered_problem


def test_without_work_for_cp_sat_the_answer_is_that_of_search() -> None:
    """Two layers; the best baseline, a bucket for each block, takes 233 ticks."""
    problem, options = layered([Layer()] * 2), SolveOptions(budget=1e-9)
    found = solve(problem, Caps(max_compute_move=0), options)
    assert found.best is not None
    assert min(b.step_time_ticks for b in found.baselines if b.fits) == 233
    assert found.best.step_time_ticks <= 231


def test_the_answer_names_the_search_and_what_cp_sat_made_of_it() -> None:
    """Four layers: CP-SAT gains two ticks under a cap halfway to the peak of the fastest, and does
    not make two layers with room for their fastest schedule any faster.
    """
    options = SolveOptions(budget=1.0)
    four, two = layered([Layer()] * 4), layered([Layer()] * 2)
    tight = solve(four, Caps(max_compute_move=0, memory_cap_bytes=140_288), options)
    assert tight.solved_by == SolvedBy.CP_SAT
    assert tight.search_ticks - tight.fastest_ticks == 2
    loose = solve(two, Caps(max_compute_move=0, memory_cap_bytes=86_528), options)
    assert loose.solved_by == SolvedBy.SEARCH
    assert loose.search_ticks == loose.fastest_ticks == 232


def test_time_is_improved_at_the_end_only_with_as_few_launches() -> None:
    """In one launch two gathers take a few ticks of copies more than alone, of some 100,000: within
    the slack of 0.1 % one launch is better, and no part of the slack that is left splits it again.
    """
    problem = in_one_launch_or_two()
    caps = Caps(max_compute_move=0)
    strict = solve(problem, caps, SolveOptions(time_slack=0.0, budget=2.0)).best
    found = solve(problem, caps, SolveOptions(time_slack=0.001, budget=2.0)).best
    assert strict is not None
    assert found is not None
    assert (strict.num_launches, found.num_launches) == (2, 1)
    assert 0 < found.step_time_ticks - strict.step_time_ticks < 10


def in_one_launch_or_two() -> Problem:
    """Two gathers are hidden behind the first node, in one launch or in two, with the same peak."""
    hand = ByHand(prices={"all_gather": line(10)}, copy_price=line(2))
    shards = [hand.input(f"s{i}", 512, kept=True) for i in range(2)]
    large = hand.compute("large", 50_000, hand.input("x", 512), size=2**20)
    small = hand.compute("small", 10, large, size=512)
    gathers = [hand.start("all_gather", f"ag{i}", s, 512, 1024) for i, s in enumerate(shards)]
    waits = [hand.wait(f"w{i}", start) for i, start in enumerate(gathers)]
    return hand.output(hand.compute("last", 50_000, small, *waits, size=512))


def test_prologues_take_places_only_where_they_are() -> None:
    """Three gathers with two casts each of one tick, 10 ticks on the wire, one node that needs all
    of them. Alone: two casts, then the wire is busy for 30, then 5. A coalesced launch would have
    all six casts before it, and costs more.
    """
    hand = ByHand(prices={"all_gather": line(0, 10)}, copy_price=line(20))
    starts = []
    for i in range(3):
        first = hand.compute(f"cast{i}", 1, hand.input(f"s{i}", 512, kept=True), size=512)
        second = hand.compute(f"again{i}", 1, first, size=512)
        starts.append(
            hand.start("all_gather", f"ag{i}", second, 512, 1024, prologue=(first, second))
        )
    waits = [hand.wait(f"w{i}", start) for i, start in enumerate(starts)]
    problem = hand.output(hand.compute("last", 5, *waits, size=512))
    keys = tuple(replace(key, coalesced_member_ticks=1) for key in problem.keys)
    instance = Instance.of(replace(problem, keys=keys), Caps(max_compute_move=0))
    exact = ExactModel(instance, horizon_ticks(instance)).minimize_step_time(SolveOptions(), None)
    assert (exact.optimal, exact.bound) == (True, 2 + 30 + 5)


@pytest.mark.parametrize("seed", range(6))
def test_open_pairs_are_those_that_the_model_decides(seed: int) -> None:
    instance = Instance.of(layered_problem(random.Random(seed), num_layers=3))
    orders = Orders(instance)
    free = in_any_order(orders, instance.caps).free
    assert free is not None
    count = len(free.pairs())
    assert orders.num_open_pairs(count) == count
    assert not count or orders.num_open_pairs(count - 1) == count


def test_an_order_with_thousands_of_open_pairs_does_not_go_to_cp_sat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sixty independent nodes behind one gather: 1,770 open pairs. As captured there are none."""
    problem = fan(60)
    orders = Orders(Instance.of(problem))
    assert is_small(problem)
    assert not is_small(problem, orders)
    assert is_small(fan(20), Orders(Instance.of(fan(20))))
    assert floated_model(Instance.of(problem, Caps(max_compute_move=None))) is None
    with_order: list[bool] = []
    of = ExactModel.__init__

    def init(self: ExactModel, *args: object, orders: Orders | None = None, **more: object) -> None:
        with_order.append(orders is not None and orders.num_open_pairs(10**6) > 0)
        of(self, *args, orders=orders, **more)

    monkeypatch.setattr(ExactModel, "__init__", init)
    found = solve(problem, Caps(max_compute_move=None), SolveOptions(budget=0.1))
    assert found.best is not None
    assert not any(with_order)
    assert solve(problem, Caps(max_compute_move=0), SolveOptions(budget=0.1)).best is not None
    assert solve(fan(20), Caps(max_compute_move=None), SolveOptions(budget=0.1)).best is not None
    assert any(with_order)


def test_few_collectives_and_hundreds_of_nodes_do_not_go_to_cp_sat() -> None:
    """One gather and a chain, in which no order is open."""
    assert is_small(chain(150))
    assert not is_small(chain(200))
    found = solve(chain(200), Caps(max_compute_move=None), SolveOptions(budget=1.0))
    assert found.best is not None
    assert found.solved_by == SolvedBy.SEARCH
    assert found.best.step_time_ticks - found.bound_ticks <= 10


def chain(num_nodes: int) -> Problem:
    hand = ByHand(prices={"all_gather": line(10)})
    weight = hand.wait("w", hand.start("all_gather", "g", hand.input("s", 512), 512, 1024))
    x = hand.input("x", 512)
    for k in range(num_nodes):
        x = hand.compute(f"n{k}", 10, x, *([weight] if k == 100 else []), size=512)
    return hand.output(x)


def fan(num_nodes: int) -> Problem:
    hand = ByHand(prices={"all_gather": line(10)})
    weight = hand.wait("w", hand.start("all_gather", "g", hand.input("s", 512), 512, 1024))
    x = hand.input("x", 512)
    nodes = [hand.compute(f"n{k}", 10, x, weight, size=512 * (k + 1)) for k in range(num_nodes)]
    return hand.output(*nodes)


def test_a_run_with_less_work_than_presolve_did_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budgets: list[float] = []
    run = ExactModel._run

    def counted(self: ExactModel, objective: object, options: SolveOptions, *args: object) -> Exact:
        budgets.append(options.budget)
        found = run(self, objective, options, *args)
        return replace(found, optimal=False, value=None, bound=0, deterministic_work=0.3)

    monkeypatch.setattr(ExactModel, "_run", counted)
    instance = Instance.of(layered([Layer()] * 2), Caps(max_compute_move=0))
    for budget, expected in ((1.0, [1 / 32, 0.5, 1.0]), (0.0, [0.0])):
        budgets.clear()
        model = ExactModel(instance, horizon_ticks(instance))
        model.minimize_step_time(SolveOptions(budget=budget), None)
        assert budgets == expected
