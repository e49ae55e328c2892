"""``tune_fsdp2`` under tensor parallelism: the captured step is the one that runs, and no bit
changes.
"""

from collections import Counter

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import apsched
from apsched.capture.fake_world import world
from apsched.capture.fsdp2 import capture_fsdp2, fake_step, gathered_by_fsdp2
from apsched.capture.joint import capture_module
from apsched.config import Caps
from apsched.errors import InputError
from apsched.fx.collectives import collective_kind, is_collective
from apsched.fx.passes.saved_as_eager import save_as_eager
from apsched.integrations.fsdp2_units import launches_of, movable, units_of
from apsched.integrations.unit_order import moved_as_units_run
from apsched.kinds import CollectiveKind
from apsched.schedule.verify import verify
from tests.helpers.graphs.tensor_parallel import PLANS, built, tied_again
from tests.helpers.processes import WORKERS, Job, run_jobs


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> list[dict]:
    asked = Job(folder=tmp_path_factory.mktemp("tensor-parallel") / "four", world_size=4)
    script = WORKERS / "training/tune_tensor_parallel_worker.py"
    (found,) = run_jobs(script, [asked], timeout_s=600)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("plan", [*PLANS, "tied again"])
def test_a_tuned_model_computes_what_it_did(job, plan):
    """Also with the units kept that pay."""
    for report in job:
        case = report[plan]
        assert case["tuned"]["trained"] == case["kept"]["trained"] == case["as it was"]
        assert len({*case["as it was"]}) == 4, "each step changes the loss"
        ends = ["embedding+norm+head"] if plan == "tied again" else []
        assert case["tuned"]["units"] == ["(root)", *ends, "blocks.0", "blocks.1"]
        predicted, untuned = case["tuned"]["times"]
        assert 0 < case["kept"]["times"][0] <= predicted < untuned
        assert min(case["tuned"]["on the path"]) > 0


@pytest.mark.ranks
def test_replicas_of_a_tensor_parallel_model_compute_what_they_did(tmp_path):
    """Three dimensions: replicas, shards, and tensor parallelism."""
    asked = Job(folder=tmp_path / "eight", world_size=8)
    script = WORKERS / "training/tune_tensor_parallel_worker.py"
    (found,) = run_jobs(script, [asked], timeout_s=600)
    for report in found:
        assert report["tuned"]["trained"] == report["as it was"]
        assert report["tuned"]["settings"] == found[0]["tuned"]["settings"]
        assert len({*report["as it was"]}) == 4, "each step changes the loss"
        predicted, untuned = report["tuned"]["times"]
        assert 0 < predicted < untuned


@pytest.mark.ranks
def test_process_ranks_of_a_tensor_parallel_group_agree(job):
    """Where one has another choice, no process rank is tuned."""
    assert [report["other on one"] for report in job] == [True] * 4


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_captured_step_has_the_collectives_of_the_one_that_runs(plan, replicas):
    """Those of activations; FSDP2 launches the others as units, with operators of c10d."""
    tokens = torch.zeros(4, 8, dtype=torch.long)
    with world(4 * replicas):
        model = built(plan, replicas)
        of = gathered_by_fsdp2(model)["norm.weight"]
        graphs = capture_fsdp2(model, (tokens,)).graphs
        with CommDebugMode() as forward:
            loss = model(tokens).float().square().mean()
        with CommDebugMode() as backward:
            loss.backward()
        num_parameters = len(list(model.parameters()))
    own = {of.shard_group.group_name}
    if of.replicate_group is not None:
        assert (of.shard_group.size(), of.replicate_group.size()) == (2, replicas)
        own.add(of.replicate_group.group_name)
    for graph, ran in zip(graphs, (forward, backward), strict=True):
        nodes = [node for node in graph.module.graph.nodes if is_collective(node)]
        captured = Counter(str(collective_kind(n)) for n in nodes if n.args[-1] not in own)
        counts = {op.__name__: n for op, n in ran.get_comm_counts().items()}
        of_activations = {
            name.removesuffix("_into_tensor").removesuffix("_tensor"): n
            for name, n in counts.items()
            if not name.startswith("_") and not name.endswith("_")
        }
        assert captured == of_activations
        of_units = Counter(str(collective_kind(n)) for n in nodes if n.args[-1] in own)
        assert of_units["all_reduce"] == (num_parameters * (replicas - 1) if ran is backward else 0)
        assert counts.get("allreduce_", 0) == (3 * (replicas - 1) if ran is backward else 0)


