"""The line from a loaded graph to a checked schedule: problem -> solve -> verify -> write back ->
round trip.

Each stage is a function of its own; ``apsched solve`` is all of them, the other commands and the
API use some.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from apsched.config import Caps, MilpOptions, SolveOptions
from apsched.errors import InputError
from apsched.graph.cost_shares import cost_shares
from apsched.pipeline.load import LoadedGraph
from apsched.pipeline.result import BitwisePrice, Result, result_of
from apsched.problem.plan.apply import check_matches, restricted
from apsched.problem.plan.bitwise import BITWISE_RULE
from apsched.problem.plan.rules import Plan
from apsched.problem.problem import Problem
from apsched.problem.second_group import with_second_groups
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.schedule.result import Scored, SolveResult
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.units import ticks_to_us
from apsched.what_if.scenarios import ScenarioOptions

if TYPE_CHECKING:
    import torch

    from apsched.writeback.round_trip import RoundTrip

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """An FX graph in the order of a schedule."""

    module: "torch.fx.GraphModule"
    round_trip: "RoundTrip"
    seconds: float


def under_plan(
    graphs: Sequence[LoadedGraph], plan: Plan, *, bitwise: bool = False
) -> tuple[LoadedGraph, ...]:
    """Return ``graphs`` with their problems restricted by ``plan``, and with ``bitwise`` in bitwise
    mode.

    ``InputError`` for a rule that matches nothing in any of them.
    """
    check_matches([graph.problem for graph in graphs], plan)
    if not bitwise:
        return tuple(replace(graph, problem=restricted(graph.problem, plan)) for graph in graphs)
    return tuple(
        replace(
            graph,
            problem=restricted(graph.problem, plan, bitwise=True),
            without_bitwise=restricted(graph.problem, plan),
        )
        for graph in graphs
    )


def with_bitwise_price(
    result: Result, free: Problem, solved: Callable[[Problem], SolveResult]
) -> Result:
    """Return ``result``, of a problem in bitwise mode, with what that costs; ``free`` is the
    problem without it.
    """
    if BITWISE_RULE not in result.problem.rules or result.best is None:
        return result
    other = solved(free)
    ticks = result.answer.fastest_ticks  # a schedule in bitwise mode is one without it, too
    least = ticks if other.best is None else min(ticks, other.fastest_ticks)
    return replace(
        result,
        bitwise=BitwisePrice(step_time_us=ticks_to_us(least), cost_us=ticks_to_us(ticks - least)),
    )


def resolve_caps(
    graph: LoadedGraph,
    caps: Caps,
    memory_cap: MemoryCap | None,
    progress: Progress,
    options: SolveOptions | None = None,
) -> Caps:
    """Return ``caps`` for ``graph``: the memory cap in bytes, as stated, above the least feasible,
    or (unstated) the device's memory.

    ``options`` are those that solve it: what a smaller budget knows of the least memory is less.
    """
    if memory_cap is None:
        if graph.device_memory_bytes is None:
            raise InputError(
                f"the memory of cluster {graph.dag.graph['cluster']!r} is not known here; "
                "state --memory-cap (bytes, none, floor or floor+2GiB)"
            )
        return replace(caps, memory_cap_bytes=graph.device_memory_bytes)
    if not memory_cap.above_floor:
        return replace(caps, memory_cap_bytes=memory_cap.size_bytes)
    from apsched.solver import least_memory, moving_where_it_pays

    searched = moving_where_it_pays(graph.problem, replace(caps, memory_cap_bytes=None))
    with progress.stage(f"least memory {graph.problem.name}"):
        floor_bytes, _ = least_memory(graph.problem, searched, options)
    return replace(caps, memory_cap_bytes=floor_bytes + (memory_cap.size_bytes or 0))


Search = Callable[[Problem, Caps, SolveOptions], SolveResult]


def solve_graph(
    graph: LoadedGraph,
    caps: Caps,
    options: SolveOptions,
    progress: Progress,
    *,
    milp: MilpOptions | None = None,
    search: Search | None = None,
    asked: ScenarioOptions | None = None,
    second_group: bool = False,
) -> Result:
    """Return the answer for one graph, checked by ``verify``; with ``milp`` that of the MILP, with
    ``search`` of what stands in for it.

    With ``asked`` the schedule is the one that is best over sampled costs. With ``second_group`` it
    is solved once more with gathers on groups of their own; ``Result.problem`` is that of the
    faster answer.
    """
    from apsched.solver import moving_where_it_pays, solve_as_asked, solve_with_milp
    from apsched.what_if.robust import made_robust

    if second_group:
        alone = solve_graph(graph, caps, options, progress, milp=milp, search=search, asked=asked)
        beside = with_second_groups(graph.problem)
        if beside is None:
            return alone
        other = replace(graph, problem=beside, without_bitwise=None)
        second = solve_graph(other, caps, options, progress, milp=milp, search=search, asked=asked)
        return min(
            alone, second, key=lambda result: (result.best is None, result.step_time_us or 0.0)
        )

    search = search or partial(solve_as_asked, progress=progress.solver)
    if milp is not None:  # it decides no order: its claims are about the one that the caps name
        caps = moving_where_it_pays(graph.problem, caps)
    with progress.stage(f"solve {graph.problem.name}") as took:
        answer = (
            search(graph.problem, caps, options)
            if milp is None
            else solve_with_milp(graph.problem, caps, options, milp)
        )
        answer, robustness = (
            (answer, None)
            if asked is None
            else made_robust(graph.problem, caps, options, answer, asked)
        )
        result = result_of(
            graph.problem,
            caps,
            answer,
            cluster=graph.dag.graph["cluster"],
            seconds={**graph.seconds, "solve": took["seconds"]},
        )
        result = replace(result, cost_shares=cost_shares(graph.dag), robustness=robustness)
        check_answer(result)
        log_metrics(result)
        if graph.without_bitwise is not None:
            result = with_bitwise_price(
                result, graph.without_bitwise, lambda other: solve_as_asked(other, caps, options)
            )
    return replace(result, seconds={**graph.seconds, "solve": took["seconds"], "write_back": 0.0})


def check_answer(result: Result) -> None:
    """Raise where the solver's answer breaks a cap or its own figures: never hand on what was not
    verified.
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
        raise RuntimeError(
            f"{result.problem.name}: the solver's schedule fails its check, a bug of apsched:"
            f" {'; '.join(wrong[:3])}"
        )


