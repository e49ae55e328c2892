"""The table of a study marks schedules that no solve under their cap found."""

import io
from dataclasses import replace

import pytest

from apsched.study.report.across import Line
from apsched.study.report.exports import flat
from apsched.study.report.frontier import GIB, least_memory
from apsched.study.report.pages import frontiers_of
from apsched.study.report.text import LEGEND, mark, print_study, slowdown_text
from apsched.study.rows import Point
from tests.study.report.test_binding import point


def marked_points() -> tuple[Point, ...]:
    """One solved, one with the schedule of another cap, one from a short search."""
    found = []
    for cap, how, by in (
        (10, "solved", "search"),
        (20, "along caps", "another cap"),
        (30, "along caps", "search along caps"),
    ):
        one = point(cap, 200 - cap, 5)
        report = {
            **one.outcome.report,
            "solved_by": by,
            "baselines": {},
            **dict.fromkeys(
                ("exposed_us", "compute_us", "fastest_us", "peak_bound_bytes", "launches_bound")
            ),
        }
        found.append(replace(one, outcome=replace(one.outcome, how=how, report=report)))
    return tuple(found)


def test_buckets_along_an_axis_stand_with_the_frontiers_that_they_compare() -> None:
    lines = [
        Line(labels={"budget": value}, graph=graph, points=marked_points(), expected=3)
        for graph in ("backward", "forward")
        for value in ("1", "2")
    ]
    found = [
        [text for text in frontier.sentences if text.startswith("buckets along")]
        for frontier in frontiers_of(lines, 0.02)
    ]
    assert [len(texts) for texts in found] == [0, 1, 0, 1]
    assert found[1][0].startswith("buckets along budget (backward): 1: 5 launches")
    assert found[3][0].startswith("buckets along budget (forward): ")


def test_where_schedules_come_from() -> None:
    points = marked_points()
    expected = ["solve", "another cap", "short search"]
    assert [one.schedule_from for one in points] == expected
    assert [mark(one) for one in points] == ["", "=", "~"]
    assert [row["schedule_from"] for row in flat(points)] == expected


def test_the_table_and_the_report_have_marks_and_a_legend() -> None:
    points = marked_points()
    line = Line(labels={}, graph="backward", points=points, expected=3)
    out = io.StringIO()
    print_study([line], 0.02, out)
    first, second, third = (text.split() for text in out.getvalue().splitlines()[1:4])
    assert first[:2] == ["backward", "10.00"]
    assert [second[0], third[0]] == ["=", "~"]
    assert LEGEND in out.getvalue()
    (frontier,) = frontiers_of([line], 0.02)
    assert [one.mark for one in frontier.points] == ["", "=", "~"]
    assert frontier.legend == LEGEND
    alone = io.StringIO()
    print_study([replace(line, points=points[:1], expected=1)], 0.02, alone)
    assert LEGEND not in alone.getvalue()


def test_the_least_memory_for_a_slowdown_is_between_bounds() -> None:
    """10 GiB is refuted by its bound, and with 20 GiB what was found is slower."""
    tight, middle, loose = point(10, 200, 9), point(20, 130, 5), point(30, 100, 4)
    tight = replace(tight, outcome=replace(tight.outcome, bound_ticks=103_000))
    said = "2 % slower than the fastest, 102.00 µs: 30.00 GiB is enough (100.00 µs)"
    found = (
        "; with 20.00 GiB the fastest schedule found takes 130.00 µs (not proven to be the fastest)"
    )
    refuted = ", 10.00 GiB is not (proven)"
    assert slowdown_text((middle, loose), 0.02) == said + found
    assert slowdown_text((tight, middle, loose), 0.02) == said + refuted + found
    assert slowdown_text((tight, loose), 0.02) == said + refuted
    assert slowdown_text((loose,), 0.02) == said
    least = least_memory((tight, middle, loose), 0.02)
    assert least is not None
    assert (least.refuted_bytes, least.slower_bytes) == (10 * GIB, 20 * GIB)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_narrow_terminal_shows_fewer_columns_and_cuts_none(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    lines = [
        Line(labels={"mesh": mesh}, graph="backward", points=marked_points(), expected=3)
        for mesh in ("fsdp=64", "fsdp=128")
    ]
    out = Terminal()
    print_study(lines, 0.02, out)
    assert "…" not in out.getvalue()
    assert "fsdp=128" in out.getvalue()
    assert ("columns for a wider terminal" in out.getvalue()) == (width < 200)
