"""Shards of uneven sizes: process ranks with other padding share one answer, and compute what they
did.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize

from apsched.capture.captured import CapturedGraph
from apsched.capture.fake_world import world
from apsched.capture.joint import capture_module
from apsched.compiler.ranks.launches import Launch, launches_of, order_digest
from apsched.compiler.ranks.uneven import Likeness, likeness_of, mapped_schedule
from apsched.config import Caps, SolveOptions
from apsched.errors import InputError
from apsched.graph.export.export import export_graph
from apsched.problem.build import build_problem
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Schedule
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.solver.solve import solve
from apsched.writeback.round_trip import round_trip
from apsched.writeback.write_back import write_back
from tests.helpers.graphs.toy_graphs import FlatCosts
from tests.helpers.processes import WORKERS, Job, run_jobs

RANKS = {3: (0, 2), 7: (0, 5, 6), 24: (0, 16, 23), 96: (0, 49, 50, 95)}
"""Shards of 100 rows: the last whole shard, one that is cut, one that is empty."""


class Gathered(nn.Module):
    """Reading a parameter casts and gathers it."""

    def forward(self, shard):
        whole = shard.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16)
        return whole.to_local(grad_placements=[Partial()])


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One graph of one process rank."""

    captured: CapturedGraph
    problem: Problem
    likeness: Likeness
    groups: Mapping[str, tuple[int, ...]]


def seen(size: int, rank: int) -> list[Seen]:
    with world(size, rank) as running:
        model = nn.Sequential(nn.Linear(16, 100), nn.GELU(), nn.Linear(100, 16)).bfloat16()
        mesh = init_device_mesh("cpu", (size,))
        for layer in (model[0], model[2]):
            for name, parameter in list(layer.named_parameters(recurse=False)):
                whole = parameter.detach().float()
                layer.register_parameter(
                    name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
                )
                parametrize.register_parametrization(layer, name, Gathered(), unsafe=True)
        capture = capture_module(model, (torch.randn(4, 16).bfloat16(),), source="odd")
        groups = running.group_ranks
        found = []
        for graph in capture.graphs:
            problem = build_problem(export_graph(graph, FlatCosts(), group_ranks=groups))
            likeness = likeness_of(graph.module.graph, problem)
            found.append(Seen(captured=graph, problem=problem, likeness=likeness, groups=groups))
        return found


def solved(problem: Problem) -> Schedule:
    """Return the fastest schedule that has a bucket, of the answer and its baselines."""
    answer = solve(problem, Caps(), SolveOptions(budget=0.0))
    known = [answer.best, *answer.baselines]
    bucketed = [entry for entry in known if any(len(b.members) > 1 for b in entry.schedule.buckets)]
    return min(bucketed, key=lambda entry: entry.step_time_ticks).schedule


def launched(one: Seen, schedule: Schedule) -> dict[str, str]:
    """Write ``schedule`` back on one process rank; return what it launches."""
    module = write_back(one.captured.module, one.problem, schedule, process_rank_of=lambda _: 0)
    trip = round_trip(
        module, one.captured, FlatCosts(), one.groups, simulate(one.problem, schedule)
    )
    assert trip.exact, trip.difference
    orders: dict[str, tuple[Launch, ...]] = launches_of(module, one.captured.module)
    return {group: order_digest(order) for group, order in orders.items()}


@pytest.mark.parametrize("size", RANKS)
def test_one_answer_serves_shards_of_all_sizes(size):
    """It is mapped from each process rank onto each other, keeps every dependence, and launches the
    same.
    """
    by_rank = [seen(size, rank) for rank in RANKS[size]]
    assert len({one[0].problem.graph_hash for one in by_rank}) > 1
    for direction in zip(*by_rank, strict=True):
        assert len({one.likeness.digest for one in direction}) == 1
        first, last = direction[0], direction[-1]
        same = first.problem.num_nodes == last.problem.num_nodes
        assert same == (torch.__version__ >= (2, 15))  # which pads every shard
        for solver in (first, last):
            schedule = solved(solver.problem)
            expected = launched(solver, schedule)
            for other in direction:
                mapped = mapped_schedule(
                    schedule, solver.likeness.padding, other.problem, other.likeness.padding
                )
                assert verify(other.problem, mapped, Caps()) == ()
                assert launched(other, mapped) == expected
                assert mapped != schedule or other.problem.num_nodes == solver.problem.num_nodes


def test_what_is_more_than_padding_is_another_graph():
    """Another operator; and a number of nodes that differs is said."""
    one = seen(7, 6)[0]
    graph = one.captured.module.graph
    (gelu,) = graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default)
    gelu.target = torch.ops.aten.relu.default
    assert likeness_of(graph, one.problem).digest != one.likeness.digest
    short = replace(one.likeness, padding=one.likeness.padding[:-1])
    schedule = solved(one.problem)
    with pytest.raises(InputError, match=r"nodes without padding, found one of"):
        mapped_schedule(schedule, one.likeness.padding, one.problem, short.padding)


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("uneven")
    asked = Job(folder=folder / "three", world_size=3)
    (found,) = run_jobs(WORKERS / "training/uneven_worker.py", [asked], timeout_s=800)
    return found


@pytest.mark.ranks
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize("case", ["kept", "gathered again", "no deadline", "inductor"])
def test_three_processes_compute_what_they_did(job, case):
    graphs = [report[case]["graphs"] for report in job]
    assert graphs == [graphs[0]] * 3
    assert any(launches < captured for _, captured, launches in graphs[0])
    for report in job:
        found = report[case]
        assert found["exact"]
        if case == "inductor":  # it fuses other kernels, which round otherwise
            assert found["largest_distance"] < 1e-5
        else:
            assert found["num_unequal"] == 0


@pytest.mark.ranks
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize("case", ["one fails", "one fails under Inductor"])
def test_where_one_process_fails_all_run_their_graphs_as_they_were(job, case):
    for report in job:
        assert report[case]["graphs"] == []
        assert report[case]["num_unequal"] == 0
