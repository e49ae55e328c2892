"""Parameters kept from forward to backward in graphs of torch.compile: tags on the joint graph for
the partitioner; and parameters resharded in their node, in the pair of graphs that it makes.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from os import PathLike

import torch.distributed as dist
from torch.fx import GraphModule

from apsched.artifacts.kept_choice import kept_beside
from apsched.capture.captured import CapturedGraph
from apsched.capture.graph_module import capture_graph
from apsched.capture.keep import keep, keepable
from apsched.compiler.memory_in_use import MemoryInUse, agreed_memory, with_memory_in_use
from apsched.compiler.ranks.agreement import GraphAgreement
from apsched.compiler.ranks.replayed import paths_of
from apsched.compiler.schedule_captured import (
    groups_of,
    in_registered_order,
    nodes_of,
    priced,
    process_rank,
    progress_of,
)
from apsched.compiler.settings import Settings
from apsched.fx.collectives import is_collective
from apsched.fx.node_shards import NodeGroup
from apsched.fx.passes.parameters import gather_nodes
from apsched.names import in_node
from apsched.pipeline.load import LoadedGraph
from apsched.torch_compat.compilers import name_parameters
from apsched.torch_compat.graphs import process_group_names
from apsched.whole_step.choices import Choice
from apsched.whole_step.keep_request import (
    AUTO,
    KeepRequest,
    keep_request,
    of_one_micro_batch,
)
from apsched.whole_step.pair import Step
from apsched.whole_step.search import solve_step

logger = logging.getLogger(__name__)

Pair = tuple[GraphModule, GraphModule]
"""Forward and backward graph."""
CapturedPair = tuple[CapturedGraph, CapturedGraph]
"""Forward and backward graph, captured."""
_RUNNING: dict[tuple[int, ...], str] = {}
"""Process ranks of a node -> name of their group, which all of them make once in the life of a
job.
"""


def stated_or_of_schedules(
    keep: str | PathLike[str] | Sequence[str] | None, settings: Settings
) -> KeepRequest | None:
    """Return the request ``keep``; where it is left out, the choice of the answer whose schedules
    ``settings`` replay. ``None``: no choice, the graph decides.
    """
    if keep is not None:
        return of_one_micro_batch(keep_request(keep, "keep"), "keep")
    if settings.schedule is None:
        return None
    beside = kept_beside(paths_of(settings.schedule), "keep")
    return of_one_micro_batch(beside, "keep") if beside.entries else None


def chosen_parameters(
    request: KeepRequest,
    joint: GraphModule,
    again: Callable[[], Pair],
    settings: Settings,
    names: Mapping[int, str],
    agreement: GraphAgreement | None,
) -> Choice:
    """Return the choice of ``request`` for the parameters of ``joint``, which are named already.

    For ``auto`` the pair ``again``, with every parameter gathered again, is solved as one step.
    With ``agreement`` one process rank does so for all that gather the same parameters.
    """
    parameters = sorted(set(gather_nodes(joint.graph).values()))
    if request.mode != AUTO:
        found = request.fitting([*parameters, *map(in_node, parameters)])
        if request.entries and parameters and not found:
            logger.warning(
                "keep: no entry fits a parameter that this graph gathers (such as %s), and none is"
                " kept in it; found %s",
                parameters[0],
                ", ".join(request.entries),
            )
        return found
    if not any(is_collective(node) for node in joint.graph.nodes):
        return Choice()

    def captured() -> CapturedPair:
        forward, backward = again()
        for module in (forward, backward):
            name_parameters(module.graph, names)
        return capture_graph(forward, name="forward"), capture_graph(backward, name="backward")

    return fastest_choice(parameters, captured, settings, agreement)


def fastest_choice(
    parameters: Sequence[str],
    again: Callable[[], CapturedPair],
    settings: Settings,
    agreement: GraphAgreement | None,
) -> Choice:
    """Return the best choice for the pair ``again``, which gathers every parameter again, solved as
    one step. With ``agreement`` one process rank does so for all that have these ``parameters``;
    the others do not call ``again``.
    """

    in_use = agreed_memory(settings, agreement)

    def solved() -> bytes:
        return json.dumps(sorted(_solved(again(), settings, agreement, in_use))).encode()

    if agreement is None:
        return Choice(json.loads(solved()))
    identity = hashlib.sha256("\n".join(parameters).encode()).hexdigest()
    answer, _ = agreement.shared(identity, {"keep": AUTO}, solved)
    return Choice(json.loads(answer))


def resharded(pair: Pair, names: Collection[str], settings: Settings) -> Pair:
    """Return the forward and backward graph ``pair`` with the parameters ``names`` resharded in
    their node; all process ranks of a node call it at once. A parameter that cannot be resharded is
    gathered again, with a warning.
    """
    if not names:
        return pair
    forward, backward = (
        capture_graph(module, name=name)
        for name, module in zip(("forward", "backward"), pair, strict=True)
    )
    nodes = nodes_of(groups_of(backward.module.graph, settings), settings)
    wanted = [found for found in keepable(forward, backward, nodes) if found.name in names]
    used = {found.again.group for found in wanted if found.node is not None}
    strange = [found.name for found in wanted if found.node is None]
    if strange and process_rank() == 0:
        logger.warning(
            "keep: %d parameters (%s, ...) are gathered again: they cannot be resharded in their"
            " node. Their process group has to have several process ranks on each of several nodes"
            " (ranks_per_node of the cluster), and their number has to divide the parameter",
            len(strange),
            strange[0],
        )
    running = {
        group: replace(node, name=running_node_group(node)) if group in used else node
        for group, node in sorted(nodes.items())
    }
    entries = [in_node(found.name) for found in wanted if found.node is not None]
    first, second = keep(forward, backward, entries, running)
    return first.module, second.module


def _solved(
    pair: CapturedPair,
    settings: Settings,
    agreement: GraphAgreement | None,
    in_use: MemoryInUse,
) -> Choice:
    """Return the best choice for two graphs with all gathered again; if no choice fits,
    those that rules of the plan keep.
    """
    progress = progress_of(settings)
    request = replace(settings.solve_request, bitwise_price=False, second_group=False)
    graphs: list[LoadedGraph] = []
    for one in pair:
        captured = replace(one, hints=settings.stated_hints)
        groups = groups_of(captured.module.graph, settings)
        graph, request = priced(captured, settings, groups, request, progress)
        graph = with_memory_in_use(graph, in_use, request.optimizer)
        graph = in_registered_order(graph, settings)
        graphs.append(replace(graph, problem=request.posed(graph.problem)[0]))
    with nullcontext() if agreement is None else agreement.job.working():
        return solve_step(Step.of(graphs, request, progress)).best.kept


def running_node_group(node: NodeGroup) -> str:
    """Return the name by which the group of ``node`` runs, which is made at the first call; that of
    ``node`` where no process group runs.

    All process ranks of a node rewrite the same graphs in the same order, so each of them makes it,
    and before the first gather on it.
    """
    if not dist.is_available() or not dist.is_initialized():
        return node.name
    if _RUNNING.get(node.ranks) not in process_group_names():
        made = dist.new_group(
            list(node.ranks), use_local_synchronization=True, group_desc="ranks of one node"
        )
        _RUNNING[node.ranks] = str(made.group_name)
    return _RUNNING[node.ranks]
