"""Schedule -> FX graph: nodes in exactly the order of the steps, and the buckets' nodes in place of
their members'.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.fx import GraphModule, Node

from apsched.config import Caps
from apsched.costs.compute.fusion import PIECE
from apsched.errors import InputError
from apsched.graph.export.aliasing import STANDS_FOR
from apsched.kinds import CollectiveKind
from apsched.names import base_of_node_group, first_name
from apsched.problem.problem import Problem
from apsched.schedule.kernel_cuts import cuts_made, second_piece
from apsched.schedule.schedule import Schedule, Step, StepKind
from apsched.schedule.verify import verify
from apsched.torch_compat.graphs import empty_graph_like, process_rank_in_group
from apsched.writeback.coalesced_bucket import CoalescedBucket
from apsched.writeback.emit import Emitter
from apsched.writeback.flat_bucket import FlatBucket, make_bucket
from apsched.writeback.members import read_members
from apsched.writeback.second_groups import running_second_groups

_SHOWN = 5
"""Differences that an error message lists."""


def write_back(
    gm: GraphModule,
    problem: Problem,
    schedule: Schedule,
    *,
    process_rank_of: Callable[[str], int] = process_rank_in_group,
) -> GraphModule:
    """Return ``gm`` in the order of ``schedule`` and with its buckets; ``gm`` itself stays
    unchanged.

    Node i of ``problem`` is the i-th node of ``gm.graph``. ``process_rank_of`` maps a group's name
    to this process rank's rank in it (by default that of the running process group): an all-gather
    bucket writes its payload in that place. Each new node has ``meta["apsched"]``: ``role``
    (``copy_in``, ``start``, ``wait``, ``copy_out``, or ``buffer`` and ``view``, which cost
    nothing), ``members`` (names of the start nodes it stands for) and ``sources`` (names of the
    nodes it was made from). Nodes of a kernel that the schedule cuts in two carry a mark
    (``apsched.costs.compute.fusion.PIECE``) from the cut on. The graph writes all-gather payloads
    with an ``out=`` kernel, so it runs without grad mode, as AOTAutograd's graphs do.

    Raises
    ------
    InputError
        where problem or schedule don't belong to ``gm``, or members of a bucket can't share a
        launch.
    """
    nodes = list(gm.graph.nodes)
    _check(nodes, problem, schedule)
    with torch.no_grad():
        graph = _new_graph(gm, nodes, problem, schedule, process_rank_of)
    graph.lint()
    result = GraphModule(gm, graph, class_name=type(gm).__name__)
    result.meta = dict(gm.meta)
    result.shape_env = gm.shape_env
    return result


def _new_graph(
    gm: GraphModule,
    nodes: Sequence[Node],
    problem: Problem,
    schedule: Schedule,
    process_rank_of: Callable[[str], int],
) -> torch.fx.Graph:
    graph: torch.fx.Graph = empty_graph_like(gm.graph)
    values: dict[Node, Node] = {}
    emitter = Emitter(graph, {node.name for node in nodes})
    second = running_second_groups(problem)
    buckets = _make_buckets(emitter, nodes, problem, schedule, values, process_rank_of, second)
    moved = {
        c.start: second[problem.keys[c.key].group]
        for c in problem.collectives
        if problem.keys[c.key].group in second
    }
    flat = {b: bucket for b, bucket in enumerate(buckets) if isinstance(bucket, FlatBucket)}
    bucket_of = {c: flat[b] for b in flat for c in schedule.buckets[b].members}
    cut_at = {
        node: nodes[cut.node].name
        for cut in cuts_made(problem, schedule)
        for node in second_piece(problem, cut)
    }
    for step in schedule.steps:
        match step.kind:
            case StepKind.NODE:
                node = nodes[step.index]
                values[node] = graph.node_copy(node, values.__getitem__)
                if values[node].name != node.name:  # FX renames a copy of "input", a builtin
                    values[node].name = node.name
                if step.index in moved:
                    _launch_on(values[node], moved[step.index])
                if step.index in cut_at:
                    values[node].meta[PIECE] = f"{node.meta.get(PIECE, '')}/{cut_at[step.index]}"
            case StepKind.COPY_IN:
                flat[step.index].copy_in()
            case StepKind.START:
                buckets[step.index].start()
            case StepKind.WAIT:
                buckets[step.index].wait()
            case StepKind.COPY_OUT:
                bucket_of[step.index].copy_out(step.index)
    for wait in (
        nodes[problem.collectives[c].wait] for bucket in schedule.buckets for c in bucket.members
    ):
        values[wait].meta[STANDS_FOR] = wait.meta["val"]
    return graph


def _make_buckets(
    emitter: Emitter,
    nodes: Sequence[Node],
    problem: Problem,
    schedule: Schedule,
    values: dict[Node, Node],
    process_rank_of: Callable[[str], int],
    second: Mapping[str, str],
) -> list[FlatBucket | CoalescedBucket]:
    buckets: list[FlatBucket | CoalescedBucket] = []
    for index, bucket in enumerate(schedule.buckets):
        members = read_members(problem, nodes, bucket.members, second)
        if bucket.coalesced:
            buckets.append(CoalescedBucket(emitter, index, members, values))
            continue
        rank = (
            _process_rank(problem, bucket.members[0], process_rank_of)
            if members[0].kind == CollectiveKind.ALL_GATHER
            else 0
        )
        buckets.append(make_bucket(emitter, index, members, values, rank))
    return buckets


def _launch_on(start: Node, group: str) -> None:
    """Make ``start``, an all-gather, run on ``group``."""
    names = [argument.name for argument in start.target._schema.arguments]  # type: ignore[union-attr]
    if "group_name" in start.kwargs:
        start.update_kwarg("group_name", group)
    else:
        start.update_arg(names.index("group_name"), group)


def _process_rank(problem: Problem, collective: int, process_rank_of: Callable[[str], int]) -> int:
    key = problem.keys[problem.collectives[collective].key]
    around = base_of_node_group(key.group)
    try:
        rank = process_rank_of(first_name(around or key.group))
    except LookupError as error:
        raise InputError(
            f"group {key.group!r}: {error}; start it, or state this process rank's place with"
            " process_rank_of"
        ) from error
    if around is not None:  # consecutive ranks of the group around it
        rank %= key.group_size
    if not 0 <= rank < key.group_size:
        raise InputError(
            f"group {key.group!r} has {key.group_size} process ranks; process_rank_of states that"
            f" this one is {rank}"
        )
    return rank


def _check(nodes: Sequence[Node], problem: Problem, schedule: Schedule) -> None:
    """Raise InputError unless ``problem`` is about these nodes, and ``schedule`` a complete order
    of them.
    """
    if len(nodes) != problem.num_nodes:
        raise InputError(
            f"the schedule's problem has {problem.num_nodes} nodes, the graph has {len(nodes)}; "
            "solve this graph, or apply the schedule to the one it came from"
        )
    different = [
        (node.name, name)
        for node, name in zip(nodes, problem.node_names, strict=True)
        if node.name != name
    ]
    if different:
        shown = ", ".join(
            f"{in_graph} in the graph is {in_problem} in the problem"
            for in_graph, in_problem in different[:_SHOWN]
        )
        raise InputError(
            f"the problem isn't about this graph; {len(different)} nodes differ: {shown}; solve"
            " this graph instead"
        )
    if wrong := verify(problem, schedule, Caps(max_compute_move=None)):
        more = f" (and {len(wrong) - _SHOWN} more)" if len(wrong) > _SHOWN else ""
        raise InputError(
            f"the schedule is no complete order of this graph: {'; '.join(wrong[:_SHOWN])}{more};"
            " solve this graph instead"
        )
    inputs = [
        step.index
        for step in schedule.steps
        if step.kind is StepKind.NODE and nodes[step.index].op == "placeholder"
    ]
    if inputs != sorted(inputs):
        raise InputError(
            "the schedule changes the order of the graph's inputs, which its callers rely on; keep"
            " it as captured"
        )
    if schedule.steps[-1] != Step(StepKind.NODE, len(nodes) - 1) or nodes[-1].op != "output":
        raise InputError(
            "the graph's output must be the last node, and the last step of the schedule"
        )
