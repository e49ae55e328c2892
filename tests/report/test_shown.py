"""A result in a notebook: three lines, the summary, the timeline, and data frames."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

import apsched.report.answer.shown  # noqa: F401, so that results show themselves
from apsched.config import Caps
from apsched.errors import InputError
from apsched.pipeline.result import Result, result_of
from apsched.solver import solve
from tests.helpers.problems.by_hand import ByHand, line


@pytest.fixture(scope="module")
def result() -> Result:
    b = ByHand(prices={"all_gather": line(1_000)}, bucket_launch_ticks=1_000)
    x = b.input("x", 512)
    for k in range(3):
        start = b.start("all_gather", f"layers.{k}.ag", b.input(f"w{k}", 512), 512, 1024)
        x = b.compute(f"y{k}", 20_000, x, b.wait(f"g{k}", start), size=512)
    problem = b.output(x)
    return result_of(problem, Caps(), solve(problem, Caps()), cluster="h100", seconds={})


def test_a_result_is_three_lines(result: Result) -> None:
    first, second, third = repr(result).splitlines()
    assert first.startswith("apsched.Result by hand: optimal, 61.00 µs, bound 61.00 µs")
    assert second.startswith("  peak ")
    assert third.startswith("  best baseline that fits: transformer_block, 61.00 µs")
    problem = result.problem
    none = result_of(
        problem,
        Caps(memory_cap_bytes=1024),
        solve(problem, Caps(memory_cap_bytes=1024)),
        cluster="h100",
        seconds={},
    )
    first, second, _ = repr(none).splitlines()
    assert "infeasible, memory cap 1.00 KiB" in first
    assert "the least memory cap" in second
    assert "the least memory cap" in none.summary()
    assert "<svg" not in none._repr_html_()


def test_the_summary_is_what_solve_prints(result: Result) -> None:
    text = result.summary()
    assert "the best baseline that fits" in text
    assert "  rests on: " in text


def test_a_notebook_shows_the_timeline(result: Result) -> None:
    html = result._repr_html_()
    picture = ET.fromstring(html[html.index("<svg") :])
    names = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert names[0] == "compute stream"
    assert len(names) == 1 + len(result.problem.streams)
    kinds = {title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")}
    assert {"compute", "all_gather"} <= kinds


def test_names_in_the_picture_are_text(result: Result) -> None:
    named = replace(result, problem=replace(result.problem, streams=("<b>&",)))
    assert "group &lt;b&gt;&amp;" in named._repr_html_()


def test_tables_of_steps_and_launches(result: Result) -> None:
    pytest.importorskip("pandas")
    steps, launches = result.to_frame(), result.to_frame("launches")
    assert len(steps) == len(result.schedule.steps)
    assert steps["live_bytes"].max() == result.best.peak_memory_bytes
    assert steps["end_us"].max() <= result.step_time_us
    assert len(launches) == result.best.num_launches
    assert launches["members"].sum() == len(result.problem.collectives)
    assert launches["end_us"].max() <= result.step_time_us
    with pytest.raises(InputError, match="expected 'schedule' or 'launches'; found 'waits'"):
        result.to_frame("waits")


def test_without_pandas_the_extra_is_named(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(InputError, match=r"install apsched\[pandas\]"):
        result.to_frame()
