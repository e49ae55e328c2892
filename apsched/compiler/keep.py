"""Parameters kept from forward to backward in graphs of torch.compile: tags on the joint graph for
the partitioner.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace

from torch.fx import GraphModule

from apsched.capture.graph_module import capture_graph
from apsched.compiler.ranks.agreement import GraphAgreement
from apsched.compiler.schedule_captured import groups_of, in_registered_order, priced, progress_of
from apsched.compiler.settings import Settings
from apsched.fx.collectives import is_collective
from apsched.fx.passes.lists import joint_passes
from apsched.fx.passes.parameters import gather_nodes
from apsched.fx.passes.run_passes import PassList, run_passes
from apsched.pipeline.load import LoadedGraph
from apsched.torch_compat.compilers import name_parameters
from apsched.whole_step.keep_request import AUTO, KeepRequest
from apsched.whole_step.pair import Step
from apsched.whole_step.search import solve_step

Partition = Callable[[GraphModule], tuple[GraphModule, GraphModule]]
"""Joint graph, which it may change -> forward and backward graph."""


def kept_passes(
    request: KeepRequest,
    joint: GraphModule,
    partition: Partition,
    settings: Settings,
    names: Mapping[int, str],
    agreement: GraphAgreement | None,
) -> PassList:
    """Return the passes after which the partitioner keeps the parameters of ``request``, and
    gathers the others of ``joint`` again; its parameters are named already.

    For ``auto`` the graphs are solved as one step with every parameter gathered again. With
    ``agreement`` one process rank does so for all that gather the same parameters.
    """
    parameters = sorted(set(gather_nodes(joint.graph).values()))
    if request.mode != AUTO:
        return joint_passes(kept=request.fitting(parameters))
    if not any(is_collective(node) for node in joint.graph.nodes):
        return joint_passes()

    def solved() -> bytes:
        pair = partition(run_passes(joint, joint_passes()).module)
        return json.dumps(sorted(_solved(pair, settings, names, agreement))).encode()

    if agreement is None:
        return joint_passes(kept=json.loads(solved()))
    identity = hashlib.sha256("\n".join(parameters).encode()).hexdigest()
    answer, _ = agreement.shared(identity, {"keep": AUTO}, solved)
    return joint_passes(kept=json.loads(answer))


def _solved(
    pair: tuple[GraphModule, GraphModule],
    settings: Settings,
    names: Mapping[int, str],
    agreement: GraphAgreement | None,
) -> frozenset[str]:
    """Return the best parameters to keep for two graphs with all gathered again; if no choice fits,
    those that rules of the plan keep.
    """
    progress = progress_of(settings)
    request = replace(settings.solve_request, bitwise_price=False, second_group=False)
    graphs: list[LoadedGraph] = []
    for name, module in zip(("forward", "backward"), pair, strict=True):
        name_parameters(module.graph, names)
        captured = capture_graph(module, name=name)
        captured = replace(captured, hints=settings.stated_hints)
        groups = groups_of(module.graph, settings)
        graph, request = priced(captured, settings, groups, request, progress)
        graph = in_registered_order(graph, settings)
        graphs.append(replace(graph, problem=request.posed(graph.problem)[0]))
    with nullcontext() if agreement is None else agreement.job.working():
        return solve_step(Step.of(graphs, request, progress)).best.kept
