"""From a problem to a checked answer: the one line that the commands, the Python API, the compiler
and studies share.

problem -> plan and bitwise mode -> caps, and where compute may move -> solve, with second groups
too -> scenarios -> result -> check -> log -> price of bitwise mode
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import networkx as nx

from apsched.config import (
    DEFAULT_OPTIMIZER,
    DEFAULT_RESERVE,
    Caps,
    MilpOptions,
    ScenarioOptions,
    SolveOptions,
    is_number,
)
from apsched.costs.optimizer_step import CountedOptimizer
from apsched.errors import InputError, SelfCheckError
from apsched.graph.cost_shares import cost_shares
from apsched.pipeline.assumptions import assumptions_of
from apsched.pipeline.compile_ahead import wait_until_compiled
from apsched.pipeline.device_memory import COMMUNICATOR_BYTES, MemoryAccount
from apsched.pipeline.load import LoadedGraph
from apsched.pipeline.result import BitwisePrice, Result, result_of
from apsched.problem.plan.apply import check_matches, restricted
from apsched.problem.plan.bitwise import BITWISE_RULE
from apsched.problem.plan.rules import Plan
from apsched.problem.problem import Problem
from apsched.problem.second_group import second_groups, with_second_groups
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.schedule.in_a_row import Part, in_a_row
from apsched.schedule.result import SolveResult, Status
from apsched.schedule.schedule import Schedule, as_captured
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.units import ticks_to_us

logger = logging.getLogger(__name__)

Search = Callable[[Problem, Caps, SolveOptions], SolveResult]
Working = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveRequest:
    """All options of a solve; costs, with contention, belong to the problem."""

    caps: Caps = field(default_factory=Caps)
    """All caps but that on memory, which may depend on the graph."""
    memory_cap: MemoryCap | None = None
    """``None``: the memory of the device, less the memory that it holds beside the graph."""
    optimizer: str | CountedOptimizer = DEFAULT_OPTIMIZER
    """Whose state the device holds: of :data:`apsched.config.OPTIMIZERS`, or those of a job."""
    reserve: float = DEFAULT_RESERVE
    """Share of the device's memory kept free for fragmentation."""
    options: SolveOptions = field(default_factory=SolveOptions)
    plan: Plan = field(default_factory=Plan)
    bitwise: bool = False
    """Reduce gradients in the buckets and payload order of eager FSDP2."""
    bitwise_price: bool = True
    """Solve once more without bitwise mode, to know the cost of it."""
    scenarios: ScenarioOptions | None = None
    """Choose the schedule that is best over sampled costs."""
    second_group: bool = False
    """Solve once more with gathers on second process groups, and keep the faster answer."""
    milp: MilpOptions | None = None
    """Solve with the MILP."""

    def __post_init__(self) -> None:
        if not is_number(self.reserve) or not 0 <= self.reserve <= 1:
            raise InputError(
                f"reserve: expected a share between 0 and 1, such as 0.05; found {self.reserve!r}"
            )

    def posed(self, problem: Problem) -> tuple[Problem, Problem | None]:
        """Return ``problem`` under the plan and in bitwise mode, and without that mode where its
        price is requested.
        """
        found = restricted(problem, self.plan, bitwise=self.bitwise)
        priced = self.bitwise and self.bitwise_price
        return found, restricted(problem, self.plan) if priced else None


def under_plan(graphs: Sequence[LoadedGraph], request: SolveRequest) -> tuple[LoadedGraph, ...]:
    """Return ``graphs`` with their problems under the plan of ``request``, and in bitwise mode.

    ``InputError`` for a rule that matches nothing in any of them.
    """
    check_matches([graph.problem for graph in graphs], request.plan)
    posed = (request.posed(graph.problem) for graph in graphs)
    return tuple(
        replace(graph, problem=problem, without_bitwise=without)
        for graph, (problem, without) in zip(graphs, posed, strict=True)
    )


def resolve_caps(graph: LoadedGraph, request: SolveRequest, progress: Progress) -> Caps:
    """Return the caps of ``request`` for ``graph``: the memory cap in bytes, as stated, above the
    least feasible, or (unstated) the device's memory less its account (:func:`account_of`).
    """
    memory_cap = request.memory_cap
    if memory_cap is None:
        if graph.device_memory_bytes is None:
            raise InputError(
                f"the memory of cluster {graph.dag.graph['cluster']!r} is not known here; "
                "state a memory cap (bytes, none, floor or floor+2GiB)"
            )
        account = account_of(graph, request, graph.problem)
        memory_cap = MemoryCap(
            size_bytes=graph.device_memory_bytes if account is None else account.left_bytes
        )
    return caps_of_problem(graph.problem, replace(request, memory_cap=memory_cap), progress)


