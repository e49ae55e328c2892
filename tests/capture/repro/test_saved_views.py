"""A printed backward graph takes saved values as views of the storages that forward has, so that
the graph of a trace is the one that the job has: the same hash, and each activation counted once.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from apsched.capture.captured import CapturedGraph
from apsched.capture.graph_module import capture_graph
from apsched.capture.repro.reader import read_repro
from apsched.graph.export.analysis import analyse
from apsched.graph.export.export import export_graph
from apsched.graph.identity import graph_hash
from apsched.torch_compat.sizes import size_hint
from tests.helpers.graphs.instrumented import UnitCosts
from tests.helpers.graphs.recorded import trace_log

BATCH, TOKENS, WIDTH = 2, 16, 32


class Attention(torch.nn.Module):
    """Three projections of one input, as in a transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        q, k, v = (part(x) for part in self.parts)
        return torch.softmax(q @ k.transpose(1, 2), -1) @ v


class Fused(torch.nn.Module):
    """Three projections in one, of which each is a part with an offset."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = torch.nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.whole(x.sin()).chunk(3, -1)
        return (q.sin() * k.sin() * v).sum()


def compiled(
    model: torch.nn.Module, *, dynamic: bool = False, tokens: int = TOKENS
) -> dict[str, torch.fx.GraphModule]:
    """Return the graphs that a backend gets in the job."""
    graphs: dict[str, torch.fx.GraphModule] = {}

    def taken(name: str) -> Callable[..., object]:
        def compiler(module: torch.fx.GraphModule, _: object) -> object:
            graphs[name] = module
            return make_boxed_func(module.forward)

        return compiler

    torch._dynamo.reset()
    x = torch.randn(BATCH, tokens, WIDTH)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    backend = aot_autograd(fw_compiler=taken("forward"), bw_compiler=taken("backward"))
    torch.compile(model, backend=backend)(x).sum().backward()
    return graphs


def printed(module: torch.fx.GraphModule) -> str:
    """Return ``module`` as torch prints it into a trace."""
    return module.print_readable(print_output=False, include_stride=True, include_device=True)


def in_trace(path: Path, graphs: dict[str, torch.fx.GraphModule]) -> dict[str, CapturedGraph]:
    """Return the graphs as read from a trace of the job."""
    records = [(0, f"aot_{name}_graph", printed(module)) for name, module in graphs.items()]
    symbols = {
        str(size): size_hint(size)
        for node in graphs["forward"].graph.find_nodes(op="placeholder")
        if isinstance(size := node.meta["val"], torch.SymInt)
    }
    read = read_repro(trace_log(path / "raw.log", [], records, symbols)).graphs
    return {graph.name: graph for graph in read}


def hash_of(graph: CapturedGraph) -> str:
    return graph_hash(export_graph(graph, UnitCosts(), group_ranks={}))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("model", [Attention, Fused])
def test_backward_of_a_trace_is_that_of_the_job(
    model: type[torch.nn.Module], dynamic: bool, tmp_path: Path
) -> None:
    graphs = compiled(model(), dynamic=dynamic)
    found = in_trace(tmp_path, graphs)
    assert found.keys() == graphs.keys() == {"forward", "backward"}
    for name, module in graphs.items():
        assert hash_of(found[name]) == hash_of(capture_graph(module)), name


def test_an_activation_is_counted_once(tmp_path: Path) -> None:
    """Its three saved views are inputs of one storage."""
    graph = in_trace(tmp_path, compiled(Attention()))["backward"]
    table = analyse(graph, {}).table
    inputs = zip(graph.module.graph.nodes, table.of_node, strict=True)
    views = [u for node, u in inputs if node.op == "placeholder" and node.name.startswith("view")]
    assert [(len(u.allocates), len(u.aliases)) for u in views][:2] == [(1, 0), (0, 1)]
    (shared,) = {*views[0].allocates, *views[1].aliases}
    assert table.storages[shared].size_bytes == BATCH * TOKENS * WIDTH * 4


def test_a_printed_backward_graph_may_stand_before_its_forward_graph(tmp_path: Path) -> None:
    graphs = compiled(Attention())
    backwards = dict(reversed(graphs.items()))
    assert [*backwards] == ["backward", "forward"]
    found = in_trace(tmp_path, backwards)
    assert hash_of(found["backward"]) == hash_of(capture_graph(graphs["backward"]))
    assert [*found] == ["forward", "backward"]


def test_of_two_forward_graphs_none_is_known_to_be_that_of_backward(tmp_path: Path) -> None:
    """Each saved value has a storage of its own then, as it does without a forward graph."""
    graphs = compiled(Attention())
    text = {name: printed(module) for name, module in graphs.items()}
    other = text["forward"].replace("sin.default", "cos.default")
    records = [
        (0, "aot_forward_graph", text["forward"]),
        (0, "aot_forward_graph", other),
        (0, "aot_backward_graph", text["backward"]),
    ]
    assert other != text["forward"]
    several = read_repro(trace_log(tmp_path / "raw.log", [], records)).graphs
    alone = read_repro(trace_log(tmp_path / "one" / "raw.log", [], records[2:])).graphs
    (found,) = (graph for graph in several if graph.name.startswith("backward"))
    assert hash_of(found) == hash_of(alone[0]) != hash_of(capture_graph(graphs["backward"]))


def test_a_forward_graph_of_other_shapes_says_nothing(tmp_path: Path) -> None:
    """Same names, another compilation: the views are left out, and no line is refused."""
    graphs, long = compiled(Attention()), compiled(Attention(), tokens=2 * TOKENS)
    found = in_trace(tmp_path, {"forward": long["forward"], "backward": graphs["backward"]})
    assert hash_of(found["backward"]) != hash_of(capture_graph(graphs["backward"]))
