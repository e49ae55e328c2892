"""Machine code in the cache is stale when any file changes that is compiled into it."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import apsched.solver
from apsched.solver.arrays.jit import (
    cache_directory,
    has_machine_code,
    source_stamp,
    stamp_of,
)


@pytest.fixture
def solver(tmp_path: Path) -> Path:
    """Return a copy of the solver's sources."""
    ignore = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(apsched.solver.__path__[0], tmp_path / "solver", ignore=ignore))


def test_the_stamp_is_of_the_files_alone(solver: Path) -> None:
    assert stamp_of(solver) == source_stamp()


@pytest.mark.parametrize(
    "file",
    [
        "program/evaluate.py",
        "search/construct_pass.py",
        "bounds/any_order/heads.py",
        "arrays/jit.py",
        pytest.param("program/program.py", id="operations and records, no compiled code"),
        pytest.param("arrays/problem_arrays.py", id="constants, no compiled code"),
    ],
)
def test_a_change_of_what_is_compiled_changes_the_stamp(solver: Path, file: str) -> None:
    before = stamp_of(solver)
    with (solver / file).open("a") as text:
        text.write("# changed")
    assert stamp_of(solver) != before


def test_a_change_of_anything_else_keeps_the_stamp(solver: Path) -> None:
    before = stamp_of(solver)
    with (solver / "infeasible" / "explain.py").open("a") as text:
        text.write("# changed")
    assert stamp_of(solver) == before


def test_machine_code_is_found_in_the_process_and_in_the_cache_on_disk(tmp_path: Path) -> None:
    file = tmp_path / "doubled.py"
    file.write_text(
        "from apsched.solver.arrays.jit import compiled\n"
        "@compiled\n"
        "def doubled(x: int) -> int:\n"
        "    return 2 * x\n"
    )
    first = runpy.run_path(str(file))["doubled"]
    assert not has_machine_code(first)
    assert first(2) == 4
    assert has_machine_code(first)
    assert has_machine_code(runpy.run_path(str(file))["doubled"])


def said(code: str, folder: Path, environment: dict[str, str]) -> tuple[str, str]:
    """Return the output and the errors of ``code`` in a process that states no directory."""
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.stdout, ran.stderr


def test_where_no_cache_can_be_written_functions_are_compiled_all_the_same() -> None:
    """As in a container with a read-only file system and without a home directory."""
    nowhere = {"HOME": "/proc/none", "XDG_CACHE_HOME": "/proc/none"}
    code = (
        "from apsched.solver.arrays.jit import compiled\n"
        "names = {}\n"
        "exec(compile('def doubled(x): return 2 * x', '/proc/none/doubled.py', 'exec'), names)\n"
        "print(compiled(names['doubled'])(2))\n"
    )
    assert said(code, Path.cwd(), nowhere) == ("4\n", "")


def test_an_installed_package_gets_no_files_that_pip_would_leave_behind(tmp_path: Path) -> None:
    """What is left of the folders would hide an editable installation of the same package."""
    packages = tmp_path / "site-packages"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(apsched.__file__).parent, packages / "apsched", ignore=ignore)
    code = (
        "import numba, numpy as np\n"
        "from apsched.solver.arrays.bucket_prices import num_at_most\n"
        "print(num_at_most(np.array([1, 2, 3]), 2), numba.config.CACHE_DIR == '')\n"
    )
    assert said(code, tmp_path, {"PYTHONPATH": str(packages)}) == ("2 True\n", "")
    written = {file.suffix for file in (packages / "apsched").rglob("__pycache__/*")}
    assert written <= {".pyc"}
    assert {file.suffix for file in (packages / "apsched-machine-code").rglob("*.nb?")} == {
        ".nbi",
        ".nbc",
    }


def test_a_checkout_keeps_machine_code_beside_its_files() -> None:
    assert cache_directory(Path("/home/me/apsched/solver/arrays/jit.py")) is None
    found = cache_directory(Path("/env/site-packages/apsched/solver/arrays/jit.py"))
    assert found == Path("/env/site-packages/apsched-machine-code")
