"""The solver's inner loops are compiled in processes of their own (``apsched.pipeline``)."""

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import apsched.solver
from apsched.config import SolveOptions
from apsched.pipeline import compile_ahead, solve_graph
from apsched.pipeline.solve_graph import SolveRequest
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from tests.helpers.graphs.sharded_layers import FlatPrices, captured_layers, loaded_layers


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    """End what a test began."""
    yield
    compile_ahead.stop_compiling()


def test_nothing_begins_where_there_is_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apsched.solver, "missing_parts", tuple)
    stream = io.StringIO()
    compile_ahead.begin_to_compile(Progress(stream))
    compile_ahead.wait_until_compiled(Progress(stream), with_orders=True)
    assert (stream.getvalue(), compile_ahead._RUNNING) == ("", {})


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
def test_a_process_leaves_its_machine_code_on_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A small function stands in for a part: these take 20 s each."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_ahead, "_CODE", _CODE_OF_A_SMALL_PART)
    parts = iter([("search",), ()])
    monkeypatch.setattr(apsched.solver, "missing_parts", lambda: next(parts))
    stream = io.StringIO()
    progress = Progress(stream)
    compile_ahead.begin_to_compile(progress)
    compile_ahead.wait_until_compiled(progress, with_orders=True)
    assert [*tmp_path.rglob("bucket_prices.num_at_most-*.nbi")]
    began, waits, *_ = stream.getvalue().splitlines()
    assert began == "the solver's inner loops are compiled in the background, this once"
    assert waits == "compile the solver's inner loops ..."


def test_a_process_that_fails_leaves_the_work_to_the_solver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(apsched.solver, "missing_parts", lambda: ("no such part",))
    monkeypatch.setattr(apsched.solver, "SEARCH", "no such part")
    stream = io.StringIO()
    progress = Progress(stream)
    compile_ahead.begin_to_compile(progress)
    (process,) = compile_ahead._RUNNING.values()
    compile_ahead.wait_until_compiled(progress, with_orders=False)
    assert process.returncode == 1
    last = stream.getvalue().splitlines()[-1]
    assert last == "the solver compiles its inner loops, once in this environment"


@pytest.mark.alone
def test_processes_end_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "_CODE", "import time\ntime.sleep(600)")
    monkeypatch.setattr(apsched.solver, "missing_parts", lambda: ("search",))
    compile_ahead.begin_to_compile(Progress(quiet=True))
    (process,) = compile_ahead._RUNNING.values()
    assert process.poll() is None
    compile_ahead.stop_compiling()
    assert process.returncode < 0


_CODE_OF_A_SMALL_PART = """
import sys
sys.path[:] = {path!r}
import numpy as np
from apsched.solver.arrays.bucket_prices import num_at_most
num_at_most(np.arange(4), 2)
"""


def test_a_floor_waits_for_the_inner_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the search for the least memory compiles them, silently, once more."""
    stream = io.StringIO()

    def waited(progress: Progress, *, with_orders: bool) -> None:
        progress.note("waited" if with_orders else "waited for a part")

    monkeypatch.setattr(solve_graph, "wait_until_compiled", waited)
    graph, _ = loaded_layers(captured_layers((8, 8)), FlatPrices())
    request = SolveRequest(memory_cap=MemoryCap(above_floor=True), options=SolveOptions(budget=0.0))
    solve_graph.resolve_caps(graph, request, Progress(stream))
    assert stream.getvalue().splitlines()[0].startswith("waited")
