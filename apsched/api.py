"""``apsched.optimize``: a graph module in, the same computation in a proven order out."""

from dataclasses import replace
from os import PathLike

import networkx as nx
import torch

from apsched.capture.graph_module import capture_graph_module
from apsched.compiler.schedule_captured import scheduled
from apsched.compiler.settings import Settings, memory_cap_of
from apsched.config import DEFAULT_COMPUTE_MOVE, Caps, SolveOptions
from apsched.costs.clusters.cluster import cluster_names, load_cluster
from apsched.costs.model import CostModel
from apsched.pipeline.result import Result, result_of
from apsched.pipeline.steps import check_answer, log_metrics, with_bitwise_price
from apsched.problem.build import build_problem
from apsched.problem.contention import Contention
from apsched.problem.contention_spec import as_asked
from apsched.problem.plan.apply import check_matches, restricted
from apsched.problem.plan.plan_file import as_plan
from apsched.problem.plan.rules import Plan
from apsched.problem.problem import Problem
from apsched.schedule.result import SolveResult
from apsched.what_if.scenarios import ScenarioOptions


def optimize(
    gm: torch.fx.GraphModule,
    *,
    cost_model: CostModel | None = None,
    memory_cap_bytes: int | str | None = None,
    bucket_cap_bytes: int | None = None,
    max_topo_span: int | None = None,
    max_prefetch: int | None = None,
    in_flight_cap_bytes: int | None = None,
    max_compute_move: int | None = DEFAULT_COMPUTE_MOVE,
    plan: Plan | str | PathLike[str] | None = None,
    bitwise: bool = False,
    contention: str | Contention | None = None,
    second_group: bool = False,
    seed: int = 0,
) -> torch.fx.GraphModule:
    """Return ``gm`` in the fastest order and with the best buckets that the caps allow; ``gm``
    itself stays as it is.

    The :class:`apsched.Result` (schedule, bound, gap, figures) is at hand as
    ``fast.apsched_result`` and ``fast.meta["apsched_result"]`` of the module returned, which was
    exported and simulated again to check it. Every node needs ``meta["val"]``, as the graphs that
    compilers hand to their backends have it. Who runs the result node by node has its order; full
    Inductor would change it, and keeps it where :func:`apsched.hold_order` has been over it.

    Parameters
    ----------
    cost_model
        Prices of nodes and collectives; by default those of the cluster ``h100``, with the process
        groups that run here.
    memory_cap_bytes
        Live bytes at any node. Text is read as by ``--memory-cap``: ``"none"``, ``"floor"``,
        ``"60GiB"``. ``None`` is the memory of the cost model's device, and no cap where the model
        is one of the user's own.
    bucket_cap_bytes, max_topo_span, max_prefetch, in_flight_cap_bytes, max_compute_move
        As in :class:`apsched.Caps`; ``None`` is no limit. Compute moves only where it has something
        to hide.
    plan
        Rules for collectives by name of their parameter: an :class:`apsched.Plan`, or the path of a
        plan file. They need names, which graphs of AOTAutograd have on their outputs and
        placeholders.
    bitwise
        Reduce gradients in the buckets and payload order of eager FSDP2, so that sums are the same
        bit for bit. What that costs is ``apsched_result.bitwise``. Parameters must have names, too.
    contention
        Who slows whom, as for ``--contention`` (``"links,compute=1.2"``), or in full; by default
        nobody.
    second_group
        Also try gathers on a second process group of the same process ranks, so that they do not
        queue behind reductions, and keep the faster. The group is made once in the life of the
        process, by all of its process ranks.

    Raises
    ------
    InputError
        Where ``gm`` cannot be scheduled; the message names the node.
    InfeasibleError
        Where no schedule keeps the caps; the message says the least that would do.
    """
    memory_cap_of(memory_cap_bytes, "memory_cap_bytes")
    settings = Settings(
        cost_model=cost_model,
        memory_cap=memory_cap_bytes,
        bucket_cap=bucket_cap_bytes,
        max_topo_span=max_topo_span,
        max_prefetch=max_prefetch,
        in_flight_cap=in_flight_cap_bytes,
        max_compute_move=max_compute_move,
        plan=plan,
        bitwise=bitwise,
        contention=contention,
        second_group=second_group,
        seed=seed,
    )
    return scheduled(capture_graph_module(gm), settings)


def solve(
    graph: "nx.DiGraph | Problem",
    *,
    memory_cap_bytes: int | None = None,
    bucket_cap_bytes: int | None = None,
    max_topo_span: int | None = None,
    max_prefetch: int | None = None,
    in_flight_cap_bytes: int | None = None,
    max_compute_move: int | None = DEFAULT_COMPUTE_MOVE,
    plan: Plan | str | PathLike[str] | None = None,
    bitwise: bool = False,
    contention: str | Contention | None = None,
    scenarios: int = 0,
    noise: float = 0.2,
    robust: str = "worst",
    options: SolveOptions | None = None,
) -> Result:
    """Return the fastest schedule of ``graph`` (a DAG of ``export`` or a graph file, or a Problem)
    within the caps; ``None`` is no limit.

    Where it has nothing to hide compute stays as captured, whatever ``max_compute_move`` says; the
    bounds hold for all orders that it allows. ``plan`` has rules for collectives by name: an
    :class:`apsched.Plan`, or the path of a plan file. What it leaves open is decided here. With
    ``bitwise``, gradients are reduced in the buckets and payload order of eager FSDP2;
    ``Result.bitwise`` says what that costs. ``contention`` is who slows whom, in full or as for
    ``--contention``, on the cluster of the DAG: ``"links,compute=1.2"``. With ``scenarios`` the
    schedule is the one that is best by ``robust`` (``mean`` or ``worst``) over so many sampled
    costs, which differ from those stated by lognormal factors with sigma ``noise``;
    ``Result.robustness`` says what it and the others take. Where no schedule keeps the caps,
    ``Result.best`` is ``None`` and ``Result.answer.infeasibility`` says why. Needs no torch.
    """
    caps = Caps(
        memory_cap_bytes=memory_cap_bytes,
        bucket_cap_bytes=bucket_cap_bytes,
        max_topo_span=max_topo_span,
        max_prefetch=max_prefetch,
        in_flight_cap_bytes=in_flight_cap_bytes,
        max_compute_move=max_compute_move,
    )
    cluster = "" if isinstance(graph, Problem) else graph.graph["cluster"]
    problem = graph if isinstance(graph, Problem) else build_problem(graph)
    ranks = {} if isinstance(graph, Problem) else graph.graph["group_ranks"]
    problem = as_asked(
        problem, contention, load_cluster(cluster) if cluster in cluster_names() else None, ranks
    )
    rules = as_plan(plan)
    check_matches([problem], rules)
    free, problem = restricted(problem, rules), restricted(problem, rules, bitwise=bitwise)
    from apsched.solver import solve_as_asked as search
    from apsched.what_if.robust import made_robust

    asked = ScenarioOptions(count=scenarios, noise=noise, measure=robust) if scenarios else None
    options = options or SolveOptions()
    answer: SolveResult = search(problem, caps, options)
    answer, robustness = (
        (answer, None) if asked is None else made_robust(problem, caps, options, answer, asked)
    )
    result = replace(
        result_of(problem, caps, answer, cluster=cluster, seconds={}), robustness=robustness
    )
    check_answer(result)
    log_metrics(result)
    return with_bitwise_price(result, free, lambda other: search(other, caps, options))
