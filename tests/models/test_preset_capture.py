"""Captured presets have the collectives that their mesh and options ask for."""

import functools
from collections import Counter

import pytest
import torch

from apsched.capture.captured import Capture, CapturedGraph
from apsched.capture.fake_world import world
from apsched.fx.passes.parameters import PARAMETER_KEY
from apsched.models.build import build
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions
from apsched.models.preset_capture import capture_preset

Count = Counter[tuple[str, tuple[int, ...]]]


@functools.cache
def _capture(name: str, mesh: str, **options: object) -> Capture:
    return capture_preset(
        name, mesh=MeshSpec.parse(mesh), seq_len=32, options=ModelOptions(**options)
    )  # type: ignore[arg-type]


def _collectives(capture: Capture, graph: CapturedGraph) -> Count:
    """Return how often each kind of collective occurs, by the process ranks of its group."""
    counts: Count = Counter()
    for node in graph.module.graph.nodes:
        if _is_start(node):
            kind = (
                node.target.overloadpacket.__name__.removesuffix("_into_tensor")
                .removesuffix("_tensor")
                .removesuffix("_single")
            )
            counts[kind, capture.group_ranks[node.args[-1]]] += 1
    return counts


def _saved(capture: Capture) -> list[torch.fx.Node]:
    return [
        node
        for node in capture.graphs[0].module.graph.output_node().args[0][1:]
        if node.op != "placeholder"
    ]  # type: ignore[index,union-attr,misc]


def _saved_bytes(capture: Capture) -> int:
    return sum(node.meta["val"].nbytes for node in _saved(capture))


ALL = (0, 1, 2, 3)
LLAMA = 21  # parameters of llama3-debug
DEEPSEEK_DENSE, DEEPSEEK_EXPERT = 41, 6


@pytest.mark.parametrize(
    ("name", "mesh", "forward", "backward"),
    [
        (
            "llama3-debug",
            "fsdp=4",
            {("all_gather", ALL): LLAMA},
            {
                ("all_gather", ALL): LLAMA - 1,
                ("reduce_scatter", ALL): LLAMA,
            },  # the embedding isn't needed in backward
        ),
        ("llama3-debug", "replicate=4", {}, {("all_reduce", ALL): LLAMA}),
        (
            "llama3-debug",
            "replicate=2,fsdp=2",
            {("all_gather", (0, 1)): LLAMA},
            {
                ("all_gather", (0, 1)): LLAMA - 1,
                ("reduce_scatter", (0, 1)): LLAMA,
                ("all_reduce", (0, 2)): LLAMA,
            },
        ),
        (
            "llama3-debug",
            "fsdp=2,tp=2",
            # Per layer two gathers and two scatters of tokens; one each for embedding and output;
            # three numbers per token for the loss.
            {
                ("all_gather", (0, 2)): LLAMA,
                ("all_gather", (0, 1)): 5,
                ("reduce_scatter", (0, 1)): 5,
                ("all_reduce", (0, 1)): 3,
            },
            {
                ("all_gather", (0, 2)): LLAMA - 1,
                ("reduce_scatter", (0, 2)): LLAMA,
                ("all_gather", (0, 1)): 5,
                ("reduce_scatter", (0, 1)): 5,
                ("all_reduce", (0, 1)): 5,  # gradients of the norms
            },
        ),
        (
            "deepseek-v3-debug",
            "fsdp=4,ep=2",
            {
                ("all_gather", ALL): DEEPSEEK_DENSE,
                ("all_gather", (0, 2)): DEEPSEEK_EXPERT,
                ("all_to_all", (0, 1)): 4,
            },
            {
                ("all_gather", ALL): DEEPSEEK_DENSE - 1,
                ("all_gather", (0, 2)): DEEPSEEK_EXPERT,
                ("reduce_scatter", ALL): DEEPSEEK_DENSE,
                ("reduce_scatter", (0, 2)): DEEPSEEK_EXPERT,
                ("all_to_all", (0, 1)): 4,
            },
        ),
    ],
)
@pytest.mark.slow
def test_collectives_of_a_mesh(name: str, mesh: str, forward: Count, backward: Count) -> None:
    capture = _capture(name, mesh)
    assert [_collectives(capture, graph) for graph in capture.graphs] == [forward, backward]
    for graph in capture.graphs:
        graph.module.graph.lint()
        assert all("val" in node.meta for node in graph.module.graph.nodes if node.op != "output")
        assert all(_source(node) for node in graph.module.graph.nodes if _is_start(node))


def _is_start(node: torch.fx.Node) -> bool:
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace == "_c10d_functional"
        and len(node.args) > 1
    )


def _source(node: torch.fx.Node) -> object:
    """Return the parameter or the module that ``node`` comes from."""
    return (
        node.meta.get("custom", {}).get(PARAMETER_KEY)
        or node.meta.get("nn_module_stack")
        or node.meta.get("fwd_nn_module_stack")
    )


