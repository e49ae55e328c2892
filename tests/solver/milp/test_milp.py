"""The MILP, exhaustive search and the solver give the same figures; two formulations that share no
code agree.

``APSCHED_MILP=1000 pytest tests/solver/milp/test_milp.py`` for as many seeds.
"""

import os
import random
import re
from dataclasses import replace
from pathlib import Path

import pulp
import pytest

from apsched.config import Caps, MilpOptions, SolveOptions
from apsched.errors import InputError
from apsched.problem.problem import Problem
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.solver import solve, solve_with_milp
from apsched.solver.arrays.instance import Instance
from apsched.solver.baselines import baselines
from apsched.solver.milp import model
from apsched.solver.milp.model import MilpResult, solve_milp
from tests.helpers.oracle import best_schedule, least_memory
from tests.helpers.problems.strategies import random_caps, random_problem
from tests.helpers.problems.transformed import enlarged, enlarged_caps

NUM_SEEDS = int(os.environ.get("APSCHED_MILP", "200"))
FEW = min(NUM_SEEDS, 15)


def case(seed: int, *, max_collectives: int = 4, max_compute: int = 3) -> tuple[Problem, Caps]:
    """Return a problem and caps; every third has a memory cap at, just under or just above the
    least that is possible.
    """
    rng = random.Random(7_000 + seed)
    problem = random_problem(rng, max_collectives=max_collectives, max_compute=max_compute)
    caps = random_caps(rng, problem)
    if seed % 3 == 0 and (floor := least_memory(problem, caps)) is not None:
        caps = replace(caps, memory_cap_bytes=max(0, floor + rng.choice((-1, 0, 0, 512, 4096))))
    return problem, caps


def figures(result: MilpResult) -> tuple[int | None, int | None, int | None]:
    return result.step_time_ticks, result.peak_memory_bytes, result.num_launches


def assert_sound(problem: Problem, caps: Caps, result: MilpResult) -> None:
    """The schedule keeps the caps and has the figures claimed, the bound not above them."""
    assert result.schedule is not None
    assert verify(problem, result.schedule, caps) == ()
    timeline = simulate(problem, result.schedule)
    assert figures(result) == (
        timeline.step_time_ticks,
        timeline.peak_memory_bytes,
        timeline.num_launches,
    )
    assert result.bound_ticks <= timeline.step_time_ticks


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
@pytest.mark.slow
def test_the_optimum_is_that_of_exhaustive_search(seed: int) -> None:
    """Step time, then peak, then launches; infeasible exactly where nothing keeps the caps."""
    problem, caps = case(seed)
    best, result = best_schedule(problem, caps), solve_milp(problem, caps)
    if best is None:
        assert (result.status, result.schedule) == ("infeasible", None)
        return
    assert_sound(problem, caps, result)
    assert (result.status, figures(result), result.bound_ticks) == (
        "optimal",
        best.value,
        best.step_time_ticks,
    )


def test_the_cases_are_not_all_of_one_sort() -> None:
    """Some fit and some do not, under every cap; otherwise the test above would say little."""
    cases = [case(seed) for seed in range(70)]
    infeasible = sum(best_schedule(*given) is None for given in cases)
    assert 5 <= infeasible <= 35
    for cap in (
        "memory_cap_bytes",
        "bucket_cap_bytes",
        "max_topo_span",
        "max_prefetch",
        "in_flight_cap_bytes",
    ):
        assert sum(getattr(caps, cap) is not None for _, caps in cases) >= 10
    assert sum(len(problem.collectives) >= 3 for problem, _ in cases) >= 20


@pytest.mark.parametrize("seed", range(FEW))
def test_the_solver_agrees(seed: int) -> None:
    problem, caps = case(seed)
    result, other = solve_milp(problem, caps), solve(problem, caps, SolveOptions(time_slack=0.0))
    assert (result.schedule is None) == (other.best is None)
    if other.best is not None:
        assert figures(result) == (
            other.best.step_time_ticks,
            other.best.peak_memory_bytes,
            other.best.num_launches,
        )


@pytest.mark.parametrize("seed", range(FEW))
def test_real_magnitudes_are_solved_too(seed: int) -> None:
    """Compute of milliseconds, storages of gigabytes: tolerances of the solver must not blur the
    answer.
    """
    problem, caps = case(seed)
    problem = enlarged(problem, 1_000_003, 3 * 10**6)
    caps = enlarged_caps(caps, 3 * 10**6)
    best, result = best_schedule(problem, caps), solve_milp(problem, caps)
    if best is None:
        assert result.status == "infeasible"
        return
    assert_sound(problem, caps, result)
    assert figures(result) == best.value
    assert result.status == "optimal"
    assert result.bound_ticks <= best.step_time_ticks <= result.bound_ticks * (1 + 1e-5)


def test_a_memory_cap_one_byte_short_is_seen_among_gigabytes() -> None:
    """The optimum's own peak as the cap is kept; the least possible less one byte is infeasible."""
    problem = enlarged(
        random_problem(random.Random(3), max_collectives=4, max_compute=3), 1_000_003, 3 * 10**6
    )
    floor = least_memory(problem, Caps())
    assert floor is not None
    assert floor > 10**9
    at = solve_milp(problem, Caps(memory_cap_bytes=floor))
    assert_sound(problem, Caps(memory_cap_bytes=floor), at)
    below = solve_milp(problem, Caps(memory_cap_bytes=floor - 1))
    assert below.schedule is None
    assert below.status == "infeasible"