def test_parameters_tied_again_are_gathered_twice_and_held_once():
    """The shards of embedding and head are one tensor: 64 rows of 16 columns, on four."""
    tokens = torch.zeros(4, 8, dtype=torch.long)
    peaks = []
    for build in (tied_again, lambda: built(PLANS[1], ends_are_one=True)):
        with world(4):
            forward = apsched.tune_fsdp2(build(), tokens, budget=0.0, memory_cap="none").results[0]
        gathered = [c.module for c in movable(forward.problem, CollectiveKind.ALL_GATHER)]
        assert {"embedding.weight", "head.weight"} <= set(gathered)
        peaks.append(forward.peak_memory_bytes)
    assert peaks[1] - peaks[0] == 64 * 16 * 4 // 4


@pytest.mark.parametrize("replicas", [1, 2])
def test_reductions_run_in_any_order_of_units(replicas):
    """Behind the sums of parts of a gradient over tensor-parallel ranks, before those over
    replicas.
    """
    tokens = torch.zeros(4, 8, dtype=torch.long)
    caps = Caps(max_compute_move=0)
    with world(4 * replicas):
        model = built(PLANS[1], replicas)
        found = apsched.tune_fsdp2(model, tokens, budget=0.0, memory_cap="none").results[1]
        units = units_of(model)
    for order in (units, units[::-1], [units[1], units[0], units[2]]):
        parameters = [unit.parameters for unit in order]
        moved = moved_as_units_run(found.problem, caps, found.best, parameters)
        assert not verify(found.problem, moved.schedule, caps)
        of = {name: unit for unit in units for name in unit.parameters}
        reduced = launches_of(found.problem, moved.schedule, CollectiveKind.REDUCE_SCATTER, of)
        assert [one.unit for one in reduced] == [unit.name for unit in reversed(order)]


class _TwoInARow(nn.Module):
    """Returns a DTensor, whose mesh torch's caches know from a model before."""

    def __init__(self, width, mesh):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))
        whole = RowwiseParallel(output_layouts=Replicate(), use_local_output=False)
        parallelize_module(self.inner, mesh, {"0": ColwiseParallel(), "2": whole})

    def forward(self, x):
        return self.inner(x)


def test_a_result_may_be_a_dtensor_also_of_the_second_model():
    with world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for width in (16, 32):
            model = fully_shard(_TwoInARow(width, mesh["tp"]), mesh=mesh["dp"])
            found = apsched.tune_fsdp2(model, torch.zeros(4, 8), budget=0.0, memory_cap="none")
            assert found.step_time_us > 0


def test_a_result_in_parts_is_refused():
    """Backward begins with a gather of its gradient."""
    with world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel(output_layouts=Shard(0))}
        fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])
        with pytest.raises(
            InputError, match=r"of 1, which .* or the gradient of a result in parts"
        ):
            apsched.tune_fsdp2(model, torch.zeros(4, 8), budget=0.0, memory_cap="none")


class _Sum(torch.autograd.Function):
    """The input; backward gathers a saved tensor, as DTensor does for some placements."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.save_for_backward(x)
        ctx.group = group
        return x + 1

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        whole = funcol.wait_tensor(funcol.all_gather_tensor(x, 0, ctx.group))
        return gradient * whole[: len(gradient)].tanh(), None


class _GathersInBackward(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.first, self.second, self.group = nn.Linear(8, 8), nn.Linear(8, 8), group

    def forward(self, x):
        return self.second(_Sum.apply(self.first(x), self.group))


def test_a_gather_of_saved_activations_stays_in_backward_and_is_refused():
    """The partitioner moves it to forward, and FSDP2 cannot launch it early."""
    with world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        group = mesh["tp"].get_group()
        model = fully_shard(_GathersInBackward(group), mesh=mesh["dp"])
        given = torch.zeros(2, 8)
        with pytest.raises(InputError, match="which gathers a tensor that forward saved"):
            capture_fsdp2(model, (given,))
        copy, inputs, _ = fake_step(model, (given,))
        graphs = capture_module(copy, inputs, source="model", passes=(save_as_eager(),)).graphs
    counts = [
        sum(is_collective(n) and n.args[-1] == group.group_name for n in graph.module.graph.nodes)
        for graph in graphs
    ]
    assert counts == [0, 1]