def test_gathered_parameters_are_gathered_again_or_saved() -> None:
    resharded, kept = (
        _capture("llama3-debug", "fsdp=4"),
        _capture("llama3-debug", "fsdp=4", reshard_after_forward=False),
    )
    assert not [node for node in _saved(resharded) if PARAMETER_KEY in node.meta.get("custom", {})]
    kept_parameters = {node.meta.get("custom", {}).get(PARAMETER_KEY) for node in _saved(kept)} - {
        None
    }
    assert len(kept_parameters) == LLAMA - 1
    gathered_bytes = sum(
        parameter.numel() * 2
        for name, parameter in _parameters()
        if name != "tok_embeddings.weight"
    )
    assert _saved_bytes(kept) == _saved_bytes(resharded) + gathered_bytes
    assert _collectives(kept, kept.graphs[1]) == {("reduce_scatter", ALL): LLAMA}


def _parameters() -> list[tuple[str, torch.nn.Parameter]]:
    with world(4):
        return list(
            build("llama3-debug", mesh=MeshSpec(fsdp=4), seq_len=32).module.named_parameters()
        )


def test_every_parameter_has_its_gather_and_its_reduction() -> None:
    forward, backward = _capture("llama3-debug", "fsdp=4").graphs
    names = set(forward.parameter_names.values())
    assert len(names) == LLAMA
    assert (
        names
        == _served(forward, "all_gather_into_tensor")
        == _served(backward, "reduce_scatter_tensor")
    )
    assert names - {"tok_embeddings.weight"} == _served(backward, "all_gather_into_tensor")
    assert "layers.1.feed_forward.w2.weight" in names


def _served(graph: CapturedGraph, operator: str) -> set[str]:
    target = getattr(torch.ops._c10d_functional, operator).default
    nodes = [node for node in graph.module.graph.nodes if node.target is target]
    served = {node.meta["custom"][PARAMETER_KEY] for node in nodes}
    assert len(served) == len(nodes)
    return served


@pytest.mark.slow
def test_activation_checkpointing_saves_less() -> None:
    sizes = {
        kind: _saved_bytes(_capture("llama3-debug", "fsdp=4", activation_checkpoint=kind))
        for kind in ("full", "selective", "every-2", "none")
    }
    assert sizes["full"] < sizes["selective"] < sizes["none"]
    assert sizes["full"] < sizes["every-2"] < sizes["none"]


def test_selective_checkpointing_saves_attention_and_every_second_product() -> None:
    capture = _capture("llama3-debug", "fsdp=4", activation_checkpoint="selective")
    targets = Counter(
        str(node.target) for graph in capture.graphs for node in graph.module.graph.nodes
    )
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert targets[str(attention)] == 2  # once per layer, in forward
    assert len(
        [node for node in _saved(capture) if node.target is torch.ops.aten.mm.default]
    ) in range(5, 9)  # of 15


def test_large_groups_add_no_nodes() -> None:
    """Neither uneven shards nor shards of another dim cost nodes per process rank."""
    sizes = [
        len(graph.module.graph.nodes)
        for graph in capture_preset(
            "llama3-debug", mesh=MeshSpec(fsdp=1024), seq_len=32, num_layers=1
        ).graphs
    ]
    assert sizes[0] < 250
    assert sizes[1] < 500


def test_inputs_that_live_on_are_kept() -> None:
    forward, backward = _capture("llama3-debug", "fsdp=4").graphs
    placeholders = {node.name for node in forward.module.graph.find_nodes(op="placeholder")}
    assert forward.kept_inputs == placeholders
    assert set(backward.parameter_names) <= backward.kept_inputs
    inputs = {_storage(node) for node in forward.module.graph.find_nodes(op="placeholder")}
    saved = forward.module.graph.output_node().args[0][1:]  # type: ignore[index]
    assert backward.kept_inputs == {node.name for node in saved if _storage(node) in inputs}  # type: ignore[union-attr,arg-type]


def _storage(node: torch.fx.Node) -> int:
    return node.meta["val"].untyped_storage()._cdata  # type: ignore[no-any-return]


def test_captures_are_the_same_each_time() -> None:
    first, second = (
        _capture("llama3-debug", "fsdp=2,tp=2"),
        _capture.__wrapped__("llama3-debug", "fsdp=2,tp=2"),
    )
    for one, other in zip(first.graphs, second.graphs, strict=True):
        assert one.module.code == other.module.code
    assert first.group_ranks == second.group_ranks


@pytest.mark.parametrize(
    ("mesh", "reduce_dtype"),
    [
        ("replicate=4", torch.bfloat16),
        ("replicate=4", torch.float64),
        ("replicate=2,fsdp=2", torch.float64),
        ("fsdp=2,tp=2", torch.float64),
    ],
)
def test_gradients_are_reduced_over_data_parallel_ranks_in_the_type_asked_for(
    mesh: str, reduce_dtype: torch.dtype
) -> None:
    capture = _capture("llama3-debug", mesh, reduce_dtype=reduce_dtype)
    reductions = [
        node
        for node in capture.graphs[1].module.graph.nodes
        if _is_start(node) and "reduce" in str(node.target)
    ]
    tensor_parallel = {(0, 1)} if mesh == "fsdp=2,tp=2" else set()
    reduced = [
        node for node in reductions if capture.group_ranks[node.args[-1]] not in tensor_parallel
    ]
    assert {node.meta["val"].dtype for node in reduced} == {reduce_dtype}
    assert {
        node.meta["val"].dtype
        for node in capture.graphs[1].module.graph.output_node().args[0][:LLAMA]
    } == {torch.float32}
