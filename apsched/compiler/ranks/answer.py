"""The solver as a job calls it: the answer of a schedule file, the cache or the solver, on one
process rank for all with the graph.
"""

import logging
from collections.abc import Callable, MutableMapping
from dataclasses import asdict, dataclass, replace

import orjson

from apsched.artifacts.schedule_file import ScheduleFile
from apsched.compiler.ranks.agreement import GraphAgreement
from apsched.compiler.ranks.answer_codec import dump_answer, parse_answer
from apsched.compiler.ranks.cache import Cache
from apsched.compiler.ranks.problem_digest import answer_digest, problem_digest, versions
from apsched.compiler.ranks.replayed import answer_of, replayed
from apsched.compiler.ranks.uneven import Likeness, mapped_schedule
from apsched.config import Caps, SolveOptions
from apsched.errors import InputError
from apsched.problem.plan.rules import digest as rules_digest
from apsched.problem.problem import Problem
from apsched.schedule.result import Scored, SolveResult, Status
from apsched.schedule.schedule import Schedule
from apsched.schedule.score import scored
from apsched.schedule.verify import verify

logger = logging.getLogger(__name__)

Solve = Callable[..., SolveResult]
"""``(problem, caps, options)``, and ``start=`` a schedule where one is near."""
Answers = MutableMapping[str, SolveResult]
"""Address (:func:`apsched.compiler.ranks.problem_digest.answer_digest`) -> answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Sources of answers other than the solver."""

    cache: Cache | None = None
    schedules: tuple[ScheduleFile, ...] = ()
    """Schedules to replay in place of solving; one of them must belong to the graph."""
    start: Schedule | None = None
    """The start of the solver: part of the address of an answer, too."""
    solved: Answers | None = None
    """Answers that this process found before; new ones are added. ``None``: none is kept."""
    near: bool = False
    """Start from the cached answer to the same problem under other caps or options, where ``start``
    is ``None``.
    """


def answered(
    problem: Problem,
    caps: Caps,
    options: SolveOptions,
    solve: Solve,
    *,
    sources: Sources | None = None,
    agreement: GraphAgreement | None = None,
    likeness: Likeness | None = None,
) -> SolveResult:
    """Return the answer for ``problem``; with ``agreement`` the same schedule on all process ranks
    that have its graph, and with ``likeness`` also on those that have it with shards of other
    sizes.

    It was verified within ``caps`` here, from any source. ``solve`` runs on one process rank, and
    only where no source has the answer.
    """
    sources = sources or Sources()
    if agreement is None or not agreement.groups:
        return _found(problem, caps, options, solve, sources)
    settings = {
        **_settings(caps, options),
        "plan": rules_digest(problem.rules) if problem.rules else "none",
    }
    settings |= {f"version of {name}": number for name, number in versions()}
    costs = problem_digest(problem)

    padding = list(likeness.padding) if likeness else []
    head_of_answer = {"graph": problem.graph_hash, "costs": costs, "padding": padding}

    def solved() -> bytes:
        answer = dump_answer(_found(problem, caps, options, solve, sources))
        return orjson.dumps(head_of_answer) + b"\n" + answer

    identity = likeness.digest if likeness else problem.graph_hash
    data, solver = agreement.shared(identity, settings, solved, exact=problem.graph_hash)
    head, _, body = data.partition(b"\n")
    answer, theirs = parse_answer(body), orjson.loads(head)
    if solver == agreement.job.rank:
        return answer
    if theirs["graph"] != problem.graph_hash and likeness is not None and answer.best is not None:
        schedule = mapped_schedule(
            answer.best.schedule, theirs["padding"], problem, likeness.padding
        )
        found = _of_other_shards(problem, caps, schedule, answer, solver)
        logger.info(
            "%s: process rank %d solved, with shards of other sizes; its schedule is used",
            problem.name,
            solver,
        )
        return found
    same_costs = theirs["costs"] == costs
    if wrong := _wrong(problem, caps, answer, figures=same_costs):
        raise InputError(
            f"{problem.name}: the schedule of process rank {solver} does not fit this graph:"
            f" {wrong}"
        )
    if same_costs:
        return answer
    logger.warning(
        "%s: costs here are not those of process rank %d, which solved; its schedule is used",
        problem.name,
        solver,
    )
    return _at_other_costs(problem, answer, solver)


def _found(
    problem: Problem, caps: Caps, options: SolveOptions, solve: Solve, sources: Sources
) -> SolveResult:
    """Return the answer from a schedule file, this process, the cache or the solver, in this
    order.
    """
    if sources.schedules:
        return replayed(problem, caps, sources.schedules)
    if sources.solved is None:
        return _cached_or_solved(problem, caps, options, solve, sources)
    address = answer_digest(problem, caps, options, sources.start, near=sources.near)
    if address not in sources.solved:
        answer = _cached_or_solved(problem, caps, options, solve, sources)
        sources.solved[address] = answer
    return sources.solved[address]


def _cached_or_solved(
    problem: Problem, caps: Caps, options: SolveOptions, solve: Solve, sources: Sources
) -> SolveResult:
    if sources.cache is None:
        return solve(problem, caps, options)
    cold = answer_digest(problem, caps, options, sources.start)
    near = answer_digest(
        problem, caps, options, sources.start, near=True
    )  # what was near when it was solved is not asked again
    for address in (cold, near) if sources.near else (cold,):
        if (kept := _kept(problem, caps, options, sources.cache, address)) is not None:
            return kept
    start = _near(problem, caps, sources.cache) if sources.near and sources.start is None else None
    answer = (
        solve(problem, caps, options)
        if start is None
        else solve(problem, caps, options, start=start)
    )
    address = cold if start is None else near
    if sources.cache.write(address, dump_answer(answer)) and answer.best is not None:
        sources.cache.note_latest(problem_digest(problem), address)
    return answer


