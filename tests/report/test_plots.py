"""Pictures show what ``simulate`` says: tested by the data that is drawn."""

import subprocess
import sys
from itertools import pairwise

import pytest

from apsched.problem.problem import Problem
from apsched.report import plots
from apsched.schedule.schedule import Schedule, as_captured
from apsched.schedule.simulate import simulate
from tests.helpers.problems.by_hand import ByHand, line, schedule

pyplot = pytest.importorskip(
    "matplotlib.pyplot", reason="matplotlib is not installed (pip install '.[plots]')"
)
KIB = 1024


@pytest.fixture(autouse=True)
def _no_window(monkeypatch: pytest.MonkeyPatch):
    pyplot.switch_backend("agg")
    yield
    pyplot.close("all")


def two_gathers() -> Problem:
    """Two weights of 4 KiB (12 us each, 16 us together), gathered for a node of 20 us each; a
    gradient that is reduced at the end.
    """
    b = ByHand(
        prices={"all_gather": line(8_000, 1_000), "reduce_scatter": line(30_000)},
        copy_price=line(2_000),
        bucket_launch_ticks=1_000,
    )
    x, s, t = b.input("x", 512), b.input("s", 512, kept=True), b.input("t", 512, kept=True)
    w = b.wait(
        "w", b.start("all_gather", "ag_w", s, 512, 4 * KIB, launch_ticks=1_000, module="layer.w")
    )
    v = b.wait(
        "v", b.start("all_gather", "ag_v", t, 512, 4 * KIB, launch_ticks=1_000, module="layer.v")
    )
    y = b.compute("y", 20_000, x, w, size=KIB)
    z = b.compute("z", 20_000, y, v, size=2 * KIB)
    return b.output(
        b.wait("g", b.start("reduce_scatter", "rs_z", z, 2 * KIB, KIB, launch_ticks=1_000))
    )


def bucketed(problem: Problem) -> Schedule:
    return schedule(
        problem, "x s t in:0 start:0 wait:0 out:ag_w y out:ag_v z rs_z g output", "ag_w ag_v"
    )


@pytest.fixture
def problem() -> Problem:
    return two_gathers()


def test_bars_are_the_timeline(problem: Problem) -> None:
    """Work and exposed time fill the compute row without holes up to the step time; transfers are
    as simulated.
    """
    for order in (as_captured(problem.num_nodes), bucketed(problem)):
        timeline = simulate(problem, order)
        bars = plots.timeline_bars(problem, order)
        compute = sorted((bar for bar in bars if bar.row == 0), key=lambda bar: bar.begin_us)
        assert all(
            a.begin_us + a.length_us == pytest.approx(b.begin_us) for a, b in pairwise(compute)
        )
        assert compute[0].begin_us == 0
        assert compute[-1].begin_us + compute[-1].length_us == pytest.approx(
            timeline.step_time_ticks / 1000
        )
        assert sum(bar.length_us for bar in compute if bar.kind == "exposed") == pytest.approx(
            timeline.exposed_ticks / 1000
        )
        drawn = [bar for bar in bars if bar.row == 1]
        assert [bar.begin_us for bar in drawn] == pytest.approx(
            [t.begin_ticks / 1000 for t in timeline.transfers]
        )
        assert [bar.length_us for bar in drawn] == pytest.approx(
            [(t.end_ticks - t.begin_ticks) / 1000 for t in timeline.transfers]
        )
        assert drawn[-1].kind == "reduce_scatter"


def test_kinds_and_labels(problem: Problem) -> None:
    bars = plots.timeline_bars(problem, bucketed(problem))
    assert [bar.kind for bar in bars if bar.row == 0] == [
        "copy",
        "launch",
        "exposed",
        "copy",
        "compute",
        "copy",
        "compute",
        "launch",
        "exposed",
    ]
    assert [bar.labels for bar in bars if bar.row == 1] == [("layer.w + layer.v", "2x"), ("rs_z",)]


def test_timeline_is_labelled_with_units(problem: Problem) -> None:
    ax = plots.plot_timeline(problem, bucketed(problem))
    assert ax.get_xlabel() == "time (us)"
    assert [text.get_text() for text in ax.get_yticklabels()] == ["compute stream", "group dp"]
    assert ax.get_xlim()[1] == pytest.approx(
        simulate(problem, bucketed(problem)).step_time_ticks / 1000
    )
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["compute", "copy", "launch", "exposed", "all_gather", "reduce_scatter"]
    assert {"y", "z", "rs_z"} <= {text.get_text() for text in ax.texts}


def test_timeline_draws_each_kind_in_its_colour(problem: Problem) -> None:
    ax = plots.plot_timeline(problem, bucketed(problem))
    found = {
        c.get_label(): tuple(c.get_facecolor()[0])
        for c in ax.collections
        if not c.get_label().startswith("_")
    }
    colors = pytest.importorskip("matplotlib.colors")
    for kind, colour in found.items():
        assert colour == pytest.approx(colors.to_rgba(plots.COLORS[kind]))
    assert len(set(plots.COLORS.values())) == len(plots.COLORS)


