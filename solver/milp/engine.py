"""Runs a PuLP solver by name on a model; the only file that knows names and logs of solvers."""

import math
import re
import tempfile
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pulp

from apsched.errors import InputError

CBC = "PULP_CBC_CMD"
_CBC_NAMES = (CBC, "COIN_CMD")
_CBC_OPTIONS = (
    "ratioGap 0",
    "allowableGap 0",
    "integerTolerance 1e-9",
    "primalTolerance 1e-9",
    "randomCbcSeed 1",
    "randomSeed 1",
    "preprocess aggregate",  # proves in seconds what the default does not in minutes
)
_CBC_BOUND = re.compile(r"Lower bound:\s+(\S+)")


class MilpStatus(StrEnum):
    """The status of one objective, as the solver reports it."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The solver's answer for one objective."""

    status: MilpStatus
    bound: float
    """No solution has a lower objective, within the solver's tolerances; -inf if it reported none.
    """


def check_solver(name: str) -> None:
    """Raise InputError where PuLP knows no solver ``name`` or cannot run it here; the message lists
    those that it can.
    """
    usable = ", ".join(pulp.listSolvers(onlyAvailable=True)) or "none"
    if name not in pulp.listSolvers():
        raise InputError(
            f"expected the name of a PuLP solver, found {name!r}; those that run here: {usable}"
        )
    if name not in pulp.listSolvers(onlyAvailable=True):
        raise InputError(
            f"the PuLP solver {name} is not installed; install it, or choose one of those that run"
            f" here: {usable}"
        )


class Engine:
    """A solver and the time it has left, in seconds; ``None`` is no limit."""

    def __init__(self, name: str, time_limit_s: float | None) -> None:
        check_solver(name)
        if time_limit_s is not None and not 0 < time_limit_s < math.inf:
            raise InputError(
                f"time_limit_s: expected a finite number above 0, or None; found {time_limit_s!r}"
            )
        self.name = name
        self.deadline = None if time_limit_s is None else time.monotonic() + time_limit_s

    @property
    def left_s(self) -> float | None:
        """Seconds left, never negative; ``None`` is no limit."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def run(self, model: pulp.LpProblem, *, relaxed: bool = False) -> Answer:
        """Solve ``model``, or with ``relaxed`` its linear relaxation; values are then in its
        variables.
        """
        left = self.left_s
        if left is not None and left < 0.01:
            return Answer(status=MilpStatus.UNKNOWN, bound=-math.inf)
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            try:
                model.solve(self._solver(relaxed, left, log))
            except (
                pulp.PulpSolverError,
                OSError,
            ) as error:  # OSError: it wrote none of the files that PuLP reads
                raise InputError(
                    f"the PuLP solver {self.name} failed on a model of {model.numConstraints()}"
                    f" rows: {error}"
                ) from error
            log_text = log.read_text(errors="replace") if log.exists() else ""
        return self._answer(model, log_text, relaxed)

    def _solver(self, relaxed: bool, left: float | None, log: Path) -> pulp.LpSolver:
        common = {"msg": False, "mip": not relaxed, "timeLimit": left}
        if self.name in _CBC_NAMES:
            return pulp.getSolver(
                self.name, **common, options=list(_CBC_OPTIONS), threads=1, logPath=str(log)
            )
        return pulp.getSolver(self.name, **common)

    def _answer(self, model: pulp.LpProblem, log_text: str, relaxed: bool) -> Answer:
        objective = float(pulp.value(model.objective) or 0.0)
        proven = _CBC_BOUND.findall(log_text)
        if model.sol_status == pulp.LpSolutionOptimal:
            return Answer(status=MilpStatus.OPTIMAL, bound=objective)
        if model.status == pulp.LpStatusInfeasible:
            return Answer(status=MilpStatus.INFEASIBLE, bound=math.inf)
        bound = float(proven[-1]) if proven and not relaxed else -math.inf
        if model.sol_status == pulp.LpSolutionIntegerFeasible and not relaxed:
            return Answer(status=MilpStatus.FEASIBLE, bound=bound)
        return Answer(status=MilpStatus.UNKNOWN, bound=bound)
