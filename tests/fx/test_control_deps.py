"""Control dependencies of a scheduler go when a graph is scheduled again, and nothing else does."""

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

import apsched
from apsched.fx.control_deps import without_control_deps
from apsched.torch_compat import graphs as torch_private
from apsched.writeback.hold_order import hold_order
from tests.helpers.graphs.programs_of_communication import (
    CONTROL_DEPS,
    inputs_of_steps,
    step_of,
    traced_step,
)

aten, higher_order = torch.ops.aten, torch.ops.higher_order


@pytest.fixture(scope="module", autouse=True)
def group():
    """A fake process group of two process ranks."""
    dist.init_process_group("fake", store=torch_private.fake_store(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def lines(module):
    return [(n.name, n.op, str(n.target), str(n.args), "val" in n.meta) for n in module.graph.nodes]


def plain():
    step = step_of(lambda x, state, group, peer: [x.cos()], "0", 1)
    return make_fx(step, tracing_mode="fake")(*inputs_of_steps(0))


def test_calls_come_out_as_they_went_in():
    held = traced_step(CONTROL_DEPS, "0", 1)
    assert any("control_deps" in str(n.target) for n in held.graph.nodes)
    before = lines(held)
    free = without_control_deps(held)
    free.graph.lint()
    assert lines(free) == lines(plain())
    assert lines(held) == before
    assert not [name for name, _ in free.named_children()]


def test_a_graph_without_them_is_itself():
    module = plain()
    assert without_control_deps(module) is module


def test_what_torch_and_apsched_held_can_be_scheduled_again():
    module, torch_held = plain(), plain()
    torch_private.schedule_overlap(torch_held, lambda node, size: 0.01, held=True)
    fast = apsched.optimize(module, budget=0.05)
    for held in (torch_held, hold_order(fast)):
        assert any("control_deps" in str(n.target) for n in held.graph.nodes)
        again = apsched.optimize(held, budget=0.05).meta["apsched_result"]
        assert again.best is not None
        assert len(again.problem.collectives) == again.best.num_launches
    released = without_control_deps(hold_order(fast))
    roles = [n.meta.get("apsched") for n in fast.graph.nodes if "apsched" in n.meta]
    assert [n.meta["apsched"] for n in released.graph.nodes if "apsched" in n.meta] == roles


@pytest.mark.parametrize("returned", [0, 1])
def test_a_body_of_several_calls_stays_whole(returned):
    module = traced_step(CONTROL_DEPS, "0", 1)
    node = next(n for n in module.graph.nodes if "control_deps" in str(n.target))
    body = getattr(module, node.args[1].target)
    (call,) = (n for n in body.graph.nodes if n.op == "call_function")
    with body.graph.inserting_after(call):
        second = body.graph.call_function(aten.relu.default, (call,))
    second.meta["val"] = call.meta["val"]
    body.graph.output_node().args = ((call, second)[returned],)
    assert without_control_deps(module) is module
