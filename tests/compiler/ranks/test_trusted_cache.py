"""Bounds in an answer of the cache, and that nothing fits, are believed only where no other user
can have written it.
"""

import json
import logging
import os
import random
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from apsched.compiler.ranks.answer import Sources, answered
from apsched.compiler.ranks.answer_codec import dump_answer, parse_answer
from apsched.compiler.ranks.cache import Cache
from apsched.compiler.ranks.problem_digest import answer_digest
from apsched.config import Caps, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.result import Infeasibility, SolveResult
from apsched.schedule.schedule import Schedule
from apsched.schedule.verify import verify
from apsched.solver import least_memory, schedule_of_least_memory, solve
from tests.conftest import Run
from tests.helpers.problems.strategies import random_problem

OPTIONS = SolveOptions(budget=0.5)
FREE = Caps()
NOTHING_FITS = Infeasibility(
    clashes=(("memory_cap_bytes",),),
    proven=True,
    nodes=(),
    relaxations=(),
    places=(),
    message="no schedule fits: so they say",
)


def a_problem(seed: int = 12) -> Problem:
    return random_problem(random.Random(seed), max_collectives=5)


class Noting:
    """The solver, and what it was asked to start from each time."""

    def __init__(self) -> None:
        self.starts: list[Schedule | None] = []

    def __call__(
        self, problem: Problem, caps: Caps, options: SolveOptions, start: Schedule | None = None
    ) -> SolveResult:
        self.starts.append(start)
        return solve(problem, caps, options, start=start)


@pytest.fixture
def mask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def planted(cache: Cache, problem: Problem, answer: SolveResult, caps: Caps = FREE) -> str:
    """Put ``answer`` where the cache has that for ``problem``; return its address."""
    address = answer_digest(problem, caps, OPTIONS)
    assert cache.write(address, dump_answer(answer))
    return address


def proven_optimal(answer: SolveResult) -> SolveResult:
    """Return ``answer`` with a false proof."""
    false = {
        "status": "optimal",
        "bound_ticks": answer.best.step_time_ticks,
        "bound_source": "they say so",
    }
    return replace(answer, **false, peak_bound_bytes=0, launches_bound=0)


def infeasible(answer: SolveResult) -> SolveResult:
    """Return a false claim that nothing fits."""
    return replace(answer, status="infeasible", best=None, infeasibility=NOTHING_FITS)


def slow(problem: Problem) -> SolveResult:
    """Return the baseline that takes longest as the answer."""
    answer = solve(problem, FREE, OPTIONS)
    slowest = max((b for b in answer.baselines if b.fits), key=lambda b: b.step_time_ticks)
    assert slowest.step_time_ticks > answer.best.step_time_ticks
    return replace(answer, best=slowest, fastest_ticks=slowest.step_time_ticks)


@pytest.mark.parametrize("seed", range(8, 14))
def test_a_false_infeasible_is_found_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    """In a directory of one's own: the schedule with the least memory fits, so that it cannot be
    true.
    """
    problem, noting, cache = a_problem(seed), Noting(), Cache(directory=tmp_path / "cache")
    best = solve(problem, FREE, OPTIONS).best
    caps = Caps(memory_cap_bytes=best.peak_memory_bytes)
    right = solve(problem, caps, OPTIONS)
    address = planted(cache, problem, infeasible(right), caps)
    with caplog.at_level(logging.WARNING):
        assert answered(problem, caps, OPTIONS, noting, sources=Sources(cache=cache)) == right
    assert noting.starts == [None]
    assert (
        "is not used, and replaced: it says that nothing fits, and the schedule with the least"
        " memory does" in caplog.text
    )
    assert parse_answer(cache.read(address) or b"") == right


def test_a_true_infeasible_is_believed(tmp_path: Path) -> None:
    problem, noting, sources = (
        a_problem(),
        Noting(),
        Sources(cache=Cache(directory=tmp_path / "cache")),
    )
    caps = Caps(memory_cap_bytes=1)
    answers = [answered(problem, caps, OPTIONS, noting, sources=sources) for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0].best is None
    assert len(noting.starts) == 1


def test_a_bound_in_a_directory_of_ones_own_is_believed(tmp_path: Path) -> None:
    """No check could tell that it is false: so it matters who can have written it."""
    problem, noting, cache = a_problem(), Noting(), Cache(directory=tmp_path / "cache")
    false = proven_optimal(slow(problem))
    planted(cache, problem, false)
    assert answered(problem, FREE, OPTIONS, noting, sources=Sources(cache=cache)) == false
    assert noting.starts == []


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
@pytest.mark.parametrize("claim", [proven_optimal, infeasible])
def test_proofs_from_a_directory_that_others_may_write_to_are_not_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, claim
) -> None:
    problem, noting, cache = a_problem(), Noting(), Cache(directory=tmp_path / "cache")
    planted(cache, problem, claim(slow(problem)))
    cache.directory.chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert answered(problem, FREE, OPTIONS, noting, sources=Sources(cache=cache)) == solve(
            problem, FREE, OPTIONS
        )
    assert noting.starts == [None]
    assert (
        "its bound is not believed, so the graph is solved: other users may write to"
        f" {cache.directory} (mode {mode & 0o777:o})" in caplog.text
    )


def test_nor_is_a_file_that_others_may_write(tmp_path: Path) -> None:
    problem, noting, cache = a_problem(), Noting(), Cache(directory=tmp_path / "cache")
    address = planted(cache, problem, proven_optimal(slow(problem)))
    assert cache.distrusted(address) == ""
    (cache.directory / f"{address}.answer").chmod(0o664)
    answered(problem, FREE, OPTIONS, noting, sources=Sources(cache=cache))
    assert noting.starts == [None]