def account_of(
    graph: LoadedGraph, request: SolveRequest, problem: Problem | None = None
) -> MemoryAccount | None:
    """Return the account of the device's memory for ``graph``, with the communicators of the second
    groups of ``problem``, that of its answer; ``None`` where it is not known.
    """
    if graph.beside is None:
        return None
    return MemoryAccount(
        beside=graph.beside,
        optimizer=request.optimizer,
        reserve=request.reserve,
        more_communicators=0 if problem is None else len(second_groups(problem)),
    )


def lowered(caps: Caps, size_bytes: int) -> Caps:
    """Return ``caps`` with a memory cap that is lower by ``size_bytes``, if there is one."""
    cap_bytes = caps.memory_cap_bytes
    if cap_bytes is None:
        return caps
    return replace(caps, memory_cap_bytes=max(cap_bytes - size_bytes, 0))


def caps_of_problem(problem: Problem, request: SolveRequest, progress: Progress) -> Caps:
    """Return the caps of ``request``, whose memory cap is stated, for ``problem``."""
    assert request.memory_cap is not None
    caps = request.caps
    size_bytes = request.memory_cap.size_bytes
    if not request.memory_cap.above_floor:
        return replace(caps, memory_cap_bytes=size_bytes)
    from apsched.solver import least_memory

    wait_until_compiled(progress, with_orders=False)
    with progress.stage(f"least memory {problem.name}"):
        # a smaller budget knows less of the least memory
        floor_bytes, _ = least_memory(problem, caps, request.options)
    return replace(caps, memory_cap_bytes=floor_bytes + (size_bytes or 0))


def solve_graph(
    graph: LoadedGraph,
    request: SolveRequest,
    progress: Progress,
    *,
    caps: Caps | None = None,
    search: Search | None = None,
    working: Working = nullcontext,
    apart: Sequence[Schedule] = (),
) -> Result:
    """Return the answer for one graph under its plan (:func:`under_plan`), with the share of each
    source of its costs; see :func:`solve_problem`.

    ``caps`` are those of :func:`resolve_caps` where they are known already. One graph of forward
    and backward starts from schedules of both alone: ``apart``, or those that are found here.
    """
    caps = resolve_caps(graph, request, progress) if caps is None else caps
    of_device = request.memory_cap is None and graph.beside is not None
    if search is None and request.milp is None and len(graph.apart) == 2:
        search = _never_slower_than_apart(graph, caps, request, progress, apart)
    result = solve_problem(
        graph.problem,
        caps,
        request,
        progress,
        without_bitwise=graph.without_bitwise,
        search=search,
        working=working,
        communicator_bytes=COMMUNICATOR_BYTES if of_device else 0,
    )
    return replace(
        with_shares(result, graph.dag),
        cluster=graph.dag.graph["cluster"],
        account=account_of(graph, request, result.problem),
        seconds={**graph.seconds, **result.seconds, "write_back": 0.0},
    )


def solve_each(
    graphs: Sequence[LoadedGraph], request: SolveRequest, progress: Progress
) -> tuple[Result, ...]:
    """Return the answers for ``graphs`` under their plan, which run on one device, each solved by
    itself.
    """

    def solve(graph: LoadedGraph, caps: Caps, request: SolveRequest) -> Result:
        return solve_graph(graph, request, progress, caps=caps)

    caps = [resolve_caps(graph, request, progress) for graph in graphs]
    return solve_on_one_device(graphs, caps, request, solve)


def solve_on_one_device(
    graphs: Sequence[LoadedGraph],
    caps: Sequence[Caps],
    request: SolveRequest,
    solve: Callable[[LoadedGraph, Caps, SolveRequest], Result],
) -> tuple[Result, ...]:
    """Return the answers of ``solve`` for ``graphs`` that run on one device, as those of a step.

    The communicator of a second group is there while any of them runs. So under the memory of the
    device a graph has less room if another one uses such a group, or none uses one if that is
    faster.
    """
    found = tuple(solve(graph, limits, request) for graph, limits in zip(graphs, caps, strict=True))
    counts = [len(second_groups(result.problem)) for result in found]
    num_used = len({group for result in found for group in second_groups(result.problem)})
    is_of_device = request.memory_cap is None and all(graph.beside for graph in graphs)
    if not is_of_device or {*counts} == {num_used} or any(r.best is None for r in found):
        return found
    without = replace(request, second_group=False)
    beside, alone = [], []
    for graph, limits, result, count in zip(graphs, caps, found, counts, strict=True):
        if count < num_used:
            less = lowered(limits, num_used * COMMUNICATOR_BYTES)
            beside.append(_with_communicators(solve(graph, less, without), num_used))
        else:
            beside.append(result)
        alone.append(solve(graph, limits, without) if count else result)
    chosen = beside if _step_ticks(beside) < _step_ticks(alone) else alone
    ways = zip(chosen, found, beside, alone, strict=True)
    return tuple(_with_least_bound(result, known) for result, *known in ways)


