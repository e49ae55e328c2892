"""Imports go one way: capture -> graph -> problem -> solver -> schedule -> write-back; the solver
knows neither torch nor networkx.
"""

import ast
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parents[2]


def _imports(file: Path) -> set[str]:
    """Return the modules that ``file`` imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            found.add(node.module or "")
    return found


def _starts(names: set[str], *prefixes: str) -> set[str]:
    return {
        name
        for name in names
        if any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)
    }


def _files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("file", _files("solver"), ids=lambda file: file.name)
def test_the_solver_knows_integers_only(file: Path) -> None:
    names = _imports(file) - {"apsched.costs.price_curve"}  # integers, too
    assert not _starts(
        names,
        "torch",
        "networkx",
        "apsched.capture",
        "apsched.costs",
        "apsched.writeback",
        "apsched.models",
        "apsched.cli",
    )


@pytest.mark.parametrize(
    "file",
    [
        *_files("apsched/schedule"),
        *(ROOT / "apsched" / name for name in ("config.py", "units.py", "kinds.py")),
        *(ROOT / "apsched" / "problem" / name for name in ("problem.py", "restriction.py")),
    ],
    ids=lambda file: file.name,
)
def test_the_core_knows_neither_torch_nor_the_solver(file: Path) -> None:
    assert not _starts(
        _imports(file),
        "torch",
        "networkx",
        "ortools",
        "apsched.solver",
        "apsched.capture",
    )


@pytest.mark.parametrize("file", _files("models"), ids=lambda file: file.name)
def test_models_know_no_solver(file: Path) -> None:
    assert not _starts(
        _imports(file),
        "apsched.solver",
        "apsched.problem.problem",
        "apsched.graph",
        "apsched.writeback",
        "apsched.cli",
    )


@pytest.mark.parametrize(
    "file",
    _files("apsched/fx", "apsched/capture", "apsched/costs", "apsched/graph"),
    ids=lambda file: file.name,
)
def test_early_stages_know_no_later_ones(file: Path) -> None:
    assert not _starts(
        _imports(file),
        "apsched.solver",
        "apsched.writeback",
        "apsched.cli",
        "apsched.pipeline.steps",
        "apsched.problem.problem",
    )


def test_private_functions_of_torch_are_behind_one_door() -> None:
    """``from torch... import _x`` stands in ``apsched/torch_compat`` and nowhere else."""
    door = set(_files("apsched/torch_compat"))
    for file in _files("apsched", "models"):
        if file in door:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                private = [
                    alias.name
                    for alias in node.names
                    if alias.name.startswith("_") and alias.name != "_pytree"
                ]
                assert not private, f"{file}: {private} of {node.module}"


def test_solving_imports_no_torch() -> None:
    code = (
        "import sys, apsched.solver, apsched.schedule.verify, apsched.problem.build,"
        " apsched.graph.graph_file; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_contracts() -> None:
    """The contracts in pyproject hold (import-linter, where it is installed: the ``dev`` extra has
    it).
    """
    pytest.importorskip(
        "importlinter.cli", reason="import-linter is not installed (pip install '.[dev]')"
    )
    lint = (
        "import sys; from importlinter.cli import lint_imports;"
        f" sys.exit(lint_imports({str(ROOT / 'pyproject.toml')!r}, no_cache=True))"
    )
    subprocess.run(
        [sys.executable, "-c", lint], check=True
    )  # in this process it would turn off all loggers for the tests behind it


def _modules() -> dict[str, Path]:
    """Return module -> file, of all that is imported as apsched."""
    return {
        ".".join([package, *file.relative_to(top).with_suffix("").parts]).removesuffix(
            ".__init__"
        ): file
        for top, package in (
            (ROOT / "apsched", "apsched"),
            (ROOT / "solver", "apsched.solver"),
            (ROOT / "models", "apsched.models"),
        )
        for file in top.rglob("*.py")
    }


def _imports_of_apsched(nodes: Iterable[ast.AST], known: Collection[str]) -> Iterator[str]:
    """Yield the modules of apsched that import statements among ``nodes`` name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from (m for m in [inner if inner in known else node.module] if m in known)


def _graph(nodes_of: Callable[[ast.Module], Iterable[ast.AST]]) -> nx.DiGraph:
    """Return which module imports which, by the import statements among ``nodes_of`` a file."""
    modules = _modules()
    return nx.DiGraph(
        (module, other)
        for module, file in modules.items()
        for other in _imports_of_apsched(nodes_of(ast.parse(file.read_text())), modules)
    )


def test_no_two_files_import_each_other() -> None:
    """No circle of files, whatever its length: also none through an import inside a function, or
    for types.
    """
    circles = nx.strongly_connected_components(_graph(ast.walk))
    assert not [sorted(files) for files in circles if len(files) > 1]


def test_every_surface_that_returns_results_lets_them_show_themselves() -> None:
    """The layer of reports gives its views to results when it is imported; results do not know
    it.
    """
    graph = _graph(lambda tree: tree.body)
    for surface in ("api", "compiler.backend", "compiler.inductor_pass", "integrations.tune_fsdp2"):
        assert nx.has_path(graph, f"apsched.{surface}", "apsched.report.answer.shown"), surface
