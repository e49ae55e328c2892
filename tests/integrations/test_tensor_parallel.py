"""``tune_fsdp2`` under tensor parallelism: the captured step is the one that runs, and no bit
changes.
"""

from collections import Counter

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from apsched.capture.fake_world import world
from apsched.capture.fsdp2 import capture_fsdp2
from apsched.fx.collectives import collective_kind, is_collective
from tests.helpers.graphs.tensor_parallel import PLANS, built
from tests.helpers.processes import WORKERS, Job, run_jobs


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> list[dict]:
    asked = Job(folder=tmp_path_factory.mktemp("tensor-parallel") / "four", world_size=4)
    script = WORKERS / "training/tune_tensor_parallel_worker.py"
    (found,) = run_jobs(script, [asked], timeout_s=600)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("plan", PLANS)
def test_a_tuned_model_computes_what_it_did(job, plan):
    """Also with the units kept that pay."""
    for report in job:
        case = report[plan]
        assert case["tuned"]["trained"] == case["kept"]["trained"] == case["as it was"]
        assert len({*case["as it was"]}) == 4, "each step changes the loss"
        assert case["tuned"]["units"] == ["(root)", "blocks.0", "blocks.1"]
        predicted, untuned = case["tuned"]["times"]
        assert 0 < case["kept"]["times"][0] <= predicted < untuned
        assert min(case["tuned"]["on the path"]) > 0


@pytest.mark.parametrize("plan", PLANS)
def test_the_captured_step_has_the_collectives_of_the_one_that_runs(plan):
    """Those of activations; FSDP2 launches the others as units, with operators of c10d."""
    tokens = torch.zeros(4, 8, dtype=torch.long)
    with world(4):
        model = built(plan)
        shards = model._get_fsdp_state()._fsdp_param_groups[0]._all_gather_process_group.group_name
        graphs = capture_fsdp2(model, (tokens,)).graphs
        with CommDebugMode() as forward:
            loss = model(tokens).float().square().mean()
        with CommDebugMode() as backward:
            loss.backward()
    for graph, ran in zip(graphs, (forward, backward), strict=True):
        captured = Counter(
            str(collective_kind(node))
            for node in graph.module.graph.nodes
            if is_collective(node) and node.args[-1] != shards
        )
        counts = {op.__name__: n for op, n in ran.get_comm_counts().items()}
        of_activations = {
            name.removesuffix("_into_tensor").removesuffix("_tensor"): n
            for name, n in counts.items()
            if not name.startswith("_")
        }
        assert captured == of_activations
