"""The rows of the linear program, worked out by hand, and its weights."""

from dataclasses import replace

import numpy as np
import pytest
from ortools.linear_solver import pywraplp

from apsched.problem.problem import Problem
from apsched.problem.restriction import Restriction
from apsched.solver.arrays.instance import Instance
from apsched.solver.bounds.linear_program import Row, costs_of, lagrangian, rows_of
from tests.helpers.problems.by_hand import ByHand, line

KIB = 1024


def two_layers() -> Problem:
    """Return two compute nodes of 100 and 200 ticks, each with a gather before it and a reduction
    behind it, all on one stream.

    A byte takes 3 ticks a KiB in a gather, 1 in a reduction and 2 in a copy.
    """
    b = ByHand(
        prices={"all_gather": line(7, 3), "reduce_scatter": line(11, 1)},
        copy_price=line(0, 2),
        bucket_launch_ticks=5,
    )
    x = b.input("x", KIB)
    reduced = []
    for i, ticks in enumerate((100, 200)):
        shard = b.input(f"s{i}", KIB, kept=True)
        size = 2 * KIB * (i + 1)
        gathered = b.wait(
            f"w{i}", b.start("all_gather", f"ag{i}", shard, KIB, size, launch_ticks=1)
        )
        x = b.compute(f"k{i}", ticks, x, gathered, size=4 * KIB)
        start = b.start("reduce_scatter", f"rs{i}", x, 4 * KIB, 2 * KIB, launch_ticks=2)
        reduced.append(b.wait(f"v{i}", start))
    return b.output(*reduced)


def test_what_follows_a_need_is_beside_the_gathers_before_it() -> None:
    """(R3) of both compute nodes: transfers of the gathers needed so far; copies of later gathers,
    launches and copies of later reductions.
    """
    rows = rows_of(Instance.of(two_layers()))
    least = (7 + 6 * 3 - 1) / 6  # ticks a KiB of a bucket of both gathers, less one by rounding
    # collectives in captured order: gather, reduction, gather, reduction
    for row, constant, alone, shared in (
        (rows[2], 300, (13, 2, 0, 2), (2 * least, 8, 8, 8)),
        (rows[3], 200, (13, 0, 19, 2), (2 * least, 0, 4 * least, 8)),
    ):
        assert row.constant == constant
        assert row.alone == pytest.approx(alone)
        assert row.shared == pytest.approx(shared)


def test_members_of_a_closed_group_bear_the_exact_price_of_their_bucket() -> None:
    problem = two_layers()
    together = Restriction(group=0, closed=True)
    problem = replace(
        problem,
        collectives=tuple(
            replace(c, restriction=together) if k in (0, 2) else c
            for k, c in enumerate(problem.collectives)
        ),
    )
    costs = costs_of(Instance.of(problem))
    assert costs.copy_in[[0, 2]].tolist() == [(4 + 5) / 2] * 2  # of 2 KiB, and the launch
    assert costs.rate[[0, 2]] == pytest.approx([25 * 2 / 6, 25 * 4 / 6])


def test_the_first_row_alone_is_the_bound_where_the_linear_program_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [
        Row(100.0, np.array([3.0]), np.array([5.0])),
        Row(50.0, np.array([90.0]), np.array([60.0])),
    ]
    assert lagrangian(rows) == 109  # 110 where both rows are the same, less the rounding
    monkeypatch.setattr(pywraplp.Solver, "OPTIMAL", -1)
    assert lagrangian(rows) == 102  # 103, likewise
