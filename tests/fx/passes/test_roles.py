"""Roles of collectives: by descriptors before the partition, by structure after it; both agree, on
every kind of mesh.
"""

import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from apsched.capture.captured import Capture
from apsched.capture.fake_world import world
from apsched.capture.graph_module import capture_graph
from apsched.fx.collectives import is_collective
from apsched.fx.graph_copies import copied
from apsched.fx.passes.roles import Role, classify, tagged_role, waits_of
from apsched.fx.passes.run_passes import run_passes
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions
from apsched.models.preset_capture import capture_preset
from apsched.names import primary_group
from tests.helpers.graphs.structural_roles import structural_roles
from tests.helpers.graphs.toy_graphs import capture_toy

R = Role
CASES = {
    "llama3-debug fsdp=4": (
        {R.PARAMETER_GATHER: 21},
        {R.PARAMETER_GATHER: 20, R.GRADIENT_SCATTER: 21},
    ),
    "llama3-debug fsdp=4 kept": ({R.PARAMETER_GATHER: 21}, {R.GRADIENT_SCATTER: 21}),
    "llama3-debug replicate=4": ({}, {R.GRADIENT_SUM: 21}),
    "llama3-debug replicate=2,fsdp=2": (
        {R.PARAMETER_GATHER: 21},
        {R.PARAMETER_GATHER: 20, R.GRADIENT_SCATTER: 21, R.REPLICA_SUM: 21},
    ),
    "llama3-debug tp=2": (
        {R.SEQUENCE_PARALLEL: 10, R.TENSOR_PARALLEL: 3},
        {R.SEQUENCE_PARALLEL: 10, R.PARTIAL_GRADIENT_SUM: 5},
    ),
    "llama3-debug replicate=2,tp=2": (
        {R.SEQUENCE_PARALLEL: 10, R.TENSOR_PARALLEL: 3},
        {R.SEQUENCE_PARALLEL: 10, R.PARTIAL_GRADIENT_SUM: 5, R.GRADIENT_SUM: 21},
    ),
    "llama3-debug replicate=2,fsdp=2,tp=2": (
        {R.PARAMETER_GATHER: 21, R.SEQUENCE_PARALLEL: 10, R.TENSOR_PARALLEL: 3},
        {
            R.PARAMETER_GATHER: 20,
            R.GRADIENT_SCATTER: 21,
            R.REPLICA_SUM: 21,
            R.SEQUENCE_PARALLEL: 10,
            R.PARTIAL_GRADIENT_SUM: 5,
        },
    ),
    # Checkpointing gathers saved activations again: their inputs are the graph's, but no
    # parameters.
    "llama3-debug fsdp=2,tp=2 selective": (
        {R.PARAMETER_GATHER: 21, R.SEQUENCE_PARALLEL: 10, R.TENSOR_PARALLEL: 3},
        {
            R.PARAMETER_GATHER: 20,
            R.GRADIENT_SCATTER: 21,
            R.SEQUENCE_PARALLEL: 14,
            R.PARTIAL_GRADIENT_SUM: 5,
        },
    ),
    "deepseek-v3-debug replicate=2,fsdp=4,ep=2": (
        {R.PARAMETER_GATHER: 47, R.EXPERT_PARALLEL: 4},
        {R.PARAMETER_GATHER: 46, R.GRADIENT_SCATTER: 47, R.REPLICA_SUM: 47, R.EXPERT_PARALLEL: 4},
    ),
}


@functools.cache
def captured(case: str) -> Capture:
    name, mesh, *how = case.split()
    options = ModelOptions(
        reshard_after_forward="kept" not in how,
        activation_checkpoint="selective" if "selective" in how else "none",
    )
    return capture_preset(name, mesh=MeshSpec.parse(mesh), seq_len=32, options=options)


@pytest.mark.parametrize("case", CASES)
def test_tags_survive_the_partitioner_and_structure_agrees_with_them(case):
    capture = captured(case)
    for graph, expected in zip(capture.graphs, CASES[case], strict=True):
        by_structure = structural_roles(graph, capture.group_ranks)
        by_tags = {start: tagged_role(start) for start in by_structure}
        assert by_tags == by_structure
        assert Counter(by_tags.values()) == expected
        assert all(
            tagged_role(wait) is role for start, role in by_tags.items() for wait in waits_of(start)
        )


def test_structure_needs_no_tags_and_no_names():
    """The same graphs, stripped of every tag, with placeholders named as AOTAutograd names them."""
    capture = captured("llama3-debug fsdp=2,tp=2 selective")
    for graph in capture.graphs:
        stripped = copied(graph.module)
        for node in stripped.graph.nodes:
            node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
        found = structural_roles(
            replace(capture_graph(stripped), name=graph.name), capture.group_ranks
        )
        tagged = {
            node.name: tagged_role(node)
            for node in graph.module.graph.nodes
            if tagged_role(node) is not None
        }
        assert {node.name: role for node, role in found.items()}.items() <= tagged.items()
        assert found


def test_a_mean_behind_the_reduction_is_still_a_gradient():
    """A step by hand: a scatter that is scaled, one that an all-reduce follows, an all-reduce
    alone, and one on the path.
    """
    with world(2):
        graph = capture_toy(torch.distributed.group.WORLD.group_name, 2, num_shards=4)
        found = structural_roles(replace(graph, name="backward"), {})
    counts = Counter(found.values())
    assert counts == {
        R.PARAMETER_GATHER: 4,
        R.GRADIENT_SCATTER: 3,
        R.REPLICA_SUM: 1,
        R.GRADIENT_SUM: 1,
        R.OTHER: 1,
    }


def test_the_pass_alone_gives_the_tags():
    """What capture runs by itself, run again on a graph that has lost them: without the pass there
    are none.
    """
    with world(2):
        graph = capture_toy(torch.distributed.group.WORLD.group_name, 2, num_shards=2)
        starts = [node.name for node in graph.module.graph.nodes if is_collective(node)]
        assert all(tagged_role(node) is None for node in graph.module.graph.nodes)
        (record,) = run_passes(graph.module, (classify(),), diff=True).records
    assert sum(
        line.startswith("+") and "apsched_role" in line for line in record.diff.splitlines()
    ) == 2 * len(starts)


def test_without_gathers_there_is_no_primary_group_and_ties_pick_exactly_one():
    assert primary_group([]) is None
    assert primary_group(["b", "a", "b", "a"]) == primary_group(["a", "b", "a", "b"]) == "a"
    assert primary_group(["a", "b", "b"]) == "b"
