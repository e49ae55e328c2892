"""Engines: any executor, workers without torch, a Dask cluster that loses a worker; every one ends
with the same answers.
"""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from apsched.config import SolveOptions
from apsched.pipeline.cost_choice import CostChoice
from apsched.pipeline.solve_graph import SolveRequest
from apsched.pipeline.sources import SourceRequest
from apsched.progress import Progress
from apsched.study.axes import MemoryAxis, parse_vary
from apsched.study.engine import Engine, GivenEngine, LocalEngine
from apsched.study.prepare import prepare
from apsched.study.rows import FILE
from apsched.study.run import chains, run
from apsched.study.setting import Setting
from apsched.study.store import Store

pytestmark = pytest.mark.ranks  # it starts and kills workers; nothing goes by the clock


def forbid_torch() -> None:
    """Make ``import torch`` raise in this process."""
    sys.modules["torch"] = None  # type: ignore[assignment]


def answer(
    engine: Engine, graph: Path, directory: Path, *, seeds: int = 1, told: Any = lambda: None
) -> list[tuple[Any, ...]]:
    """Answer a small study with ``engine``; return what must be the same whatever the engine."""
    store = Store(directory, create=True)
    request = SourceRequest(source=str(graph))
    settings = [
        Setting(
            request=request,
            costs=CostChoice(),
            direction="both",
            search=SolveRequest(options=SolveOptions(budget=0.5, seed=seed)),
        )
        for seed in range(seeds)
    ]
    memory = parse_vary(["memory_cap=floor..none:4"])[1]
    assert isinstance(memory, MemoryAxis)
    lives = chains(prepare(settings, store, Progress(quiet=True)), memory, store, full=False)
    run(lives, engine, "run", told)
    with sqlite3.connect(directory / FILE) as db:
        return db.execute(
            "select point_id, how, step_ticks, bound_ticks, report from results order by point_id"
        ).fetchall()


@pytest.fixture(scope="module")
def expected(
    debug_graphs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Any, ...]]:
    """Return the answers of an undisturbed run in this process."""
    return answer(
        LocalEngine(1), debug_graphs["backward"], tmp_path_factory.mktemp("expected"), seeds=3
    )


def test_workers_need_no_torch(
    debug_graphs: dict[str, Path], tmp_path: Path, expected: list[tuple[Any, ...]]
) -> None:
    """An executor of somebody else's, in whose worker torch cannot be imported."""
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=forbid_torch
    ) as executor:
        with pytest.raises(ImportError):
            executor.submit(__import__, "torch").result()
        assert (
            answer(GivenEngine(executor), debug_graphs["backward"], tmp_path, seeds=3) == expected
        )


def test_a_worker_of_the_pool_is_killed(
    debug_graphs: dict[str, Path], tmp_path: Path, expected: list[tuple[Any, ...]]
) -> None:
    """Questions in flight are answered again in a new pool."""
    engine = LocalEngine(2)
    killed: list[int] = []

    def told() -> None:
        if not killed:
            killed.extend(list(engine.executor()._processes)[:1])  # type: ignore[attr-defined]
            os.kill(killed[0], signal.SIGKILL)

    try:
        assert answer(engine, debug_graphs["backward"], tmp_path, seeds=3, told=told) == expected
    finally:
        engine.stop()
    assert killed


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A Dask cluster of two worker processes in which torch cannot be imported; nor in those that
    take their place.
    """
    distributed = pytest.importorskip("distributed")

    class NoTorch(distributed.WorkerPlugin):  # type: ignore[name-defined,misc]
        def setup(self, worker: object) -> None:
            sys.modules["torch"] = None  # type: ignore[assignment]

    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as found:
        with distributed.Client(found, set_as_default=False) as client:
            client.register_plugin(NoTorch())
        yield found


def test_a_dask_worker_is_killed_in_the_middle(
    debug_graphs: dict[str, Path], tmp_path: Path, cluster: Any, expected: list[tuple[Any, ...]]
) -> None:
    """Nothing is lost, and nothing is there twice."""
    from distributed import Client

    from apsched.study.dask_engine import DaskEngine

    engine = DaskEngine.at(cluster.scheduler_address)
    with Client(cluster.scheduler_address, set_as_default=False) as client:
        with pytest.raises(ImportError):
            client.submit(__import__, "torch").result()
        killed: list[int] = []

        def told() -> None:
            if not killed:
                busy = next(iter(client.processing()), None)
                killed.append(
                    client.run(os.getpid)[busy]
                    if busy
                    else next(iter(client.run(os.getpid).values()))
                )
                threading.Thread(target=os.kill, args=(killed[0], signal.SIGKILL)).start()
                time.sleep(0.2)

        try:
            found = answer(engine, debug_graphs["backward"], tmp_path / "study", seeds=3, told=told)
        finally:
            engine.stop()
    assert killed
    assert found == expected
    assert len({row[0] for row in found}) == len(found)


def test_the_command_on_a_dask_cluster_that_loses_a_worker(
    debug_graphs: dict[str, Path], tmp_path: Path, cluster: Any, expected: list[tuple[Any, ...]]
) -> None:
    """``apsched study --engine dask://host:port`` as a user runs it: a worker is killed after the
    first answer, and the answers are those of this process.
    """
    from distributed import Client

    address = cluster.scheduler_address.removeprefix("tcp://")
    command = [
        sys.executable,
        "-m",
        "apsched",
        "study",
        str(debug_graphs["backward"]),
        "--budget",
        "0.5",
        "--max-compute-move",
        "0",
    ]
    command += [
        "--engine",
        f"dask://{address}",
        "--vary",
        "memory_cap=floor..none:4",
        "--vary",
        "seed=0,1,2",
        "-o",
        str(tmp_path / "study"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    schedules = tmp_path / "study" / "schedules"
    while process.poll() is None and not any(schedules.glob("*.json")):
        time.sleep(0.05)
    with Client(cluster.scheduler_address, set_as_default=False) as client:
        os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert "12 points" in stdout or stdout.count("4 points") == 3, stdout
    with sqlite3.connect(tmp_path / "study" / FILE) as db:
        found = db.execute(
            "select point_id, how, step_ticks, bound_ticks, report from results order by point_id"
        ).fetchall()
    assert found == expected


def is_running(pid: int) -> bool:
    """Return whether the process has not ended; nothing may wait for one without its parent."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


KILLED = """
import os, signal
from apsched.study.engine import LocalEngine

if __name__ == "__main__":
    pool = LocalEngine(2).executor()
    print(*{pool.submit(os.getpid).result() for _ in range(4)}, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_workers_of_a_killed_study_end(tmp_path: Path) -> None:
    """SIGTERM of a job manager ends a study without its clean-up."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    with (tmp_path / "pids").open("wb") as pids:  # workers that stay would keep a pipe open
        ran = subprocess.run([sys.executable, script], stdout=pids, check=False, timeout=120)
    assert ran.returncode == -signal.SIGTERM
    workers = {int(pid) for pid in (tmp_path / "pids").read_text().split()}
    assert workers
    until = time.monotonic() + 30
    while running := {pid for pid in workers if is_running(pid)}:
        if time.monotonic() > until:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"{running} run without their parent")
        time.sleep(0.1)