def _with_least_bound(result: Result, known: Sequence[Result]) -> Result:
    """Return ``result`` with the least bound of the answers ``known``, those in other ways to place
    gathers on groups: no way is faster than the sum of such bounds over a step.
    """
    least = min((one.answer for one in known), key=lambda answer: answer.bound_ticks)
    if result.best is None or least.bound_ticks == result.answer.bound_ticks:
        return result
    answer = replace(
        result.answer,
        status=Status.FEASIBLE,
        bound_ticks=least.bound_ticks,
        bound_source=least.bound_source,
    )
    return replace(result, answer=answer)


def _with_communicators(result: Result, number: int) -> Result:
    """Return ``result`` with the communicators of so many second groups in its account."""
    assert result.account is not None
    return replace(result, account=replace(result.account, more_communicators=number))


def _step_ticks(results: Sequence[Result]) -> tuple[bool, int]:
    """Return the step time of all graphs; those without a schedule come last."""
    ticks = [result.best.step_time_ticks for result in results if result.best is not None]
    return len(ticks) < len(results), sum(ticks)


def _never_slower_than_apart(
    graph: LoadedGraph,
    caps: Caps,
    request: SolveRequest,
    progress: Progress,
    apart: Sequence[Schedule],
) -> Search:
    """Return a search that starts from the answers for forward and backward alone, one behind the
    other: where these fit together, it finds nothing slower.
    """
    from apsched.solver import solve_requested

    problems = [request.posed(half.problem)[0] for half in graph.apart]
    start = _in_a_row(graph, problems, apart) if apart else None
    if start is None or verify(graph.problem, start, caps):
        schedules = []
        for problem, size_bytes in zip(problems, _bytes_outside(graph, problems), strict=True):
            with progress.stage(f"solve {problem.name} alone"):
                best = solve_requested(problem, lowered(caps, size_bytes), request.options).best
            if best is None:
                return partial(solve_requested, progress=progress.solver)
            schedules.append(best.schedule)
        start = _in_a_row(graph, problems, schedules)
    return partial(solve_requested, progress=progress.solver, start=start)


def _in_a_row(
    graph: LoadedGraph, problems: Sequence[Problem], schedules: Sequence[Schedule]
) -> Schedule | None:
    """Return the ``schedules`` of both halves of ``graph`` as one of it."""
    both = zip(problems, schedules, graph.apart, strict=True)
    parts = [Part(problem=p, schedule=s, places=half.places) for p, s, half in both]
    return in_a_row(graph.problem, parts)


def _bytes_outside(graph: LoadedGraph, problems: Sequence[Problem]) -> list[int]:
    """Return the bytes that ``graph`` has alive while it runs a half, outside of that half: inputs
    that only the other half takes. No order inside of the half changes them.
    """
    whole, *halves = (
        simulate(problem, as_captured(problem.num_nodes)).live_bytes
        for problem in (graph.problem, *problems)
    )
    return [
        max(whole[place] - own for place, own in zip(half.places, live, strict=True) if place >= 0)
        for half, live in zip(graph.apart, halves, strict=True)
    ]


def with_shares(result: Result, dag: nx.DiGraph) -> Result:
    """Return ``result``, about ``dag``, with the shares of its cost sources and its assumptions."""
    found = assumptions_of(dag, result.problem, result.schedule, result.timeline)
    return replace(result, cost_shares=cost_shares(dag), assumptions=found)


def solve_problem(
    problem: Problem,
    caps: Caps,
    request: SolveRequest,
    progress: Progress,
    *,
    without_bitwise: Problem | None = None,
    search: Search | None = None,
    working: Working = nullcontext,
    communicator_bytes: int = 0,
) -> Result:
    """Return the answer for one problem, checked by ``verify``.

    ``search`` stands in for the solver; it may wait for other process ranks, so the work after it
    runs in ``working()``. With second groups ``Result.problem`` is the problem of the faster
    answer, by the measure of the scenarios where there are any; each of them takes
    ``communicator_bytes`` of the memory cap.
    """
    alone = _solved(problem, caps, request, progress, without_bitwise, search, working)
    beside = with_second_groups(problem) if request.second_group else None
    if beside is None:
        return alone
    caps = lowered(caps, len(second_groups(beside)) * communicator_bytes)
    without = None if without_bitwise is None else with_second_groups(without_bitwise)
    second = _solved(beside, caps, request, progress, without, search, working)
    ways = [way for way in (alone, second) if way.best is not None]
    if not ways:
        return alone
    best = _with_least_bound(min(ways, key=_measured), (alone, second))
    return _with_least_price(best, ways)


