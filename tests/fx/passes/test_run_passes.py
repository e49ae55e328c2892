"""The one loop: what it records, and what it refuses, by the name of the pass."""

import logging
from dataclasses import replace

import pytest
import torch
from torch.fx import GraphModule

from apsched.capture.fake_world import world
from apsched.errors import InputError
from apsched.fx.graph_copies import copied, finished
from apsched.fx.passes.run_passes import Pass, graph_lines, run_passes
from tests.helpers.graphs.toy_graphs import capture_toy


@pytest.fixture
def module():
    with world(2):
        yield capture_toy(torch.distributed.group.WORLD.group_name, 2, num_shards=2).module


def relu_for_tanh(module: GraphModule) -> GraphModule:
    result = copied(module)
    for node in result.graph.nodes:
        if node.target is torch.ops.aten.tanh.default:
            node.target = torch.ops.aten.relu.default
    return finished(result)


RELU = Pass(name="relu", run=relu_for_tanh)
NOTHING = Pass(name="nothing", run=copied)


def test_passes_run_in_order_and_each_leaves_a_record(module, caplog):
    before = graph_lines(module.graph)
    with caplog.at_level(logging.INFO, "apsched.fx.passes.run_passes"):
        run = run_passes(module, (NOTHING, RELU), diff=True)
    assert graph_lines(module.graph) == before
    assert [record.name for record in run.records] == ["nothing", "relu"]
    assert [line.partition(":")[0] for line in caplog.messages] == ["pass nothing", "pass relu"]
    assert run.records[0].diff == ""
    changed = [line for line in run.records[1].diff.splitlines()[2:] if line[0] in "+-"]
    assert (
        len([line for line in changed if "tanh.default" in line or "relu.default" in line]) == 4
    ), "two lines go, two come"
    assert len(changed) == 6, "a product whose result nobody wants goes, and what it was made of"
    count = len(module.graph.nodes)
    assert run.records[1].num_nodes == (count, count - 2)
    assert run.records[1].num_collectives == (6, 6)


def test_the_diff_shows_tags(module):
    def tagged(module: GraphModule) -> GraphModule:
        result = copied(module)
        next(iter(result.graph.nodes)).meta["custom"] = {"seen": True}
        return result

    (record,) = run_passes(module, (Pass(name="tag", run=tagged),), diff=True).records
    assert [
        line for line in record.diff.splitlines() if line.startswith("+") and "seen=True" in line
    ]
    assert "seen" not in graph_lines(module.graph)[0], "a copy has tags of its own"


def in_place(module: GraphModule) -> GraphModule:
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.tanh.default:
            node.target = torch.ops.aten.relu.default
    return module


def forgets_values(module: GraphModule) -> GraphModule:
    result = copied(module)
    for node in result.graph.nodes:
        if node.target is torch.ops.aten.tanh.default:
            node.meta = {}
    return result


def drops_a_wait(module: GraphModule) -> GraphModule:
    result = copied(module)
    wait = next(node for node in result.graph.nodes if "wait_tensor" in str(node.target))
    wait.replace_all_uses_with(wait.args[0])
    return finished(result)


def drops_an_output(module: GraphModule) -> GraphModule:
    result = copied(module)
    output = result.graph.output_node()
    output.args = (output.args[0][:-1],)
    return finished(result)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (in_place, "pass bad: expected its input to stay as it is, found it changed"),
        (forgets_values, 'pass bad: node tanh: expected meta\\["val"\\]'),
        (
            drops_a_wait,
            "pass bad: node all_gather_into_tensor: expected a wait_tensor of the collective, as",
        ),
        (drops_an_output, "pass bad: expected a graph that is called as before, with outputs"),
    ],
)
def test_a_pass_that_breaks_the_graph_is_named(module, run, message):
    with pytest.raises(InputError, match=message):
        run_passes(module, (NOTHING, Pass(name="bad", run=run)))


def test_a_pass_that_breaks_its_own_spec_is_named(module):
    def no_relu(module: GraphModule) -> None:
        if any(node.target is torch.ops.aten.relu.default for node in module.graph.nodes):
            raise InputError("expected no relu")

    with pytest.raises(InputError, match="pass relu: expected no relu"):
        run_passes(module, (replace(RELU, spec=no_relu),))
    assert run_passes(module, (replace(RELU, spec=no_relu),), check=False).records[0].name == "relu"


def test_a_list_names_each_pass_once():
    with pytest.raises(InputError, match="a pass list names each pass once; found nothing twice"):
        run_passes(torch.fx.GraphModule({}, torch.fx.Graph()), (NOTHING, NOTHING))


def test_what_nobody_uses_goes_but_not_what_writes():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (x,))
    graph.call_function(torch.ops.aten.relu.default, (x,))
    graph.call_function(torch.ops.aten.relu_.default, (x,))
    graph.output(x)
    result = finished(GraphModule({}, graph))
    assert [str(node.target) for node in result.graph.nodes if node.op == "call_function"] == [
        "aten.relu_.default"
    ]
