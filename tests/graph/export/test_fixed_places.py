"""A result that the graph uses by its place, or that no bucket's launch takes, stays out of
buckets.
"""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.capture.fake_world import world
from apsched.graph.export.export import export_graph
from tests.helpers.graphs.instrumented import UnitCosts, capture_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
WORLD = 4


@pytest.fixture(scope="module", autouse=True)
def group():
    with world(WORLD):
        yield


def gathered(x):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, WORLD, "0"))


def scattered(x):
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", WORLD, "0"))


def summed(x):
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", "0"))


def summed_in_place(result):
    c10d.wait_tensor(c10d.all_reduce_(result, "max", "0"))


def may_share(function, shape=(8, 8), dtype=torch.float32):
    """Return whether the first collective of ``function`` may share a launch."""
    module = make_fx(function, tracing_mode="fake")(torch.ones(shape, dtype=dtype))
    dag = export_graph(capture_of(module), UnitCosts())
    records = [record for _, record in dag.nodes(data="record")]
    return next(record.collective for record in records if record.collective).bucketable


def in_a_body(result, *offset):
    def body(x):
        return aten.as_strided.default(x, [2], [1], *offset) * 2

    return torch.cond(result.sum() > 0, body, body, (result,))


def resized(result):
    torch.ops.inductor.resize_storage_bytes_(result, 0)


USES = {
    "a view with an offset": lambda r: aten.as_strided.default(r, [2], [1], 0),
    "a part that is written": lambda r: aten.as_strided_scatter.default(r, r[0], [8], [1], 0),
    "a view of a view": lambda r: aten.as_strided.default(r.view(-1), [2], [1], 0),
    "complex numbers": lambda r: torch.view_as_complex(r.view(-1, 2)),
    "wider elements": lambda r: r.view(torch.float64),
    "another size": resized,
    "another transfer": summed_in_place,
    "a view with an offset in a body": lambda r: in_a_body(r, 0),
}
ANYWHERE = {
    "a view at its own offset": lambda r: aten.as_strided.default(r, [2], [1]),
    "a view at its own offset in a body": in_a_body,
    "narrower elements": lambda r: r.view(torch.int16),
    "equal elements": lambda r: r.view(torch.int32),
}


@pytest.mark.parametrize("reduced", [scattered, summed])
@pytest.mark.parametrize("use", [*USES, *ANYWHERE])
def test_a_sum_that_is_used_by_its_place_is_no_part_of_a_bucket(reduced, use):
    used = (USES | ANYWHERE)[use]

    def step(x):
        result = reduced(x)
        return result, used(result)

    assert may_share(step) == (use in ANYWHERE)


def test_a_gather_has_a_copy_of_its_own_behind_a_bucket():
    assert may_share(lambda x: aten.as_strided.default(gathered(x), [2], [1], 0))


@pytest.mark.parametrize("collective", [gathered, scattered, summed])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_gathers_of_complex_numbers_share_no_launch(collective, dtype):
    refused = collective is gathered and dtype is torch.complex64
    assert may_share(collective, dtype=dtype) != refused


def test_a_collective_that_autograd_knows_shares_no_launch():
    operators = torch.ops._c10d_functional_autograd
    for differentiable in (
        lambda x: c10d.wait_tensor(operators.all_gather_into_tensor(x, WORLD, "0")),
        lambda x: c10d.wait_tensor(operators.reduce_scatter_tensor(x, "sum", WORLD, "0")),
    ):
        assert not may_share(differentiable)
