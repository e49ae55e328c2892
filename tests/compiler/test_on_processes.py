"""Real gloo processes train under ``torch.compile`` with apsched as they do without: the same losses and gradients."""

import shutil
from pathlib import Path

import pytest
from processes import run_processes

pytestmark = pytest.mark.alone


def run(tmp_path_factory, world_size: int) -> list[dict]:
    folder = tmp_path_factory.mktemp(f"compiled_{world_size}")
    return run_processes(Path(__file__).parent / "worker.py", folder, world_size, timeout_s=800)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[dict]:
    return run(tmp_path_factory, 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> list[dict]:
    return run(tmp_path_factory, 4)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize("case", ["preset", "reshard", "graph breaks", "sizes that change"])
def test_two_processes_train_bit_for_bit_as_without(two, case):
    """A sum over two process ranks has the same bits in any order."""
    for report in two:
        found = report[case]
        assert found["num_unequal"] == 0
        assert found["exact"]
        assert {name for name, _, _ in found["graphs"]} == {"forward", "backward"}
        assert any(launches < captured for _, captured, launches in found["graphs"])


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_inference_and_full_inductor(two):
    for report in two:
        assert report["inference"] == {"equal": True, "names": ["graph", "graph"]}
        assert report["inductor"]["largest_distance"] < 1e-5, "Inductor fuses other kernels, which round otherwise"
        assert [launches < captured for _, captured, launches in report["inductor"]["graphs"]] == [True, True]


def test_four_processes_train_bit_for_bit_as_without(four):
    """FSDP times tensor parallelism: every sum is one of two process ranks."""
    for report in four:
        assert report["preset"]["num_unequal"] == 0
        assert [launches < captured for _, captured, launches in report["preset"]["graphs"]] == [True, True]
