"""Parameters resharded in their node: the groups, and the graphs."""

import pytest
import torch

from apsched.capture.captured import Capture
from apsched.capture.keep import keep, keepable
from apsched.errors import InputError
from apsched.fx.node_shards import NodeGroup, divisor, node_groups
from apsched.names import in_node
from apsched.problem.problem import Problem
from apsched.schedule.schedule import as_captured
from apsched.schedule.simulate import simulate
from tests.helpers.graphs.sharded_layers import RANKS, captured_layers, loaded_layers

WIDTHS = (32, 64, 128)
NAMES = ("weights.0", "weights.1")


@pytest.fixture(scope="module")
def again() -> Capture:
    return captured_layers(WIDTHS)


def test_ranks_of_a_node_by_hand() -> None:
    groups = {
        "all": range(8),
        "every second": range(0, 16, 2),
        "one node": range(4),
        "one a node": (0, 4, 8),
        "uneven": range(6),
        "another": range(4, 12),
    }
    found = node_groups(groups, 4)
    assert {name: node.ranks for name, node in found.items()} == {
        "all": (0, 1, 2, 3),
        "every second": (0, 2),
    }
    assert {node.index for node in found.values()} == {0}
    assert found["all"].name == "all+node"
    sixth = node_groups(groups, 4, process_rank=6)
    assert {name: (node.ranks, node.index) for name, node in sixth.items()} == {
        "all": ((4, 5, 6, 7), 2),
        "every second": ((4, 6), 1),
        "another": ((4, 5, 6, 7), 2),
    }
    assert node_groups({"turns": (0, 4, 1, 5)}, 4) == {}, "FSDP2 takes consecutive ranks"
    assert node_groups({"unknown": ()}, 4) == {}


def _in_node(capture: Capture, names: tuple[str, ...], process_rank: int = 0) -> Capture:
    nodes = node_groups(capture.group_ranks, 2, process_rank)
    graphs = keep(*capture.graphs, [in_node(name) for name in names], nodes)
    ranks = {**capture.group_ranks, **{node.name: node.ranks for node in nodes.values()}}
    return Capture(source="in node", graphs=graphs, group_ranks=ranks)


def _handed_over(forward: Problem) -> list[int]:
    """Return the bytes of the tensors that forward returns and that the caller does not hold."""
    last = forward.num_nodes - 1
    return sorted(s.size_bytes for s in forward.storages if s.uses[-1:] == (last,) and not s.kept)


def test_backward_gathers_in_the_node_what_forward_kept_a_part_of(again: Capture) -> None:
    group = next(iter(again.group_ranks))
    forward, backward = (graph.problem for graph in loaded_layers(_in_node(again, NAMES[1:])))
    gathers = {
        backward.keys[c.key].group: (c.module, c.size_bytes)
        for c in backward.collectives
        if backward.keys[c.key].kind == "all_gather"
    }
    assert gathers == {
        group: ("weights.0", 4 * 32 * 64),
        f"{group}+node": ("weights.1", 4 * 64 * 128),
    }
    assert {k.group_size for k in backward.keys if k.group == f"{group}+node"} == {2}
    part = 4 * 64 * 128 // 2
    assert _handed_over(forward) == sorted([*_handed_over(loaded_layers(again)[0].problem), part])


def test_the_whole_parameter_is_freed_in_forward(again: Capture) -> None:
    """Forward then holds at its end as much as with every parameter gathered again, and a part."""
    sizes = []
    for capture in (again, _in_node(again, NAMES[1:])):
        problem = loaded_layers(capture)[0].problem
        sizes.append(simulate(problem, as_captured(problem.num_nodes)).live_bytes[-1])
    assert sizes[1] - sizes[0] == 4 * 64 * 128 // 2


@pytest.mark.parametrize("process_rank", range(RANKS))
def test_each_rank_keeps_its_own_part(again: Capture, process_rank: int) -> None:
    forward, _ = _in_node(again, NAMES[1:], process_rank).graphs
    cuts = [
        node.args[2:4]
        for node in forward.module.graph.find_nodes(
            op="call_function", target=torch.ops.aten.slice.Tensor
        )
    ]
    part = 64 * 128 // 2
    assert cuts == [(process_rank % 2 * part, process_rank % 2 * part + part)]


def test_a_parameter_that_has_no_equal_parts_is_refused(again: Capture) -> None:
    """Three process ranks on a node: none of the numbers of elements can be divided by three."""
    nodes = {name: NodeGroup(name="three", ranks=(0, 1, 2)) for name in again.group_ranks}
    assert [found.node for found in keepable(*again.graphs, nodes)] == [None, None]
    with pytest.raises(InputError, match=r"found 'weights.1 @node'; there are 2"):
        keep(*again.graphs, ["weights.1 @node"], nodes)


def test_only_elements_one_behind_the_other_can_be_cut() -> None:
    whole = torch.empty(4, 6)
    assert divisor(whole) == 24
    assert divisor(whole.t()) == divisor(whole[:, :3]) == divisor(torch.empty(0)) == 1


def test_without_several_nodes_there_is_nothing_to_choose(again: Capture) -> None:
    assert node_groups(again.group_ranks, RANKS) == {}
    assert all(found.node is None for found in keepable(*again.graphs))
