"""A module that runs partitioned graphs is compiled again: the second partition decides as the
first did.
"""

from collections import Counter
from functools import partial
from operator import getitem

import pytest
import torch
import torch.fx.traceback
from torch import nn
from torch._dynamo import nonstrict_trace
from torch.fx import GraphModule, Interpreter
from torch.utils.checkpoint import CheckpointPolicy

import apsched
from apsched.capture import joint
from apsched.capture.captured import Capture
from apsched.capture.fake_world import world
from apsched.capture.joint import capture_module
from apsched.fx.collectives import collective_kind, is_collective
from apsched.fx.graph_copies import copied
from apsched.fx.passes.checkpointing import saved_bytes, saved_nodes
from apsched.fx.passes.partition_replay import SAVED_KEY, replayed_saves, tag_saved
from apsched.fx.passes.run_passes import Pass
from apsched.models.build import BuiltModel, build
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions
from apsched.models.preset_capture import capture_built
from apsched.models.training import forward_inputs


class Graphs(torch.autograd.Function):
    """A forward and a backward graph as one differentiable function, as a compiler wraps them;
    tracers see each node's metadata.
    """

    @staticmethod
    def forward(ctx, graphs, *inputs):
        with torch.fx.traceback.preserve_node_meta():
            loss, *saved = Interpreter(graphs[0]).run(*inputs)
        ctx.graphs, ctx.num_inputs = graphs, len(inputs)
        ctx.save_for_backward(*saved)
        return loss

    @staticmethod
    def backward(ctx, gradient):
        with torch.fx.traceback.preserve_node_meta():
            gradients = list(Interpreter(ctx.graphs[1]).run(*ctx.saved_tensors, gradient))
        return None, *(gradients + [None] * ctx.num_inputs)[: ctx.num_inputs]


class Partitioned(nn.Module):
    """The result of a compiler: the parameters of a model as local shards, and its graphs."""

    def __init__(self, built: BuiltModel, capture: Capture) -> None:
        super().__init__()
        state = forward_inputs(built)[: -len(built.inputs)]
        num_parameters = len(list(built.module.parameters()))
        self.shards = nn.ParameterList(nn.Parameter(shard) for shard in state[:num_parameters])
        self.constants = state[num_parameters:]
        for k, buffer in enumerate(self.constants):
            self.register_buffer(f"constant_{k}", buffer)
        self.graphs = [graph.module for graph in capture.graphs]

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return Graphs.apply(self.graphs, *self.shards, *self.buffers(), *inputs)


CASES = {
    "fsdp=4": {},
    "fsdp=4 kept": {"reshard_after_forward": False},
    "fsdp=4 full": {"activation_checkpoint": "full"},
    "fsdp=2,tp=2 selective": {"activation_checkpoint": "selective"},
}


def twice(case: str, passes: tuple[Pass, ...] = ()) -> tuple[Capture, Capture]:
    with world(4):
        built = build(
            "llama3-debug",
            mesh=MeshSpec.parse(case.split()[0]),
            seq_len=32,
            num_layers=1,
            options=ModelOptions(**CASES[case]),
        )
        first = capture_built(built)
        return first, capture_module(
            Partitioned(built, first), built.inputs, source="again", passes=passes
        )


def figures(capture: Capture) -> tuple[list[Counter], int, int]:
    """Collectives of both graphs, bytes and number of saved tensors."""
    counts = [
        Counter(collective_kind(n) for n in graph.module.graph.nodes if is_collective(n))
        for graph in capture.graphs
    ]
    forward = capture.graphs[0].module
    return counts, saved_bytes(forward, 1), len(saved_nodes(forward, 1))


@pytest.mark.parametrize("case", CASES)
def test_the_second_partition_is_the_first(case):
    first, second = twice(case)
    assert figures(first) == figures(second)


def test_without_replay_every_gathered_parameter_is_saved(monkeypatch):
    monkeypatch.setattr(joint, "replayed_saves", lambda nodes: [])
    first, second = twice("fsdp=4")
    assert figures(first)[0] == [{"all_gather": 12}, {"all_gather": 11, "reduce_scatter": 12}]
    assert figures(second)[0] == [{"all_gather": 12}, {"reduce_scatter": 12}]
    assert figures(second)[1] > 2 * figures(first)[1]


def demands(policies: dict[str, CheckpointPolicy]) -> Pass:
    def run(module: GraphModule) -> GraphModule:
        result = copied(module)
        for node in result.graph.nodes:
            if node.name in policies:
                node.meta["recompute"] = policies[node.name]
        return result

    return Pass(name="demands", run=run)


