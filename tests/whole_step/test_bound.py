"""The bound over choices on problems by hand."""

import random
from collections.abc import Iterator
from itertools import product

import pulp
import pytest

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.result import BoundSource
from apsched.solver import solve_requested
from apsched.solver.bounds.whole_step import StepBound, with_more_moves
from apsched.solver.bounds.whole_step_rows import KeptItem, Row, Sizes
from tests.helpers.problems.by_hand import ByHand, line

KIB = 1024
PARAMETERS = ("w", "v", "u")


def backward(kept: frozenset[str]) -> Problem:
    """A node of 4 us for each parameter of 4 KiB, all of which are gathered but ``kept``: 12 us
    alone, 4 us and a share of 8 us in a bucket; in a bucket also copies of about 10 us each.
    """
    b = ByHand(prices={"all_gather": line(8_000, 1_000)}, copy_price=line(0, 2_000))
    made = b.input("x", 512)
    whole = {}
    for name in PARAMETERS:
        if name in kept:
            whole[name] = b.input(name, 4 * KIB)
            continue
        shard = b.input(f"shard_{name}", KIB, kept=True)
        fields = {"launch_ticks": 1_000, "module": name}
        start = b.start("all_gather", f"ag_{name}", shard, KIB, 4 * KIB, **fields)
        whole[name] = b.wait(name, start)
    for name in PARAMETERS:
        made = b.compute(f"mm_{name}", 4_000, made, whole[name], size=KIB)
    return b.output(made)


def bound_with(free_bytes: int | None) -> StepBound:
    items = [KeptItem(collectives=(c,), kept_bytes=4 * KIB) for c in range(len(PARAMETERS))]
    return StepBound.of(
        forward_ticks=0,
        again=backward(frozenset()),
        kept=backward(frozenset(PARAMETERS)),
        items=items,
        caps=Caps(max_compute_move=0),
        free_bytes=free_bytes,
    )


def test_streams_are_weighed_against_each_other() -> None:
    """Nothing may be kept: gathers in a bucket would fill the compute stream with copies, gathers
    alone the network. Neither stream by itself shows it.
    """
    bound = bound_with(0)
    ticks = [(row.of_choice([], []), row.source) for row in bound.rows]
    best = {source: one for one, source in sorted(ticks)}
    weighed = best.pop(BoundSource.WEIGHED)
    assert weighed > 1.1 * max(best.values())
    found = bound.over_choices()
    assert found.source == BoundSource.WEIGHED
    assert found.ticks == int(weighed)


@pytest.mark.parametrize("room", range(len(PARAMETERS) + 1))
def test_no_choice_that_fits_is_below_it(room: int) -> None:
    """With room for so many parameters no choice of that many is faster than the bound."""
    bound = bound_with(room * 4 * KIB).over_choices()
    kept = backward(frozenset(PARAMETERS[:room]))
    answer = solve_requested(kept, Caps(max_compute_move=0), SolveOptions())
    assert answer.best is not None
    assert bound.ticks <= answer.best.step_time_ticks
    others = [bound_with(k * 4 * KIB).over_choices().ticks for k in range(room)]
    assert bound.ticks <= min(others, default=bound.ticks)


def made_up(rng: random.Random) -> StepBound:
    """Return a bound of random rows; some parameters can be resharded, some take no bytes."""
    count = rng.randrange(1, 6)
    kept = tuple(rng.choice([0, rng.randrange(12)]) for _ in range(count))
    in_node = tuple(rng.choice([size, rng.randrange(size + 1)]) for size in kept)
    rows = []
    for r in range(rng.randrange(1, 4)):
        again = [rng.uniform(0, 20) for _ in range(count)]
        parts = [rng.choice([0.0, rng.uniform(0, 25)]) for _ in range(count)]
        parts = [0.0 if a == b else t for a, b, t in zip(kept, in_node, parts, strict=True)]
        ticks = rng.uniform(0, 50)
        rows.append(Row(source=str(r), ticks=ticks, again=tuple(again), in_node=tuple(parts)))
    free = rng.choice([None, 0, rng.randrange(30)])
    return StepBound(rows=tuple(rows), sizes=Sizes(kept=kept, in_node=in_node), free_bytes=free)


def every_choice(count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield all pairs of kept and resharded items."""
    for ways in product(("again", "node", "kept"), repeat=count):
        yield tuple([i for i, way in enumerate(ways) if way == one] for one in ("kept", "node"))  # type: ignore[misc]


@pytest.mark.parametrize("seed", range(60))
def test_the_bound_over_choices_is_below_each_that_fits(seed: int) -> None:
    bound = made_up(random.Random(seed))
    count = len(bound.sizes.kept)
    fitting = [c for c in every_choice(count) if bound.may_fit(*c)]
    assert bound.over_choices().ticks <= min(bound.of_choice(*c).ticks for c in fitting)
    if bound.free_bytes is None:
        assert bound.over_choices().ticks == bound.of_choice(range(count)).ticks


@pytest.mark.parametrize("seed", range(60))
def test_a_row_is_least_where_a_linear_program_is(seed: int) -> None:
    bound = made_up(random.Random(1000 + seed))
    items = range(len(bound.sizes.kept))
    for row in bound.rows:
        lp = pulp.LpProblem("shares", pulp.LpMinimize)
        x, y, z = ([pulp.LpVariable(f"{name}{i}", 0, 1) for i in items] for name in ("x", "y", "z"))
        lp += row.ticks + pulp.lpSum(row.again[i] * x[i] + row.in_node[i] * z[i] for i in items)
        for i in items:
            lp += x[i] + y[i] + z[i] == 1
        if bound.free_bytes is not None:
            sizes = bound.sizes
            taken = pulp.lpSum(sizes.kept[i] * y[i] + sizes.in_node[i] * z[i] for i in items)
            lp += taken <= bound.free_bytes
        assert lp.solve(pulp.PULP_CBC_CMD(msg=False)) == pulp.LpStatusOptimal
        assert row.least(bound.sizes, bound.free_bytes) == pytest.approx(pulp.value(lp.objective))


def test_a_node_may_be_farther_from_its_place_without_other_nodes() -> None:
    limited = Caps(max_compute_move=5)
    assert with_more_moves(limited, 3).max_compute_move == 8
    assert with_more_moves(limited, -1) == limited
    assert with_more_moves(Caps(max_compute_move=0), 3).max_compute_move == 0
    assert with_more_moves(Caps(max_compute_move=None), 3).max_compute_move is None
