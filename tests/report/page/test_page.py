"""The page as a text: its tables are the answer's figures, its data the timeline's, and it holds
all that it needs.
"""

import base64
import gzip
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import accumulate
from pathlib import Path

import pytest

from apsched.artifacts.solved_run import SolvedRun, load_run
from apsched.quantities import show_us
from apsched.report.answer.first import best_baseline
from apsched.report.page import report_page, run_title
from apsched.report.page.columns import page_data
from apsched.report.page.sections import figures, launches
from apsched.report.stall_text import stalls
from apsched.schedule.simulate import simulate
from tests.conftest import Run


class _Cells(HTMLParser):
    """Collects rows of all tables."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        self.inside = tag in ("td", "th")
        if self.inside:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def solved(debug_run: Path) -> SolvedRun:
    return load_run(debug_run)


@pytest.fixture(scope="module")
def page(solved: SolvedRun) -> str:
    return report_page(solved).decode()


def test_the_tables_are_the_figures_of_the_run(page: str, debug_run: Path) -> None:
    """Every baseline and the schedule found, of both graphs, with step time and number of
    collectives; and a row for every launch.
    """
    cells = _Cells()
    cells.feed(page)
    for graph in json.loads((debug_run / "result.json").read_text())["graphs"]:
        scores = {**graph["baselines"], "apsched": graph}
        for name, score in scores.items():
            found = [
                row
                for row in cells.rows
                if row[0] == name and row[1] == show_us(score["step_time_us"])
            ]
            assert found, name
            assert found[0][5] == str(score["num_launches"])
    rows = [row for row in cells.rows if len(row) == 11 and row[0].isdigit()]
    assert len(rows) == sum(
        graph["num_launches"]
        for graph in json.loads((debug_run / "result.json").read_text())["graphs"]
    )


def test_one_launch_is_named_as_such_and_text_has_no_backticks(solved: SolvedRun) -> None:
    graph = solved.graphs[0]
    timeline = graph.result.timeline
    assert timeline is not None
    once = replace(timeline, transfers=timeline.transfers[:1])
    one = replace(graph, result=replace(graph.result, timeline=once))
    assert "<summary>the only launch</summary>" in launches(one)
    assert f"all {len(timeline.transfers)} launches in order" in launches(graph)
    text = report_page(solved).decode().partition("<script")[0]
    assert "<code>apsched study</code>" in text
    assert "`" not in text


def test_the_data_are_the_timelines(page: str, solved: SolvedRun) -> None:
    """The page unpacks exactly the simulated times and bytes of both orders."""
    packed = re.search(r'<script type="text/plain" id="data">([^<]*)</script>', page)
    assert packed is not None
    data = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    assert data.pop("frontiers")
    assert data == page_data(solved)
    for graph, shown in zip(solved.graphs, data["graphs"], strict=True):
        for schedule, order in zip((graph.before, graph.after), shown["orders"], strict=True):
            timeline = simulate(graph.result.problem, schedule)
            assert tuple(accumulate(order["steps"]["length"])) == timeline.end_ticks
            assert tuple(accumulate(order["steps"]["live"])) == timeline.live_bytes
            assert order["step_time"] == timeline.step_time_ticks
            assert [
                *zip(order["transfers"]["begin"], order["transfers"]["bytes"], strict=True)
            ] == [(t.begin_ticks, t.size_bytes) for t in timeline.transfers]


def test_every_stall_says_why(solved: SolvedRun) -> None:
    """Each step at which the compute stream stands still has a sentence, which names the collective
    that it waits for.
    """
    for graph in solved.graphs:
        problem = graph.result.problem
        for schedule in (graph.before, graph.after):
            timeline = simulate(problem, schedule)
            said = stalls(problem, schedule, timeline, graph.result.caps)
            waits = {
                t.wait_step: t
                for t in timeline.transfers
                if timeline.end_ticks[t.wait_step] > timeline.begin_ticks[t.wait_step]
            }
            assert waits.keys() == {k for k in said if k >= 0}
            assert (-1 in said) == (timeline.step_time_ticks > timeline.end_ticks[-1])
            for k, transfer in waits.items():
                first = problem.collectives[transfer.members[0]]
                assert (first.module or problem.node_names[first.start]) in said[k]
                queued = transfer.begin_ticks > timeline.end_ticks[transfer.start_step]
                assert ("it was queued for" in said[k]) == queued


def test_the_page_fetches_nothing(page: str) -> None:
    """No address of anything outside, and a policy that forbids any; small, too (a run of 13,000
    nodes takes half a megabyte).
    """
    assert not re.search(r"https?://|src=|<link|@import|url\(", page)
    assert "default-src 'none'" in page
    assert len(page) < 200_000


def test_names_are_text(solved: SolvedRun) -> None:
    """A source with markup in its name stays a name."""
    page = report_page(replace(solved, source="<script>alert(1)</script>")).decode()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page


@pytest.mark.slow
def test_the_command_needs_no_torch_and_repeats_its_bytes(debug_run: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from apsched.cli import main; code = main(sys.argv[1:]); assert 'torch' not in"
        " sys.modules; sys.exit(code)"
    )
    for name in ("one.html", "two.html"):
        subprocess.run(
            [sys.executable, "-c", code, "report", str(debug_run), "-o", str(tmp_path / name)],
            check=True,
            capture_output=True,
        )
    assert (
        (tmp_path / "one.html").read_bytes()
        == (tmp_path / "two.html").read_bytes()
        == report_page(load_run(debug_run))
    )


def test_the_command_says_what_it_wrote_and_what_is_wrong(run: Run, debug_run: Path) -> None:
    ran = run("report", debug_run, "-o", "page.html", "--json")
    assert json.loads(ran.stdout) == {
        "schema": 1,
        "file": "page.html",
        "bytes": Path("page.html").stat().st_size,
    }
    ran = run("report", "nowhere")
    assert ran.code == 2
    assert len(ran.errors) == 1
    assert "expected a directory that `apsched solve -o DIR` wrote" in ran.errors[0]


def test_the_title_has_mesh_sequence_and_layers(solved: SolvedRun) -> None:
    (first, *others) = solved.graphs
    options = {"--mesh": "fsdp=4", "--seq": 64, "--layers": 2}
    stated = replace(solved, source="a.graph", graphs=(replace(first, options=options), *others))
    assert run_title(stated) == "a.graph, fsdp=4, 64 tokens, 2 layers"
    default = replace(solved, source="llama3-8b", graphs=(replace(first, options={}), *others))
    assert run_title(default) == "llama3-8b, fsdp=64, 8192 tokens, all layers"
    assert run_title(replace(default, source="a.graph")) == "a.graph"


def test_the_tiles_compare_with_the_best_baseline(solved: SolvedRun) -> None:
    for graph in solved.graphs:
        found = best_baseline(graph.result)
        assert found is not None
        name, step_us = found
        text = figures(graph)
        words = "less than" if graph.result.step_time_us < step_us else "time, as long as"
        assert f"{words} {name}, the best baseline that fits ({show_us(step_us)})" in text
        assert f"in {name}" in text
        assert "as captured" not in text


def test_a_frontier_of_one_point_is_a_sentence(page: str, solved: SolvedRun) -> None:
    assert 'data-picture="frontier"' not in page
    assert page.count("One point is known: ") == len(solved.graphs)