def test_what_is_asked_for_since_goes_before():
    """One saved tensor is to be recomputed, and a recomputed one saved: in the second compilation
    alone.
    """
    first, second = twice("fsdp=4 full")
    saved = {node.name for node in saved_nodes(second.graphs[0].module, 1)}
    recomputed = [
        node.name
        for node in second.graphs[1].module.graph.nodes
        if node.target is torch.ops.aten.mm.default
        and node.name in {n.name for n in second.graphs[0].module.graph.nodes}
    ]
    not_wanted = next(
        n.name
        for n in saved_nodes(second.graphs[0].module, 1)
        if n.target is torch.ops.aten.rsqrt.default
    )
    asked = {
        recomputed[0]: CheckpointPolicy.MUST_SAVE,
        not_wanted: CheckpointPolicy.PREFER_RECOMPUTE,
    }
    _, changed = twice("fsdp=4 full", (demands(asked),))
    assert {node.name for node in saved_nodes(changed.graphs[0].module, 1)} - saved == {
        recomputed[0]
    }
    assert not_wanted not in {node.name for node in saved_nodes(changed.graphs[0].module, 1)}
    assert figures(first)[0] == figures(changed)[0]


def tagged_relu(module: GraphModule) -> torch.fx.Node:
    return module.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)[0]


def test_items_are_marked_on_the_node_that_has_them():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    split = graph.call_function(torch.ops.aten.split.Tensor, (x, 2))
    items = [
        graph.call_function(torch.ops.aten.relu.default, (x,)),
        *(graph.call_function(getitem, (split, k)) for k in (2, 0, 1)),
    ]
    graph.output((x, items[0], items[1], items[2], x))
    tagged = tag_saved(1).run(GraphModule({}, graph))
    (marked,) = tagged.graph.find_nodes(op="call_function", target=torch.ops.aten.split.Tensor)
    assert marked.meta["custom"][SAVED_KEY] == (0, 2)
    assert [node.args for node in replayed_saves(tagged.graph.nodes)] == [
        tagged_relu(tagged).args,
        (marked, 2),
        (marked, 0),
    ]
    for node in tagged.graph.nodes:
        node.meta["partitioner_tag"] = "is_backward"
    assert replayed_saves(tagged.graph.nodes) == [], (
        "tags that tracers copied to backward don't count"
    )


def test_the_second_graphs_compute_the_same():
    with world(1), torch.no_grad():
        built = build("llama3-debug", mesh=MeshSpec(), seq_len=32, materialize=True, num_layers=1)
        with torch.enable_grad():
            first = capture_built(built)
            second = capture_module(Partitioned(built, first), built.inputs, source="again")
        found = []
        for capture in (first, second):
            forward, backward = (graph.module for graph in capture.graphs)
            loss, *saved = forward(*forward_inputs(built))
            found.append(
                [loss, *(g for g in backward(*saved, torch.ones_like(loss)) if g is not None)]
            )
    assert len(found[0]) == len(found[1]) == 1 + len(list(built.module.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("case", "how", "num_again"),
    [
        ("fsdp=4", {}, 11),
        ("fsdp=4", {"keep": "none"}, 11),
        ("fsdp=4", {"keep": "all"}, 0),
        ("fsdp=4", {"reshard_after_forward": False}, 0),
        ("fsdp=4 kept", {}, 0),
        ("fsdp=4 kept", {"keep": "none"}, 11),
    ],
)
def test_torch_compile_of_such_a_module_keeps_what_is_stated(case, how, num_again):
    """As AutoParallel hands it to ``torch.compile``: Dynamo traces the graphs of the first
    partition without looking at them, and nodes that its backward computes again have the tags of
    forward.
    """
    with world(4):
        built = build(
            "llama3-debug",
            mesh=MeshSpec.parse("fsdp=4"),
            seq_len=32,
            num_layers=1,
            options=ModelOptions(**CASES[case]),
            materialize=True,
        )
        module = Partitioned(built, capture_built(built))
        run = nonstrict_trace(partial(Graphs.apply, module.graphs))
        torch._dynamo.reset()
        backend = apsched.backend(budget=0.0, memory_cap="none", **how)
        compiled = torch.compile(
            lambda *inputs: run(*module.shards, *module.buffers(), *inputs), backend=backend
        )
        compiled(*built.inputs).backward()
        gradients = [shard.grad for shard in module.shards]
        module.zero_grad()
        module(*built.inputs).backward()
        for shard, gradient in zip(module.shards, gradients, strict=True):
            assert torch.equal(shard.grad, gradient)
    forward, backward = (
        [r.problem.keys[c.key].kind for c in r.problem.collectives] for r in backend.results
    )
    assert forward.count("all_gather") == 12
    assert backward.count("all_gather") == num_again
