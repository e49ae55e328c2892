"""What people are told about moved compute: how much moved, how far, and what it gains over compute
as captured.
"""

import io
from dataclasses import replace

import networkx as nx
import pytest

from apsched.config import Caps, SolveOptions
from apsched.pipeline import steps
from apsched.pipeline.load import LoadedGraph
from apsched.pipeline.result import Result, result_of
from apsched.pipeline.solve_graph import SolveRequest
from apsched.problem.problem import Problem
from apsched.progress import Progress
from apsched.report.summary import graph_json, print_table, summary_lines
from apsched.solver import solve
from tests.helpers.problems.by_hand import ByHand, line

QUIET = Progress(quiet=True)


@pytest.fixture
def problem() -> Problem:
    """An all-gather of 10 us between two nodes on the path, and a gradient of 10 us that is
    captured ahead of its launch.
    """
    b = ByHand(prices={"all_gather": line(10_000)})
    x = b.input("x", 512)
    y = b.compute("y", 5_000, x, size=512)
    w = b.compute("w", 10_000, x, size=512)
    z = b.compute("z", 5_000, y, size=512)
    g = b.wait(
        "g", b.start("all_gather", "ag", z, 512, 1024, group="tp", on_path=True, bucketable=False)
    )
    return b.output(w, b.compute("end", 5_000, g, size=512))


def result(problem: Problem, caps: Caps) -> Result:
    return result_of(problem, caps, solve(problem, caps), cluster="none", seconds={})


def compared(problem: Problem, caps: Caps) -> Result:
    graph = LoadedGraph(dag=nx.DiGraph(cluster="none"), problem=problem, device_memory_bytes=None)
    return steps.with_compute_as_captured(graph, result(problem, caps), SolveOptions(), QUIET)


def test_the_summary_has_the_time_of_the_search_alone_where_it_is_another(
    problem: Problem,
) -> None:
    found = result(problem, Caps())
    texts = {}
    for ticks in (0, found.answer.fastest_ticks, found.answer.fastest_ticks + 1000):
        answer = replace(found.answer, search_ticks=ticks)
        texts[ticks] = "\n".join(summary_lines(replace(found, answer=answer)))
    assert ["the search alone" in text for text in texts.values()] == [False, False, True]


def test_the_summary_has_the_bound_on_memory(problem: Problem) -> None:
    """Beside the least peak that is known; the answer of a replay has no bound."""
    found = result(problem, Caps(max_compute_move=5))
    for proven, bound in ((1024, ", bound 1.00 KiB"), (0, "")):
        answer = replace(found.answer, floor_bound_bytes=proven, floor_memory_bytes=2048)
        line_of_memory = f"  memory cap none; least peak known 2.00 KiB{bound}"
        assert line_of_memory in summary_lines(replace(found, answer=answer))


def test_the_summary_says_what_moved(problem: Problem) -> None:
    free, fixed = result(problem, Caps(max_compute_move=5)), result(problem, Caps())
    assert free.step_time_us == 25
    assert fixed.step_time_us == 35
    assert "  moved: 1 of 4 compute nodes, 5.00 µs of work, by up to 1 places" in summary_lines(
        free
    )
    assert not any("moved" in text for text in summary_lines(fixed))


def test_the_summary_says_that_nothing_moved() -> None:
    b = ByHand()
    x = b.input("x", 512)
    still = b.output(b.compute("y", 5_000, x, size=512))
    assert "  moved: no compute node, of 1 that could move by at most 5 places" in summary_lines(
        result(still, Caps(max_compute_move=5))
    )
    assert (
        "  moved: no compute node, of 1 that could move by any number of places"
        in summary_lines(result(still, Caps(max_compute_move=None)))
    )


def test_a_row_shows_compute_as_captured(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        steps,
        "solve_graph",
        lambda graph, request, progress, *, caps: result(graph.problem, caps),
    )
    shown = compared(problem, Caps(max_compute_move=5))
    (score,) = shown.others
    assert (score.name, score.step_time_ticks, score.fits) == ("compute as captured", 35_000, True)
    assert graph_json(shown)["baselines"]["compute as captured"]["step_time_us"] == 35
    stream = io.StringIO()
    print_table([shown], stream, ratio=True)
    (row,) = [text for text in stream.getvalue().splitlines() if "compute as captured" in text]
    assert "1.400" in row
    assert shown.beaten_by == ()


def test_no_row_where_nothing_moved(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "solve_graph", lambda *_, **__: pytest.fail("solved for nothing"))
    assert compared(problem, Caps()).others == ()


def test_a_note_where_only_moves_fit(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    def solve_graph(
        graph: LoadedGraph, request: SolveRequest, progress: Progress, *, caps: Caps
    ) -> Result:
        return result(graph.problem, replace(caps, memory_cap_bytes=1))

    monkeypatch.setattr(steps, "solve_graph", solve_graph)
    shown = compared(problem, Caps(max_compute_move=5))
    assert shown.others == ()
    assert shown.notes == ("by hand: no schedule with compute as captured keeps the caps",)
