"""Stages, and their parts, on a terminal and elsewhere (``apsched.progress``)."""

import io
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
