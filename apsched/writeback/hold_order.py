"""Control dependencies that hold the order of a graph through full Inductor, which sorts launches,
waits and kernels as it likes.

An *event* is a launch or a wait. Events cut the order into segments, and the nodes between two
events stay between them:

1. an event comes behind the one before it, and behind the compute of the segment before it;
2. the compute of a segment comes behind the event before it, and behind the later waits of a
   coalesced launch, which are part of its wait.
3. the copy-in of a bucket comes behind the event before it, and behind the compute before it in its
   segment; casts of the members are a part of it.

One rule alone does not hold the order: without the second, launches and compute float up to the
place where their inputs exist; without the first, they sink to the place where their results are
needed. Inductor writes a bucket with a copy of its own for each member, and allocates the buffer
for the first: without the third rule, copies float up to the place where their members exist, and
the buffer is alive long before the launch. Elsewhere in a segment Inductor sorts as it likes:
nothing is launched or waited for there, so the step time does not change.

Pointwise nodes and the reductions at their ends become one kernel
(:mod:`apsched.costs.compute.fusion`), and must not be torn apart. If events stand between the nodes
of a kernel, the kernel belongs to the segment of its last node. A node that is needed before that
segment keeps its own segment, and the nodes before it in the kernel go with it: in the order given,
no compiler could fuse it with the rest.

``control_deps`` is torch's own (torch/_inductor/fx_passes/control_dependencies.py, with which
``schedule_overlap_bucketing`` holds its order, too). Its lowering realizes the nodes at both ends
of a dependency: intermediate results of a kernel are never at an end.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from torch.fx import Graph, GraphModule, Node

from apsched.capture.captured import CapturedGraph
from apsched.costs.compute.fusion import fused_kernels
from apsched.fx.collectives import is_wait_tensor
from apsched.fx.control_deps import without_control_deps
from apsched.fx.tensors import is_cast
from apsched.graph.export.analysis import Analysis, analyse, edges_of
from apsched.kinds import NodeKind
from apsched.torch_compat.graphs import add_control_deps, empty_graph_like
from apsched.writeback.in_flight import keep_what_is_sent

_EVENTS = (NodeKind.START, NodeKind.WAIT)
_FIRST = -1
"""Place of inputs. Segment i, before the i-th event, has place 2 i, that event 2 i + 1."""


def hold_order(
    gm: GraphModule, *, group_ranks: Mapping[str, tuple[int, ...]] | None = None
) -> GraphModule:
    """Return ``gm`` with control dependencies by which full Inductor keeps its order; ``gm`` itself
    stays unchanged.

    The result is for a compiler of graphs as AOTAutograd hands them out
    (``torch._inductor.compile_fx.compile_fx_inner``). A graph that runs node by node keeps its
    order anyway. Call this function last: later passes see ``control_deps`` in place of the nodes
    that they look for. Control dependencies that are there already are removed. ``group_ranks``
    maps the name of a process group to its process ranks; it is needed if the graph names, without
    its size, a group that does not run here.

    Raises
    ------
    InputError
        where a node cannot be understood, or where Inductor would overwrite a payload in flight
        (:mod:`apsched.writeback.in_flight`); it names the node.
    """
    gm = keep_what_is_sent(without_control_deps(gm))
    captured = CapturedGraph(name="", module=gm, kept_inputs=frozenset(), parameter_names={})
    analysis = analyse(captured, group_ranks or {})
    places = _places(analysis)
    graph: Graph = empty_graph_like(gm.graph)
    values: dict[Node, Node] = {}
    for rank in sorted(range(len(places)), key=lambda rank: (places[rank], rank)):
        node = analysis.nodes[rank]
        values[node] = graph.node_copy(node, values.__getitem__)
    result = GraphModule(gm, graph, class_name=type(gm).__name__)
    result.meta = dict(gm.meta)
    result.shape_env = gm.shape_env
    dependencies = _control_dependencies(analysis, places)
    add_control_deps(
        result.graph,
        {
            values[node]: [values[before] for before in all_before]
            for node, all_before in dependencies
        },
    )
    result.graph.lint()
    result.recompile()
    return result


def _places(analysis: Analysis) -> list[int]:
    """Return for each node its segment or event; sorted by them, and then by rank, nodes are in a
    legal order.
    """
    num_nodes, kinds = len(analysis.nodes), analysis.kinds
    events = [rank for rank in range(num_nodes) if kinds[rank] in _EVENTS]
    before: list[list[int]] = [[] for _ in kinds]
    after: list[list[int]] = [[] for _ in kinds]
    for edges in edges_of(analysis):
        for earlier, later in edges:
            before[later].append(earlier)
            after[earlier].append(later)
    kernel_of = {
        analysis.rank_of[node]: k
        for k, nodes in enumerate(fused_kernels(analysis.nodes[0].graph))
        for node in nodes
    }
    end = 2 * len(events)
    latest = [end] * num_nodes
    place_of_kernel: dict[int, int] = {}
    for rank in reversed(range(num_nodes)):
        segment = 2 * bisect_left(events, rank)
        limit = min((latest[later] for later in after[rank]), default=end)
        if kinds[rank] in _EVENTS:
            latest[rank] = segment + 1
        elif kinds[rank] is NodeKind.COMPUTE:
            kernel = kernel_of.get(rank, -1 - rank)
            wanted = place_of_kernel.get(kernel, segment)
            latest[rank] = place_of_kernel[kernel] = wanted if wanted <= limit else segment
        elif kinds[rank] is NodeKind.VIEW:
            latest[rank] = limit
    places = latest
    for rank in range(num_nodes):
        if kinds[rank] is NodeKind.INPUT:
            places[rank] = _FIRST
        elif kinds[rank] is NodeKind.VIEW:
            places[rank] = max(
                (places[earlier] + places[earlier] % 2 for earlier in before[rank]), default=0
            )
        elif kinds[rank] is NodeKind.OUTPUT:
            places[rank] = end + 1
    return places


def _control_dependencies(
    analysis: Analysis, places: Sequence[int]
) -> Iterator[tuple[Node, list[Node]]]:
    """Yield the nodes to hold, in the order of ``places``, with the nodes before them that the data
    do not imply.
    """
    nodes, kinds = analysis.nodes, analysis.kinds
    producers = _producers(analysis)
    segments: dict[int, list[int]] = {}
    for rank, kind in enumerate(kinds):
        if (
            kind is NodeKind.COMPUTE or kind in _EVENTS or is_wait_tensor(nodes[rank])
        ):  # later waits: of a coalesced launch
            segments.setdefault(places[rank], []).append(rank)
    event: int | None = None
    for place in range(0, max(segments, default=0) + 1, 2):
        inside = segments.get(place, [])
        (following,) = segments.get(place + 1, [None])
        ends = [*inside] if following is None else [*inside, following]
        taken = set().union(*(producers[rank] for rank in ends))
        last = [
            rank for rank in inside if rank not in taken and nodes[rank].meta.get("val") is not None
        ]
        waits = [rank for rank in inside if is_wait_tensor(nodes[rank])]
        compute = {rank for rank in inside if rank not in waits}
        for rank in inside:
            behind = [event] if event is not None else []
            if rank in compute and waits:
                behind = waits
            if _fills_bucket(nodes[rank]):
                before_it = {*last, *_copied(rank, analysis, producers)} & compute
                held = sorted({*behind, *(before for before in before_it if before < rank)})
            elif producers[rank].isdisjoint(compute):
                held = [before for before in behind if before not in producers[rank]]
            else:
                continue
            if held:
                yield nodes[rank], [nodes[before] for before in held]
        if following is None:
            return
        if event is not None:
            last.append(event)
        if (
            not last
        ):  # the dependence on an operation without a result is known only if that has one itself
            last = sorted(producers[following])
        if last:
            yield nodes[following], [nodes[rank] for rank in last]
        event = following


def _fills_bucket(node: Node) -> bool:
    """Say whether write-back made the node to allocate the buffer of a bucket, or to fill it."""
    return node.meta.get("apsched", {}).get("role") in ("buffer", "copy_in")


def _copied(rank: int, analysis: Analysis, producers: Sequence[set[int]]) -> set[int]:
    """Return the nodes whose values a copy-in reads; casts are a part of the copy."""
    found, waiting = set(), list(producers[rank])
    while waiting:
        taken = waiting.pop()
        if is_cast(analysis.nodes[taken]):
            waiting += producers[taken]
        elif not _fills_bucket(analysis.nodes[taken]):
            found.add(taken)
    return found


def _producers(analysis: Analysis) -> list[set[int]]:
    """Return for each node those that compute or communicate its operands, directly or as a
    view.
    """
    producers: list[set[int]] = []
    for node in analysis.nodes:
        found: set[int] = set()
        for taken in node.all_input_nodes:
            rank = analysis.rank_of[taken]
            if analysis.kinds[rank] is NodeKind.VIEW:
                found |= producers[rank]
            elif analysis.kinds[rank] is not NodeKind.INPUT:
                found.add(rank)
        producers.append(found)
    return producers
