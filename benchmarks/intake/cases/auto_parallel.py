"""Graphs of the shapes that AutoParallel makes (meta-pytorch/autoparallel, which is in no package
index): weights on a mesh of two axes, moved by collectives among local tensors, and the graphs that
its passes cut of forward and backward or put together.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.fx import Graph, GraphModule, Node

from apsched.capture.captured import CapturedGraph
from apsched.fx.collectives import is_collective, is_wait_tensor
from benchmarks.intake.case import Case
from benchmarks.intake.cases.compiled import as_captured, compiled_graphs
from benchmarks.intake.cases.features_that_communicate import exchanged
from benchmarks.intake.cases.parts import TOKENS, WIDTH
from benchmarks.intake.cases.worlds import running_world

_AXIS, _NUM_RANKS = 2, 4
_HIDDEN = 2 * WIDTH
_ROWS, _COLUMNS, _LAST, _WHOLE, _PART = Shard(0), Shard(1), Shard(2), Replicate(), Partial()
_Placements = tuple[Placement, Placement]
_Graphs = tuple[CapturedGraph, ...]


class _Block(nn.Module):
    """Products of which the second axis has parts, with weights sharded over both axes."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.norm = nn.Parameter(torch.ones(WIDTH // _NUM_RANKS))
        self.up = nn.Parameter(torch.randn(_HIDDEN // _NUM_RANKS, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(WIDTH // _AXIS, _HIDDEN // _AXIS) / 8)
        self.expert = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.out = nn.Parameter(torch.randn(WIDTH, WIDTH // _NUM_RANKS) / 8)

    def _moved(
        self, x: torch.Tensor, before: _Placements, after: _Placements, gradient: _Placements
    ) -> torch.Tensor:
        placed = DTensor.from_local(x, self.mesh, before, run_check=False)
        moved: torch.Tensor = placed.redistribute(self.mesh, after).to_local(
            grad_placements=gradient
        )
        return moved

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activations, whose batch the first axis splits and whose width the second."""
        both, none, parts = (_ROWS, _ROWS), (_WHOLE, _WHOLE), (_PART, _PART)
        norm = self._moved(self.norm, both, none, parts)
        up = self._moved(self.up, both, (_WHOLE, _ROWS), (_PART, _ROWS))
        down = self._moved(self.down, (_ROWS, _COLUMNS), (_WHOLE, _COLUMNS), (_PART, _COLUMNS))
        out = self._moved(self.out, (_COLUMNS, _COLUMNS), none, parts)
        whole = self._moved(x, (_ROWS, _LAST), (_ROWS, _WHOLE), (_ROWS, _PART))
        y = F.linear(F.gelu(F.linear(F.rms_norm(whole, (WIDTH,), norm), up)), down)
        y = self._moved(y, (_ROWS, _PART), (_ROWS, _COLUMNS), (_ROWS, _COLUMNS))  # tokens split
        rows = y.flatten(0, 1)
        sizes = [rows.shape[0] // _NUM_RANKS] * _NUM_RANKS
        y = exchanged(F.linear(exchanged(rows, sizes), self.expert), sizes).view_as(y)
        y = F.linear(y, out)
        return x + self._moved(y, (_ROWS, _COLUMNS), (_ROWS, _LAST), (_ROWS, _LAST))


def cases() -> Iterator[Case]:
    """Yield a case for each graph, or set of graphs, that AutoParallel schedules or runs."""
    made: Mapping[str, Callable[[], _Graphs]] = {
        "two axes": _step,
        "two axes, one graph": partial(_step, joint=True),
        "parameters gathered in a graph of their own": _gathers_apart,
        "gradients reduced in a graph of their own": _reductions_apart,
        "gradients of weights after those of inputs": _weights_apart,
        "forward of a micro-batch beside backward of another": _side_by_side,
    }
    for name, make in made.items():
        yield Case(name=name, group="AutoParallel", build=make, smoke=name == "two axes")


def _step(*, joint: bool = False) -> _Graphs:
    running_world(_NUM_RANKS)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (_AXIS, _AXIS), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(_Block(mesh), _Block(mesh))
    x = torch.randn(2, TOKENS, WIDTH // _AXIS, requires_grad=True)
    return compiled_graphs(lambda x: model(x).square().mean(), (x,), joint=joint)


def _gathers_apart() -> _Graphs:
    """Forward in two: the gathers of parameters, whose results are outputs, and the rest."""
    module = _step()[0].module
    inputs = module.graph.find_nodes(op="placeholder")
    given = {node: _last_wait(node) for node in inputs}
    wanted = [given[node] or node for node in inputs]
    return _in_two(module, wanted, _results(module), ("gathers", "forward"))


def _last_wait(node: Node) -> Node | None:
    """Return the last wait on the way of a parameter to its first use."""
    found = None
    while len(node.users) == 1:
        node = next(iter(node.users))
        if len(node.all_input_nodes) != 1 or node.op != "call_function":
            break
        found = node if is_wait_tensor(node) else found
    return found


def _reductions_apart() -> _Graphs:
    """Backward in two: gradients before their reduction, and the reductions."""
    module = _step()[1].module
    wanted = [_before_reduction(node) for node in _results(module)]
    return _in_two(module, wanted, _results(module), ("backward", "reductions"))


def _before_reduction(node: Node) -> Node:
    """Return the value of a gradient before the first collective that nothing else reads."""
    found = node
    while len(node.all_input_nodes) == 1 and len(node.users) <= 1:
        before = node.all_input_nodes[0]
        found = before if is_collective(node) else found
        node = before
    return found


def _weights_apart() -> _Graphs:
    """Backward in two: the gradient of the input, and then those of the weights."""
    module = _step()[1].module
    *weights, of_input = _results(module)
    kept = _needed([of_input])
    wanted = [
        node
        for node in module.graph.nodes
        if node in kept and any(user not in kept for user in node.users)
    ]
    return _in_two(module, [*wanted, of_input], weights, ("inputs", "weights"))


def _side_by_side() -> _Graphs:
    """One graph of a backward and a forward that do not know each other, with the tags of their
    regions.
    """
    forward, backward = (graph.module for graph in _step())
    graph = Graph()
    copies: dict[Node, Node] = {}
    for tag, module in (("backward", backward), ("forward", forward)):
        for node in module.graph.find_nodes(op="placeholder"):
            copies[node] = graph.placeholder(f"{tag}_{node.name}")
            copies[node].meta = dict(node.meta)
    for tag, module in (("backward", backward), ("forward", forward)):
        for node in module.graph.nodes:
            if node.op == "call_function":
                copies[node] = graph.node_copy(node, copies.__getitem__)
                region = "comm_region" if is_collective(node) else "compute_region"
                copies[node].meta["custom"] = {region: tag}
    outputs = (*_results(backward), *_results(forward))
    graph.output(tuple(copies[node] for node in outputs))
    return (as_captured(GraphModule(torch.nn.Module(), graph), "multiplexed"),)


def _results(module: GraphModule) -> list[Node]:
    output = next(iter(module.graph.find_nodes(op="output")))
    return [node for node in output.args[0] if isinstance(node, Node)]


def _needed(wanted: Iterable[Node], given: Iterable[Node] = ()) -> set[Node]:
    found: set[Node] = set()
    todo, known = list(wanted), set(given)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += () if node in known else node.all_input_nodes
    return found


def _in_two(
    module: GraphModule, middle: list[Node], last: list[Node], names: tuple[str, str]
) -> _Graphs:
    """Return the graph up to ``middle``, and from there to ``last``."""
    first = _cut(module, [], middle)
    return as_captured(first, names[0]), as_captured(_cut(module, middle, last), names[1])


def _cut(module: GraphModule, given: list[Node], wanted: list[Node]) -> GraphModule:
    """Return the graph from ``given`` and inputs of ``module`` to ``wanted``."""
    needed = _needed(wanted, given)
    graph = Graph()
    copies: dict[Node, Node] = {}
    inputs = module.graph.find_nodes(op="placeholder")
    for node in dict.fromkeys([*given, *inputs]):
        if node in needed:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
    for node in module.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in wanted))
    return GraphModule(torch.nn.Module(), graph)
