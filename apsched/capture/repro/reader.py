"""Reads the files that torch writes when a job is traced (``fx_graph_runnable``, minifier repros)
into captured graphs.

The file is read, never run: it may name CUDA, triton and libraries that this machine does not have.
Accelerators are replaced by ``cpu``; ``node.meta["apsched_device"]`` keeps the device that the file
names.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from apsched.capture.captured import Capture, CapturedGraph
from apsched.capture.fake_values import propagate
from apsched.capture.graph_module import direction_of, kept_by_name
from apsched.capture.repro.graph import DEVICE, LINE, build_graph
from apsched.capture.repro.groups import fake_groups, group_sizes, needs_groups
from apsched.capture.repro.inputs import ReproInput, read_inputs
from apsched.capture.repro.source import ReproSource, read_source
from apsched.fx.control_deps import without_control_deps
from apsched.fx.passes.spec import check_graph


def read_repro(path: str | Path) -> Capture:
    """Return the one graph of the repro file ``path``: one node for each line of ``forward``, with
    its names and in its order.

    Process groups are known by name and size only (``group_sizes``); their process ranks are not in
    the file.

    Raises
    ------
    InputError
        If it is no such file, or holds what cannot be read; the message names the file, the line
        and what to do.
    """
    source = read_source(Path(path))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    inputs = read_inputs(source, mode)
    module = build_graph(source, inputs, mode)
    _refuse_missing(source, module, inputs)

    def where(node: torch.fx.Node) -> str:
        return f"{source.path}:{node.meta.get(LINE, 1)}"

    sizes = group_sizes(module.graph, source, where)
    groups: AbstractContextManager[None] = (
        fake_groups(sizes) if needs_groups(module.graph) else nullcontext()
    )
    with groups:
        propagate(module, [item.value for item in inputs], mode, where)
    module = without_control_deps(module)
    check_graph(module, where)
    _spread_devices(module.graph)
    placeholders = [node.name for node in module.graph.find_nodes(op="placeholder")]
    graph = CapturedGraph(
        name=direction_of(module.graph),
        module=module,
        kept_inputs=kept_by_name(placeholders),
        parameter_names={},
    )
    return Capture(
        source=source.path, graphs=(graph,), group_ranks=dict.fromkeys(sizes, ()), group_sizes=sizes
    )


def _refuse_missing(
    source: ReproSource, module: torch.fx.GraphModule, inputs: tuple[ReproInput, ...]
) -> None:
    """Refuse an input that the graph uses and the file has no value for."""
    for node, item in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if item.missing and node.users:
            raise source.fault(
                item.line,
                f"expected the shape of input {node.name}, which node {next(iter(node.users)).name}"
                f" uses, found none: it {item.missing}; remove that input from the traced function",
            )


def _spread_devices(graph: torch.fx.Graph) -> None:
    """Say of every node which device the job ran it on, where another stands in for it."""
    for node in graph.nodes:
        if DEVICE not in node.meta:
            device = next(
                (source.meta[DEVICE] for source in node.all_input_nodes if DEVICE in source.meta),
                None,
            )
            if device is not None and node.op != "output":
                node.meta[DEVICE] = device
