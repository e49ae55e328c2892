"""A schedule that does not rest on its costs: chosen by the mean or the worst step time over
sampled scenarios.

Candidates are the schedule for the costs as they are, those for a slower network, and those for the
costs of some scenarios; each is replayed in all scenarios. The one for the costs as they are is
kept unless another is better by the measure, fits, and is, at the costs as they are, no slower than
any baseline that fits: so nothing that is promised of the answer is lost.
"""

from collections.abc import Iterator
from dataclasses import replace

from apsched.config import Caps, ScenarioOptions, SolveOptions
from apsched.problem.problem import Problem
from apsched.schedule.result import Scored, SolveResult
from apsched.schedule.score import score
from apsched.solver import moving_where_it_pays, solve
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.relaxed import without_places
from apsched.solver.bounds.memory_and_launches import later_bounds
from apsched.what_if.robustness import Robustness, Spread
from apsched.what_if.scenarios import (
    Replay,
    Scenario,
    priced_as,
    scenarios,
    with_slower_network,
)

_SCENARIOS_SOLVED = 3
"""Scenarios whose own best schedule is searched: those where the present schedule does worst."""
_SHARE_OF_BUDGET = 0.25
"""Of the budget of the search, for each candidate."""
AS_PRICED = "apsched, for the costs as they are"


def made_robust(
    problem: Problem,
    caps: Caps,
    options: SolveOptions,
    answer: SolveResult,
    scenario_options: ScenarioOptions,
) -> tuple[SolveResult, Robustness | None]:
    """Return ``answer`` with the best schedule by ``scenario_options``, and the result of the
    scenarios; ``None`` where there is no schedule.
    """
    if answer.best is None:
        return answer, None
    drawn = scenarios(problem, scenario_options, options.seed)
    at_hand = Replay(problem, answer.best.schedule)
    times = [at_hand.step_time_ticks(scenario) for scenario in drawn]
    as_priced = _spread(AS_PRICED, answer.best, times)
    hardest = sorted(range(len(drawn)), key=lambda k: (-times[k], k))[:_SCENARIOS_SOLVED]
    limit = min((b.step_time_ticks for b in answer.baselines if b.fits), default=None)
    best, chosen, count = answer.best, as_priced, 1
    searched = moving_where_it_pays(problem, caps)
    for name, other in _others(problem, scenario_options, [(k, drawn[k]) for k in hardest]):
        found = solve(
            other, searched, replace(options, budget=options.budget * _SHARE_OF_BUDGET)
        ).best
        if found is None:
            continue
        count += 1
        scored = score(problem, "apsched", found.schedule, caps)
        if not scored.fits or (limit is not None and scored.step_time_ticks > limit):
            continue
        replay = Replay(problem, scored.schedule)
        spread = _spread(
            f"apsched, {name}", scored, [replay.step_time_ticks(scenario) for scenario in drawn]
        )
        if spread.measured(scenario_options) < chosen.measured(scenario_options):
            best, chosen = scored, spread
    robustness = Robustness(
        options=scenario_options,
        baselines=tuple(
            _spread(b.name, b, _times(problem, b, drawn)) for b in answer.baselines if b.fits
        ),
        as_priced=as_priced,
        chosen=chosen,
        num_candidates=count,
    )
    return (
        answer if best is answer.best else _with_best(problem, caps, answer, best, chosen.name)
    ), robustness


def _others(
    problem: Problem, scenario_options: ScenarioOptions, hardest: list[tuple[int, Scenario]]
) -> Iterator[tuple[str, Problem]]:
    """Yield a description of each set of other costs, and the problem with these costs."""
    for times in (1, 2):
        yield (
            f"for a network slower by {100 * times * scenario_options.noise:.0f} %",
            with_slower_network(problem, 1 + times * scenario_options.noise),
        )
    for k, scenario in hardest:
        yield f"for scenario {k}", priced_as(problem, scenario)


def _times(problem: Problem, scored: Scored, drawn: tuple[Scenario, ...]) -> list[int]:
    replay = Replay(problem, scored.schedule)
    return [replay.step_time_ticks(scenario) for scenario in drawn]


def _spread(name: str, scored: Scored, times: list[int]) -> Spread:
    return Spread(
        name=name,
        step_time_ticks=scored.step_time_ticks,
        mean_ticks=round(sum(times) / len(times)),
        worst_ticks=max(times),
    )


def _with_best(
    problem: Problem, caps: Caps, answer: SolveResult, best: Scored, found_by: str
) -> SolveResult:
    """Return ``answer`` with another schedule, and the bounds that it is measured by."""
    instance = Instance.of(problem, caps)
    if caps.max_compute_move != 0:
        instance = replace(instance, arrays=without_places(instance.arrays))
    later = later_bounds(
        instance,
        best,
        answer.time_limit_ticks,
        answer.floor_bound_bytes,
    )
    found = SolveResult.found(
        best,
        bound_ticks=answer.bound_ticks,
        bound_source=answer.bound_source,
        baselines=answer.baselines,
        floor_memory_bytes=answer.floor_memory_bytes,
        floor_bound_bytes=answer.floor_bound_bytes,
        fastest_ticks=answer.fastest_ticks,
        time_limit_ticks=later.limit_ticks,
        peak_bound_bytes=later.peak_bytes,
        launches_bound=later.launches,
        solved_by=found_by,
        deterministic_work=answer.deterministic_work,
        search_ticks=answer.search_ticks,
        trade_offs=answer.trade_offs,
    )
    return replace(found, may_improve=answer.may_improve, lacks_floor=answer.lacks_floor)
