"""Real tensors in the rewritten graph take, at every step of the schedule, the bytes that the model
says.
"""

from dataclasses import replace

import pytest
import torch.distributed as dist

from apsched.capture.fake_world import world
from apsched.graph.export.export import export_graph
from apsched.problem.build import build_problem
from apsched.schedule.memory import live_bytes
from apsched.writeback.write_back import write_back
from benchmarks.common.live_bytes import live_bytes_of, run_counting
from tests.helpers.graphs.toy_graphs import FlatCosts, capture_toy, toy_inputs
from tests.helpers.problems.random_schedules import random_schedule

WORLD_SIZE = 4


@pytest.fixture(scope="module")
def captured():
    with world(WORLD_SIZE):
        yield capture_toy(dist.group.WORLD.group_name, WORLD_SIZE, width=36)


@pytest.mark.parametrize("seed", range(12))
def test_bytes_counted_at_every_step_are_those_of_the_model(captured, seed):
    problem = build_problem(export_graph(captured, FlatCosts()))
    schedule = random_schedule(problem, seed)
    module = write_back(captured.module, problem, schedule)
    dag = export_graph(replace(captured, module=module), FlatCosts())
    inputs = list(toy_inputs(WORLD_SIZE, 8, 0, 36))
    _, counted = run_counting(module, inputs, dag, captured.kept_inputs)
    assert counted == live_bytes_of(dag)
    at_steps = [
        live
        for node, live in zip(module.graph.nodes, counted, strict=True)
        if node.meta.get("apsched", {}).get("role") not in ("buffer", "view")
    ]
    assert at_steps == list(live_bytes(problem, schedule))