@pytest.mark.parametrize("seed", range(6))
def test_out_of_time_the_bound_still_holds(seed: int) -> None:
    """Too little time for a proof: never a bound above the optimum, never a schedule that breaks a
    cap.
    """
    problem, caps = case(seed, max_collectives=6)
    best, result = best_schedule(problem, caps), solve_milp(problem, caps, time_limit_s=0.1)
    if best is None:
        assert result.schedule is None
        return
    assert result.status != "infeasible"
    assert result.bound_ticks <= best.step_time_ticks
    if result.schedule is not None:
        assert_sound(problem, caps, result)


@pytest.mark.parametrize("seed", range(FEW))
def test_in_the_place_of_the_solver_it_gives_a_whole_answer(seed: int) -> None:
    problem, caps = case(seed)
    best, answer = best_schedule(problem, caps), solve_with_milp(problem, caps)
    if not problem.travels:  # else a bound of all schedules, out of normal form, too, may stand
        assert answer.bound_source == "milp (PULP_CBC_CMD)"
    if best is None:
        assert answer.status == "infeasible"
        assert answer.infeasibility is not None
        return
    assert answer.best is not None
    assert (answer.best.name, answer.solved_by) == ("milp", "milp (PULP_CBC_CMD)")
    assert answer.status == "optimal" or problem.travels
    assert answer.best.fits
    assert (
        answer.best.step_time_ticks,
        answer.best.peak_memory_bytes,
        answer.best.num_launches,
    ) == best.value


def test_out_of_time_a_baseline_answers_with_the_milp_s_bound() -> None:
    """No baseline solves the problem to its optimum."""
    problem = next(
        p
        for p in (
            random_problem(random.Random(seed), max_collectives=4, max_compute=3)
            for seed in range(100)
        )
        if (best := best_schedule(p, Caps())) is not None
        and best.step_time_ticks < min(b.step_time_ticks for b in baselines(Instance.of(p)))
    )
    answer = solve_with_milp(problem, milp=MilpOptions(time_limit_s=1e-6))
    assert answer.best is not None
    assert answer.solved_by == answer.best.name in {baseline.name for baseline in answer.baselines}
    assert answer.bound_ticks <= answer.best.step_time_ticks


def test_an_order_that_exact_figures_refuse_is_not_handed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A solution that only the solver's tolerances allow is cut off, and the next best found."""
    problem, caps = random_problem(random.Random(5), max_collectives=3, max_compute=3), Caps()
    first = solve_milp(problem, caps)
    monkeypatch.setattr(
        "apsched.solver.milp.model.verify",
        lambda p, schedule, c: (
            ("refused",) if schedule == first.schedule else verify(p, schedule, c)
        ),
    )
    second = solve_milp(problem, caps)
    assert second.schedule != first.schedule
    assert_sound(problem, caps, second)
    assert figures(second) >= figures(first)


def test_an_unknown_solver_is_refused_with_those_that_run() -> None:
    problem = random_problem(random.Random(0))
    with pytest.raises(
        InputError,
        match=(
            r"expected the name of a PuLP solver, found 'CPC'; those that run here: .*PULP_CBC_CMD"
        ),
    ):
        solve_milp(problem, Caps(), solver_name="CPC")


def test_a_solver_that_is_not_installed_is_refused_with_those_that_run() -> None:
    missing = next(
        (name for name in pulp.listSolvers() if name not in pulp.listSolvers(onlyAvailable=True)),
        None,
    )
    if missing is None:
        pytest.skip("every solver that PuLP knows is installed")
    with pytest.raises(
        InputError, match=rf"{missing} is not installed; install it, or choose .*PULP_CBC_CMD"
    ):
        solve_milp(random_problem(random.Random(0)), Caps(), solver_name=missing)


def test_too_many_collectives_are_refused() -> None:
    problem = random_problem(random.Random(1), max_collectives=4)
    many = replace(problem, collectives=problem.collectives * 41)
    with pytest.raises(
        InputError, match=r"at most 40 collectives; random has .*choose --solver cp-sat"
    ):
        solve_milp(many, Caps())


def test_too_many_possible_buckets_are_refused() -> None:
    """Fourteen gathers of one key have 16383 subsets; a cap that leaves few is taken."""
    rng = random.Random(11)
    problem = next(
        p
        for p in iter(lambda: random_problem(rng, max_collectives=4), None)
        if p.collectives[0].bucketable
    )
    many = replace(problem, collectives=(problem.collectives[0],) * 14)
    with pytest.raises(InputError, match=r"at most 4000 possible buckets.*lower --bucket-cap"):
        solve_milp(many, Caps())


def test_each_formula_has_its_function() -> None:
    """The table in the module's docstring is complete, and every function it names says the same
    number.
    """
    folder = Path(model.__file__).parent
    rows = re.findall(
        r"^\((\d+)\) .*?``(\w+)\.([\w.]+)``$",
        model.__doc__ or "",
        flags=re.MULTILINE | re.DOTALL,
    )
    assert [int(number) for number, _, _ in rows] == list(range(1, 18))
    for number, name, function in rows:
        source = (folder / f"{name}.py").read_text()
        body = source.split(f"def {function.rsplit('.', maxsplit=1)[-1]}(", maxsplit=1)[1].split(
            "\ndef ", maxsplit=1
        )[0]
        assert f"({number})" in body or (int(number) == 15 and "(13) to (15)" in body), (
            number,
            function,
        )
