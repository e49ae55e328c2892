"""The parts that are compiled ahead of a solve (``apsched.solver.inner_loops``)."""

import os
import random
import subprocess
import sys

import pytest

from apsched.config import Caps, SolveOptions
from apsched.problem.problem import check_problem
from apsched.solver import ORDERS, SEARCH, compile_part, missing_parts, solve
from apsched.solver.inner_loops import layered_problem
from apsched.solver.reorder.min_memory import is_small
from tests.helpers.problems import strategies


def machine_code() -> set[tuple[str, str]]:
    """Return the compiled functions of the solver that this process has, with argument types."""
    modules = [m for name, m in sys.modules.items() if name.startswith("apsched.solver")]
    functions = {f for m in modules for f in vars(m).values() if hasattr(f, "overloads")}
    return {(f.__name__, str(types)) for f in functions for types in f.overloads}


def print_what_else_is_compiled() -> None:
    """Compile both parts, solve problems that have all that a step can have, and print what these
    loaded or compiled beside.
    """
    compile_part(SEARCH)
    compile_part(ORDERS)
    before = machine_code()
    assert before
    for seed in range(6):
        problem = strategies.layered_problem(random.Random(seed), num_layers=14)
        assert not is_small(problem)
        solve(problem, Caps(max_compute_move=20), SolveOptions(budget=8.0))
    print("else:", *sorted(machine_code() - before), sep="\n")


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
@pytest.mark.slow
def test_a_solve_needs_no_other_machine_code_than_the_two_parts() -> None:
    code = f"from {__name__} import print_what_else_is_compiled as f; f()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("else:\n", "")


def test_the_problem_that_is_solved_for_them_is_a_valid_one() -> None:
    problem = layered_problem(3)
    check_problem(problem)
    assert not missing_parts() or {*missing_parts()} <= {SEARCH, ORDERS}
    assert {len(c.prologue) for c in problem.collectives} == {0}
    assert sum(c.on_path for c in problem.collectives) == 3
