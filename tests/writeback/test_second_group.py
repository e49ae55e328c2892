"""Gathers on a second group of the same process ranks: what moves, what it costs, what it says, and
that it runs.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from apsched.artifacts.module_file import dump_module
from apsched.artifacts.schedule_file import bind_schedule, load_schedule, save_schedule
from apsched.capture.fake_world import world
from apsched.capture.repro.reader import read_repro
from apsched.compiler.schedule_captured import scheduled
from apsched.compiler.settings import Settings
from apsched.config import Caps, SolveOptions
from apsched.errors import InputError
from apsched.graph.export.export import export_graph
from apsched.names import RUNNING, second_name
from apsched.pipeline.result import result_of
from apsched.problem.build import build_problem
from apsched.problem.problem import Problem
from apsched.problem.second_group import second_groups, with_second_groups
from apsched.schedule.simulate import simulate
from apsched.solver import solve
from apsched.torch_compat.graphs import group_of_name
from apsched.writeback.round_trip import round_trip
from apsched.writeback.second_groups import running_second_groups
from apsched.writeback.write_back import write_back
from tests.helpers.graphs.toy_graphs import FlatCosts, capture_toy
from tests.helpers.problems.by_hand import ByHand, line
from tests.helpers.problems.random_schedules import random_schedule
from tests.helpers.processes import WORKERS, run_processes

KIB = 1024


def gather_behind_a_reduction() -> Problem:
    """One small gather, whose shard comes late, behind a large reduction that nothing waits for."""
    hand = ByHand(prices={"all_gather": line(10), "reduce_scatter": line(0, 100)})
    shard = hand.input("shard", KIB, kept=True)
    a = hand.compute("a", 1, size=4 * KIB)
    rs = hand.start("reduce_scatter", "rs", a, 4 * KIB, 2 * KIB)
    late = hand.compute("late", 1, shard, a, size=KIB)
    gather = hand.start("all_gather", "gather", late, KIB, 2 * KIB)
    b = hand.compute("b", 1000, hand.wait("w", gather), size=KIB)
    return hand.output(b, hand.wait("x", rs))


def test_gathers_get_a_stream_of_their_own_on_the_same_links():
    problem = gather_behind_a_reduction()
    beside = with_second_groups(problem)
    assert beside is not None
    assert (beside.streams, second_groups(beside)) == (("dp", "dp+gathers"), ("dp+gathers",))
    assert {
        (beside.keys[c.key].kind, beside.streams[beside.keys[c.key].stream])
        for c in beside.collectives
    } == {
        ("all_gather", "dp+gathers"),
        ("reduce_scatter", "dp"),
    }
    assert beside.contention is not None
    assert beside.contention.links_of("dp") == beside.contention.links_of("dp+gathers") == (0,)
    assert with_second_groups(beside) is None


def test_a_second_group_that_runs_is_used_again(monkeypatch: pytest.MonkeyPatch):
    beside = with_second_groups(gather_behind_a_reduction())
    assert beside is not None
    monkeypatch.setitem(RUNNING, "17", "tp")
    assert running_second_groups(beside) == {"dp+gathers": "dp+gathers"}
    monkeypatch.setitem(RUNNING, "18", "dp")
    assert running_second_groups(beside) == {"dp+gathers": "18"}


def test_a_group_of_gathers_alone_needs_no_second():
    hand = ByHand()
    gather = hand.start("all_gather", "gather", hand.input("shard", KIB, kept=True), KIB, 2 * KIB)
    assert with_second_groups(hand.output(hand.wait("w", gather))) is None


def test_a_gather_no_longer_queues_behind_a_reduction():
    """On one stream it waits for 400 ticks; on two it shares the links, and is there after twice
    its own time.
    """
    problem = gather_behind_a_reduction()
    beside = with_second_groups(problem)
    assert beside is not None
    options, caps = SolveOptions(time_slack=0.0), Caps(max_compute_move=0)
    held = replace(
        problem,
        predecessors=tuple(
            (*before, 2) if node == 4 else before
            for node, before in enumerate(problem.predecessors)
        ),
    )
    held_beside = replace(beside, predecessors=held.predecessors)  # the reduction is launched first
    one, two = solve(held, caps, options).best, solve(held_beside, caps, options).best
    assert one is not None
    assert two is not None
    assert one.step_time_ticks >= 400 + 1000
    assert two.step_time_ticks < one.step_time_ticks - 300


def test_the_file_of_a_schedule_says_so(tmp_path: Path):
    problem = gather_behind_a_reduction()
    beside = with_second_groups(problem)
    assert beside is not None
    answer = solve(beside, Caps(), SolveOptions(budget=1.0))
    save_schedule(tmp_path / "s.json", result_of(beside, Caps(), answer, cluster="", seconds={}))
    file = load_schedule(tmp_path / "s.json")
    assert bind_schedule(file, file.problem_of(problem)) == answer.best.schedule
    with pytest.raises(
        InputError, match="expected gathers on second groups, as the file has them, found one group"
    ):
        bind_schedule(file, problem)


def test_offline_it_goes_by_a_name_and_the_round_trip_is_exact():
    with world(4) as running:
        captured = capture_toy(dist.group.WORLD.group_name, 4)
        problem = with_second_groups(build_problem(export_graph(captured, FlatCosts())))
        assert problem is not None
        for seed in range(5):
            schedule = random_schedule(problem, seed)
            module = write_back(captured.module, problem, schedule)
            claimed = simulate(problem, schedule)
            assert (
                round_trip(
                    module, captured, FlatCosts(), running.group_ranks, claimed, problem.contention
                ).difference
                == ""
            )
            assert f"{dist.group.WORLD.group_name}+gathers" in module.code


def test_a_job_replays_a_schedule_with_second_groups(tmp_path: Path):
    """The file says that gathers have groups of their own, so that nobody has to say it again."""
    with world(4) as running:
        captured = capture_toy(dist.group.WORLD.group_name, 4)
        problem = with_second_groups(
            build_problem(export_graph(captured, FlatCosts(), group_ranks=running.group_ranks))
        )
        assert problem is not None
        answer = solve(problem, Caps(), SolveOptions(budget=0.2))
        save_schedule(
            tmp_path / "s.json", result_of(problem, Caps(), answer, cluster="", seconds={})
        )
        settings = Settings(
            cost_model=FlatCosts(), schedule=str(tmp_path / "s.json"), deadline_s=None
        )
        result = scheduled(captured, settings).apsched_result
        assert second_groups(result.problem) == (f"{dist.group.WORLD.group_name}+gathers",)
        assert result.schedule == answer.best.schedule
        assert result.round_trip_exact


def test_the_rewritten_module_is_a_file_that_runs_and_reads_back(tmp_path: Path):
    with world(4) as running:
        first = dist.group.WORLD.group_name
        captured = capture_toy(first, 4)
        problem = with_second_groups(build_problem(export_graph(captured, FlatCosts())))
        assert problem is not None
        module = write_back(captured.module, problem, random_schedule(problem, 1))
        (tmp_path / "graph.py").write_bytes(dump_module(module, "graph"))
        assert running.group_ranks.keys() == {first}
        with pytest.raises(RuntimeError, match="Could not resolve"):
            group_of_name(second_name(first))  # the name is gone again
    capture = read_repro(tmp_path / "graph.py")
    assert capture.group_sizes == {first: 4, second_name(first): 4}
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "graph.py")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.ranks
def test_two_processes_make_it_once_and_get_the_same_bits(tmp_path: Path):
    for report in run_processes(
        WORKERS / "graphs/second_group_worker.py", tmp_path, 2, timeout_s=300
    ):
        assert report["unequal"] == []
        assert report["inexact"] == []
        assert report["num_groups"] == [2, 2]
        assert report["used"] == [
            ["all_gather", False],
            ["all_reduce", True],
            ["reduce_scatter", True],
        ]
