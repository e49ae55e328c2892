"""Private functions of torch that write-back uses."""

import pytest
import torch
import torch.distributed as dist
from torch.fx import Graph, GraphModule

from apsched.torch_compat.graphs import (
    empty_graph_like,
    group_of_name,
    node_source,
    process_rank_in_group,
)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@pytest.fixture
def group(tmp_path):
    """The name of a real group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_gather_with_out_writes_into_out_and_returns_it(group):
    buffer = torch.empty(4)
    own = buffer[0:4]
    aten._foreach_copy_(
        [own[0:1], own[1:4]], [torch.ones(1, dtype=torch.float64), torch.full((3,), 2.0)]
    )  # casts on the way
    started = c10d.all_gather_into_tensor_out(own, 1, group, out=buffer)
    waited = c10d.wait_tensor(started)
    assert started.data_ptr() == waited.data_ptr() == buffer.data_ptr()
    assert buffer.tolist() == [1, 2, 2, 2]


def test_all_reduce_with_underscore_writes_into_its_input(group):
    buffer = torch.ones(3)
    assert c10d.wait_tensor(c10d.all_reduce_(buffer, "sum", group)).data_ptr() == buffer.data_ptr()


def test_functional_all_reduce_leaves_its_input(group):
    payload = torch.ones(3)
    assert c10d.wait_tensor(c10d.all_reduce(payload, "sum", group)).data_ptr() != payload.data_ptr()


def test_reduce_scatter_splits_dim_0(group):
    assert c10d.wait_tensor(
        c10d.reduce_scatter_tensor(torch.ones(1, 5), "sum", 1, group)
    ).shape == (1, 5)


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (c10d.all_gather_into_tensor.default, ["input", "group_size", "group_name"]),
        (c10d.all_gather_into_tensor_out.default, ["input", "group_size", "group_name", "out"]),
        (c10d.reduce_scatter_tensor.default, ["input", "reduce_op", "group_size", "group_name"]),
        (c10d.all_reduce.default, ["input", "reduce_op", "group_name"]),
        (c10d.all_reduce_.default, ["input", "reduce_op", "group_name"]),
    ],
)
def test_arguments_of_functional_collectives(operator, arguments):
    assert [argument.name for argument in operator._schema.arguments] == arguments


def test_process_rank_is_found_by_the_name_of_the_group(group):
    assert process_rank_in_group(group) == 0


def test_a_group_is_found_by_its_name(group):
    assert group_of_name(group).size() == 1


def test_a_stream_can_be_held_back():
    assert callable(torch.cuda._sleep)  # what it does needs a GPU


def test_unknown_groups_are_a_lookup_error(group):
    with pytest.raises(LookupError, match="no process group named 'nowhere' runs"):
        process_rank_in_group("nowhere")


def test_without_process_groups_every_group_is_unknown():
    with pytest.raises(LookupError, match="no process group named '0' runs"):
        process_rank_in_group("0")


def test_an_empty_graph_like_another_keeps_its_calling_convention():
    class Doubled(torch.fx.graph.CodeGen):
        pass

    graph = Graph()
    graph.set_codegen(Doubled())
    new = empty_graph_like(graph)
    assert len(new.nodes) == 0
    new.output(new.placeholder("x"))
    assert GraphModule({}, new)(3) == 3
    assert type(new._codegen) is Doubled
    assert new._codegen is not graph._codegen


def test_a_node_source_names_its_node_and_pass():
    node = Graph().placeholder("x")
    source = node_source(node, "apsched").to_dict()
    assert (source["name"], source["pass_name"], source["action"]) == (
        "x",
        "apsched",
        "create+replace",
    )
