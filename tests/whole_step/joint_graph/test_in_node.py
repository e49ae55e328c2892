"""Parameters resharded in their node where forward and backward are one graph: against every choice
of small steps.
"""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch.fx import GraphModule

from apsched.capture.captured import Capture
from apsched.capture.keep import keep, keepable
from apsched.capture.one_graph import joined, with_joint_graph
from apsched.config import Caps, SolveOptions
from apsched.fx.graph_copies import copied
from apsched.fx.keep import with_parts
from apsched.fx.node_shards import node_groups
from apsched.fx.passes.parameters import is_backward
from apsched.integrations.torchtitan_keep import halves
from apsched.kinds import CollectiveKind
from apsched.names import in_node, nodes_of_part
from apsched.pipeline.load import with_apart
from apsched.pipeline.solve_graph import SolveRequest
from apsched.pipeline.steps import check_round_trip, rewrite
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.report.answer.joint_graph import joint_json, joint_lines
from apsched.schedule.verify import verify
from apsched.whole_step.choices import Choice, kept_in_node
from apsched.whole_step.improve import ticks_of
from apsched.whole_step.joint_graph.step import JointStep, solve_joint
from tests.helpers.graphs.sharded_layers import (
    FlatPrices,
    PricesInNodes,
    captured_layers,
    loaded_layers,
)

NAMES = ("weights.0", "weights.1")
SLOW, FAST = PricesInNodes(bytes_per_us=150.0), PricesInNodes(bytes_per_us=4000.0)
QUIET = Progress(quiet=True)


@pytest.fixture(scope="module")
def layers() -> Capture:
    return with_joint_graph(captured_layers((32, 64, 128)))


@pytest.fixture(scope="module")
def layers_with_casts() -> Capture:
    """Compute and the parts take casts of gathered parameters."""
    return with_joint_graph(captured_layers((32, 64, 128), cast=torch.bfloat16))


def step_of(capture: Capture, prices: FlatPrices, cap_bytes: int | None) -> JointStep:
    *apart, joint = loaded_layers(capture, prices, ranks_per_node=2)
    request = SolveRequest(
        caps=Caps(),
        memory_cap=MemoryCap(size_bytes=cap_bytes),
        options=SolveOptions(time_slack=0.0, budget=0.0),
    )
    return JointStep.of(with_apart(joint, apart), request, QUIET)


def every_choice() -> Iterator[Choice]:
    for entries in product(*(("", name, in_node(name)) for name in NAMES)):
        yield Choice(filter(None, entries))


@pytest.mark.slow
@pytest.mark.parametrize("prices", [SLOW, FAST], ids=["slow", "fast"])
@pytest.mark.parametrize("cap_bytes", [None, 140_000, 126_000])
def test_no_choice_is_faster_than_the_bound(
    layers: Capture, prices: PricesInNodes, cap_bytes: int | None
) -> None:
    """And the schedule of every choice is one of its graph, and keeps the cap."""
    step = step_of(layers, prices, cap_bytes)
    found = solve_joint(step)
    assert found.bound.ticks <= ticks_of(found.best)
    num_fitting = 0
    for kept in every_choice():
        choice = step.solve(kept)
        if not choice.fits:
            continue
        (result,) = choice.results
        assert found.bound.ticks <= choice.step_ticks, sorted(kept)
        assert choice.bound_ticks <= choice.step_ticks
        assert verify(result.problem, result.best.schedule, result.caps) == ()
        num_fitting += 1
    assert num_fitting >= 2


@pytest.mark.parametrize("capture", ["layers", "layers_with_casts"])
def test_the_node_is_chosen_where_memory_is_short(
    capture: str, request: pytest.FixtureRequest
) -> None:
    """Gathers of parts have a size and a stream of their own, and may share buckets."""
    free = step_of(request.getfixturevalue(capture), SLOW, None)
    room = sum(p.node_bytes for p in free.apart.parameters)
    cap_bytes = free.solve(Choice()).least_bytes + room
    step = step_of(request.getfixturevalue(capture), SLOW, cap_bytes)
    found = solve_joint(step)
    assert kept_in_node(found.best.kept)
    assert ticks_of(found.best) < ticks_of(step.solve(Choice()))
    problem = found.result.problem
    of_parts = [
        c
        for c in problem.collectives
        if problem.keys[c.key].group_size == 2
        and problem.keys[c.key].kind == CollectiveKind.ALL_GATHER
    ]
    assert {c.module for c in of_parts} == kept_in_node(found.best.kept)
    assert all(c.may_share and not c.on_path and c.direction == "backward" for c in of_parts)
    rewritten = rewrite(found.best.graph, found.result.best, QUIET)
    check_round_trip("joint", rewritten)
    entry = joint_json(found)["keep_joint"]
    assert entry["num_in_node"] == len(kept_in_node(found.best.kept)) > 0
    assert f"; {entry['num_in_node']} resharded in their node, " in joint_lines(found)[-1]


def test_a_joint_graph_is_changed_as_its_halves_are(layers: Capture) -> None:
    """TorchTitan's graph is changed itself; that of a capture is made of both halves again."""
    *apart, joint = layers.graphs
    nodes = node_groups(layers.group_ranks, 2)
    forward, backward = halves(joint.module, joint.parameter_names)
    found = {one.name: one for one in keepable(forward, backward, nodes)}
    early = {node.name for node in forward.module.graph.nodes}
    before = calls(joint.module)
    for names in (NAMES, NAMES[1:]):
        pair = keep(*apart, [in_node(name) for name in names], nodes)
        chosen = [(found[name].again, found[name].node) for name in names]
        made = with_parts(joint.module, chosen, early)
        assert calls(made) == calls(joined(*pair).module) != before
    assert calls(joint.module) == before


def test_a_part_is_copied_in_forward_also_where_backward_reads_the_whole(layers: Capture) -> None:
    """As in a joint graph in which a part of backward does not repeat the gather."""
    joint = copied(layers.graphs[-1].module)
    forward, backward = halves(joint, layers.graphs[-1].parameter_names)
    nodes = node_groups(layers.group_ranks, 2)
    first = keepable(forward, backward, nodes)[0]
    (value, _), *_ = first.again.values
    output = joint.graph.output_node()
    whole = next(node for node in joint.graph.nodes if node.name == value)
    with joint.graph.inserting_before(output):
        read = joint.graph.call_function(torch.ops.aten.neg.default, (whole,))
    output.args = ((*output.args[0], read),)
    early = {node.name for node in forward.module.graph.nodes}
    made = with_parts(joint, [(first.again, first.node)], early)
    names = [node.name for node in made.graph.nodes]
    calls_of_backward = (n for n in made.graph.nodes if n.op != "placeholder" and is_backward(n))
    begins = names.index(next(calls_of_backward).name)
    assert names.index(nodes_of_part(value)[-1]) < begins


def calls(module: GraphModule) -> list[str]:
    """Return the calls of a graph, each as its operator on the calls that it takes; the order of
    calls that do not depend on each other does not count.
    """
    made: dict[object, str] = {}
    for node in module.graph.nodes:
        given = [made.get(value, str(value)) for value in node.all_input_nodes]
        others = [value for value in node.args if value not in node.all_input_nodes]
        made[node] = f"{node.op} {node.target} {given} {others if node.op != 'output' else ''}"
    return sorted(made.values())
