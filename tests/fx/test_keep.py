"""Parameters kept on a pair of graphs are those that the partitioner would have kept."""

import copy
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch

from apsched.capture.captured import Capture
from apsched.capture.fake_world import world
from apsched.capture.joint import capture_module
from apsched.capture.keep import keep, keepable
from apsched.errors import InputError
from apsched.models.mesh import MeshSpec
from apsched.models.preset_capture import capture_preset
from apsched.schedule.schedule import as_captured
from apsched.schedule.simulate import simulate
from tests.fx.passes.test_recompute import CastBehind
from tests.helpers.graphs.sharded_layers import captured_layers, loaded_layers

WIDTHS = (32, 64, 128, 32)


def _figures(capture: Capture) -> list[tuple[object, ...]]:
    """Return collectives by what they carry, step time and peak of each graph, as captured."""
    found = []
    for graph in loaded_layers(capture):
        problem = graph.problem
        timeline = simulate(problem, as_captured(problem.num_nodes))
        carried = [(problem.keys[c.key].kind, c.size_bytes) for c in problem.collectives]
        found.append((carried, timeline.step_time_ticks, timeline.peak_memory_bytes))
    return found


def _kept(capture: Capture, names: tuple[str, ...]) -> Capture:
    graphs = keep(*capture.graphs, names)
    return Capture(source="kept", graphs=graphs, group_ranks=capture.group_ranks)


NAMES = tuple(f"weights.{k}" for k in range(3))
CHOICES = [c for n in range(1, 4) for c in combinations(NAMES, n)]


@pytest.fixture(scope="module")
def again() -> Capture:
    return captured_layers(WIDTHS)


@pytest.mark.parametrize("names", CHOICES, ids=" ".join)
def test_each_choice_has_the_figures_of_the_partitioner(again: Capture, names) -> None:
    assert _figures(_kept(again, names)) == _figures(captured_layers(WIDTHS, kept=names))


def test_nothing_that_was_given_changes(again: Capture) -> None:
    before = [str(graph.module.graph) for graph in again.graphs]
    _kept(again, NAMES)
    assert [str(graph.module.graph) for graph in again.graphs] == before


def test_forward_hands_over_what_backward_takes_place_by_place(again: Capture) -> None:
    forward, backward = keep(*again.graphs, NAMES[1:])
    outputs = forward.module.graph.output_node()
    saved = [node.name for node in outputs.args[0]][1:]
    inputs = [node.name for node in backward.module.graph.find_nodes(op="placeholder")]
    assert inputs[: len(saved)] == saved
    assert len(outputs.meta["desc"]) == len(saved) + 1
    assert set(backward.parameter_names.values()) == {NAMES[0]}
    assert len(backward.kept_inputs) == len(again.graphs[1].kept_inputs) - 2


def test_a_cast_behind_the_gather_is_kept_in_place_of_it() -> None:
    capture = captured_layers(WIDTHS, cast=torch.bfloat16)
    found = {k.name: k.again for k in keepable(*capture.graphs)}
    assert [again.value_bytes for again in found.values()] == [
        (2 * a * b,) for a, b in pairwise(WIDTHS)
    ]
    kept = _figures(_kept(capture, NAMES))
    assert kept == _figures(captured_layers(WIDTHS, cast=torch.bfloat16, kept=NAMES))


def test_a_transposed_copy_is_kept_at_its_true_size() -> None:
    """Gathered in float32, cast and transposed: 2 bytes for each of 64 x 64 elements."""
    with world(4):
        model = CastBehind()
        with model.mode:
            x = torch.empty(8, 64, dtype=torch.bfloat16, requires_grad=True)
        capture = capture_module(model, (x,), source="layers")
    found = [k.again.value_bytes for k in keepable(*capture.graphs)]
    assert found == [(2 * 64 * 64,)] * 2


def test_a_shard_that_backward_reads_itself_stays_an_input() -> None:
    capture = captured_layers(WIDTHS, penalty=True)
    assert not any(k.again.frees_shard for k in keepable(*capture.graphs))
    assert _figures(_kept(capture, NAMES)) == _figures(
        captured_layers(WIDTHS, penalty=True, kept=NAMES)
    )


@pytest.mark.parametrize(
    ("model", "mesh", "again"),
    [("llama3-debug", "fsdp=4,tp=2", 0), ("deepseek-v3-debug", "fsdp=4,ep=2", 0)],
)
def test_all_parameters_of_a_preset_can_be_kept(model: str, mesh: str, again: int) -> None:
    """All but the embedding, which backward does not read."""
    capture = capture_preset(model, mesh=MeshSpec.parse(mesh), seq_len=64, num_layers=1)
    names = [k.name for k in keepable(*capture.graphs)]
    assert set(capture.graphs[0].parameter_names.values()) - set(names) == {"tok_embeddings.weight"}
    _, backward = keep(*capture.graphs, names)
    target = torch.ops._c10d_functional.all_gather_into_tensor.default
    gathers = backward.module.graph.find_nodes(op="call_function", target=target)
    left = [n for n in gathers if n.meta.get("custom", {}).get("apsched_parameter")]
    assert len(left) == again


def test_a_name_that_is_no_parameter_is_refused(again: Capture) -> None:
    with pytest.raises(InputError, match=r"'weights.7'; there are 3 \(weights.0"):
        keep(*again.graphs, ["weights.7"])


def _gathered_twice(capture: Capture, name: str) -> Capture:
    """Return ``capture`` whose backward gathers the parameter ``name`` for each of two uses, as
    that of two micro-batches does.
    """
    forward, backward = capture.graphs
    module = copy.deepcopy(backward.module)
    graph = module.graph
    again = next(k.again for k in keepable(forward, backward) if k.name == name)
    node = {n.name: n for n in graph.nodes}[again.values[0][1]]
    (use,) = node.users
    chain = [node]
    while (above := chain[-1].all_input_nodes[0]).op != "placeholder":
        chain.append(above)
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    with graph.inserting_before(use):
        for one in reversed(chain):
            copies[one] = graph.node_copy(one, lambda n: copies.get(n, n))
        second = graph.node_copy(use, lambda n: copies.get(n, n))
    with graph.inserting_after(use):
        both = graph.call_function(torch.ops.aten.add.Tensor, (use, second))
    both.meta = dict(use.meta)
    use.replace_all_uses_with(both, delete_user_cb=lambda user: user is not both)
    module.recompile()
    return replace(capture, graphs=(forward, replace(backward, module=module)))


def test_a_parameter_that_backward_gathers_twice_is_handed_over_once(again: Capture) -> None:
    capture = _gathered_twice(again, NAMES[1])
    (once,), (twice,) = (
        [k.again for k in keepable(*one.graphs) if k.name == NAMES[1]] for one in (again, capture)
    )
    assert (len(twice.values), len(twice.gathers)) == (2, 2)
    assert twice.value_bytes == once.value_bytes
    (_, plain), (_, kept) = (keep(*one.graphs, [NAMES[1]]) for one in (again, capture))
    names = [[n.target for n in g.module.graph.find_nodes(op="placeholder")] for g in (plain, kept)]
    assert names[0] == names[1]
    assert len(set(names[1])) == len(names[1])
    target = torch.ops._c10d_functional.all_gather_into_tensor.default
    left = (
        len(g.module.graph.find_nodes(op="call_function", target=target)) for g in (plain, kept)
    )
    assert next(left) == next(left)