def _measured(result: Result) -> tuple[float, ...]:
    """Return the measure that is least for the best of several answers."""
    robustness = result.robustness
    if robustness is None:
        return (result.step_time_us or 0.0,)
    return robustness.chosen.measured(robustness.options)


def _with_least_price(result: Result, ways: Sequence[Result]) -> Result:
    """Return ``result`` with the cost of bitwise mode over the fastest of ``ways`` without it."""
    if result.bitwise is None:
        return result
    with_us = result.bitwise.step_time_us + result.bitwise.cost_us
    least_us = min(way.bitwise.step_time_us for way in ways if way.bitwise is not None)
    price = BitwisePrice(step_time_us=least_us, cost_us=with_us - least_us)
    return replace(result, bitwise=price)


def _solved(
    problem: Problem,
    caps: Caps,
    request: SolveRequest,
    progress: Progress,
    without_bitwise: Problem | None,
    search: Search | None,
    working: Working,
) -> Result:
    from apsched.solver import moving_where_it_pays, solve_requested, solve_with_milp
    from apsched.what_if.robust import made_robust

    options, robustness = request.options, None
    search = search or partial(solve_requested, progress=progress.solver)
    searched = moving_where_it_pays(problem, caps)
    if request.milp is not None:  # it decides no order: its claims are about the one of the caps
        caps = searched
    else:
        wait_until_compiled(progress, with_orders=searched.max_compute_move != 0)
    with progress.stage(f"solve {problem.name}") as took:
        answer = (
            search(problem, caps, options)
            if request.milp is None
            else solve_with_milp(problem, caps, options, request.milp)
        )
        with working():
            if request.scenarios is not None:
                answer, robustness = made_robust(problem, caps, options, answer, request.scenarios)
            result = result_of(problem, caps, answer, cluster="", seconds={})
            result = replace(result, robustness=robustness)
            check_answer(result)
            log_metrics(result)
            if without_bitwise is not None:
                result = _with_bitwise_price(result, without_bitwise, options)
    return replace(result, seconds={"solve": took["seconds"]})


def _with_bitwise_price(result: Result, without: Problem, options: SolveOptions) -> Result:
    """Return ``result``, of a problem in bitwise mode, with the cost of that mode; ``without`` is
    the problem without bitwise mode.
    """
    from apsched.solver import solve_requested

    if BITWISE_RULE not in result.problem.rules or result.best is None:
        return result
    other = solve_requested(without, result.caps, options)
    ticks = result.answer.fastest_ticks  # a schedule in bitwise mode is one without it, too
    least = ticks if other.best is None else min(ticks, other.fastest_ticks)
    return replace(
        result,
        bitwise=BitwisePrice(step_time_us=ticks_to_us(least), cost_us=ticks_to_us(ticks - least)),
    )


def completed(result: Result, request: SolveRequest) -> Result:
    """Return ``result`` with the parts that a search alone leaves out, but for CP-SAT."""
    from apsched.solver import completed as with_all

    answer = with_all(result.answer, result.problem, result.caps, request.options)
    return replace(result, answer=answer)


def check_answer(result: Result) -> None:
    """Raise SelfCheckError where the solver's answer breaks a cap or its own figures: never hand on
    an answer that was not verified.
    """
    answer, best = result.answer, result.best
    if best is None or result.timeline is None:
        return
    wrong = list(verify(result.problem, best.schedule, result.caps))
    claimed = (best.step_time_ticks, best.peak_memory_bytes, best.num_launches)
    found = (
        result.timeline.step_time_ticks,
        result.timeline.peak_memory_bytes,
        result.timeline.num_launches,
    )
    if claimed != found:
        wrong.append(f"step ticks, peak bytes and launches are {found}, not {claimed} as claimed")
    if answer.bound_ticks > best.step_time_ticks:
        wrong.append(
            f"the bound of {answer.bound_ticks} ticks lies above the step time of"
            f" {best.step_time_ticks}"
        )
    if (
        answer.peak_bound_bytes > best.peak_memory_bytes
        or answer.launches_bound > best.num_launches
    ):
        wrong.append(
            f"peak or launches lie below their bounds of {answer.peak_bound_bytes} bytes and"
            f" {answer.launches_bound} launches"
        )
    if wrong:
        raise SelfCheckError(
            f"{result.problem.name}: the solver's schedule fails its check, a bug of apsched:"
            f" {'; '.join(wrong[:3])}"
        )


def log_metrics(result: Result) -> None:
    """Log the metrics of the schedule."""
    for line in result.metrics.lines() if result.metrics else ():
        logger.info("%s: %s", result.problem.name, line)
