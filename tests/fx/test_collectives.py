"""The role of a node in communication, read from its operator and arguments."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed._symmetric_memory  # registers its operators
import torch.distributed.tensor.experimental._context_parallel._cp_custom_ops  # registers cplib
from torch._subclasses import FakeTensorMode

from apsched.capture.fake_world import world
from apsched.errors import InputError
from apsched.fx.collectives import (
    ANY_GROUP,
    collective_kind,
    describe,
    group_name,
    group_sizes,
    is_all_gather,
    is_blocking_collective,
    is_collective,
    is_reduce_scatter,
    is_unknown_communication,
    is_wait_tensor,
    kind_inside,
    ranks_of_groups,
    stated_group,
)
from apsched.torch_compat.graphs import process_group_names

c10d = torch.ops._c10d_functional
HAS_ISEND = hasattr(c10d, "isend")
"""torch 2.11 has none."""


def call(target, *args, result=(8, 4), source=(8, 4), dtype=torch.float32, **kwargs):
    """Return a call on one tensor ``x`` (given as the string "x"), with fake values."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    args, kwargs = torch.utils._pytree.tree_map(lambda a: x if a == "x" else a, (args, kwargs))
    node = graph.call_function(target, args, kwargs)
    with FakeTensorMode():
        x.meta["val"] = torch.empty(source, dtype=dtype)
        node.meta["val"] = torch.empty(result, dtype=dtype)
    return node


def gather(**kwargs):
    return call(
        c10d.all_gather_into_tensor.default,
        "x",
        4,
        "dp",
        result=(32, 4),
        dtype=torch.bfloat16,
        **kwargs,
    )


def test_predicates_name_the_kind():
    scatter = call(c10d.reduce_scatter_tensor.default, "x", "avg", 4, "dp", result=(2, 4))
    reduce = call(c10d.all_reduce.default, "x", "sum", "dp")
    exchange = call(c10d.all_to_all_single.default, "x", [8], [8], "ep")
    wait = call(c10d.wait_tensor.default, "x")
    compute = call(torch.ops.aten.relu.default, "x")
    nodes = (gather(), scatter, reduce, exchange, wait, compute)
    assert [collective_kind(node) for node in nodes] == [
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "all_to_all",
        None,
        None,
    ]
    predicates = (is_all_gather, is_reduce_scatter, is_wait_tensor)
    table = [
        [predicate(node) for predicate in predicates]
        for node in (gather(), scatter, wait, reduce, exchange, compute)
    ]
    assert table == [[row == column for column in range(3)] for row in range(6)]
    assert [is_collective(n) for n in (gather(), wait, compute)] == [True, False, False]


def test_bytes_are_counted_once_as_nccl_does():
    sizes = {"dp": 4}
    assert describe(gather(), sizes).size_bytes == 32 * 4 * 2
    assert (
        describe(
            call(c10d.reduce_scatter_tensor.default, "x", "avg", 4, "dp", result=(2, 4)), sizes
        ).size_bytes
        == 8 * 4 * 4
    )
    reduce = describe(call(c10d.all_reduce.default, "x", "AVG", "dp"), sizes)
    assert (reduce.size_bytes, reduce.input_bytes, reduce.output_bytes, reduce.reduce_op) == (
        128,
        128,
        128,
        "avg",
    )


@pytest.mark.parametrize(
    ("target", "arguments", "kind", "holds", "in_place", "coalesced"),
    [
        (c10d.all_reduce.default, ("x", "sum", "dp"), "all_reduce", False, False, False),
        (c10d.all_reduce_.default, ("x", "sum", "dp"), "all_reduce", True, True, False),
        (c10d.all_reduce_coalesced.default, (["x"], "sum", "dp"), "all_reduce", False, False, True),
        (c10d.all_reduce_coalesced_.default, (["x"], "sum", "dp"), "all_reduce", True, True, True),
        (c10d.all_gather_into_tensor_out.default, ("x", 4, "dp"), "all_gather", True, True, False),
        (
            c10d.all_gather_into_tensor_coalesced.default,
            (["x"], 4, "dp"),
            "all_gather",
            True,
            False,
            True,
        ),
        (
            c10d.reduce_scatter_tensor_out.default,
            ("x", "sum", 4, "dp"),
            "reduce_scatter",
            True,
            True,
            False,
        ),
        (
            c10d.reduce_scatter_tensor_coalesced.default,
            (["x"], "sum", 4, "dp"),
            "reduce_scatter",
            True,
            False,
            True,
        ),
        (c10d.broadcast.default, ("x", 0, "dp"), "broadcast", False, False, False),
        (c10d.broadcast_.default, ("x", 0, "dp"), "broadcast", True, True, False),
    ],
)
def test_every_variant_says_what_it_holds_and_where_it_writes(
    target, arguments, kind, holds, in_place, coalesced
):
    described = describe(call(target, *arguments), {"dp": 4})
    found = (
        described.kind,
        described.holds_input,
        described.in_place,
        described.coalesced,
        described.group,
        described.input_bytes,
    )
    assert found == (kind, holds, in_place, coalesced, "dp", 128)


