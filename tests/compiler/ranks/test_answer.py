"""An answer as bytes, its address, and where it comes from: a schedule file, the cache, another
process rank, the solver.
"""

import logging
import random
import shutil
import threading
from dataclasses import fields, replace

import pytest
import torch.distributed as dist

import apsched.solver
from apsched.artifacts.schedule_file import load_schedule, save_schedule
from apsched.compiler.ranks.agreement import GraphAgreement
from apsched.compiler.ranks.answer import Sources, answered
from apsched.compiler.ranks.answer_codec import dump_answer, parse_answer
from apsched.compiler.ranks.cache import Cache
from apsched.compiler.ranks.job import Job
from apsched.compiler.ranks.problem_digest import (
    answer_digest,
    code_digest,
    problem_digest,
    solver_code,
)
from apsched.config import Caps, SolveOptions
from apsched.costs.price_curve import PriceCurve
from apsched.errors import ApschedError, InputError
from apsched.kinds import KernelCut
from apsched.pipeline.result import result_of
from apsched.problem.contention import Contention
from apsched.problem.problem import Problem
from apsched.schedule.result import SolveResult
from apsched.schedule.schedule import as_captured
from apsched.schedule.score import scored
from apsched.solver import solve
from tests.helpers.problems.random_schedules import random_schedule
from tests.helpers.problems.strategies import random_caps, random_problem

OPTIONS = SolveOptions(budget=0.5)
FREE = Caps()


def a_problem(seed: int = 7) -> Problem:
    return random_problem(random.Random(seed), max_collectives=5)


