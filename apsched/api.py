"""``apsched.optimize`` and ``apsched.solve``: a graph in, its fastest order out, with a proof."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from enum import Enum
from os import PathLike
from typing import Final, Literal

import networkx as nx
import torch

from apsched.capture.captured import Capture
from apsched.capture.fake_world import world
from apsched.capture.function import capture_own
from apsched.capture.graph_module import capture_graph, direction_of
from apsched.compiler.memory_in_use import in_job_account, working
from apsched.compiler.schedule_captured import RESULT, process_rank, scheduled
from apsched.compiler.schedule_graph import kept_as_it_was
from apsched.compiler.settings import Settings, memory_cap_of, memory_cap_once, size_once
from apsched.config import (
    DEFAULT_COMPUTE_MOVE,
    DEFAULT_OPTIMIZER,
    DEFAULT_RESERVE,
    Caps,
    SolveOptions,
    checked_switches,
    checked_texts,
    scenario_options,
    with_keywords,
)
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import DEFAULT_CLUSTER, load_cluster
from apsched.costs.model import CostModel
from apsched.costs.optimizer_state import StatedOptimizer, optimizer_of_model
from apsched.errors import InputError
from apsched.graph.check import check_graph
from apsched.graph.export.export import export_graph
from apsched.graph.graph_file import load_graph
from apsched.models.mesh import MeshSpec
from apsched.options_table import read_values
from apsched.pipeline.assumptions import check_hints
from apsched.pipeline.cost_choice import cluster_of_graphs
from apsched.pipeline.load import group_ranks_of, priced_on_cluster
from apsched.pipeline.result import Result
from apsched.pipeline.solve_graph import (
    SolveRequest,
    caps_of_problem,
    solve_problem,
    under_plan,
    with_shares,
)
from apsched.problem.build import build_problem
from apsched.problem.contention import Contention
from apsched.problem.contention_spec import with_stated_contention
from apsched.problem.plan.apply import check_matches
from apsched.problem.plan.plan_file import as_plan
from apsched.problem.plan.rules import Plan
from apsched.problem.problem import Problem
from apsched.progress import Progress
from apsched.quantities import MemoryCap, checked_count, checked_group_ranks
from apsched.report.answer.step import StepResult
from apsched.whole_step.accumulation.held_tensors import held_tensors
from apsched.whole_step.accumulation.search import solve_accumulation
from apsched.whole_step.accumulation.step import Accumulation
from apsched.whole_step.keep_request import keep_request, plan_for
from apsched.whole_step.pair import Step, kept_tensors
from apsched.whole_step.search import solve_choice


class _LeftOut(Enum):
    LEFT_OUT = "as in caps, else 200"


_LEFT_OUT: Final = _LeftOut.LEFT_OUT
_ComputeMove = int | None | Literal[_LeftOut.LEFT_OUT]


def optimize(
    gm: torch.fx.GraphModule,
    *,
    caps: Caps | None = None,
    options: SolveOptions | None = None,
    cluster: str | PathLike[str] | None = None,
    cost_model: CostModel | None = None,
    memory_cap: int | str | None = None,
    memory_cap_bytes: int | str | None = None,
    bucket_cap: int | str | None = None,
    bucket_cap_bytes: int | str | None = None,
    max_topo_span: int | None = None,
    max_prefetch: int | None = None,
    in_flight_cap: int | str | None = None,
    in_flight_cap_bytes: int | str | None = None,
    max_compute_move: _ComputeMove = _LEFT_OUT,
    plan: Plan | str | PathLike[str] | None = None,
    bitwise: bool = False,
    contention: str | Contention | None = None,
    second_group: bool = False,
    scenarios: int | None = None,
    noise: float | None = None,
    robust: str | None = None,
    time_slack: float | None = None,
    budget: float | None = None,
    seed: int | None = None,
    optimizer: StatedOptimizer | None = None,
    reserve: float | str | None = None,
    hints: Mapping[str, int] | None = None,
    group_ranks: Mapping[str, Sequence[int]] | None = None,
    on_error: str = "raise",
) -> torch.fx.GraphModule:
    """Return ``gm`` in the fastest order and with the best buckets that the caps allow; ``gm``
    itself stays unchanged.

    ``fast.apsched_result`` and ``fast.meta["apsched_result"]`` are its :class:`apsched.Result`
    (schedule, bound, gap, figures); the module was exported and simulated again as a check.
    Placeholders need ``meta["val"]``, as in the graphs that compilers pass to their backends; calls
    without it are run on fake values. The module has its order if it runs node by node; full
    Inductor changes the order unless :func:`apsched.writeback.hold_order.hold_order` holds it.

    Parameters
    ----------
    caps, options
        All caps, and all options of the search, in one record each. A value that a record states
        and a keyword states again is an InputError. A memory cap of ``None`` is the device's
        memory, as for the keyword, and ``caps.max_compute_move`` limits the move of compute;
        ``Caps()`` allows no move.
    cluster, cost_model
        Prices of nodes and collectives: a cluster by name or TOML file, or a model of the user's
        own; by default the cluster ``h100``, with the process groups that run here.
    memory_cap, memory_cap_bytes
        Two names for one thing: live bytes at any node. Text is read as by ``--memory-cap``:
        ``"none"``, ``"floor"``, ``"60GiB"``. ``None`` is the memory of the cost model's device,
        less the bytes beside the graph: the state of ``optimizer``, a name as of ``--optimizer`` or
        a ``torch.optim.Optimizer``, and ``reserve`` (5 %); a model of the user's own sets no cap.
    bucket_cap, max_topo_span, max_prefetch, in_flight_cap, max_compute_move
        As in :class:`apsched.Caps`; ``None`` is no limit. Sizes, with or without
        ``_bytes`` in the name, are bytes or texts (``"500MB"``). Compute moves only if that hides
        something; without ``caps``, by at most 200 places if ``max_compute_move`` is left out.
    plan
        Rules for collectives by name of their parameter: an :class:`apsched.Plan`, or the path of a
        plan file. They need names, which graphs of AOTAutograd have on their outputs and
        placeholders.
    bitwise
        Reduce gradients in the buckets and payload order of eager FSDP2, so that sums are the same
        bit for bit. ``apsched_result.bitwise`` has the cost of that. Parameters must have names,
        too.
    contention
        How streams slow each other: ``"links,compute=1.2"``, or in full; off by default.
    second_group
        Also try gathers on a second process group of the same process ranks, so that they do not
        queue behind reductions, and keep the faster. The group is made once in the life of the
        process, by all of its process ranks.
    scenarios, noise, robust
        Choose the schedule that is best by ``robust`` (``"mean"`` or ``"worst"``, the default) over
        so many sampled costs, which differ from those stated by lognormal factors with sigma
        ``noise`` (0.2); ``apsched_result.robustness`` has the figures.
    time_slack, budget, seed
        As in :class:`apsched.SolveOptions`, where ``options`` does not state them.
    hints
        Symbol -> size, such as ``{"u0": 6144}``, of sizes that depend on data; ``None``: as torch
        hints at them, else balanced, else 8192 (docs/compiler.md). ``apsched_result.assumptions``
        has all sizes, and the shares that rest on them.
    group_ranks
        Process ranks of process groups by name, where they do not run here. The graph has priority:
        where its collectives state another size of a group, their size sets the price.
    on_error
        ``"fallback"``: an error is logged, and ``gm`` itself returned.

    Raises
    ------
    InputError
        Where ``gm`` cannot be scheduled; the message names the node.
    InfeasibleError
        Where no schedule keeps the caps; the message has the least cap with a schedule.
    RoundTripError
        Where the graph to be returned, exported and simulated again, differs from the claim; the
        message names the difference.
    """
    memory_cap_once(memory_cap, memory_cap_bytes)
    stated = {
        "memory_cap": memory_cap_bytes if memory_cap is None else memory_cap,
        "bucket_cap": size_once("bucket_cap", bucket_cap, bucket_cap_bytes),
        "max_topo_span": max_topo_span,
        "max_prefetch": max_prefetch,
        "in_flight_cap": size_once("in_flight_cap", in_flight_cap, in_flight_cap_bytes),
        "time_slack": time_slack,
        "budget": budget,
        "seed": seed,
        "optimizer": optimizer,
        "reserve": reserve,
    }
    moved = {} if max_compute_move is _LEFT_OUT else {"max_compute_move": max_compute_move}
    settings = Settings.of(
        {name: value for name, value in stated.items() if value is not None}
        | moved
        | {"caps": caps, "options": options, "cluster": cluster, "cost_model": cost_model}
        | {"plan": plan, "bitwise": bitwise, "contention": contention, "hints": hints}
        | {"second_group": second_group, "scenarios": scenarios, "noise": noise, "robust": robust}
        | {"group_ranks": group_ranks, "on_error": on_error}
    )
    return _optimized(gm, settings)


def _optimized(gm: torch.fx.GraphModule, settings: Settings) -> torch.fx.GraphModule:
    try:
        fast = scheduled(capture_graph(gm), settings)
        found = fast.meta[RESULT].assumptions
        check_hints(settings.stated_hints, found.sizes if found else (), "hints", "the graph has")
        return fast
    except Exception as error:
        if settings.on_error == "raise":
            raise
        return kept_as_it_was(gm, error, settings, direction_of(gm.graph))


def capture(
    model: torch.nn.Module,
    inputs: Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
    mesh: str | None = None,
    *,
    cluster: str = DEFAULT_CLUSTER,
    activation_checkpoint: str = "none",
) -> tuple[nx.DiGraph, ...]:
    """Return the graphs of a training step of ``model``, forward and backward, priced for
    ``cluster``: the input of :func:`apsched.solve`. Nothing is computed, and no GPU is needed.

    ``mesh`` (``"fsdp=64"``) shards the model **in place**, as ``apsched solve module:function
    --mesh`` does, on a fake process group; without it the running process group applies, if there
    is one. ``inputs`` are those of forward in order, or by name. The model may be on the ``meta``
    device. ``activation_checkpoint`` is ``none``, ``full``, ``selective`` or ``every-N``. The
    function raises ``InputError`` where the model cannot be traced, or has no mesh of that form.
    """
    with _captured(model, inputs, mesh, activation_checkpoint, Progress(quiet=True)) as found:
        ranks = group_ranks_of(found)
        prices = ClusterCostModel(load_cluster(cluster), ranks)
        return tuple(
            export_graph(graph, prices, group_ranks=ranks, cluster_name=prices.cluster.name)
            for graph in found.graphs
        )


def solve(
    graph: "nx.DiGraph | Problem | str | PathLike[str]",
    caps: Caps | None = None,
    options: SolveOptions | None = None,
    *,
    memory_cap: int | str | None = None,
    memory_cap_bytes: int | str | None = None,
    bucket_cap: int | str | None = None,
    bucket_cap_bytes: int | str | None = None,
    max_topo_span: int | None = None,
    max_prefetch: int | None = None,
    in_flight_cap: int | str | None = None,
    in_flight_cap_bytes: int | str | None = None,
    max_compute_move: _ComputeMove = _LEFT_OUT,
    plan: Plan | str | PathLike[str] | None = None,
    bitwise: bool = False,
    contention: str | Contention | None = None,
    second_group: bool = False,
    scenarios: int | None = None,
    noise: float | None = None,
    robust: str | None = None,
    time_slack: float | None = None,
    budget: float | None = None,
    seed: int | None = None,
    group_ranks: Mapping[str, Sequence[int]] | None = None,
) -> Result:
    """Return the fastest schedule of ``graph`` within the caps; ``None`` is no limit. ``graph`` is
    a DAG of :func:`apsched.capture` or :func:`apsched.export_graph`, the path of a graph file, or
    a Problem. It has its prices, so there is no ``cluster`` here.

    ``memory_cap`` is bytes or a text as for ``--memory-cap``: ``"60GiB"``, ``"floor"``. Caps and
    options come in records or as keywords, each value once; see :func:`apsched.optimize`. Compute
    moves by at most 200 places without ``caps``, and by ``caps.max_compute_move`` with it. If no
    collective would be hidden, compute stays as captured; bounds hold for all orders. ``plan`` has
    rules for collectives by name: an :class:`apsched.Plan`, or the path of a plan file. The solver
    decides the rest. With ``bitwise``, ``Result.bitwise`` has its price; with ``scenarios``,
    ``Result.robustness`` has the step times over the sampled costs; with ``second_group``,
    ``Result.problem`` has the second groups if these are faster. A text in ``contention`` is read
    for the cluster of the DAG. If no schedule keeps the caps, ``Result.best`` is ``None`` and
    ``Result.answer.infeasibility`` has the reason. ``group_ranks`` are process ranks of process
    groups by name, for contention, in addition to those in the DAG.
    Needs no process group and no FX graph.
    """
    checked_switches(bitwise=bitwise, second_group=second_group)
    stated = memory_cap_once(memory_cap, memory_cap_bytes)
    request = SolveRequest(
        caps=_caps(
            caps,
            max_compute_move,
            size_once("bucket_cap", bucket_cap, bucket_cap_bytes),
            max_topo_span,
            max_prefetch,
            size_once("in_flight_cap", in_flight_cap, in_flight_cap_bytes),
            None if stated is None else stated.size_bytes,
        ),
        options=_options(options, time_slack, budget, seed),
        plan=as_plan(plan),
        bitwise=bitwise,
        scenarios=scenario_options(scenarios, noise, robust),
        second_group=second_group,
    )
    cap = MemoryCap(size_bytes=request.caps.memory_cap_bytes)
    request = replace(request, memory_cap=cap if stated is None else stated)
    dag = None if isinstance(graph, Problem) else _dag(graph)
    problem = graph if isinstance(graph, Problem) else build_problem(dag)
    cluster = dag.graph["cluster"] if dag is not None else ""
    known_ranks = dag.graph["group_ranks"] if dag is not None else {}
    ranks = {**known_ranks, **checked_group_ranks(group_ranks)}
    known = None if dag is None else cluster_of_graphs(None, [dag])
    problem = with_stated_contention(problem, contention, known, ranks)
    check_matches([problem], request.plan)
    problem, without_bitwise = request.posed(problem)
    progress = Progress(quiet=True)
    limits = caps_of_problem(problem, request, progress)
    result = solve_problem(problem, limits, request, progress, without_bitwise=without_bitwise)
    result = replace(result, cluster=cluster)
    return result if dag is None else with_shares(result, dag)


def solve_step(
    model: torch.nn.Module,
    inputs: Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
    mesh: str | None = None,
    *,
    keep: str | PathLike[str] | Iterable[str] = "auto",
    accumulate: int = 1,
    cluster: str = DEFAULT_CLUSTER,
    activation_checkpoint: str = "none",
    caps: Caps | None = None,
    options: SolveOptions | None = None,
    memory_cap: int | str | None = None,
    optimizer: StatedOptimizer = DEFAULT_OPTIMIZER,
    reserve: float = DEFAULT_RESERVE,
    in_job: bool = False,
    in_node: bool = True,
    plan: Plan | str | PathLike[str] | None = None,
    second_group: bool = False,
    time_slack: float | None = None,
    budget: float | None = None,
    seed: int | None = None,
    progress: bool = False,
) -> StepResult:
    """Return the fastest training step of ``model`` that fits: forward and backward solved under
    one memory cap, together with the choice of the gathered parameters that are kept in between.

    Nothing is computed, and no GPU is needed. ``model``, ``inputs``, ``mesh`` and
    ``activation_checkpoint`` are those of :func:`apsched.capture`: the model is sharded in place.

    Parameters
    ----------
    keep
        ``"auto"``, ``"none"``, ``"all"``, names of parameters (or regular expressions), or a file
        of such. ``NAME @node``: each process rank keeps one part, and gathers the others of its
        node in backward. Of a model under ``fully_shard``: of the units that gather again; one with
        ``reshard_after_forward=False`` stays gathered.
    accumulate
        Micro-batches in a row; ``model`` and ``inputs`` are of one. With more than one the choice
        is also which parameters stay gathered until the next micro-batch (``NAME @next``), and
        which gradients are added and reduced once (``NAME @sum``; ``NAME @sum-shards``: of HSDP,
        over the replicas only).
    memory_cap
        Bytes of each graph, or a text as for ``--memory-cap``. By default the memory of the
        cluster's device, less the bytes beside the graphs with ``optimizer`` (a name or a
        ``torch.optim.Optimizer``, counted in the shards of ``mesh``) and ``reserve``.
    in_job
        The default memory cap also leaves out the other memory that the running job has in use, the
        most of its process ranks, as ``apsched.backend`` does. All of them make this call at once.
    in_node
        ``False``: no parameter is resharded in its node, for a job that cannot do so (FSDP2).
    caps, options, time_slack, budget, seed, second_group
        As for :func:`apsched.solve`; without ``caps`` compute moves by at most 200 places.
    plan
        Rules for collectives and, with ``keep="auto"``, for parameters (``keep = true``).
    progress
        Print the progress to stderr, as ``apsched solve`` does; in a job on process rank 0.

    Raises
    ------
    InputError
        where the model cannot be traced, or an argument cannot be used.
    AgreementError
        with ``in_job``, where another process rank does not make this call.
    """
    wanted = keep_request(keep, "keep")
    checked_switches(second_group=second_group, in_job=in_job, in_node=in_node, progress=progress)
    if in_job and mesh is not None:
        raise InputError(
            f"in_job: expected a model of the running job, found mesh {mesh!r}; leave one out"
        )
    counted = optimizer_of_model(optimizer, model)
    accumulate = checked_count(accumulate, "accumulate", least=1)
    limits = _caps(caps, _LEFT_OUT)
    request = SolveRequest(
        caps=limits,
        memory_cap=_memory_cap_once(memory_cap, limits),
        **read_values(reserve=reserve),
        options=_options(options, time_slack, budget, seed),
        plan=plan_for(as_plan(plan), wanted),
        second_group=second_group,
    )
    stream = Progress(quiet=not progress or process_rank() > 0)
    at_work = working() if in_job else ExitStack()
    with at_work, _captured(model, inputs, mesh, activation_checkpoint, stream) as found:
        request = replace(request, optimizer=counted())
        priced = priced_on_cluster(found, cluster, stream, in_node=in_node)
        at_work.close()
        if in_job:
            priced = in_job_account(priced, request, optimizer)
        graphs = under_plan(priced, request)
        step = Step.of(graphs, request, stream)
        if accumulate != 1:
            several = solve_accumulation(Accumulation.of(step, accumulate), wanted, "keep")
            held = held_tensors(graphs, several.best)
            return StepResult(answer=several, model=found.source, kept_tensors=held)
        answer = solve_choice(step, wanted, "keep")
        tensors = kept_tensors(graphs, answer.best.graphs)
        return StepResult(answer=answer, model=found.source, kept_tensors=tensors)


@contextmanager
def _captured(
    model: torch.nn.Module, inputs: object, mesh: str | None, checkpoint: str, progress: Progress
) -> Iterator[Capture]:
    """Capture ``model``; its process groups, fake ones with a mesh, are there until the end."""
    checked_texts(activation_checkpoint=checkpoint, mesh="" if mesh is None else mesh)
    spec = None if mesh is None else MeshSpec.parse(mesh)
    with world(spec.world_size) if spec is not None else nullcontext():
        with progress.stage("capture"):
            found = capture_own(
                model,
                inputs,
                source=type(model).__name__,
                num_ranks=None if spec is None else spec.world_size,
                mesh=spec,
                activation_checkpoint=checkpoint,
            )
        for warning in found.warnings:
            warnings.warn(warning, stacklevel=4)  # past contextlib, to the caller of the API
        yield found


def _memory_cap_once(stated: int | str | None, caps: Caps) -> MemoryCap | None:
    if caps.memory_cap_bytes is None:
        return memory_cap_of(stated, "memory_cap")
    if stated is not None:
        raise InputError("memory_cap: expected it once, found it in caps, too; leave one out")
    return MemoryCap(size_bytes=caps.memory_cap_bytes)


def _dag(graph: "nx.DiGraph | str | PathLike[str]") -> nx.DiGraph:
    if isinstance(graph, str | PathLike):
        return load_graph(graph)
    if not isinstance(graph, nx.DiGraph):
        raise InputError(
            "graph: expected a graph of apsched.capture, the path of a graph file or a Problem,"
            f" found {type(graph).__name__}; apsched.optimize takes FX graphs"
        )
    missing = sorted({"cluster", "group_ranks", "storages", "curves"} - graph.graph.keys())
    if missing:
        raise InputError(
            "graph: expected a graph of apsched.capture or apsched.export_graph, found one without"
            f" {', '.join(missing)}; pass one of these, or the path of a graph file"
        )
    check_graph(graph)
    return graph


def _caps(
    caps: Caps | None,
    max_compute_move: _ComputeMove,
    bucket_cap_bytes: int | None = None,
    max_topo_span: int | None = None,
    max_prefetch: int | None = None,
    in_flight_cap_bytes: int | None = None,
    memory_cap_bytes: int | None = None,
) -> Caps:
    keywords = {
        "memory_cap_bytes": memory_cap_bytes,
        "bucket_cap_bytes": bucket_cap_bytes,
        **read_values(max_topo_span=max_topo_span, max_prefetch=max_prefetch),
        "in_flight_cap_bytes": in_flight_cap_bytes,
    }
    if caps is None:
        move = DEFAULT_COMPUTE_MOVE if max_compute_move is _LEFT_OUT else max_compute_move
        return with_keywords(Caps(max_compute_move=move), "caps", keywords)
    if max_compute_move is _LEFT_OUT:
        return with_keywords(caps, "caps", keywords)
    if max_compute_move is None:  # no limit, which is a value here
        with_keywords(caps, "caps", {"max_compute_move": DEFAULT_COMPUTE_MOVE})
        return replace(with_keywords(caps, "caps", keywords), max_compute_move=None)
    return with_keywords(caps, "caps", {**keywords, "max_compute_move": max_compute_move})


def _options(
    options: SolveOptions | None, time_slack: float | None, budget: float | None, seed: int | None
) -> SolveOptions:
    keywords = read_values(time_slack=time_slack, budget=budget, seed=seed)
    return with_keywords(SolveOptions() if options is None else options, "options", keywords)
