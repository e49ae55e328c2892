"""The report in a real browser: what people see when they hover, zoom and click is what the run
says.
"""

import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from apsched.artifacts.solved_run import SolvedGraph, load_run
from apsched.quantities import show_bytes, show_us
from apsched.report.page import report_page
from apsched.report.stall_text import stalls, transfer_name
from apsched.schedule.memory import lifetimes
from apsched.schedule.simulate import Timeline, simulate
from apsched.units import ticks_to_us

pytestmark = pytest.mark.alone

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

BROWSER = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
COMPUTE_BEFORE, GROUP_AFTER = 1, 5
"""Lanes of the timeline of a graph with one group: headings are lanes, too."""


class OpenedSource:
    """A report in a browser, with all that it asked for and complained about."""

    def __init__(self, page: "Page", path: Path) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]")

    def figure(self, kind: str, graph: str = "backward", which: int = 0) -> "Locator":
        figure = self.page.locator(f"#{graph} figure[data-picture={kind}]").nth(which)
        figure.locator("> canvas").scroll_into_view_if_needed()
        return figure

    def ask(self, figure: "Locator", expression: str, argument: Any = None) -> Any:
        """Return what ``expression`` of ``picture`` and ``argument`` is in the page."""
        return figure.evaluate(
            f"(figure, argument) => {{ const picture = figure.picture; return {expression}; }}",
            argument,
        )

    def hover(self, figure: "Locator", x: float, y: float) -> str:
        """Return the tooltip at a place of the canvas."""
        box = figure.locator("> canvas").bounding_box()
        assert box is not None
        self.page.mouse.move(box["x"] + x, box["y"] + y)
        return self.page.locator("#tip").inner_text()

    def hover_at(self, figure: "Locator", lane: int, ticks: float) -> str:
        """Return the tooltip at a time of a lane, which is brought into view first."""
        self.ask(figure, "picture.view.show(argument - 1000, argument + 1000)", ticks)
        x, y = self.ask(
            figure,
            "[picture.view.x(argument[1]), picture.lanes[argument[0]].y + 12]",
            [lane, ticks],
        )
        return self.hover(figure, x, y)


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed; pip install -e '.[dev]'"
    )
    if BROWSER is None:
        pytest.skip("no Chromium found; apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=BROWSER, args=[*FLAGS])
        yield found
        found.close()


@pytest.fixture(scope="module")
def path(debug_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_bytes(report_page(load_run(debug_run)))
    return path


@pytest.fixture(scope="module")
def graph(debug_run: Path) -> SolvedGraph:
    return load_run(debug_run).graphs[1]


@pytest.fixture
def opened(browser: "Browser", path: Path) -> Iterator[OpenedSource]:
    page = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light")
    shown = OpenedSource(page, path)
    yield shown
    page.close()
    assert shown.complaints == []


def _after(graph: SolvedGraph) -> Timeline:
    return simulate(graph.result.problem, graph.after)


def test_hovering_a_transfer_says_what_it_is(opened: OpenedSource, graph: SolvedGraph) -> None:
    """Name, bytes, begin and end of transfers are those of the simulated schedule."""
    figure, problem, timeline = opened.figure("timeline"), graph.result.problem, _after(graph)
    for transfer in timeline.transfers[:: max(1, len(timeline.transfers) // 6)]:
        said = opened.hover_at(figure, GROUP_AFTER, (transfer.begin_ticks + transfer.end_ticks) / 2)
        begin, end = (
            show_us(ticks_to_us(transfer.begin_ticks)),
            show_us(ticks_to_us(transfer.end_ticks)),
        )
        assert said.startswith(transfer_name(problem, transfer))
        assert f"{begin} to {end}" in said
        assert show_bytes(transfer.size_bytes) in said


def test_hovering_compute_and_stalls(opened: OpenedSource, graph: SolvedGraph) -> None:
    """A node says its name, module and time; where compute stands still, the page says for what it
    waits, and why.
    """
    figure, problem = opened.figure("timeline"), graph.result.problem
    before = simulate(problem, graph.before)
    why = stalls(problem, graph.before, before, graph.result.caps)
    long = [
        k for k in range(len(before.end_ticks)) if before.end_ticks[k] - before.begin_ticks[k] > 500
    ]
    stalling = [k for k in long if k in why]
    working = [k for k in long if k not in why]
    for k in (*stalling[::7], *working[::40]):
        said = opened.hover_at(
            figure, COMPUTE_BEFORE, (before.begin_ticks[k] + before.end_ticks[k]) / 2
        )
        assert problem.node_names[graph.before.steps[k].index] in said
        assert show_us(ticks_to_us(before.end_ticks[k] - before.begin_ticks[k])) in said
        assert (
            f"{show_us(ticks_to_us(before.begin_ticks[k]))} to"
            f" {show_us(ticks_to_us(before.end_ticks[k]))}" in said
        )
        assert (why[k] in said) if k in why else ("why" not in said)
    assert stalling
    assert working


def test_what_is_drawn_are_the_bars(opened: OpenedSource, graph: SolvedGraph) -> None:
    """The canvas has the colour of a kind where the schedule has a bar of it, and the page's ground
    where it has none.
    """
    figure, problem, timeline = opened.figure("timeline"), graph.result.problem, _after(graph)
    colors = {"all_gather": (0xE6, 0x9F, 0x00), "reduce_scatter": (0x00, 0x9E, 0x73)}
    seen = set()
    for transfer in timeline.transfers:
        kind = problem.keys[problem.collectives[transfer.members[0]].key].kind
        if kind in seen:
            continue
        seen.add(kind)
        found = _pixel(opened, figure, transfer.begin_ticks, transfer.end_ticks)
        assert found == [*colors[kind], 255], kind
    assert seen == {"all_gather", "reduce_scatter"}
    last = timeline.transfers[-1].end_ticks
    shown_to = int(opened.ask(figure, "picture.view.full"))
    assert shown_to > last  # the order as captured takes longer
    assert _pixel(opened, figure, last, shown_to) != [*colors["reduce_scatter"], 255]


def _pixel(opened: OpenedSource, figure: "Locator", begin: int, end: int) -> list[int]:
    """Return the pixel of the group's lane near the beginning of a span that fills the view."""
    return list(
        opened.ask(
            figure,
            """(() => { const view = picture.view;
                 view.show(argument[0], argument[1]); picture.draw();
                 const x = (view.left + 6) * devicePixelRatio,
                       y = (picture.lanes[5].y + 4) * devicePixelRatio;
                 const copy = new OffscreenCanvas(1, 1).getContext("2d");
                 copy.drawImage(picture.canvas, -x, -y);
                 return [...copy.getImageData(0, 0, 1, 1).data]; })()""",
            [begin, end],
        )
    )


def test_zoom_and_pan(opened: OpenedSource) -> None:
    """Buttons, Ctrl+wheel, dragging, double click and keys move the range as they say; the wheel
    alone scrolls the page.
    """
    figure = opened.figure("timeline")
    canvas = figure.locator("> canvas")
    box = canvas.bounding_box()
    assert box is not None

    def shown() -> tuple[float, float]:
        low, high = opened.ask(figure, "[picture.view.lo, picture.view.hi]")
        return low, high

    full = shown()
    assert full[0] == 0
    figure.locator("[data-act=in]").click()
    assert shown() == (full[1] / 4, full[1] * 3 / 4)
    figure.locator("[data-act=reset]").click()
    assert shown() == full
    x = 700.0
    opened.page.mouse.move(box["x"] + x, box["y"] + 40)
    under = opened.ask(figure, "picture.view.valueAt(argument)", x)
    opened.page.keyboard.down("Control")
    opened.page.mouse.wheel(0, -400)
    opened.page.keyboard.up("Control")
    opened.page.wait_for_function(
        "full => document.querySelector('#backward figure').picture.view.hi < full", arg=full[1]
    )
    assert opened.ask(figure, "picture.view.valueAt(argument)", x) == pytest.approx(under, rel=1e-6)
    low, high = shown()
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + x - 100, box["y"] + 40)
    opened.page.mouse.up()
    assert opened.ask(figure, "picture.view.valueAt(argument)", x - 100) == pytest.approx(
        under, rel=1e-6
    )
    assert shown()[1] - shown()[0] == pytest.approx(high - low)
    canvas.press("0")
    assert shown() == full
    canvas.press("+")
    canvas.press("ArrowRight")
    assert shown() == pytest.approx((full[1] * 0.35, full[1] * 0.85))
    canvas.press("0")
    canvas.dblclick(position={"x": x, "y": 40})
    assert shown()[1] - shown()[0] == pytest.approx(full[1] / 4)


def test_a_click_lists_what_is_alive(opened: OpenedSource, graph: SolvedGraph) -> None:
    """The table at a step has the bytes of the simulated order there, and its rows are what lives,
    counted again here.
    """
    problem, timeline = graph.result.problem, _after(graph)
    figure = opened.figure("memory", which=1)
    for k in (len(timeline.live_bytes) // 3, len(timeline.live_bytes) // 2):
        x = opened.ask(figure, "picture.view.x(argument + 0.5)", k)
        figure.locator("> canvas").click(position={"x": x, "y": 60})
        assert (
            figure.locator(".alive caption")
            .inner_text()
            .endswith(f": {show_bytes(timeline.live_bytes[k])}")
        )
        assert f"step {k}," in figure.locator(".alive caption").inner_text()
        rows = [row.split("\t") for row in figure.locator(".alive tbody tr").all_inner_texts()]
        lives = [
            life
            for life in lifetimes(problem, graph.after)
            if life.first <= k <= life.last and life.size_bytes
        ]
        kept = [storage for storage in problem.storages if storage.kept]
        assert sum(int(row[1].replace(",", "")) for row in rows) == len(lives) + len(kept)
        total = opened.ask(
            figure, "picture.aliveAt(argument).reduce((sum, row) => sum + row[2], 0)", k
        )
        assert total == timeline.live_bytes[k]
    figure.locator("[data-act=peak]").click()
    assert show_bytes(timeline.peak_memory_bytes) in figure.locator(".alive caption").inner_text()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_themes_and_no_request(browser: "Browser", path: Path, theme: str) -> None:
    """The page follows the system, can be switched, and asks for nothing but itself."""
    page = browser.new_page(color_scheme=theme)  # type: ignore[arg-type]
    shown = OpenedSource(page, path)

    def luminance() -> int:
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", color)[:3]))

    first = luminance()
    assert (first > 700) == (theme == "light")
    page.locator("#theme").click()
    assert (luminance() > 700) == (theme == "dark")
    page.locator("#theme").click()
    assert luminance() == first
    page.emulate_media(media="print")
    assert luminance() == 765  # paper is white
    assert shown.requests == [path.as_uri()]
    assert shown.complaints == []
    page.close()


@pytest.mark.parametrize("width", [320, 400])
def test_a_narrow_window_needs_no_sideways_scroll(
    browser: "Browser", path: Path, width: int
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    OpenedSource(page, path)
    page.eval_on_selector("nav", "nav => nav.prepend(nav.firstElementChild.cloneNode(true))")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


def test_headings_labels_and_tables_for_who_cannot_see_pictures(opened: OpenedSource) -> None:
    """Each picture and button has a name, each column a head, and headings go down one level at a
    time.
    """
    page = opened.page
    assert page.locator("figure > canvas:not([aria-label])").count() == 0
    names = page.eval_on_selector_all(
        "button", "all => all.map((b) => b.getAttribute('aria-label') || b.textContent)"
    )
    assert all(names)
    assert (
        page.locator("thead td, thead th:not([scope=col]), tbody th:not([scope=row])").count() == 0
    )
    levels = page.eval_on_selector_all(
        "h1, h2, h3, h4", "all => all.map((h) => Number(h.tagName[1]))"
    )
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