class Counting:
    """The solver, and how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, problem: Problem, caps: Caps, options: SolveOptions) -> SolveResult:
        self.calls += 1
        return solve(problem, caps, options)


@pytest.mark.parametrize("seed", range(12))
def test_an_answer_is_read_as_it_was(seed):
    rng = random.Random(seed)
    problem = random_problem(rng)
    answer = solve(problem, random_caps(rng, problem), OPTIONS)
    assert parse_answer(dump_answer(answer)) == answer
    if answer.best is not None:
        schedule = random_schedule(problem, seed)  # with buckets of every form
        other = replace(answer, best=replace(answer.best, schedule=schedule))
        assert parse_answer(dump_answer(other)) == other


def test_infeasible_answers_are_read_as_they_were():
    problem = a_problem()
    answer = solve(problem, Caps(memory_cap_bytes=1, max_prefetch=0, bucket_cap_bytes=0), OPTIONS)
    assert answer.infeasibility is not None
    assert parse_answer(dump_answer(answer)) == answer


@pytest.mark.parametrize(
    "content",
    [b"", b"abc", dump_answer(solve(a_problem(), FREE, OPTIONS))[:-5]],
    ids=["empty", "foreign", "cut"],
)
def test_anything_else_is_refused(content):
    with pytest.raises(InputError, match="expected an answer of the solver"):
        parse_answer(content)


@pytest.mark.parametrize(
    ("more_ticks", "status"), [(-1, "feasible"), (0, "optimal"), (7, "optimal")]
)
def test_no_bound_of_an_answer_is_above_its_schedule(more_ticks, status):
    problem = a_problem()
    best = scored(problem, "apsched", as_captured(problem.num_nodes))
    answer = SolveResult.found(
        best,
        bound_ticks=best.step_time_ticks + more_ticks,
        bound_source="compute",
        baselines=(best,),
        floor_memory_bytes=best.peak_memory_bytes + 1,
        floor_bound_bytes=0,
        fastest_ticks=best.step_time_ticks + 1,
        time_limit_ticks=best.step_time_ticks,
        peak_bound_bytes=0,
        launches_bound=best.num_launches + 1,
        solved_by="search",
    )
    assert answer.status == status
    assert answer.bound_ticks == best.step_time_ticks + min(more_ticks, 0)
    assert (answer.fastest_ticks, answer.floor_memory_bytes) == (
        best.step_time_ticks,
        best.peak_memory_bytes,
    )
    assert answer.launches_bound == best.num_launches


# the address


def changed(problem: Problem) -> dict[str, Problem]:
    """Return ``problem`` with one thing changed, each of which an answer depends on."""
    first, key, c = problem.storages[0], problem.keys[0], problem.collectives[0]
    dearer = PriceCurve(
        size_bytes=key.price.size_bytes, price_ticks=tuple(t + 1 for t in key.price.price_ticks)
    )
    ticks = problem.duration_ticks
    return {
        "graph_hash": replace(problem, graph_hash="other"),
        "kinds": replace(problem, kinds=tuple(reversed(problem.kinds))),
        "duration_ticks": replace(problem, duration_ticks=(ticks[0] + 1, *ticks[1:])),
        "predecessors": replace(
            problem, predecessors=(*problem.predecessors[:-1], problem.predecessors[-1][:-1])
        ),
        "modules": replace(problem, modules=("other", *problem.modules[1:])),
        "storages": replace(
            problem,
            storages=(replace(first, size_bytes=first.size_bytes + 512), *problem.storages[1:]),
        ),
        "keys": replace(problem, keys=(replace(key, price=dearer), *problem.keys[1:])),
        "collectives": replace(
            problem, collectives=(replace(c, bucketable=not c.bucketable), *problem.collectives[1:])
        ),
        "copy_price": replace(problem, copy_price=dearer),
        "kernels": replace(problem, kernels=(0,) * problem.num_nodes),
        "cuts": replace(problem, cuts=(KernelCut(node=1, nodes=(1,), extra_ticks=(1,)),)),
        "reordered": replace(problem, reordered=tuple(reversed(problem.compute_order))),
        "chains": replace(problem, chains=(0,) * problem.num_nodes),
        "rules": replace(problem, rules=("match '.*': forbid",)),
        "contention": replace(problem, contention=Contention(compute_slowdown=(6, 5))),
    }


def test_an_address_has_all_that_an_answer_depends_on():
    """A field that is new in ``Problem`` is in the digest, or is named here as one that no answer
    depends on.
    """
    problem = a_problem()
    assert {*changed(problem)} == {f.name for f in fields(Problem)} - {
        "name",
        "node_names",
        "streams",
    }
    digests = [problem_digest(p) for p in (problem, *changed(problem).values())]
    assert len({*digests}) == len(digests)


def test_names_are_no_part_of_an_address():
    problem = a_problem()
    renamed = replace(
        problem,
        name="another",
        node_names=tuple(f"n{i}" for i in range(problem.num_nodes)),
        streams=tuple(f"{s}x" for s in problem.streams),
        keys=tuple(replace(key, group=f"{key.group}x") for key in problem.keys),
    )
    assert problem_digest(renamed) == problem_digest(problem)


def test_caps_options_and_start_are_part_of_an_address(monkeypatch):
    problem = a_problem()
    start = as_captured(problem.num_nodes)
    addresses = [
        answer_digest(problem, FREE, OPTIONS),
        answer_digest(problem, FREE, OPTIONS, start),
        *(answer_digest(problem, replace(FREE, **{f.name: 1}), OPTIONS) for f in fields(Caps)),
        *(
            answer_digest(problem, FREE, replace(OPTIONS, **{f.name: 1}))
            for f in fields(SolveOptions)
            if f.name != "num_workers"
        ),
        answer_digest(problem, FREE, replace(OPTIONS, num_workers=2)),
    ]
    monkeypatch.setattr(
        "apsched.compiler.ranks.problem_digest.solver_code", lambda: "of another version"
    )
    addresses.append(answer_digest(problem, FREE, OPTIONS))
    assert len({*addresses}) == len(addresses)


@pytest.mark.parametrize(
    "file", ["solve.py", "program/evaluate.py", "bounds/any_order/heads.py", "cpsat/model.py"]
)
def test_any_change_of_the_solver_changes_the_digest_of_its_code(tmp_path, file):
    """Files in folders of folders, too: an old answer must not be replayed."""
    copy = tmp_path / "solver"
    shutil.copytree(apsched.solver.__path__[0], copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = code_digest(copy)
    assert before == solver_code()
    with (copy / file).open("a") as text:
        text.write("# changed")
    assert code_digest(copy) != before


# where answers come from


def test_what_was_solved_once_is_in_the_cache(tmp_path):
    problem, counting, sources = a_problem(), Counting(), Sources(cache=Cache(directory=tmp_path))
    answers = [answered(problem, FREE, OPTIONS, counting, sources=sources) for _ in range(2)]
    assert answers == [solve(problem, FREE, OPTIONS)] * 2
    assert counting.calls == 1
    answered(problem, FREE, replace(OPTIONS, seed=1), counting, sources=sources)
    assert counting.calls == 2


def test_what_this_process_solved_once_is_not_solved_again():
    """Under other caps it is."""
    problem, counting, sources = a_problem(), Counting(), Sources(solved={})
    answers = [
        answered(problem, caps, OPTIONS, counting, sources=sources)
        for caps in (FREE, FREE, Caps(max_prefetch=0), FREE)
    ]
    assert counting.calls == 2
    assert answers[0] is answers[1] is answers[3]
    assert answers[0] is not answers[2]


def test_what_does_not_fit_the_graph_is_solved_again_and_replaced(tmp_path, caplog):
    """A whole entry under the right name whose answer is that of another problem: the checksum
    holds, the verification does not.
    """
    problem, counting, cache = a_problem(), Counting(), Cache(directory=tmp_path)
    address = answer_digest(problem, FREE, OPTIONS)
    cache.write(address, dump_answer(solve(a_problem(8), FREE, OPTIONS)))
    with caplog.at_level(logging.WARNING):
        answer = answered(problem, FREE, OPTIONS, counting, sources=Sources(cache=cache))
    assert answer == solve(problem, FREE, OPTIONS)
    assert counting.calls == 1
    assert "is not used, and replaced" in caplog.text
    assert parse_answer(cache.read(address) or b"") == answer


def test_a_schedule_file_is_replayed(tmp_path):
    problem, counting = a_problem(), Counting()
    answer = solve(problem, FREE, OPTIONS)
    save_schedule(tmp_path / "mine.json", result_of(problem, FREE, answer, cluster="", seconds={}))
    other = replace(a_problem(8), graph_hash="another")
    save_schedule(
        tmp_path / "other.json",
        result_of(other, FREE, solve(other, FREE, OPTIONS), cluster="", seconds={}),
    )
    files = tuple(load_schedule(tmp_path / name) for name in ("other.json", "mine.json"))
    found = answered(problem, FREE, OPTIONS, counting, sources=Sources(schedules=files))
    assert counting.calls == 0
    assert (found.best.schedule, found.best.step_time_ticks) == (
        answer.best.schedule,
        answer.best.step_time_ticks,
    )
    with pytest.raises(InputError, match=r"other\.json: the schedule belongs to another graph"):
        answered(problem, FREE, OPTIONS, counting, sources=Sources(schedules=files[:1]))
    evaluated = replace(a_problem(6), graph_hash="third", name="graph")
    with pytest.raises(InputError, match=r"none of 'graph' .*an evaluation and each batch"):
        answered(evaluated, FREE, OPTIONS, counting, sources=Sources(schedules=files))
    changed = replace(problem, graph_hash="third")  # the nearest of both is named
    with pytest.raises(InputError, match=r"mine\.json: the schedule belongs to another graph"):
        answered(changed, FREE, OPTIONS, counting, sources=Sources(schedules=files))
    with pytest.raises(
        InputError,
        match=r"mine\.json: its schedule breaks the caps of this job: .*more than the cap of 1",
    ):
        answered(
            problem, Caps(memory_cap_bytes=1), OPTIONS, counting, sources=Sources(schedules=files)
        )


def of_two(mine: Problem, theirs: Problem, counting: Counting) -> list[object]:
    """Return what two process ranks with these problems get."""
    store, found = dist.HashStore(), [None, None]

    def rank(number: int, problem: Problem) -> None:
        try:
            with GraphAgreement(Job(store, number, deadline_s=60.0), {"dp": (0, 1)}) as agreement:
                found[number] = answered(problem, FREE, OPTIONS, counting, agreement=agreement)
        except ApschedError as error:
            found[number] = error

    threads = [
        threading.Thread(target=rank, args=arguments) for arguments in enumerate((mine, theirs))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=200)
    return found


@pytest.mark.alone
def test_one_process_rank_solves_and_the_other_verifies():
    counting, problem = Counting(), a_problem()
    assert of_two(problem, problem, counting) == [solve(problem, FREE, OPTIONS)] * 2
    assert counting.calls == 1


@pytest.mark.alone
def test_costs_of_one_process_rank_do_not_change_the_schedule(caplog):
    counting, problem = Counting(), a_problem()
    dearer = replace(problem, duration_ticks=tuple(t * 2 for t in problem.duration_ticks))
    with caplog.at_level(logging.WARNING):
        mine, theirs = of_two(problem, dearer, counting)
    assert counting.calls == 1
    assert theirs.best.schedule == mine.best.schedule
    assert theirs.best.step_time_ticks > mine.best.step_time_ticks
    assert (theirs.bound_ticks, theirs.bound_source) == (0, "none: process rank 0 has other costs")
    assert "costs here are not those of process rank 0" in caplog.text


@pytest.mark.alone
def test_a_schedule_that_does_not_fit_here_is_refused():
    """Equal hashes, other dependences: cannot be, and is found all the same."""
    problem, counting = a_problem(), Counting()
    other = replace(a_problem(8), graph_hash=problem.graph_hash)
    assert "the schedule of process rank 0 does not fit this graph" in str(
        of_two(problem, other, counting)[1]
    )


# what is near


class TestNear:
    """The search starts from what the cache has for other caps."""

    @staticmethod
    def sources(tmp_path) -> Sources:
        return Sources(cache=Cache(directory=tmp_path), near=True)

    def test_it_starts_from_the_answer_under_other_caps(self, tmp_path):
        problem, starts = a_problem(), []

        def noted(problem, caps, options, start=None):
            starts.append(start)
            return solve(problem, caps, options, start=start)

        tight = answered(
            problem,
            replace(FREE, max_prefetch=8),
            OPTIONS,
            noted,
            sources=Sources(cache=Cache(directory=tmp_path)),
        )
        poor = SolveOptions(budget=0.0, time_slack=0.0)
        near = answered(problem, FREE, poor, noted, sources=self.sources(tmp_path))
        assert starts == [None, tight.best.schedule]
        assert near.best.step_time_ticks <= tight.best.step_time_ticks
        assert answered(problem, FREE, poor, noted, sources=self.sources(tmp_path)) == near
        assert len(starts) == 2, "the second time it is in the cache"
        assert answered(problem, FREE, poor, noted) == solve(problem, FREE, poor), (
            "who does not ask for it gets what others get"
        )

    def test_what_was_solved_from_nothing_comes_first(self, tmp_path):
        problem, counting = a_problem(), Counting()
        cold = answered(
            problem, FREE, OPTIONS, counting, sources=Sources(cache=Cache(directory=tmp_path))
        )
        answered(
            problem,
            replace(FREE, max_prefetch=1),
            OPTIONS,
            counting,
            sources=Sources(cache=Cache(directory=tmp_path)),
        )
        assert answered(problem, FREE, OPTIONS, counting, sources=self.sources(tmp_path)) == cold
        assert counting.calls == 2

    @pytest.mark.parametrize("damage", ["gone", "foreign", "over the caps"])
    def test_what_cannot_be_started_from_is_left_alone(self, tmp_path, damage):
        problem, counting, cache = a_problem(), Counting(), Cache(directory=tmp_path)
        answered(problem, FREE, OPTIONS, counting, sources=Sources(cache=cache))
        (name,) = tmp_path.glob("*.latest")
        if damage == "gone":
            cache._path(name.read_text()).unlink()
        if damage == "foreign":
            name.write_bytes(b"\xff/../x")
        caps = (
            Caps(memory_cap_bytes=1) if damage == "over the caps" else replace(FREE, max_prefetch=1)
        )
        assert answered(problem, caps, OPTIONS, counting, sources=self.sources(tmp_path)) == solve(
            problem, caps, OPTIONS
        )

    def test_the_names_go_with_the_answers(self, tmp_path):
        cache = Cache(directory=tmp_path)
        answered(a_problem(), FREE, OPTIONS, Counting(), sources=Sources(cache=cache))
        assert len(cache.entries()) == 1, "a name is no answer"
        cache.clear()
        assert list(tmp_path.iterdir()) == []