def test_nor_is_a_directory_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    problem, noting, cache = a_problem(), Noting(), Cache(directory=tmp_path / "cache")
    planted(cache, problem, proven_optimal(slow(problem)))
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with caplog.at_level(logging.WARNING):
        answered(problem, FREE, OPTIONS, noting, sources=Sources(cache=cache))
    assert noting.starts == [None]
    assert f"{cache.directory} belongs to user {owner}, not to user {owner + 1}" in caplog.text


def test_its_schedule_is_a_start_where_that_is_asked_for(tmp_path: Path) -> None:
    problem, noting, cache = a_problem(), Noting(), Cache(directory=tmp_path / "cache")
    answered(problem, FREE, OPTIONS, noting, sources=Sources(cache=cache))
    known = solve(problem, FREE, OPTIONS).best.schedule
    planted(cache, problem, proven_optimal(solve(problem, FREE, OPTIONS)))
    cache.directory.chmod(0o777)
    found = answered(problem, FREE, OPTIONS, noting, sources=Sources(cache=cache, near=True))
    assert noting.starts == [None, known]
    assert found == solve(problem, FREE, OPTIONS, start=known)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_what_the_cache_made_itself_is_believed(tmp_path: Path, mask: None, umask: int) -> None:
    """Whatever files of this user are by default."""
    problem, noting, cache = a_problem(), Noting(), Cache(directory=tmp_path / "new" / "cache")
    os.umask(umask)
    for _ in range(2):
        answered(problem, FREE, OPTIONS, noting, sources=Sources(cache=cache))
    assert len(noting.starts) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: {"bound_ticks": a.best.step_time_ticks + 1}, "its bound on the step time is"),
        (lambda a: {"peak_bound_bytes": a.best.peak_memory_bytes + 1}, "its bound on the peak is"),
        (
            lambda a: {"launches_bound": a.best.num_launches + 1},
            "its bound on the number of launches is",
        ),
        (
            lambda a: {"status": "optimal", "bound_ticks": a.best.step_time_ticks - 1},
            "it says 'optimal' of a step time of",
        ),
        (lambda a: {"status": "infeasible"}, "it says 'infeasible' of a step time of"),
    ],
)
def test_a_bound_that_the_schedule_refutes_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change, said: str
) -> None:
    problem, noting, cache = a_problem(), Noting(), Cache(directory=tmp_path / "cache")
    right = solve(problem, FREE, OPTIONS)
    planted(cache, problem, replace(right, **change(right)))
    with caplog.at_level(logging.WARNING):
        assert answered(problem, FREE, OPTIONS, noting, sources=Sources(cache=cache)) == right
    assert said in caplog.text
    assert len(noting.starts) == 1


@pytest.mark.parametrize("seed", [8, 13, 30, 74, 122, 145])
def test_the_schedule_with_the_least_memory_has_the_least_peak(seed: int) -> None:
    """As captured (8), with compute moved (13, 74, 145), and moved as CP-SAT found it (30, 122)."""
    problem, caps = a_problem(seed), Caps(max_compute_move=4)
    floor, _ = least_memory(problem, caps, OPTIONS)
    least = schedule_of_least_memory(problem, caps, OPTIONS)
    assert least is not None
    assert verify(problem, least, replace(caps, memory_cap_bytes=floor)) == ()
    if seed != 8:
        as_captured = schedule_of_least_memory(problem, Caps(max_compute_move=0), OPTIONS)
        assert as_captured is not None
        assert verify(problem, as_captured, replace(caps, memory_cap_bytes=floor)) != ()


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(bound_ticks="much"),
        lambda d: d.update(peak_bound_bytes=None),
        lambda d: d.update(status=5),
        lambda d: d.update(launches_bound=1.5),
        lambda d: d["best"].update(indices=["a"] * len(d["best"]["indices"])),
        lambda d: d["best"].update(indices=[10**9] * len(d["best"]["indices"])),
        lambda d: d["best"].update(kinds=[-1.0] * len(d["best"]["indices"])),
        lambda d: d["best"].update(buckets=[[["a", 2], False]]),
        lambda d: d["best"].update(buckets=[[[10**9, 2], False]]),
        lambda d: d["best"].update(step_time_ticks=[1]),
    ],
)
def test_values_of_other_types_stop_no_job(tmp_path: Path, change, near: bool) -> None:
    problem, cache = a_problem(), Cache(directory=tmp_path / "cache")
    answered(problem, FREE, OPTIONS, Noting(), sources=Sources(cache=cache))
    data = json.loads(zlib.decompress(cache.read(answer_digest(problem, FREE, OPTIONS)) or b""))
    change(data)
    cache.write(answer_digest(problem, FREE, OPTIONS), zlib.compress(json.dumps(data).encode()))
    assert answered(
        problem, FREE, OPTIONS, Noting(), sources=Sources(cache=cache, near=near)
    ) == solve(problem, FREE, OPTIONS)


def test_the_command_says_so(run: Run, tmp_path: Path) -> None:
    cache = Cache(directory=tmp_path / "cache")
    cache.write("a" * 64, b"x")
    assert "believed" not in run("cache", "list", "--cache", cache.directory).stdout
    cache.directory.chmod(0o777)
    said = run("cache", "list", "--cache", cache.directory).stdout
    assert (
        f"no bound of these answers is believed: other users may write to {cache.directory} (mode"
        " 777); take that from them" in said
    )
