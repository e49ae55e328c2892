"""``apsched period``: the curve of one layer, for people and for programs."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import networkx as nx
import pytest

from apsched.cli import period
from apsched.config import Caps
from apsched.load_source import LoadedGraph, LoadedSource
from apsched.problem import Problem
from apsched.solver.least_period import period_curve
from tests.conftest import Ran, Run
from tests.layered import layered

RunPeriod = Callable[..., Ran]


@pytest.fixture
def run_period(run: Run, monkeypatch: pytest.MonkeyPatch) -> RunPeriod:
    """Run ``apsched period`` on a problem made by hand."""

    def run_period(problem: Problem, *args: str) -> Ran:
        @contextmanager
        def loaded(*_: object) -> Iterator[LoadedSource]:
            graph = LoadedGraph(dag=nx.DiGraph(), problem=problem, device_memory_bytes=None)
            yield LoadedSource(label="by hand", slug="by-hand", cluster="h100", graphs=(graph,))

        monkeypatch.setattr(period, "loaded", loaded)
        return run("period", "step.graph", "--memory-cap", "none", *args)

    return run_period


def test_two_layers_are_no_repetition(run_period: RunPeriod) -> None:
    """Said in words, and in JSON; not an error."""
    problem = layered(2)
    ran = run_period(problem)
    assert ran.code == 0, ran.stderr
    assert "by hand: no layer repeats three times or more" in ran.stdout
    assert json.loads(run_period(problem, "--json").stdout)["period"] == [{"name": "by hand", "num_layers": 0}]


def test_the_curve_is_shown(run_period: RunPeriod) -> None:
    """A row for each point, with what is proven, and a line on what repeats."""
    problem = layered(8, backward=True, ticks=(60, 2))
    ran = run_period(problem)
    assert ran.code == 0, ran.stderr
    curve = period_curve(problem, budget=20.0)
    assert curve is not None
    assert len([line for line in ran.stdout.splitlines() if " yes " in line]) == len(curve.points) >= 3
    assert f"8 layers of {curve.period.length} compute nodes" in ran.stdout
    assert "no schedule of a layer is shorter" in ran.stdout
    points = json.loads(run_period(problem, "--json").stdout)["period"][0]["points"]
    assert [point["peak_memory_bytes"] for point in points] == [point.peak_memory_bytes for point in curve.points]


def test_what_no_schedule_keeps_is_said() -> None:
    problem = layered(8, backward=True)
    curve = period_curve(problem, Caps(memory_cap_bytes=1), budget=1.0)
    graph = LoadedGraph(dag=nx.DiGraph(), problem=problem, device_memory_bytes=None)
    assert "no schedule of a layer was found within the caps" in period.verdict(graph, curve)
