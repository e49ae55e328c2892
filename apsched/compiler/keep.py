"""Parameters kept from forward to backward in graphs of torch.compile: tags on the joint graph for
the partitioner; and parameters resharded in their node, in the pair of graphs that it makes.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from os import PathLike

import torch.distributed as dist
from torch.fx import GraphModule

from apsched.artifacts.kept_choice import kept_beside
from apsched.capture.captured import CapturedGraph
from apsched.capture.graph_module import capture_graph
from apsched.capture.keep import Keepable, keep, keepable
from apsched.compiler.memory_in_use import MemoryInUse, agreed_memory
from apsched.compiler.ranks.agreement import GraphAgreement
from apsched.compiler.ranks.answer import Answers
from apsched.compiler.ranks.replayed import paths_of
from apsched.compiler.schedule_captured import (
    groups_of,
    nodes_of,
    priced_in_job,
    process_rank,
    progress_of,
    searching,
)
from apsched.compiler.settings import Settings
from apsched.fx.collectives import is_collective
from apsched.fx.keep import with_parts
from apsched.fx.node_shards import NodeGroup
from apsched.fx.passes.parameters import gather_nodes, parameter_names
from apsched.names import in_node, mark_of, marked, name_of
from apsched.pipeline.load import LoadedGraph
from apsched.pipeline.solve_graph import SolveRequest
from apsched.torch_compat.compilers import name_parameters
from apsched.torch_compat.graphs import process_group_names
from apsched.whole_step.choices import Choice
from apsched.whole_step.joint_graph.step import (
    AS_APART,
    JointStep,
    choices_to_compare,
    compare,
    step_times,
)
from apsched.whole_step.keep_request import (
    AUTO,
    KeepRequest,
    keep_request,
    of_one_micro_batch,
)
from apsched.whole_step.pair import Step
from apsched.whole_step.rules import nearest_names
from apsched.whole_step.search import solve_step

logger = logging.getLogger(__name__)

Pair = tuple[GraphModule, GraphModule]
"""Forward and backward graph."""
CapturedPair = tuple[CapturedGraph, CapturedGraph]
"""Forward and backward graph, captured."""
_OTHERS = "others"
"""Key of the parameters that only one half gathers."""
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
        request = _under_names_of(joint, request)
        if text := none_fits(request, parameters):  # perhaps of one behind a graph break
            logger.warning("%s. None is kept in this graph", text)
        return request.fitting([*parameters, *map(in_node, parameters)])
    if not any(is_collective(node) for node in joint.graph.nodes):
        return Choice()

    def captured() -> CapturedPair:
        forward, backward = again()
        for module in (forward, backward):
            name_parameters(module.graph, names)
        return capture_graph(forward, name="forward"), capture_graph(backward, name="backward")

    return fastest_choice(parameters, captured, settings, agreement)


def _under_names_of(joint: GraphModule, request: KeepRequest) -> KeepRequest:
    """Return ``request`` with the names of the parameters of ``joint`` in place of those of its
    placeholders, which an answer for a graph that torch wrote has: such a graph has no other names.
    """
    names = parameter_names(joint.graph)

    def renamed(entry: str) -> str:
        if name_of(entry) not in names:
            return entry
        name, mark = names[name_of(entry)], mark_of(entry)
        return marked(name, mark) if mark else name

    return replace(request, entries=tuple(map(renamed, request.entries)))


def none_fits(request: KeepRequest, parameters: Sequence[str]) -> str:
    """Return the text of an error where a graph gathers ``parameters``, and no stated entry of
    ``request`` fits one of them; else an empty text. An entry by itself may be about another graph.
    """
    entries = [*parameters, *map(in_node, parameters)]
    if not (request.entries and parameters) or request.fitting(entries):
        return ""
    nearest = nearest_names(name_of(request.entries[0]), parameters)
    return (
        "keep: expected an entry that fits a parameter which this graph gathers, found"
        f" {', '.join(request.entries)}: {nearest}; correct the names, or leave keep out"
    )


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

    def solved() -> Choice:
        with _working(agreement):
            return solve_step(_step(again(), settings, in_use)).best.kept

    return _agreed(parameters, lambda: {"best": solved()}, agreement)["best"]


def fastest_in_joint(
    parameters: Sequence[str],
    pair: CapturedPair,
    joint: Callable[[Choice], CapturedGraph],
    settings: Settings,
    agreement: GraphAgreement | None,
    solved: Answers,
) -> Choice:
    """Return the fastest of three choices in one graph of forward and backward: the best one for
    its halves ``pair`` (:func:`fastest_choice`), none kept and all kept.

    ``joint`` makes the graph with the parameters that are kept; all process ranks make it for the
    same choices. With ``agreement`` one process rank solves, and all get its choice. ``solved``
    gets the answers that this process finds. Any choice but none has also those of ``parameters``
    that only one half gathers, as all kept has.
    """
    in_use = agreed_memory(settings, agreement)
    apart: list[Step] = []  # of the process rank that solves, which is the same both times

    def of_halves() -> dict[str, Choice]:
        with _working(agreement):
            step = _step(pair, settings, in_use)
            apart.append(step)
            others = Choice(parameters).difference(p.name for p in step.parameters)
            return {_OTHERS: others, **choices_to_compare(step, solve_step(step).best.kept)}

    choices = _agreed(parameters, of_halves, agreement)
    others = choices.pop(_OTHERS)
    tagged = {kept: kept | others if kept else kept for kept in choices.values()}
    if len(choices) == 1:
        return tagged[choices[AS_APART]]
    graphs = {kept: joint(tags) for kept, tags in tagged.items()}

    def compared() -> dict[str, Choice]:
        with _working(agreement):
            step = _joint_step(graphs, apart[0], settings, in_use, solved)
            best, found = compare(step, choices)
            logger.info("keep: %s in one graph", step_times(choices, found))
            return {"best": best.kept}

    return tagged[_agreed(parameters, compared, agreement)["best"]]


def _agreed(
    parameters: Sequence[str],
    find: Callable[[], dict[str, Choice]],
    agreement: GraphAgreement | None,
) -> dict[str, Choice]:
    """Return the choices that ``find`` returns, by name; with ``agreement`` those of one process
    rank for all that have these ``parameters``.
    """

    def found() -> bytes:
        return json.dumps({name: sorted(kept) for name, kept in find().items()}).encode()

    if agreement is None:
        answer = found()
    else:
        identity = hashlib.sha256("\n".join(parameters).encode()).hexdigest()
        answer, _ = agreement.shared(identity, {"keep": AUTO}, found)
    return {name: Choice(kept) for name, kept in json.loads(answer).items()}


def _working(agreement: GraphAgreement | None) -> AbstractContextManager[None]:
    return nullcontext() if agreement is None else agreement.job.working()


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
    wanted = _can_be_resharded((forward, backward), names, settings)
    running = {found.again.group: node for found, node in wanted}
    entries = [in_node(found.name) for found, _ in wanted]
    first, second = keep(forward, backward, entries, running)
    return first.module, second.module


def resharded_in_joint(
    joint: GraphModule,
    halves: Callable[[GraphModule], CapturedPair],
    names: Collection[str],
    settings: Settings,
) -> GraphModule:
    """Return ``joint``, one graph of forward and backward, with the parameters ``names`` resharded
    in their node, as :func:`resharded`; ``halves`` cuts it in two.
    """
    if not names:
        return joint
    forward, backward = halves(joint)
    wanted = _can_be_resharded((forward, backward), names, settings)
    early = {node.name for node in forward.module.graph.nodes}
    return with_parts(joint, [(found.again, node) for found, node in wanted], early)


def _can_be_resharded(
    pair: CapturedPair, names: Collection[str], settings: Settings
) -> list[tuple[Keepable, NodeGroup]]:
    """Return those of the parameters ``names`` that can be resharded in their node, each with the
    group of the node, which runs; a warning has the others.
    """
    nodes = nodes_of(groups_of(pair[1].module.graph, settings), settings)
    wanted = [found for found in keepable(*pair, nodes) if found.name in names]
    strange = [found.name for found in wanted if found.node is None]
    if strange and process_rank() == 0:
        logger.warning(
            "keep: %d parameters (%s, ...) are gathered again: they cannot be resharded in their"
            " node. Their process group has to have several process ranks on each of several nodes"
            " (ranks_per_node of the cluster), and their number has to divide the parameter",
            len(strange),
            strange[0],
        )
    used = {found.again.group: found.node for found in wanted if found.node is not None}
    running = {
        group: replace(node, name=running_node_group(node)) for group, node in sorted(used.items())
    }
    return [(found, running[found.again.group]) for found in wanted if found.node is not None]


def _step(pair: CapturedPair, settings: Settings, in_use: MemoryInUse) -> Step:
    """Return the step of two graphs with all gathered again."""
    request = replace(settings.solve_request, bitwise_price=False, second_group=False)
    graphs: list[LoadedGraph] = []
    for captured in pair:
        graph, request = _posed(captured, settings, request, in_use)
        graphs.append(graph)
    return Step.of(graphs, request, progress_of(settings))


def _joint_step(
    graphs: Mapping[Choice, CapturedGraph],
    apart: Step,
    settings: Settings,
    in_use: MemoryInUse,
    solved: Answers,
) -> JointStep:
    """Return the step of which ``graphs`` are one graph of forward and backward under each choice,
    and ``apart`` both halves.
    """
    request = replace(settings.solve_request, bitwise_price=False)
    made: dict[Choice, LoadedGraph] = {}
    for kept, captured in graphs.items():
        made[kept], request = _posed(captured, settings, request, in_use)
    sources = replace(settings.answers, schedules=(), solved=solved)
    return JointStep(
        graph=made[apart.always],
        apart=apart,
        request=request,
        search=searching(settings, apart.progress, sources),
        made=made,
    ).with_floor()


def _posed(
    captured: CapturedGraph, settings: Settings, request: SolveRequest, in_use: MemoryInUse
) -> tuple[LoadedGraph, SolveRequest]:
    """Return ``captured`` priced and under the plan, and ``request`` as the prices allow it."""
    progress = progress_of(settings)
    graph, request = priced_in_job(captured, settings, request, in_use, progress)
    return replace(graph, problem=request.posed(graph.problem)[0]), request


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
