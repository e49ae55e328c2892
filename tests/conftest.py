"""Common fixtures of several stages: small graph files, made once, and a way to run a command."""

import gc
import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest

from apsched.cli import main
from apsched.graph.graph_file import save_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The output of a command."""

    code: int
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        """The lines of stderr that are errors; the others are progress."""
        return [line for line in self.stderr.splitlines() if line.startswith("apsched: error:")]


Run = Callable[..., Ran]

# A shell's background jobs ignore Ctrl-C, and so do the processes that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Each compiler process of Inductor would import torch anew; some tests of process ranks start them.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Each process would compile three programs to see which vector instructions there are, in place of
# asking the processor (torch/_inductor/cpu_vec_isa.py).
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# No test depends on the speed of the machine.
hypothesis.settings.register_profile("apsched", deadline=None)
hypothesis.settings.load_profile("apsched")

# Collections of garbage would take a tenth of the time.
gc.set_threshold(100_000, 20, 10)


HEAVIEST = (
    "compiler/ranks/test_job.py",
    "benchmarks/execution/test_whole_steps.py",
    "compiler/test_on_processes.py",
    "benchmarks/execution/test_execution.py",
    "compiler/test_keep.py",
    "end_to_end/test_training.py",
    "compiler/test_micro_batches_on_processes.py",
    "models/test_hf.py",
    "fuzz/test_random_graphs.py",
    "integrations/test_fsdp2_accumulation.py",
    "compiler/test_uneven_shards.py",
)
"""The files that take the longest, in seconds alone: they begin first, so that none runs at the end
while the other worker has no file left.
"""


def pytest_configure(config: pytest.Config) -> None:
    """Let xdist hand out files in the order of collection, not those of few tests last.

    All processes of a run share a cache of Inductor that begins empty: no pass sees a graph whose
    code an earlier run has left there.
    """
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="inductor-", ignore_cleanup_errors=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the heaviest files; the others keep their order."""
    tests = Path(__file__).parent
    places = {tests / name: place for place, name in enumerate(HEAVIEST)}
    assert all(path.exists() for path in places), "HEAVIEST names a file that is not there"
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave out of collections what the modules hold."""
    gc.freeze()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``apsched ARGS`` in an empty directory, as a user would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("APSCHED_DEBUG", raising=False)

    def run(*args: object) -> Ran:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Ran(code=code, stdout=captured.out, stderr=captured.err)

    return run


@pytest.fixture(scope="session")
def debug_graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The graph files of a small preset, ``forward`` and ``backward``, in a directory that tests
    only read.
    """
    from apsched.capture.fake_world import world
    from apsched.costs.cluster_model import ClusterCostModel
    from apsched.costs.clusters.cluster import load_cluster
    from apsched.graph.export.export import export_graph
    from apsched.models.mesh import MeshSpec
    from apsched.models.preset_capture import capture_preset

    folder = tmp_path_factory.mktemp("graphs")
    mesh = MeshSpec(fsdp=4)
    with world(mesh.world_size):
        capture = capture_preset("llama3-debug", mesh=mesh, seq_len=64)
        cost_model = ClusterCostModel(load_cluster(), capture.group_ranks)
        paths = {}
        for graph in capture.graphs:
            paths[graph.name] = folder / f"step.{graph.name}.graph"
            save_graph(
                export_graph(
                    graph, cost_model, group_ranks=capture.group_ranks, cluster_name="h100"
                ),
                paths[graph.name],
            )
    return paths


@pytest.fixture(scope="session")
def debug_run(debug_graphs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that ``apsched solve`` wrote for ``debug_graphs``, which tests only read."""
    folder = tmp_path_factory.mktemp("run") / "out"
    assert (
        main(
            [
                "solve",
                str(debug_graphs["forward"].parent / "step.graph"),
                "--budget",
                "0.1",
                "-o",
                str(folder),
            ]
        )
        == 0
    )
    return folder


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where ``APSCHED_NO_SKIP`` is set (``.ci/run`` has all that tests need), a skipped test is a
    failure.
    """
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if os.environ.get("APSCHED_NO_SKIP") and skipped and session.exitstatus == pytest.ExitCode.OK:
        reporter.ensure_newline()
        reporter.write_line(f"{len(skipped)} tests were skipped, which is a failure here", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
