"""The tree is what pyproject says: two folders at the top import under apsched, and no package is
forgotten in the wheel.
"""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

import apsched

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]


def _package_folders() -> dict[str, Path]:
    """Return package name -> folder, of every folder with an ``__init__.py``; links are followed
    once.
    """
    packages = {}
    for top, name in (
        (ROOT / "apsched", "apsched"),
        (ROOT / "solver", "apsched.solver"),
        (ROOT / "models", "apsched.models"),
    ):
        for init in top.rglob("__init__.py"):
            relative = init.parent.relative_to(top)
            packages[".".join([name, *relative.parts])] = init.parent
    return packages


@pytest.mark.parametrize("name", ["solver", "models"])
def test_the_folder_at_the_top_is_the_package(name: str) -> None:
    spec = importlib.util.find_spec(f"apsched.{name}")
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).resolve() == ROOT / name / "__init__.py"
    assert (ROOT / "apsched" / name).is_symlink()
    assert (ROOT / "apsched" / name).readlink() == Path("..") / name
    assert SETUPTOOLS["package-dir"][f"apsched.{name}"] == name


def test_every_package_is_listed() -> None:
    """One that is missing silently drops from the wheel."""
    assert sorted(SETUPTOOLS["packages"]) == sorted(_package_folders())


def test_every_folder_with_code_is_a_package() -> None:
    packages = set(_package_folders().values())
    for top in ("apsched", "solver", "models"):
        for file in (ROOT / top).rglob("*.py"):
            assert file.parent in packages, f"{file} is in no package"


def test_no_file_is_too_long() -> None:
    """One idea a file: at most 500 lines."""
    long = {}
    for top in ("apsched", "solver", "models", "benchmarks"):
        for file in (ROOT / top).rglob("*.py"):
            num_lines = len(file.read_text().splitlines())
            if num_lines > 500:
                long[str(file)] = num_lines
    assert not long


def test_no_folder_is_too_full() -> None:
    """A folder is read at a glance: at most 12 source files."""
    full = {}
    for top in ("apsched", "solver", "models", "benchmarks"):
        for folder in {file.parent for file in (ROOT / top).rglob("*.py")}:
            num_files = sum(file.name != "__init__.py" for file in folder.glob("*.py"))
            if num_files > 12:
                full[str(folder)] = num_files
    assert not full


def test_what_starts_processes_or_goes_by_the_clock_is_marked() -> None:
    """``.ci/run`` runs the others side by side."""
    starts = r"run_(processes|sizes|jobs)\(|mp\.spawn|Popen\(|Thread\(|LocalCluster|sync_playwright"
    alone = re.compile(starts + r"|perf_counter|process_time|monotonic\(|\bsleep\(")
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if "titan" not in file.parts]
    assert [
        str(f)
        for f in files
        if alone.search(text := f.read_text()) and "pytest.mark.alone" not in text
    ] == []


def test_the_version_is_said_once() -> None:
    assert SETUPTOOLS["dynamic"]["version"] == {"attr": "apsched.__version__"}
    assert f"## [{apsched.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_citation_has_the_version() -> None:
    assert f"\nversion: {apsched.__version__}\n" in (ROOT / "CITATION.cff").read_text()
