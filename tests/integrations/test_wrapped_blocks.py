"""Blocks in wrappers (``checkpoint_wrapper``, ``torch.compile``) have the names that they have
without: in graphs, in plans, and in the settings of FSDP2.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import apsched
from apsched.capture.fake_world import world
from apsched.integrations.fsdp2 import apply_fsdp2, fsdp2_plan
from apsched.integrations.fsdp2_accumulation import apply_fsdp2_micro_batches
from apsched.integrations.tune_fsdp2 import Fsdp2Tuning
from apsched.problem.build import build_problem
from apsched.problem.plan.module_buckets import block_buckets

INPUTS = (torch.zeros(4, 32),)
WIDTH = 32
CAPS = apsched.Caps(max_compute_move=0)
Wrap = Callable[[nn.Module], nn.Module]
WRAPS: dict[str, Wrap] = {
    "checkpoint_wrapper": checkpoint_wrapper,
    "torch.compile": lambda block: torch.compile(block, backend="eager"),
    "both": lambda block: torch.compile(checkpoint_wrapper(block), backend="eager"),
}
wrapped = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


class Net(nn.Module):
    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        blocks = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(3)
        )
        self.layers = nn.ModuleList(map(wrap, blocks))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def sharded(wrap: Wrap, *, kept: int = -1) -> nn.Module:
    """Return the model under ``fully_shard``; block ``kept`` stays gathered behind forward."""
    model = Net(wrap)
    for k, layer in enumerate(model.layers):
        fully_shard(layer, reshard_after_forward=k != kept)
    fully_shard(model.head)
    return fully_shard(model)


def expected_names() -> list[str]:
    return sorted(name for name, _ in Net(lambda block: block).named_parameters())


@wrapped
def test_graphs_and_plans_have_the_names_without_wrappers(wrap: Wrap) -> None:
    with world(2):
        model = sharded(wrap)
        graphs = apsched.capture(model, INPUTS)
        plan = fsdp2_plan(model, *graphs)
    for graph in graphs:
        gathered = {c.module for c in build_problem(graph).collectives}
        assert gathered <= set(expected_names())
        assert "layers.1.0.weight" in gathered
    assert any(r"layers\.1\.0\.weight" in rule.match for rule in plan.rules)


@wrapped
def test_apply_fsdp2_gathers_each_unit_as_one(wrap: Wrap) -> None:
    with world(2):
        model = sharded(wrap)
        results = [
            apsched.solve(g, plan=fsdp2_plan(model, g), caps=CAPS, budget=0)
            for g in apsched.capture(model, INPUTS)
        ]
        settings = apply_fsdp2(model, results)
    names = [unit.name for unit in settings.units]
    assert names == ["(root)", "layers.0", "layers.1", "layers.2", "head"]


@wrapped
def test_apply_fsdp2_micro_batches(wrap: Wrap, tmp_path: Path) -> None:
    with world(2):
        model = sharded(wrap)
        graphs = apsched.capture(model, INPUTS)
        step = apsched.solve_step(
            model,
            INPUTS,
            accumulate=3,
            plan=fsdp2_plan(model, *graphs),
            caps=CAPS,
            budget=0,
        )
        step.save_run(tmp_path / "run")
        found = apply_fsdp2_micro_batches(model, step)
        assert apply_fsdp2_micro_batches(model, tmp_path / "run").settings == found.settings
    assert len(found.settings) == 3
    assert any(not unit.reduce_gradients for unit in found.settings[0].units)


@wrapped
@pytest.mark.parametrize(
    "keep", ["none", "all", "auto", [r"layers\.1\..*", r"layers\.2\.0\.weight"]]
)
def test_tune_fsdp2_keeps_units_of_wrapped_blocks(wrap: Wrap, keep: str | list[str]) -> None:
    """As without wrappers: units, prices and the cost of a part of a unit."""

    def tuned(wrap: Wrap) -> Fsdp2Tuning:
        with world(2):
            return apsched.tune_fsdp2(
                sharded(wrap, kept=1), INPUTS, keep=keep, memory_cap="none", budget=0.0
            )

    found, plain = tuned(wrap), tuned(lambda block: block)
    kept = {u.name for u in found.settings.units if not u.reshard_after_forward}
    assert kept == {u.name for u in plain.settings.units if not u.reshard_after_forward}
    assert found.choices.keys() == plain.choices.keys()
    if wrap is not WRAPS["torch.compile"]:
        return  # checkpointed blocks have other prices
    assert found.settings == plain.settings
    assert (found.step_time_us, found.untuned_us) == (plain.step_time_us, plain.untuned_us)


@wrapped
def test_a_block_that_stays_gathered_is_known_by_its_name(wrap: Wrap) -> None:
    with world(2):
        _, backward = apsched.capture(sharded(wrap, kept=1), INPUTS)
    problem = build_problem(backward)
    again = {
        c.module.rpartition(".")[0]
        for c in problem.collectives
        if problem.keys[c.key].kind == "all_gather"
    }
    assert not any(name.startswith("layers.1") for name in again)
    assert "layers.2.0" in again


def test_buckets_of_blocks_have_the_names_without_wrappers() -> None:
    plain = block_buckets(Net(lambda block: block))
    assert block_buckets(Net(checkpoint_wrapper)) == plain


def test_a_plan_for_the_parameters_of_another_model_is_refused() -> None:
    """Its buckets would match nothing, and the schedule would be one that FSDP2 cannot run."""
    other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8))
    with world(2):
        graphs = apsched.capture(sharded(lambda block: block), INPUTS)
        with pytest.raises(
            apsched.InputError,
            match=r"forward: expected .* among the parameters of the model, found none of that",
        ):
            fsdp2_plan(fully_shard(other), *graphs)
