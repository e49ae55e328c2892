"""Graphs that a trace has as text only, as of a backend other than Inductor."""

from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from apsched.capture.captured import CapturedGraph
from apsched.capture.repro.reader import read_repro
from apsched.errors import InputError
from apsched.torch_compat.sizes import size_hint
from tests.helpers.graphs.recorded import trace_log

DATA = Path(__file__).parent / "data"
COND = """class <lambda>(torch.nn.Module):
    def forward(
        self,
        arg0_1: "f32[8, 64][64, 1]cpu",  # PlainAOTInput(idx=0)
        arg1_1,  # SubclassGetAttrAOTInput(base=PlainAOTInput(idx=1), attr='device_mesh')
    ):
        # File: job.py:7 in forward, code: y = torch.cond(x.sum() > 0, f, g, (x,))
        sum_1: "f32[][]cpu" = torch.ops.aten.sum.default(arg0_1)
        gt: "b8[][]cpu" = torch.ops.aten.gt.Scalar(sum_1, 0);  sum_1 = None
        true_graph_0 = self.true_graph_0
        false_graph_0 = self.false_graph_0
        cond = torch.ops.higher_order.cond(gt, true_graph_0, false_graph_0, (arg0_1,));  gt = None
        getitem: "f32[8, 64][64, 1]cpu" = cond[0];  cond = None
        return (getitem, arg1_1)

    class true_graph_0(torch.nn.Module):
        def forward(self, arg0_1: "f32[8, 64][64, 1]cpu"):
            sin: "f32[8, 64][64, 1]cpu" = torch.ops.aten.sin.default(arg0_1);  arg0_1 = None
            return (sin,)

    class false_graph_0(torch.nn.Module):
        def forward(self, arg0_1: "f32[8, 64][64, 1]cpu"):
            cos: "f32[8, 64][64, 1]cpu" = torch.ops.aten.cos.default(arg0_1);  arg0_1 = None
            return (cos,)
"""
LACKING = """
class Repro(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.true_graph_0 = <lambda>()
        self.false_graph_0 = <lambda>()

    def forward(self, arg0_1):
        true_graph_0 = self.true_graph_0
        false_graph_0 = self.false_graph_0
        gt = torch.ops.aten.gt.Scalar(arg0_1, 0)
        cond = torch.ops.higher_order.cond(gt, true_graph_0, false_graph_0, (arg0_1,));  gt = None
        getitem = cond[0];  cond = None
        return (getitem,)

def load_args(reader):
    buf0 = reader.storage(None, 4)
    reader.tensor(buf0, ())
mod = Repro()
"""


def as_printed(graph: CapturedGraph) -> str:
    """Return ``graph`` as torch prints it into a trace."""
    return graph.module.print_readable(print_output=False, include_stride=True, include_device=True)


def described(graph: CapturedGraph) -> list[object]:
    """Return the nodes with their targets, and shapes, strides and types of their values."""
    found: list[object] = []
    for node in graph.module.graph.nodes:
        found.append((node.op, node.name, str(node.target), str(node.args), str(node.kwargs)))
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor):
                sizes = [size_hint(size) for size in (*value.shape, *value.stride())]
                found.append((sizes, value.dtype))
    return found


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fsdp_forward", "aot_forward_graph"),
        ("fsdp_backward", "aot_backward_graph"),
        ("fsdp_forward_symbolic", "aot_forward_graph"),
        ("dtensor_forward", "aot_forward_graph"),
        ("dtensor_backward", "aot_inference_graph"),
    ],
)
def test_printed_graph_is_that_of_the_file_that_runs(name: str, kind: str, tmp_path: Path) -> None:
    (graph,) = read_repro(DATA / f"{name}.py.txt").graphs
    symbols = {
        str(node.meta["val"]): size_hint(node.meta["val"])
        for node in graph.module.graph.find_nodes(op="placeholder")
        if isinstance(node.meta["val"], torch.SymInt)
    }
    log = trace_log(tmp_path / "raw.log", [], [(0, kind, as_printed(graph))], symbols)
    (found,) = read_repro(log, group_ranks={"0": tuple(range(64))}).graphs
    assert described(found) == described(graph)
    assert (found.name, found.kept_inputs) == (graph.name, graph.kept_inputs)


def test_file_that_runs_goes_first(tmp_path: Path) -> None:
    """A backward graph that was never compiled is taken as printed."""
    forward, backward = (DATA / f"fsdp_{name}.py.txt" for name in ("forward", "backward"))
    printed = as_printed(read_repro(backward).graphs[0])
    log = trace_log(
        tmp_path / "raw.log",
        [(0, forward.read_text())],
        [(0, "aot_forward_graph", "not read"), (0, "aot_backward_graph", printed)],
    )
    found = read_repro(log).graphs
    assert [graph.name for graph in found] == ["forward", "backward"]
    assert described(found[1]) == described(read_repro(backward).graphs[0])


def test_subgraphs(tmp_path: Path) -> None:
    """As printed, and beside a file that torch wrote without them."""
    path = tmp_path / "aot_inference_graph_4.txt"
    path.write_text(COND)
    for source in (
        path,
        trace_log(tmp_path / "raw.log", [(0, LACKING)], [(0, path.stem[:-2], COND)]),
    ):
        (graph,) = read_repro(source).graphs
        nodes = {node.name: node for node in graph.module.graph.nodes}
        inside = graph.module.get_submodule("false_graph_0").graph.nodes
        assert [node.name for node in inside] == ["arg0_1", "cos", "output"]
        assert nodes["getitem"].meta["val"].shape == nodes["arg0_1"].meta["val"].shape


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('[64, 1]cpu",  #', '",  #', r":4: expected type, shape, strides and device of arg0_1"),
        ('f32[8, 64][64, 1]cpu",  #', 'f99[8][1]cpu",  #', r":4: expected type, shape"),
        ('[8, 64][64, 1]cpu",  #', '[8 64][1]cpu",  #', r":4: expected type, shape"),
        ('[8, 64][64, 1]cpu",  #', '[8);exit(][1]cpu",  #', r":4: expected type, shape"),
        ('[8, 64][64, 1]cpu",  #', '[s0, 64][64, 1]cpu",  #', r":4: .*size s0, whose value"),
        ('[8, 64][64, 1]cpu",  #', '[8, 64][-9, 1]cpu",  #', r":4: .*strides are not supported"),
        ("(getitem, arg1_1)", "(getitem,", r":\d+: expected a graph that torch printed"),
        ("aten.sin.", "aten.sinus.", r":18: .*aten\.sinus"),
        ("(getitem, arg1_1)", "(torch.sin(arg1_1),)", r":14: expected a line of forward"),
    ],
)
def test_broken_text_is_refused_by_line(
    before: str, after: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "aot_forward_graph.txt"
    assert before in COND
    path.write_text(COND.replace(before, after, 1))
    with pytest.raises(InputError, match=rf"aot_forward_graph\.txt{message}"):
        read_repro(path)


def test_sizes_of_symbols_may_be_written_above_the_graph(tmp_path: Path) -> None:
    path = tmp_path / "aot_forward_graph.txt"
    path.write_text(
        "s0 = 8\n" + COND.replace('[8, 64][64, 1]cpu",  #', '[s0, 64][64, 1]cpu",  #', 1)
    )
    nodes = {node.name: node for node in read_repro(path).graphs[0].module.graph.nodes}
    assert size_hint(nodes["arg0_1"].meta["val"].shape[0]) == 8
