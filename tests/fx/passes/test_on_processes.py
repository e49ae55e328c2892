"""Passes that take collectives away, on real process groups: the same bits with fewer of them, or
left alone.
"""

import pytest

from tests.helpers.processes import WORKERS, run_processes

pytestmark = pytest.mark.alone

AXES = ("dp-tp", "tp-dp")
FUSED = [
    "dtensor rows",
    "dtensor columns",
    *(f"{between} {axes}" for between in ("nothing", "cancelling") for axes in AXES),
]
LEFT = [f"{between} {axes}" for between in ("turned", "cast", "also_used") for axes in AXES]
ONE_AXIS = ["gathers twice", "sums first", "there and back", "only back", "other part", "exchanged"]

Reports = list[dict]


def run(tmp_path_factory: pytest.TempPathFactory, world_size: int) -> Reports:
    return run_processes(
        WORKERS / "graphs/passes_worker.py",
        tmp_path_factory.mktemp("passes"),
        world_size,
        timeout_s=400,
    )


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> Reports:
    """What each of four processes found, as 2 x 2 and in a row."""
    return run(tmp_path_factory, 4)


@pytest.fixture(scope="module")
def eight(tmp_path_factory) -> Reports:
    """What each of eight processes found, as 2 x 4: rows and columns differ in length."""
    return run(tmp_path_factory, 8)


@pytest.mark.parametrize("world", ["four", "eight"])
@pytest.mark.parametrize("case", [*FUSED, *LEFT])
def test_chained_gathers_become_one_where_nothing_lies_between(case, world, request):
    for report in request.getfixturevalue(world):
        found = report[case]
        assert found["before"] == [{"all_gather": 2}, {"reduce_scatter": 2}]
        assert found["after"] == [{"all_gather": 1 if case in FUSED else 2}, {"reduce_scatter": 2}]
        assert found["equal"], "loss and gradients, bit for bit"
        assert found["results"] == 2


@pytest.mark.parametrize("case", ONE_AXIS)
def test_a_shorter_graph_computes_the_same(four, case):
    assert all(report[case]["equal"] for report in four)


@pytest.mark.parametrize(
    ("case", "before", "after"),
    [
        (
            "gathers twice",
            {"all_gather": 2, "reduce_scatter": 2},
            {"all_gather": 1, "reduce_scatter": 2},
        ),
        (
            "sums first",
            {"all_gather": 2, "reduce_scatter": 2},
            {"all_gather": 1, "reduce_scatter": 1},
        ),
        ("there and back", {"all_gather": 2}, {"all_gather": 2}),  # the whole is needed, too
        ("only back", {"all_gather": 2}, {}),
        ("other part", {"all_gather": 2}, {"all_gather": 2}),
        ("exchanged", {"all_to_all": 4}, {}),
    ],
)
def test_collectives_of_the_joint_graph(four, case, before, after):
    for report in four:
        assert (report[case]["before"], report[case]["after"]) == ([before], [after])


def test_consumers_are_rewired_and_dead_aliases_go(four):
    """An alias and two cuts; what stays are cuts that take another part, and the one of a
    gradient.
    """
    for report in four:
        assert [report[case]["cuts"] for case in ("there and back", "only back", "other part")] == [
            [3, 1],
            [3, 0],
            [3, 2],
        ]
