"""Forward and backward as one graph (``apsched.capture.one_graph``)."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from apsched.capture.captured import CapturedGraph
from apsched.capture.joint import capture_module
from apsched.capture.one_graph import JOINT, with_joint_graph
from apsched.errors import InputError
from tests.conftest import Run

SOURCE = ("llama3-debug", "--mesh", "fsdp=2", "--seq", "64", "--budget", "1", "--json")


class Doubled(torch.autograd.Function):
    """Has a constant in forward and another one in backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([2.0, 2.0, 2.0, 2.0])

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * torch.tensor([2.0, 2.0, 2.0, 3.0])


class Step(nn.Module):
    """Two layers, running statistics and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(self.second(torch.relu(self.norm(self.first(x))))).square().mean()


def joint_of(module: nn.Module, x: torch.Tensor) -> tuple[CapturedGraph, CapturedGraph]:
    """Return the forward and the joint graph."""
    forward, _, joint = with_joint_graph(capture_module(module, (x,), source="step")).graphs
    return forward, joint


def test_one_graph_computes_what_the_module_computes() -> None:
    torch.manual_seed(0)
    module, x = Step(), torch.randn(3, 8)
    forward, joint = joint_of(module, x)
    inputs = (*module.parameters(), *module.buffers(), x)
    results = joint.module(*inputs, torch.tensor(1.0))
    expected = forward.module(*inputs)
    loss = module(x)
    loss.backward()
    gradients = [p.grad for p in module.parameters()]
    num_others = len(inputs) - len(gradients)
    assert results[-num_others:] == (None,) * num_others
    found = results[-num_others - len(gradients) : -num_others]
    assert all(torch.equal(*pair) for pair in zip(found, gradients, strict=True))
    num_results = len(results) - len(inputs)
    assert num_results == 4, "the loss, and what batch normalisation counts"
    assert all(torch.equal(*pair) for pair in zip(results[:4], expected[:4], strict=True))
    assert any(torch.equal(result, loss) for result in results[:4])


def test_one_graph_says_what_is_kept_and_what_is_backward() -> None:
    forward, joint = joint_of(Step(), torch.randn(3, 8))
    assert (joint.name, joint.kept_inputs) == (JOINT, forward.kept_inputs)
    assert joint.parameter_names == forward.parameter_names
    *inputs, tangent = joint.module.graph.find_nodes(op="placeholder")
    assert [node.name for node in inputs] == [
        node.name for node in forward.module.graph.find_nodes(op="placeholder")
    ]
    assert tangent.name not in joint.kept_inputs
    calls = joint.module.graph.nodes
    tags = [node.meta["partitioner_tag"] for node in calls if node.op == "call_function"]
    assert tags == sorted(tags, reverse=True), "forward, then backward"


def test_a_module_without_gradients_has_no_such_graph() -> None:
    module = Step().requires_grad_(False)
    with pytest.raises(InputError, match=r"one forward and one backward .*found forward"):
        with_joint_graph(capture_module(module, (torch.randn(3, 8),), source="step"))


@pytest.mark.slow
def test_one_graph_takes_no_longer_than_both(run: Run) -> None:
    """Kernels, buckets and transfers may reach from forward into backward; nothing is added."""
    both, (whole,) = (solved(run, which, "--keep", "none") for which in ("both", "joint"))
    apart_us = sum(graph["step_time_us"] for graph in both)
    assert whole["name"] == JOINT
    assert whole["num_collectives"] == sum(graph["num_collectives"] for graph in both)
    assert 0.9 * apart_us <= whole["step_time_us"] <= apart_us
    assert whole["bound_us"] <= whole["step_time_us"]
    assert whole["round_trip_exact"]


def test_parameters_that_are_kept_are_gathered_once(run: Run, tmp_path: Path) -> None:
    (again,) = solved(run, "joint", "--keep", "none")
    (kept,) = solved(run, "joint", "--keep", "all")
    assert (again["num_collectives"], kept["num_collectives"]) == (62, 42), "20 are gathered again"
    file = tmp_path / "kept.txt"
    file.write_text("layers.0.attention.wq.weight\n")
    (one,) = solved(run, "joint", "--keep", str(file))
    assert one["num_collectives"] == again["num_collectives"] - 1


@pytest.mark.slow
def test_the_choice_is_that_of_both_graphs_apart(run: Run, tmp_path: Path) -> None:
    """Under a cap that does not hold all parameters; the joint graph gathers the others again."""
    capped = ("--memory-cap", "floor+64KiB", "--budget", "0")
    ran = run("solve", *SOURCE, *capped, "--direction", "joint", "-o", "joint")
    assert ran.code == 0, ran.stderr
    found = json.loads(ran.stdout)
    kept = found["keep_joint"]["kept"]
    assert found["keep_apart"]["kept"] == kept
    assert found["options"]["--keep"] == "auto"
    ran = run("solve", *SOURCE, *capped, "--keep", "auto", "-o", "apart")
    assert json.loads(ran.stdout)["keep"]["kept"] == kept
    assert 0 < len(kept) < 20
    assert found["graphs"][0]["num_collectives"] == 62 - len(kept)
    names = [(tmp_path / folder / "kept.txt").read_text() for folder in ("joint", "apart")]
    assert names[0] == names[1]
    assert names[0].splitlines() == kept
    ran = run("solve", *SOURCE, "--direction", "joint", "--budget", "0", "--frontier", "3")
    assert ran.code == 0, ran.stderr
    along = json.loads(ran.stdout)["keep_joint"]["along_caps"]
    assert len(along) == 3
    assert along[0]["kept"] == []
    assert along[-1]["step_time_us"] == min(one["step_time_us"] for one in along)


@pytest.mark.slow
def test_explain_names_the_choice_of_both_graphs_apart(run: Run) -> None:
    ran = run("explain", *SOURCE[:-1], "--budget", "0", "--direction", "joint", "--keep", "auto")
    assert ran.code == 0, ran.stderr
    assert "forward and backward apart:\nstep: " in ran.stdout
    choice = ran.stdout.partition("one graph of both:\n")[2].splitlines()
    assert choice[0].startswith("step: ")
    assert choice[1].startswith("  kept from forward to backward: 20 of 20")
    assert choice[2].startswith("  one more 1.00 GiB (memory cap ")
    assert "\njoint: step time" in ran.stdout


def solved(run: Run, direction: str, *options: str) -> list[dict]:
    ran = run("solve", *SOURCE, "--direction", direction, *options, "-o", "out")
    assert ran.code == 0, ran.stderr
    return json.loads(ran.stdout)["graphs"]