def test_moved_compute_has_a_colour_of_its_own() -> None:
    """Only the node that was put off; those that it lets pass have not moved. Its name is white on
    dark.
    """
    b = ByHand()
    x = b.input("x", 512)
    p = b.output(*[b.compute(f"n{k}", 20_000, x, size=512) for k in range(4)])
    put_off = schedule(p, "x n0 n2 n3 n1 output")
    assert [bar.kind for bar in plots.timeline_bars(p, put_off)] == [
        "compute",
        "compute",
        "compute",
        "moved compute",
    ]
    ax = plots.plot_timeline(p, put_off)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["compute", "moved compute"]
    assert {text.get_text(): text.get_color() for text in ax.texts} == {
        "n0": "black",
        "n2": "black",
        "n3": "black",
        "n1": "white",
    }


def test_memory_is_what_simulate_says(problem: Problem) -> None:
    """The curve, the peak, what is kept and the cap, in KiB."""
    order = bucketed(problem)
    timeline = simulate(problem, order)
    ax = plots.plot_memory(problem, order, cap_bytes=64 * KIB)
    lines = {one.get_label(): one for one in ax.lines}
    assert list(lines["alive"].get_ydata()) == pytest.approx([b / KIB for b in timeline.live_bytes])
    peak = next(one for label, one in lines.items() if label.startswith("peak"))
    assert peak.get_ydata()[0] == pytest.approx(timeline.peak_memory_bytes / KIB)
    assert timeline.live_bytes[int(peak.get_xdata()[0])] == timeline.peak_memory_bytes
    assert lines["cap 64 KiB"].get_ydata()[0] == 64
    assert lines["kept by the caller"].get_ydata()[0] == 1
    assert ax.get_ylabel() == "memory (KiB)"
    assert ax.get_ylim()[1] > 64


def test_draws_into_given_axes(problem: Problem) -> None:
    _, axes = pyplot.subplots(2)
    assert plots.plot_timeline(problem, bucketed(problem), axes[0]) is axes[0]
    assert plots.plot_memory(problem, bucketed(problem), ax=axes[1]) is axes[1]
    assert not any(one.get_label().startswith("cap") for one in axes[1].lines)


def test_shared_axes_show_all_of_each(problem: Problem) -> None:
    """A shorter schedule drawn last does not cut the longer one off, in time or in memory."""
    short, long = sorted(
        (bucketed(problem), as_captured(problem.num_nodes)),
        key=lambda s: simulate(problem, s).step_time_ticks,
    )
    _, axes = pyplot.subplots(2, sharex=True)
    for ax, order in zip(axes, (long, short), strict=True):
        plots.plot_timeline(problem, order, ax)
    assert axes[0].get_xlim() == (0, pytest.approx(simulate(problem, long).step_time_ticks / 1000))
    _, axes = pyplot.subplots(2, sharey=True)
    low, high = sorted((short, long), key=lambda s: simulate(problem, s).peak_memory_bytes)
    for ax, order in zip(axes, (high, low), strict=True):
        plots.plot_memory(problem, order, ax=ax)
    assert axes[0].get_ylim()[1] > simulate(problem, high).peak_memory_bytes / KIB
    assert (
        simulate(problem, high).peak_memory_bytes > simulate(problem, low).peak_memory_bytes * 1.1
    )


def test_long_steps_are_in_milliseconds() -> None:
    b = ByHand()
    p = b.output(b.compute("long", 30_000_000, b.input("x", 512), size=512))
    ax = plots.plot_timeline(p, as_captured(p.num_nodes))
    assert ax.get_xlabel() == "time (ms)"
    assert ax.get_xlim() == (0, 30)


def test_without_matplotlib_one_is_told_what_to_install() -> None:
    code = """
import sys
sys.modules["matplotlib"] = None
import apsched.report.plots
from apsched.errors import InputError
try:
    apsched.report.plots._axes(None, 1.0)
except InputError as error:
    print(error)
"""
    said = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert (
        said == "pictures need matplotlib, which is not installed; pip install 'apsched[plots]'\n"
    )


def test_kept_tensors_are_drawn_apart(problem: Problem) -> None:
    """The area of their own is the bytes of the gathered weight while it is alive."""
    order = as_captured(problem.num_nodes)
    ax = plots.plot_memory(problem, order, kept_tensors=["w"])
    label = "kept gathered"
    (area,) = [area for area in ax.collections if area.get_label() == label]
    heights = area.get_paths()[0].vertices[:, 1]
    assert heights.max() == pytest.approx(4.0)
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert label in names
    assert label not in [
        text.get_text() for text in plots.plot_memory(problem, order).get_legend().get_texts()
    ]