def _kept(
    problem: Problem, caps: Caps, options: SolveOptions, cache: Cache, address: str
) -> SolveResult | None:
    """Return the answer that the cache has under ``address``; ``None`` where there is none, or it
    is not right.

    A schedule is verified. Bounds, and claims that nothing fits, cannot be verified: they are
    believed only where this user alone may write to the cache. A claim that nothing fits is false
    where the schedule with the least memory fits.
    """
    kept = cache.read(address)
    if kept is None:
        return None
    if why := cache.distrusted(address):
        logger.warning(
            "%s: the cache has an answer, and its bound is not believed, so the graph is"
            " solved: %s",
            problem.name,
            why,
        )
        return None
    try:
        answer = parse_answer(kept)
        wrong = _wrong(problem, caps, answer) or _refuted(problem, caps, answer, options)
    except InputError as error:
        wrong = str(error)
    if not wrong:
        logger.info("%s: answer taken from the cache (%s)", problem.name, address[:12])
        return answer
    logger.warning(
        "%s: the cached answer (%s) is not used, and replaced: %s",
        problem.name,
        address[:12],
        wrong,
    )
    return None


def _near(problem: Problem, caps: Caps, cache: Cache) -> Schedule | None:
    """Return the schedule for ``problem`` that the cache got last, if it keeps ``caps``, too."""
    kept = cache.latest(problem_digest(problem))
    if kept is None:
        return None
    try:
        best = parse_answer(kept).best
    except InputError:
        return None
    if best is None or verify(problem, best.schedule, caps):
        return None
    logger.info(
        "%s: the search starts from the cached answer for other caps or options", problem.name
    )
    return best.schedule


def _at_other_costs(problem: Problem, answer: SolveResult, solver: int) -> SolveResult:
    """Return ``answer`` with the figures that its schedule has at the costs here, where nothing is
    proven.
    """
    if answer.best is None:
        return answer
    best = scored(problem, answer.best.name, answer.best.schedule)
    return replace(
        answer_of(best, f"none: process rank {solver} has other costs", answer.solved_by),
        baselines=(),
    )


def _of_other_shards(
    problem: Problem, caps: Caps, schedule: Schedule, answer: SolveResult, solver: int
) -> SolveResult:
    """Return the facts known here about a ``schedule`` that process rank ``solver`` found for a
    graph with shards of other sizes.
    """
    if wrong := verify(problem, schedule, caps):
        raise InputError(
            f"{problem.name}: the schedule of process rank {solver}, whose shards have other sizes,"
            f" does not fit here: {'; '.join(wrong[:3])}"
        )
    source = f"none: process rank {solver} solved, with shards of other sizes"
    assert answer.best is not None
    return answer_of(scored(problem, answer.best.name, schedule), source, answer.solved_by)


def _wrong(problem: Problem, caps: Caps, answer: SolveResult, *, figures: bool = True) -> str:
    """Return the faults of the schedule of ``answer`` here, or (``figures``) of its figures; empty
    for none.
    """
    if answer.best is None:
        stated = answer.infeasibility is not None and answer.status is Status.INFEASIBLE
        return "" if stated else "neither a schedule nor a reason"
    schedule = answer.best.schedule
    wrong = verify(problem, schedule, caps)
    if wrong:
        return "; ".join(wrong[:3])
    if not figures:
        return ""
    simulated = scored(problem, answer.best.name, schedule)
    same = replace(simulated, violations=answer.best.violations) == answer.best
    return (
        _contradiction(answer, answer.best) if same else "its figures are not those that it states"
    )


def _contradiction(answer: SolveResult, best: Scored) -> str:
    """Return which bound of ``answer`` its own schedule refutes; empty for none."""
    for what, bound, found in (
        ("step time", answer.bound_ticks, best.step_time_ticks),
        ("peak", answer.peak_bound_bytes, best.peak_memory_bytes),
        ("number of launches", answer.launches_bound, best.num_launches),
    ):
        if bound > found:
            return f"its bound on the {what} is {bound}, and its schedule has {found}"
    if answer.status is Status.INFEASIBLE or (
        answer.status is Status.OPTIMAL and answer.bound_ticks < best.step_time_ticks
    ):
        return (
            f"it says '{answer.status}' of a step time of {best.step_time_ticks} and a bound of"
            f" {answer.bound_ticks}"
        )
    return ""


def _refuted(problem: Problem, caps: Caps, answer: SolveResult, options: SolveOptions) -> str:
    """Return a schedule that fits although ``answer`` claims that none does; empty for none."""
    if answer.best is not None:
        return ""
    from apsched.solver import schedule_of_least_memory

    least = schedule_of_least_memory(problem, caps, options)
    if least is None or verify(problem, least, caps):
        return ""
    return "it says that nothing fits, and the schedule with the least memory does"


def _settings(caps: Caps, options: SolveOptions) -> dict[str, str]:
    return {key: str(value) for key, value in (asdict(caps) | asdict(options)).items()}
