"""The document of the formulation and the code say the same: each number once in both, with the
function that implements it.
"""

import ast
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from apsched.solver.arrays.problem_arrays import ProblemArrays
from apsched.solver.bounds import contention, launch_sequence, linear_program, step_time
from apsched.solver.bounds.any_order import bound as any_order_bound
from apsched.solver.bounds.any_order import (
    chain,
    compute_chain,
    heads,
    items,
    jobs,
    last_reduction,
    memory,
    one_machine,
    two_chains,
)
from apsched.solver.bounds.paths import bound as path_bound
from apsched.solver.bounds.paths import (
    bucket_costs,
    cheapest_buckets,
    launches,
    network,
    price_lines,
    pricing,
)
from apsched.solver.cpsat import (
    constraints,
    constraints_buckets,
    constraints_memory,
    constraints_order,
    constraints_plan,
)
from apsched.solver.cpsat.variables import Variables
from apsched.solver.interleave import fastest
from apsched.solver.search.open_bucket import front, stretches

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "formulation.md").read_text()
HEADING = re.compile(r"^### \(([A-Z]?\d+)\) [^`]+: `(\w+)`$", re.MULTILINE)
DOCUMENTED: list[tuple[str, str]] = HEADING.findall(TEXT)
"""(number, function) of each formula in the document."""


def numbered_in(*modules: ModuleType) -> list[tuple[str, str]]:
    """Return (number, function) of each number that a docstring of a function names."""
    found = []
    for module in modules:
        tree = ast.parse(Path(str(module.__file__)).read_text())
        for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
            said = ast.get_docstring(function) or ""
            found += [(number, function.name) for number in re.findall(r"\(([A-Z]?\d+)\)", said)]
    return found


def lines_of(module: ModuleType, letter: str) -> list[str]:
    """Return the numbers that begin a line in the docstring of ``module``."""
    return re.findall(rf"^ +\(({letter}\d+)\) ", module.__doc__ or "", re.MULTILINE)


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_constraints_are_numbered_in_order_in_the_document_and_in_the_code() -> None:
    """(1) to (20): a heading with the function's name, the first words of its docstring, its place
    in ``ALL``.
    """
    documented = [(number, function) for number, function in DOCUMENTED if number.isdigit()]
    assert [number for number, _ in documented] == [str(n) for n in range(1, 21)]
    assert [function for _, function in documented] == [
        function.__name__ for function in constraints.ALL
    ]
    for (number, _), function in zip(documented, constraints.ALL, strict=True):
        assert (function.__doc__ or "").startswith(f"({number}) ")


def test_each_constraint_is_implemented_once() -> None:
    """No second function claims a number."""
    modules = (
        constraints,
        constraints_buckets,
        constraints_memory,
        constraints_order,
        constraints_plan,
    )
    assert sorted(numbered_in(*modules)) == sorted(item for item in DOCUMENTED if item[0].isdigit())


@pytest.mark.parametrize(
    ("module", "letter", "numbers"),
    [
        (step_time, "B", range(1, 8)),
        (linear_program, "R", range(1, 5)),
        (contention, "C", range(1, 5)),
        (memory, "A", range(1, 3)),
    ],
)
def test_each_bound_is_proven_once_and_implemented_once(
    module: ModuleType, letter: str, numbers: range
) -> None:
    """A heading with the name of the function, whose docstring says the number; and a line in the
    docstring of the module.
    """
    expected = [f"{letter}{n}" for n in numbers]
    documented = [item for item in DOCUMENTED if item[0].startswith(letter)]
    assert [number for number, _ in documented] == expected
    assert lines_of(module, letter) == expected
    assert sorted(numbered_in(module)) == sorted(documented)


def test_each_part_of_the_bound_along_paths_is_implemented_once() -> None:
    """(W1) to (W7): methods count, too."""
    found = []
    for module in (
        price_lines,
        cheapest_buckets,
        bucket_costs,
        network,
        launches,
        pricing,
        path_bound,
        launch_sequence,
    ):
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
            if isinstance(node, ast.FunctionDef):
                found += [
                    (number, node.name)
                    for number in re.findall(r"\((W\d+)\)", ast.get_docstring(node) or "")
                ]
    documented = [item for item in DOCUMENTED if item[0].startswith("W")]
    assert [number for number, _ in documented] == [f"W{n}" for n in range(1, 8)]
    assert sorted(found) == sorted(documented)


def test_each_bound_for_any_order_is_implemented_once() -> None:
    """(V1) to (V10), over the files that make it up."""
    expected = [f"V{n}" for n in range(1, 11)]
    documented = [item for item in DOCUMENTED if item[0].startswith("V")]
    assert [number for number, _ in documented] == lines_of(any_order_bound, "V") == expected
    found = numbered_in(
        chain,
        any_order_bound,
        compute_chain,
        heads,
        items,
        jobs,
        one_machine,
        last_reduction,
        two_chains,
    )
    assert sorted(found) == sorted(documented)


def test_each_rule_of_merges_is_implemented_once() -> None:
    """(M1) and (M2)."""
    documented = [item for item in DOCUMENTED if item[0].startswith("M")]
    assert [number for number, _ in documented] == ["M1", "M2"]
    assert numbered_in(fastest) == documented


def test_each_part_of_the_fronts_is_implemented_once() -> None:
    """(D1) and (D2): a heading with the name of the function, whose docstring begins with it."""
    documented = [item for item in DOCUMENTED if item[0].startswith("D")]
    assert [number for number, _ in documented] == ["D1", "D2"]
    assert numbered_in(stretches, front) == documented


def test_each_constraint_has_a_formula() -> None:
    """Between its heading and the next there is one."""
    parts = re.split(r"^#+ .*$", section("Constraints"), flags=re.MULTILINE)[1:]
    assert len(parts) == 20
    for part in parts:
        assert part.count("```math") >= 1
        assert part.count("```") % 2 == 0


def test_the_document_names_every_constraint_that_it_refers_to() -> None:
    """No reference to a number that does not exist."""
    known = {number for number, _ in DOCUMENTED}
    assert set(re.findall(r"\(([BRMWVCDA]\d+)\)", TEXT)) <= known
    assert {n for n in re.findall(r"\((\d+)\)", TEXT) if int(n) > 0} <= known


@pytest.mark.parametrize(
    ("title", "owner"), [("Parameters", ProblemArrays), ("Variables", Variables)]
)
def test_symbols_are_named_as_in_the_code(title: str, owner: type) -> None:
    """Each row of the tables names a field."""
    named = re.findall(r"^\| \$[^|]+\$ \| `(\w+)` \|", section(title), re.MULTILINE)
    assert len(named) >= 14
    assert set(named) <= {field.name for field in fields(owner)}  # type: ignore[arg-type]


def test_inline_formulas_are_whole() -> None:
    """Dollars come in pairs on every line, and blocks are closed: GitHub renders nothing else."""
    prose = re.sub(r"```math\n.*?```", "", TEXT, flags=re.DOTALL)
    assert "```" not in prose
    for line in prose.splitlines():
        assert line.count("$") % 2 == 0, line
        for formula in re.findall(r"\$([^$]+)\$", line):
            assert formula == formula.strip(), line
            assert not re.search(r"\\[{}]", formula), f"GitHub takes the backslash: {line}"
            depth = formula.count("{") - formula.count("}")
            assert depth == 0, line
