"""Captured graphs compute what the module computes, on real processes."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from apsched.models.build import build
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions
from apsched.models.preset_capture import capture_built
from apsched.models.training import descend, run_step
from tests.helpers.processes import run_processes


def main(rank: int, size: int, folder: Path, cases: str) -> None:
    """On each process: losses and gradients of captured graphs and of the module are the same, and
    training lowers the loss.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    first_losses = []
    for name, mesh, checkpoint in json.loads(cases):
        options = ModelOptions(activation_checkpoint=checkpoint)
        built = build(
            name,
            mesh=MeshSpec.parse(mesh),
            seq_len=32,
            num_layers=2,
            materialize=True,
            options=options,
        )
        forward, backward = (graph.module for graph in capture_built(built).graphs)
        eager_loss = built.module(*built.inputs)
        eager_loss.backward()
        losses = []
        for step in range(3):
            loss, gradients = run_step(built, forward, backward)
            if step == 0:
                assert torch.equal(loss, eager_loss)
                for parameter_name, parameter in built.module.named_parameters():
                    assert torch.equal(gradients[parameter_name], parameter.grad.to_local())  # type: ignore[union-attr,attr-defined]
            descend(built, gradients, rate=0.1)
            dist.all_reduce(loss)
            losses.append(loss.item() / built.mesh.tp)
        assert losses[-1] < losses[0], (name, mesh, losses)
        first_losses.append((name, built.mesh.data_parallel_size, losses[0]))
    for (
        name,
        data_size,
        loss,
    ) in first_losses:  # the same model on the same tokens, whatever the mesh
        others = [
            other
            for other_name, other_size, other in first_losses
            if (other_name, other_size) == (name, data_size)
        ]
        assert all(abs(other - loss) < 1e-2 for other in others)
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(first_losses))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "cases",
    [
        [
            ("llama3-debug", "fsdp=2", "none"),
            ("llama3-debug", "fsdp=2", "selective"),
            ("llama3-debug", "replicate=2", "none"),
            ("llama3-debug", "tp=2", "full"),
            ("deepseek-v3-debug", "fsdp=2", "none"),
            ("deepseek-v3-debug", "fsdp=2,ep=2", "none"),
        ],
        [("llama3-debug", "fsdp=3", "none")],  # uneven shards
    ],
)
def test_captured_graphs_train_as_the_module_does(
    tmp_path: Path, cases: list[tuple[str, str, str]]
) -> None:
    size = MeshSpec.parse(cases[0][1]).world_size
    reports = run_processes(Path(__file__), tmp_path, size, json.dumps(cases), timeout_s=600)
    assert [len(report) for report in reports] == [len(cases)] * size