def test_arguments_may_be_passed_by_name():
    node = call(
        c10d.all_gather_into_tensor.default,
        input="x",
        group_size=4,
        group_name="dp",
        result=(32, 4),
    )
    assert describe(node, group_sizes([node], {})).group_size == 4
    assert describe(node, {"dp": 4}).input_bytes == 128


def test_a_group_without_a_size_takes_it_from_another_node_or_from_group_ranks():
    reduce = call(c10d.all_reduce.default, "x", "sum", "dp")
    assert group_sizes([reduce, gather()], {}) == {"dp": 4}
    assert group_sizes([reduce], {"dp": (0, 2, 4)}) == {"dp": 3}
    with pytest.raises(
        InputError, match="node all_reduce_default: expected the size of process group 'dp'"
    ):
        group_sizes([reduce], {"dp": ()})


def test_a_group_that_only_the_registry_of_torch_knows():
    """Its size and, of a group of this process, its process ranks; what the graph says of the size
    goes before both.
    """
    reduce = call(c10d.all_reduce.default, "x", "sum", "alias")
    with world(8):
        group = torch.distributed.new_group([0, 2, 4, 6])
        with registered_as("alias", group):
            assert "alias" not in process_group_names()
            assert group_sizes([reduce], {}) == {"alias": 4}
            assert ranks_of_groups([reduce], {}) == {"alias": (0, 2, 4, 6)}
            assert ranks_of_groups([reduce], {"alias": (5, 6)}) == {"alias": (5, 6)}
            inside = call(torch.ops.cplib.flex_cp_allgather.default, "x", "x", 2, "alias")
            assert ranks_of_groups([inside], {}) == {"alias": (0, 2, 4, 6)}
            two = call(c10d.all_gather_into_tensor.default, "x", 2, "alias", result=(16, 4))
            assert group_sizes([reduce, two], {"alias": tuple(range(256))}) == {"alias": 2}
    assert ranks_of_groups([reduce], {}) == {}
    with pytest.raises(InputError, match=r"'alias'.*group_ranks=.*--group-ranks NAME=0-7"):
        group_sizes([reduce], {})


@contextmanager
def registered_as(name: str, group: torch.distributed.ProcessGroup) -> Iterator[None]:
    """Run the body with a further name of ``group``, as other libraries register their own."""
    torch._C._distributed_c10d._register_process_group(name, group)
    try:
        yield
    finally:
        torch._C._distributed_c10d._unregister_process_group(name)


def test_the_name_of_a_group_may_be_a_node():
    graph = torch.fx.Graph()
    x, group = graph.placeholder("x"), graph.placeholder("group")
    group.meta["val"] = "dp"
    node = graph.call_function(c10d.all_reduce.default, (x, "sum", group))
    assert group_name(node) == "dp"


@pytest.mark.parametrize(
    "target",
    [
        *([c10d.isend.default] if HAS_ISEND else []),
        torch.ops.c10d.allreduce_.default,
        torch.ops.symm_mem._low_contention_all_gather.default,
    ],
)
def test_communication_that_is_not_known_is_no_start_and_no_wait(target):
    node = call(target, "x", 0, 0, "dp")
    assert is_unknown_communication(target)
    assert not is_collective(node)
    assert not is_wait_tensor(node)


@pytest.mark.parametrize(
    "target",
    [
        c10d.all_reduce.default,
        c10d.wait_tensor.default,
        c10d._wrap_tensor_autograd.default,
        torch.ops.c10d_functional.wait_tensor.default,
        torch.ops.aten.relu.default,
        torch.ops.symm_mem.fused_all_gather_matmul.default,
        torch.ops.cplib.flex_cp_allgather.default,
        torch.relu,
    ],
)
def test_what_is_known_is_not_unknown(target):
    assert not is_unknown_communication(target)


@pytest.mark.skipif(not HAS_ISEND, reason="this torch has no isend")
def test_the_group_of_unknown_communication_is_known_where_it_says_so():
    assert stated_group(call(c10d.isend.default, "x", 0, 0, "dp")) == "dp"
    assert stated_group(call(torch.ops.c10d.allreduce_.default, "x", 0, 0)) == ANY_GROUP
    sent = call(c10d.isend.default, "x", 0, 0, "dp")
    assert group_sizes([sent], {}) == {}
    assert group_sizes([sent], {"dp": (0, 1, 2)}) == {"dp": 3}


def test_an_operator_that_transfers_inside_is_no_start():
    node = call(torch.ops.cplib.flex_cp_allgather.default, "x", "x", 2, "cp")
    assert kind_inside(node.target) == "all_gather"
    assert group_name(node) == stated_group(node) == "cp"
    assert not is_collective(node)
    assert not is_blocking_collective(node)
    assert kind_inside(torch.ops.aten.relu.default) is None


def test_a_collective_that_blocks_is_no_start():
    node = call(torch.ops._dtensor.shard_dim_alltoall.default, "x", 0, 1, "tp")
    assert is_blocking_collective(node)
    assert not is_collective(node)
    assert describe(node, {"tp": 2}).kind == "all_to_all"
