"""Stages, and their parts, on a terminal and elsewhere (``apsched.progress``)."""

import io
import math
import re

import pytest
import torch
from torch import nn

from apsched import progress as module
from apsched.capture.module_stack import recorded_modules
from apsched.progress import Progress, working_on


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_capture_names_the_modules_that_it_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LINES", 0.0)
    model, stream = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), io.StringIO()
    with Progress(stream).stage("capture"), recorded_modules(model):
        model(torch.ones(2))
    parts = [re.sub(r" +\d+\.\d s", "", line) for line in stream.getvalue().splitlines()]
    assert parts == [
        "capture ...",
        "capture  forward of Sequential",
        "capture  forward of 0",
        "capture  forward of 1",
        "capture  backward of Sequential",
        "capture",
    ]


def test_short_stages_have_no_parts_in_a_log() -> None:
    stream = io.StringIO()
    with Progress(stream).stage("capture"):
        working_on("forward of layers.0")
    assert "layers.0" not in stream.getvalue()


def test_a_part_that_may_take_minutes_has_a_line_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    with Progress(stream).stage("capture"):
        working_on("pass mark_chains", is_long=True)
        assert "mark_chains" not in stream.getvalue(), "a moment after the line of the stage"
        monkeypatch.setattr(module, "_SECONDS_BEFORE_LONG", 0.0)
        working_on("forward of layers.0")
        working_on("partition", is_long=True)
    assert "layers.0" not in stream.getvalue()
    assert re.search(r"^capture +\d\.\d s  partition$", stream.getvalue(), re.MULTILINE)


def test_a_terminal_shows_each_part_in_place() -> None:
    stream = Terminal()
    progress = Progress(stream)
    with progress.stage("capture"):
        working_on("forward of layers.0")
        assert progress._live is not None
        (task,) = progress._live.tasks
        assert task.description == "capture: forward of layers.0"
    assert "capture    0." in stream.getvalue().splitlines()[-1]


def test_without_a_stage_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    working_on("forward of layers.0")
    with Progress(quiet=True).stage("capture"):
        working_on("forward of layers.0")
    assert capsys.readouterr() == ("", "")


def test_the_stage_outside_goes_on_after_one_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LINES", 0.0)
    outer, inner = io.StringIO(), io.StringIO()
    with Progress(outer).stage("solve"):
        with Progress(inner).stage("capture"):
            working_on("one")
        working_on("two")
    assert "one" in inner.getvalue()
    assert "one" not in outer.getvalue()
    assert "two" in outer.getvalue()


@pytest.mark.alone
def test_the_budget_is_shown_in_seconds_at_the_pace_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A quarter of the budget took two seconds: the other three quarters take six."""
    clock, stream = [100.0], io.StringIO()
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LINES", 0.0)
    progress = Progress(stream)
    with progress.stage("solve"):
        for now, share in ((100.0, math.nan), (101.0, 0.0), (103.0, 0.25)):
            clock[0] = now
            progress.solver("local moves", 20.0, 18.0, share)
        clock[0] = 104.0
        assert progress.budget_text() == "budget 3 s used, at most 5 s left"
        progress.solver("bounds", math.nan, 18.0)  # the next search begins
        assert progress.budget_text() == ""
    assert stream.getvalue().splitlines() == [
        "solve ...",
        "solve    0.0 s  incumbent 20.00 µs, gap 10.000 %, bound 18.00 µs; local moves",
        "solve    3.0 s  incumbent 20.00 µs, gap 10.000 %, bound 18.00 µs; local moves;"
        " budget 2 s used, at most 6 s left",
        "solve    4.0 s  bound 18.00 µs; bounds",
        "solve    4.0 s  bound 18.00 µs; bounds",
    ]
