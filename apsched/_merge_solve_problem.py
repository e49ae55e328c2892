"""``apsched.solve``: a graph or a problem in, the fastest schedule out. Needs no torch."""

from dataclasses import replace
from os import PathLike

import networkx as nx

from apsched.build_problem import build_problem
from apsched.config import DEFAULT_COMPUTE_MOVE, Caps, SolveOptions
from apsched.contention import Contention
from apsched.contention_choice import as_asked
from apsched.costs.cluster import cluster_names, load_cluster
from apsched.graph_result import Result, result_of
from apsched.pipeline import check_answer, log_metrics, with_bitwise_price
from apsched.plan import Plan
from apsched.plan_file import as_plan
from apsched.problem import Problem
from apsched.restrict import check_matches, restricted
from apsched.result import SolveResult
from apsched.scenarios import ScenarioOptions
from apsched.where_it_pays import moving_where_it_pays


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
    """Return the fastest schedule of ``graph`` (a DAG of ``export`` or a graph file, or a Problem) within the caps; ``None`` is no limit.

    Where it has nothing to hide compute stays as captured, whatever ``max_compute_move`` says (``Result.caps`` has what held).
    ``plan`` has rules for collectives by name: an :class:`apsched.Plan`, or the path of a plan file. What it leaves open is decided here.
    With ``bitwise``, gradients are reduced in the buckets and payload order of eager FSDP2; ``Result.bitwise`` says what that costs.
    ``contention`` is who slows whom, in full or as for ``--contention``, on the cluster of the DAG: ``"links,compute=1.2"``.
    With ``scenarios`` the schedule is the one that is best by ``robust`` (``mean`` or ``worst``) over so many sampled costs, which differ
    from those stated by lognormal factors with sigma ``noise``; ``Result.robustness`` says what it and the others take.
    Where no schedule keeps the caps, ``Result.best`` is ``None`` and ``Result.answer.infeasibility`` says why. Needs no torch.
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
    problem = as_asked(problem, contention, load_cluster(cluster) if cluster in cluster_names() else None, ranks)
    rules = as_plan(plan)
    check_matches([problem], rules)
    free, problem = restricted(problem, rules), restricted(problem, rules, bitwise=bitwise)
    from apsched.robust import made_robust
    from apsched.solver import solve as search

    caps = moving_where_it_pays(problem, caps)
    asked = ScenarioOptions(count=scenarios, noise=noise, measure=robust) if scenarios else None
    options = options or SolveOptions()
    answer: SolveResult = search(problem, caps, options)
    answer, robustness = (answer, None) if asked is None else made_robust(problem, caps, options, answer, asked)
    result = replace(result_of(problem, caps, answer, cluster=cluster, seconds={}), robustness=robustness)
    check_answer(result)
    log_metrics(result)
    return with_bitwise_price(result, free, lambda other: search(other, caps, options))