def log_metrics(result: Result) -> None:
    """Log what the schedule makes of the collectives."""
    for line in result.metrics.lines() if result.metrics else ():
        logger.info("%s: %s", result.problem.name, line)


def with_torch_schedulers(graph: LoadedGraph, result: Result, progress: Progress) -> Result:
    """Return ``result`` with torch's own schedulers among the baselines; where there is no FX graph
    a note says so.
    """
    name = graph.problem.name
    if graph.captured is None:
        return replace(
            result,
            notes=(
                (
                    f"{name}: no inductor, which needs the FX graph; a graph file has none (compare"
                    " the source itself)"
                ),
            ),
        )
    from apsched.pipeline.inductor_baseline import torch_scores

    assert graph.cost_model is not None
    with progress.stage(f"inductor {name}"):
        found = torch_scores(
            graph.captured,
            graph.problem,
            graph.cost_model,
            result.caps,
            group_ranks=graph.group_ranks,
        )
    if graph.problem.rules:
        unplanned = ("it knows nothing of the plan",)
        found = replace(
            found,
            scores=tuple(
                replace(score, violations=(*score.violations, *unplanned)) for score in found.scores
            ),
        )
    return replace(
        result, others=found.scores, notes=found.notes, seconds={**result.seconds, **found.seconds}
    )


def rewrite(graph: LoadedGraph, scored: Scored, progress: Progress) -> Rewritten:
    """Return the FX graph in the order of ``scored``, and whether what it does is what was
    claimed.
    """
    from apsched.writeback.round_trip import round_trip, with_names_checked
    from apsched.writeback.write_back import write_back

    assert graph.captured is not None
    assert graph.cost_model is not None
    with progress.stage(f"write back {graph.problem.name}") as took:
        module = write_back(graph.captured.module, graph.problem, scored.schedule)
        claimed = simulate(graph.problem, scored.schedule)
        trip = round_trip(
            module,
            graph.captured,
            graph.cost_model,
            graph.group_ranks,
            claimed,
            graph.problem.contention,
        )
        trip = with_names_checked(trip, module, graph.problem, scored.schedule)
    return Rewritten(module=module, round_trip=trip, seconds=took["seconds"])


def with_round_trip(result: Result, rewritten: Rewritten) -> Result:
    """Return ``result`` with what the round trip of its graph said."""
    if not rewritten.round_trip.exact:
        logger.warning(
            "%s: the rewritten graph is not what was claimed: %s",
            result.problem.name,
            rewritten.round_trip.difference,
        )
    seconds = {**result.seconds, "write_back": rewritten.seconds}
    return replace(result, round_trip_exact=rewritten.round_trip.exact, seconds=seconds)
