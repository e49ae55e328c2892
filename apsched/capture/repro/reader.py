"""Reads the files that torch writes when a job is traced (``fx_graph_runnable``, minifier repros)
into captured graphs.

The file is read, never run: it may name CUDA, triton and libraries that this machine does not have.
Accelerators are replaced by ``cpu``; ``node.meta["apsched_device"]`` keeps the device that the file
names.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from apsched.capture.captured import Capture, CapturedGraph
from apsched.capture.fake_values import propagate
from apsched.capture.function import import_module
from apsched.capture.graph_module import direction_of, kept_by_name
from apsched.capture.repro.graph import DEVICE, LINE, build_graph
from apsched.capture.repro.groups import fake_groups, group_sizes, needs_groups
from apsched.capture.repro.inputs import ReproInput, read_inputs
from apsched.capture.repro.printed import parse_printed
from apsched.capture.repro.recordings import (
    RecordedGraph,
    Recordings,
    is_printed,
    is_trace_log,
    recorded_graphs,
)
from apsched.capture.repro.saved import SavedView, saved_views
from apsched.capture.repro.source import ReproSource, parse_source, read_source
from apsched.fx.control_deps import without_control_deps
from apsched.fx.passes.spec import check_graph
from apsched.fx.repeated_waits import without_repeated_waits
from apsched.names import graph_order


def read_repro(
    path: str | Path,
    *,
    imports: Sequence[str] = (),
    group_ranks: Mapping[str, tuple[int, ...]] | None = None,
) -> Capture:
    """Return the graphs of ``path``: of a repro file the one that it has, of a directory or trace
    log all that torch wrote (:mod:`apsched.capture.repro.recordings`); one node for each line of
    ``forward``, with its names and in its order.

    ``imports`` are modules that define operators of the graphs, and are imported first. Process
    groups are known by name and size (``group_sizes``), except those in ``group_ranks``; the
    process ranks of a group are not in the file.

    Raises
    ------
    InputError
        If it is no such file, or holds content that cannot be read; the message names the file, the
        line and the remedy.
    """
    path = Path(path)
    for name in imports:
        import_module(name, imported_for="--import")
    if not (path.is_dir() or is_trace_log(path) or is_printed(path)):
        graph, sizes = _read_graph(read_source(path), group_ranks or {})
        return _capture(str(path), (graph,), sizes, group_ranks)
    recordings = recorded_graphs(path)
    sizes = {}
    read: dict[int, tuple[str, CapturedGraph]] = {}
    saved: dict[str, list[dict[str, SavedView]]] = {}
    forward_first = sorted(enumerate(recordings.graphs), key=lambda item: item[1].is_backward)
    for k, recorded in forward_first:
        views = saved.get(recorded.compilation, [])
        # of several forward graphs, none is known to be that of this backward graph
        source = _source_of(recorded, views[0] if recorded.is_backward and len(views) == 1 else {})
        graph, found = _read_graph(source, group_ranks or {})
        for name, size in found.items():
            if sizes.setdefault(name, size) != size:
                raise source.fault(
                    source.forward.lineno,
                    f"expected process group {name!r} to have {sizes[name]} process ranks, as in"
                    f" the graphs before, found {size}; hand in one file at a time",
                )
        read[k] = recorded.compilation, graph
        if not recorded.is_backward:
            views = [saved_views(graph.module.graph, {**recorded.symbols, **source.symbols})]
            saved[recorded.compilation] = saved.get(recorded.compilation, []) + views
    graphs, where = _named([read[k] for k in sorted(read)], recordings)
    return _capture(str(path), graphs, sizes, group_ranks, (*recordings.notes, *where))


def _source_of(
    recorded: RecordedGraph, saved: Mapping[str, SavedView] | None = None
) -> ReproSource:
    """Return the parts of a graph; ``saved`` are the views that forward saved for it."""
    if recorded.printed:
        text = "\n" * recorded.lines_before + recorded.text
        return parse_printed(recorded.path, text, recorded.symbols, saved)
    source = parse_source(recorded.path, recorded.text, lines_before=recorded.lines_before)
    beside = recorded.as_printed
    return source if beside is None else replace(source, subgraphs=_source_of(beside).subgraphs)


def _capture(
    path: str,
    graphs: tuple[CapturedGraph, ...],
    sizes: Mapping[str, int],
    group_ranks: Mapping[str, tuple[int, ...]] | None,
    notes: tuple[str, ...] = (),
) -> Capture:
    stated = group_ranks or {}
    return Capture(
        source=path,
        graphs=graphs,
        group_ranks={name: stated.get(name, ()) for name in sizes},
        group_sizes=sizes,
        notes=notes,
    )


def _named(
    read: Sequence[tuple[str, CapturedGraph]], recordings: Recordings
) -> tuple[tuple[CapturedGraph, ...], tuple[str, ...]]:
    """Return the graphs pair by pair, forward first, with names of their own, and a line about
    each where there are several pairs.
    """
    pairs: list[dict[str, tuple[CapturedGraph, str]]] = []
    last: dict[str, int] = {}
    for (compilation, graph), recorded in zip(read, recordings.graphs, strict=True):
        pair = last.get(compilation, -1)
        if pair < 0 or graph.name in pairs[pair]:
            pair = last[compilation] = len(pairs)
            pairs.append({})
        pairs[pair][graph.name] = graph, f"{recorded.path}:{recorded.lines_before + 1}"
    several = len(pairs) > 1
    named = [
        (replace(graph, name=f"{graph.name}-{k}" if several else graph.name), place)
        for k, pair in enumerate(pairs, start=1)
        for graph, place in sorted(pair.values(), key=lambda found: graph_order(found[0].name))
    ]
    notes = tuple(f"{graph.name}: {place}" for graph, place in named) if several else ()
    return tuple(graph for graph, _ in named), notes


def _read_graph(
    source: ReproSource, group_ranks: Mapping[str, tuple[int, ...]]
) -> tuple[CapturedGraph, dict[str, int]]:
    """Return the graph of ``source``, and the sizes of its process groups."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    inputs = read_inputs(source, mode)
    module = build_graph(source, inputs, mode)
    _refuse_missing(source, module, inputs)

    def where(node: torch.fx.Node) -> str:
        return f"{source.path}:{node.meta.get(LINE, 1)}"

    sizes = group_sizes(module.graph, source, group_ranks, where)
    groups: AbstractContextManager[None] = (
        fake_groups(sizes) if needs_groups(module.graph) else nullcontext()
    )
    with groups:
        propagate(module, [item.value for item in inputs], mode, where)
    module = without_repeated_waits(without_control_deps(module))
    check_graph(module, where)
    _spread_devices(module.graph)
    placeholders = [node.name for node in module.graph.find_nodes(op="placeholder")]
    graph = CapturedGraph(
        name=direction_of(module.graph),
        module=module,
        kept_inputs=kept_by_name(placeholders),
        parameter_names={},
        gradient_inputs=_gradient_inputs(module.graph),
    )
    return graph, sizes


def _gradient_inputs(graph: torch.fx.Graph) -> tuple[str, ...]:
    """Return the placeholders of forward whose gradients ``graph`` returns; none unless it is a
    backward graph.

    Backward returns one value for each input of forward, in their order, ``None`` for an input
    without a gradient, and AOTAutograd numbers these inputs from 1.
    """
    values = graph.output_node().args[0]
    if direction_of(graph) != "backward" or not isinstance(values, list | tuple):
        return ()
    return tuple(f"primals_{k}" for k, value in enumerate(values, start=1) if value is not None)


def _refuse_missing(
    source: ReproSource, module: torch.fx.GraphModule, inputs: tuple[ReproInput, ...]
) -> None:
    """Refuse an input that an operator uses and the file has no value for. One that only passes
    through (a DeviceMesh of a DTensor) takes no memory, and needs none.
    """
    for node, item in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        user = next((user for user in node.users if user.op != "output"), None)
        if item.missing and user is not None:
            raise source.fault(
                item.line,
                f"expected the shape of input {node.name}, which node {user.name} uses, found none:"
                f" it {item.missing}; remove that input from the traced function",
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
