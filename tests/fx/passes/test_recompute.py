"""Recompute tags: what the partitioner saves with and without them, on real joint graphs."""

import functools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import CheckpointPolicy

from apsched.capture.captured import Capture
from apsched.capture.fake_world import world
from apsched.capture.joint import capture_module
from apsched.errors import InputError
from apsched.fx.collectives import is_all_gather, is_wait_tensor
from apsched.fx.graph_copies import copied
from apsched.fx.passes import lists
from apsched.fx.passes.checkpointing import (
    _check_chains,
    recompute_gathers,
    saved_bytes,
    saved_nodes,
)
from apsched.fx.passes.parameters import PARAMETER_KEY, gather_nodes
from apsched.fx.passes.roles import classify
from apsched.fx.passes.run_passes import Pass, PassList, run_passes
from apsched.models.build import build
from apsched.models.mesh import MeshSpec


@functools.cache
def built_capture(mesh: str, **options: bool) -> Capture:
    spec = MeshSpec.parse(mesh)
    with world(spec.world_size):
        built = build("llama3-debug", mesh=spec, seq_len=32)
        return capture_module(built.module, built.inputs, source="llama3-debug", **options)


def only_the_gather() -> Pass:
    """Tag the gather and its wait, and leave the chain behind them to the partitioner."""

    def run(module):
        result = copied(module)
        for node in gather_nodes(result.graph):
            if is_all_gather(node) or is_wait_tensor(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                node.meta["ac_graph_id"] = 100_000
        return result

    return Pass(name="recompute_gathers", run=run)


class CastBehind(nn.Module):
    """Two products with weights that are gathered in float32, then cast and transposed: a chain
    behind each wait.
    """

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (4,))
        with FakeTensorMode() as self.mode:
            shards = [
                DTensor.from_local(torch.empty(16, 64), mesh, (Shard(0),), run_check=False)
                for _ in range(2)
            ]
        self.weights = nn.ParameterList(nn.Parameter(shard) for shard in shards)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            whole = weight.redistribute(placements=(Replicate(),)).to_local(
                grad_placements=(Partial(),)
            )
            x = (x @ whole.to(torch.bfloat16).t()).relu()
        return x.sum()


def captured_with(monkeypatch: pytest.MonkeyPatch, passes: PassList) -> Capture:
    """Capture with these passes on the joint graph, and no others."""
    monkeypatch.setattr("apsched.capture.joint.joint_passes", lambda **_: passes)
    with world(4):
        module = CastBehind()
        with module.mode:
            x = torch.empty(8, 64, dtype=torch.bfloat16, requires_grad=True)
        return capture_module(module, (x,), source="cast")


def parameters_saved(capture: Capture) -> int:
    saved = saved_nodes(capture.graphs[0].module, 1)
    named = {name for node, name in gather_nodes_of(capture).items() if node in saved}
    return len(named)


def gather_nodes_of(capture: Capture) -> dict:
    return gather_nodes(capture.graphs[0].module.graph)


def test_no_gathered_parameter_is_saved_nor_what_a_cast_makes_of_it(monkeypatch):
    """Without the pass the partitioner saves both weights; where only gather and wait are tagged,
    their casts; with it, neither.
    """
    bare, half, whole = (
        captured_with(monkeypatch, passes)
        for passes in (
            (classify(),),
            (classify(), only_the_gather()),
            (classify(), recompute_gathers()),
        )
    )
    assert [parameters_saved(capture) for capture in (bare, half, whole)] == [2, 2, 0]
    sizes = [saved_bytes(capture.graphs[0].module, 1) for capture in (bare, half, whole)]
    assert sizes[0] == sizes[1] == sizes[2] + 2 * 64 * 64 * 2
    assert [num_gathers(capture) for capture in (bare, half, whole)] == [2, 2, 4]


def num_gathers(capture: Capture) -> int:
    return sum(is_all_gather(node) for graph in capture.graphs for node in graph.module.graph.nodes)


def test_presets_save_no_gathered_parameter():
    assert parameters_saved(built_capture("fsdp=4")) == 0


def test_gathered_parameters_may_be_kept():
    kept = built_capture("fsdp=4", reshard_after_forward=False)
    assert parameters_saved(kept) == 20
    assert saved_bytes(kept.graphs[0].module, 1) > saved_bytes(
        built_capture("fsdp=4").graphs[0].module, 1
    )


def test_a_chain_tagged_in_part_breaks_the_spec():
    with pytest.raises(
        InputError,
        match=(
            r"pass recompute_gathers: node .*: expected a recompute tag on all that only moves a"
            r" parameter"
        ),
    ):
        run_passes(
            built_capture("fsdp=4").graphs[0].module,
            (
                Pass(
                    name="recompute_gathers", run=only_the_gather_of_a_bare_copy, spec=_check_chains
                ),
            ),
        )


def only_the_gather_of_a_bare_copy(module):
    result = copied(module)
    for node in result.graph.nodes:
        node.meta.pop("recompute", None)
    return only_the_gather().run(result)


def test_lists_are_values():
    assert [one.name for one in lists.joint_passes()] == ["classify", "recompute_gathers"]
    assert [one.name for one in lists.add_before_reducing()] == ["fuse_summed_scatters"]
    assert PARAMETER_KEY in next(iter(gather_nodes_of(built_capture("fsdp=4")))).meta["custom"]


@pytest.mark.slow
def test_what_the_tags_save_is_counted():
    """Of a preset whose gathers are cast behind the wait; without being asked nothing is
    counted.
    """
    spec = MeshSpec.parse("fsdp=2,tp=2")
    with world(spec.world_size):
        built = build("llama3-debug", mesh=spec, seq_len=32)
        counted = capture_module(
            built.module, built.inputs, source="llama3-debug", count_saved=True
        )
        plain = capture_module(built.module, built.inputs, source="llama3-debug")
    assert plain.saved_bytes is None
    forward = plain.graphs[0].module
    assert counted.saved_bytes.tagged == saved_bytes(forward, 1)
    assert counted.saved_bytes.untagged > counted.saved_bytes.tagged
    assert counted.graphs[0].module.code == forward.code
