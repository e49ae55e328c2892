"""The tree is what pyproject says: two folders at the top import under apsched, and no package is
forgotten in the wheel.
"""

import ast
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


LONG = {
    "solver/program/contended_clock.py with_shared_clock": 61,
    "solver/program/evaluate.py live": 82,
    "solver/program/evaluate.py walk": 98,
    "solver/search/construct_pass.py place": 209,
}
"""Functions of more than 60 lines: compiled loops, which are slower in parts, and others that are
still to be split.
"""


def _num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function without its docstring."""
    end = function.end_lineno or function.lineno
    num_lines = end - function.lineno + 1
    if ast.get_docstring(function) is not None:
        first = function.body[0]
        num_lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return num_lines


def test_no_function_is_too_long() -> None:
    """One step of an idea a function: at most 60 lines beside its docstring."""
    found = {}
    for top in ("apsched", "solver", "models", "benchmarks"):
        for file in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    num_lines = _num_lines(node)
                    if num_lines > 60:
                        found[f"{file.relative_to(ROOT)} {node.name}"] = num_lines
    longer = {name: n for name, n in found.items() if n > LONG.get(name, 60)}
    assert not longer, f"expected at most 60 lines in a function; found {longer}: split them"
    assert LONG.keys() <= found.keys(), "what was split goes from the list"


def test_what_starts_processes_or_goes_by_the_clock_is_marked() -> None:
    """``.ci/run`` runs the others side by side at each commit; ``ranks`` two files at a time."""
    starts = r"run_(processes|sizes|jobs)\(|mp\.spawn|Popen\(|Thread\(|LocalCluster|sync_playwright"
    found = re.compile(starts + r"|perf_counter|process_time|monotonic\(|\bsleep\(")
    marked = re.compile(r"pytest\.mark\.(alone|ranks)")
    others = {"titan", "rules"}
    files = [f for f in (ROOT / "tests").rglob("test_*.py") if not others & set(f.parts)]
    texts = {str(file): file.read_text() for file in files}
    assert [f for f, text in texts.items() if found.search(text) and not marked.search(text)] == []


def test_the_mark_of_tests_alone_is_in_their_files() -> None:
    """``.ci/run`` looks for it in the files of tests, and imports no others for these tests; so it
    does for those that wait, which have both marks.
    """
    mark = re.compile(r"\bmark\.(alone|waits)\b")
    both = re.compile(r"pytest\.mark\.alone,\s+pytest\.mark\.waits\b")
    other_ways = re.compile(
        r"\badd_marker\(|from pytest import .*\bmark\b|= *pytest\.mark$", re.MULTILINE
    )
    for file in (ROOT / "tests").rglob("*.py"):
        if file == Path(__file__):
            continue
        text = file.read_text()
        if mark.search(text):
            assert file.name.startswith("test_"), f"{file}: write the mark where the tests are"
            assert ("mark.waits" in text) == bool(both.search(text)), f"{file}: expected both marks"
        assert not other_ways.search(text), f"{file}: expected pytest.mark.alone, in full"


def test_ci_keeps_the_modules_that_python_compiles() -> None:
    """Else each process of the tests compiles torch anew, which takes ten seconds."""
    script = (ROOT / ".ci" / "run").read_text()
    kept = re.search(r"^unset PYTHONDONTWRITEBYTECODE\b", script, re.MULTILINE)
    assert kept is not None
    assert kept.start() < script.index('step "environment')


def test_the_version_is_said_once() -> None:
    assert SETUPTOOLS["dynamic"]["version"] == {"attr": "apsched.__version__"}
    assert f"## [{apsched.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_citation_has_the_version() -> None:
    assert f"\nversion: {apsched.__version__}\n" in (ROOT / "CITATION.cff").read_text()
