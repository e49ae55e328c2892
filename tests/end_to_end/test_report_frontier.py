"""The frontier in a report, read as text and in a real browser: its points are the study's, and
this run's is marked.
"""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from apsched.artifacts.solved_run import load_run
from apsched.cli import main
from apsched.quantities import show_bytes, show_us
from apsched.report.page import report_page, run_point
from apsched.report.page.frontier import frontier_data
from apsched.study.report.frontier import fitting, least_memory, prices_ms_per_gib
from apsched.study.report.pages import frontiers_of, frontiers_of_run, lines_of
from apsched.study.report.text import mark
from apsched.study.rows import InStep, Point
from apsched.study.store import Store
from apsched.units import ticks_to_us
from tests.conftest import Run
from tests.end_to_end.test_report_browser import OpenedSource, browser  # noqa: F401  (a fixture)
from tests.report.page.test_page import _Cells

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.alone  # a browser


@pytest.fixture(scope="module")
def study(debug_graphs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two frontiers: of the graphs that ``debug_run`` solved."""
    folder = tmp_path_factory.mktemp("study") / "caps"
    source = debug_graphs["forward"].parent / "step.graph"
    assert (
        main(
            [
                "study",
                str(source),
                "--budget",
                "0.1",
                "--vary",
                "memory_cap=floor..none:5",
                "--jobs",
                "1",
                "-o",
                str(folder),
            ]
        )
        == 0
    )
    return folder


@pytest.fixture(scope="module")
def points(study: Path) -> tuple[Point, ...]:
    """The frontier of backward, by ascending caps."""
    return fitting([point for point in Store(study).points() if point.graph.name == "backward"])


@pytest.fixture(scope="module")
def beside(debug_run: Path, study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with that study, as a page."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert main(["report", str(debug_run), "--study", str(study), "-o", str(path)]) == 0
    return path


def _rows(page: Path) -> list[list[str]]:
    cells = _Cells()
    cells.feed(page.read_text())
    return [[cell.strip() for cell in row] for row in cells.rows]


def test_every_point_is_a_row(beside: Path, points: tuple[Point, ...], debug_run: Path) -> None:
    """Cap, step time, bound, gap, peak, launches, price and what binds; this run has a row, too,
    and slowdowns have theirs.
    """
    rows = _rows(beside)
    for point, price in zip(points, prices_ms_per_gib(points), strict=True):
        cap = point.outcome.memory_cap_bytes
        head = [
            "none" if cap is None else show_bytes(cap),
            f"{show_us(point.step_time_us or 0)} {mark(point)}".strip(),
            show_us(point.bound_us),
        ]
        (row,) = (row for row in rows if row[:3] == head and len(row) == 10)
        assert row[3] == f"{100 * (point.gap or 0):.2f} %"
        assert row[4:6] == [
            show_bytes(point.outcome.peak_memory_bytes),
            str(point.outcome.num_launches),
        ]
        assert row[7] == ("" if price is None else f"{price:,.3f}")
        assert row[9]
    run = next(
        g
        for g in json.loads((debug_run / "result.json").read_text())["graphs"]
        if g["name"] == "backward"
    )
    assert any(
        row[0].endswith("(this run)") and row[1] == show_us(run["step_time_us"])
        for row in rows
        if row
    )
    least = least_memory(points, 0.02)
    assert least is not None
    assert [
        "2 %",
        show_us(least.step_limit_us),
        show_bytes(least.peak_memory_bytes),
        show_us(least.step_time_us),
    ] in [r[:4] for r in rows]


def test_without_a_study_the_run_stands_alone(debug_run: Path) -> None:
    """Its point and its baselines, and how to get the rest; with a study of other graphs nothing is
    shown as if it were of these.
    """
    page = report_page(load_run(debug_run)).decode()
    assert 'id="frontier"' in page
    assert "--vary memory_cap=floor..none:20" in page


def test_a_study_of_something_else_is_refused(
    run: Run, debug_run: Path, study: Path, debug_graphs: dict[str, Path]
) -> None:
    """The same graph at other costs is another graph here: its step times are no neighbours of this
    run's.
    """
    ran = run(
        "study",
        debug_graphs["backward"],
        "--vary",
        "compute=2x",
        "--budget",
        "0",
        "--jobs",
        "1",
        "-o",
        "other",
    )
    assert ran.code == 0, ran.stderr
    for args, words in (
        (("--study", "other"), "found none of them at these costs"),
        (("--study", "nowhere"), "expected the directory of a study"),
        (("--point", "0123"), "it chooses among the points of a study"),
    ):
        ran = run("report", debug_run, *args)
        assert ran.code == 2
        assert words in ran.errors[0]
    ran = run("report", study, "--point", "nothing")
    assert ran.code == 2
    assert "expected the name of one point" in ran.errors[0]


def test_a_page_of_a_study(run: Run, study: Path, points: tuple[Point, ...]) -> None:
    """All frontiers, then the fastest point of each in detail; ``--point`` chooses another. The
    commands make those schedules again.
    """
    ran = run("report", study, "-o", "one.html")
    assert ran.code == 0, ran.stderr
    page = Path("one.html").read_text()
    assert page.index('id="frontier"') < page.index('id="backward"') < page.index('id="forward"')
    assert "this run" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    tightest = points[0]
    ran = run("report", study, "--point", tightest.point_id[:8], "-o", "two.html")
    assert ran.code == 0, ran.stderr
    page = Path("two.html").read_text()
    assert 'id="forward"' not in page
    (command,) = re.findall(r"<pre>(apsched solve [^<]*)</pre>", page)
    ran = run(*shlex.split(command)[1:], "-o", "again", "--json")
    assert ran.code == 0, ran.stderr
    graph = next(g for g in json.loads(ran.stdout)["graphs"] if g["name"] == "backward")
    assert graph["memory_cap_bytes"] == tightest.outcome.memory_cap_bytes
    assert (
        graph["step_time_us"] <= (tightest.step_time_us or 0) * 1.001
        or tightest.outcome.how != "solved"
    )


@pytest.fixture
def opened(browser: "Browser", beside: Path) -> Iterator[OpenedSource]:  # noqa: F811
    page = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light")
    shown = OpenedSource(page, beside)
    yield shown
    page.close()
    assert shown.complaints == []
    assert shown.requests == [beside.as_uri()]


PICTURE = "#frontier figure[data-picture=frontier]"


def test_hovering_and_clicking_a_point(opened: OpenedSource, points: tuple[Point, ...]) -> None:
    """The tooltip at a point has its figures; a click lists the baselines there; zoomed in, points
    are where they belong.
    """
    figure = opened.page.locator(PICTURE).nth(1)  # forward, backward
    figure.locator("> canvas").scroll_into_view_if_needed()
    drawn = opened.ask(
        figure,
        "picture.frontier.lines[0].points.map((p) => [p.cap, p.peak, p.step, p.bound, p.launches])",
    )
    assert [tuple(point) for point in drawn] == [
        (
            p.outcome.memory_cap_bytes,
            p.outcome.peak_memory_bytes,
            p.outcome.step_ticks,
            p.outcome.bound_ticks,
            p.outcome.num_launches,
        )
        for p in points
    ]
    for k in (0, len(points) // 2):
        point = points[k]
        x, y = opened.ask(
            figure,
            "(({at, point}) => [picture.x(at), picture.y(point.step)])(picture.dots[argument])",
            k,
        )
        said = opened.hover(figure, x, y)
        assert show_us(point.step_time_us or 0) in said
        assert show_us(point.bound_us) in said
        assert show_bytes(point.outcome.memory_cap_bytes) in said
        figure.locator("> canvas").click(position={"x": x, "y": y})
        rows = [row.split("\t") for row in figure.locator(".alive tbody tr").all_inner_texts()]
        expected = {
            (name, show_us(b["step_time_us"]))
            for name, b in point.outcome.report["baselines"].items()
        }
        assert {(row[0], row[1]) for row in rows} == expected
    opened.page.mouse.move(0, 0)
    figure.locator("[data-act=in]").click()
    at = opened.ask(figure, "picture.view.valueAt(picture.x(picture.dots[2].at)) + picture.base")
    assert at == pytest.approx(points[2].outcome.memory_cap_bytes, rel=1e-9)


def test_the_picture_shows_what_it_says(opened: OpenedSource, points: tuple[Point, ...]) -> None:
    """Every point in view lies within the picture, above its bound; with all baselines the slowest
    is in it; this run has its star.
    """
    figure = opened.page.locator(PICTURE).nth(1)
    figure.locator("> canvas").scroll_into_view_if_needed()
    places = opened.ask(
        figure,
        "picture.dots.map(({at, point}) => [picture.x(at), picture.y(point.step),"
        " picture.y(point.bound)])",
    )
    width = opened.ask(figure, "picture.canvas.clientWidth")
    assert all(0 < x < width and 0 < y <= bound < 340 for x, y, bound in places)
    assert opened.ask(figure, "picture.frontier.here.length") == 1
    slowest = max(b["step_time_us"] for p in points for b in p.outcome.report["baselines"].values())
    high = opened.ask(figure, "picture.high")
    button = figure.locator("[data-act=range]")
    for _ in range(2):
        button.click()
    opened.page.wait_for_function(
        "text => document.querySelectorAll('[data-act=range]')[1].textContent === text",
        arg="with all baselines",
    )
    assert ticks_to_us(opened.ask(figure, "Math.round(picture.high)")) > slowest
    button.click()
    opened.page.wait_for_function(
        "text => document.querySelectorAll('[data-act=range]')[1].textContent === text",
        arg="with the bound",
    )
    assert opened.ask(figure, "picture.high") == high
    colour = opened.ask(
        figure,
        """(() => { const star = picture.dots.find((dot) => dot.line < 0),
                   ratio = devicePixelRatio; picture.draw();
             const copy = new OffscreenCanvas(1, 1).getContext("2d");
             copy.drawImage(picture.canvas, -picture.x(star.at) * ratio,
                            -picture.y(star.point.step) * ratio);
             return [...copy.getImageData(0, 0, 1, 1).data]; })()""",
    )
    assert colour == [0xD5, 0x5E, 0x00, 255]


def test_frontiers_that_differ_in_an_option_are_told_apart(points: tuple[Point, ...]) -> None:
    """Lines are named by what differs, in the order of numbers."""
    other = [
        replace(p, point_id=p.point_id + "x", described={**p.described, "mesh": "fsdp=8"})
        for p in points
    ]
    these = [replace(p, described={**p.described, "mesh": "fsdp=64"}) for p in points]
    lines = lines_of([*these, *other])
    assert [line.title for line in lines] == ["backward, mesh fsdp=8", "backward, mesh fsdp=64"]
    assert [len(line.points) for line in lines] == [5, 5]


def test_the_data_are_the_same_bytes_twice(debug_run: Path, study: Path) -> None:
    solved = load_run(debug_run)
    first, second = (frontiers_of_run(solved, study, 0.02) for _ in range(2))
    assert frontier_data(first, ()) == frontier_data(second, ())
    assert report_page(solved, first) == report_page(solved, second)


def test_a_run_counts_the_kept_shards_that_its_study_counts(
    debug_run: Path, points: tuple[Point, ...]
) -> None:
    kept = InStep(kept=("w",), kept_bytes=4096, shard_bytes=1024)
    these = [replace(p, graph=replace(p.graph, in_step=kept)) for p in points]
    (free,), (frontier,) = (frontiers_of(lines_of(some), 0.02) for some in (points, these))
    graph = next(g for g in load_run(debug_run).graphs if g.result.problem.name == frontier.graph)
    assert graph.result.best is not None
    data, alone = (
        frontier_data((line,), (run_point(graph, (line,)),)) for line in (frontier, free)
    )
    assert alone[0]["here"][0]["peak"] == graph.result.best.peak_memory_bytes
    assert data[0]["here"][0]["peak"] == alone[0]["here"][0]["peak"] + 1024
    before, after = (line.points[0].baselines[0].peak_bytes for line in (free, frontier))
    assert after == before + 1024
