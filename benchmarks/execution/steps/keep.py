"""A step with choices of kept parameters, each with schedules of its own."""

from dataclasses import dataclass, replace

from apsched.capture.captured import Capture
from apsched.capture.keep import keep
from apsched.config import SolveOptions
from apsched.models.build import BuiltModel
from apsched.pipeline.load import LoadedGraph, loaded_graph
from apsched.pipeline.solve_graph import SolveRequest
from apsched.problem.problem import with_contention
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.schedule.schedule import Schedule
from apsched.whole_step.choices import ALL, NONE, named_choices
from apsched.whole_step.keep_request import AUTO
from apsched.whole_step.pair import SolvedChoice, Step
from apsched.whole_step.search import solve_step
from apsched.writeback.write_back import write_back
from benchmarks.execution.calibration import Found, ranks_of
from benchmarks.execution.steps.step_run import StepRun, from_first_rank
from benchmarks.execution.worker import exported

_NAMED = (NONE, ALL, "last_block")
TIGHT = f"{AUTO}, tight cap"
"""The choice of ``auto`` under a memory cap halfway between the peaks of none and of all kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """A solved choice, as process ranks send it."""

    kept: tuple[str, ...]
    beside_bytes: int
    schedules: tuple[Schedule, ...]


def keep_runs(built: BuiltModel, capture: Capture, known: Found, budget: float) -> list[StepRun]:
    """Return the step with each choice, none kept first; all process ranks have the choices and
    schedules of process rank 0.
    """
    chosen: dict[str, _Chosen] = from_first_rank(
        lambda: {name: _sent(one) for name, one in _choices(capture, known, budget).items()}
    )
    forward, backward = capture.graphs
    runs = []
    for name, one in chosen.items():
        pair = keep(forward, backward, one.kept) if one.kept else (forward, backward)
        first, second = (
            write_back(c.module, exported(c, c.module, known.queues, capture), schedule)
            for c, schedule in zip(pair, one.schedules, strict=True)
        )
        runs.append(
            StepRun(
                name=name,
                inputs=(built,),
                capture=replace(capture, graphs=pair),
                modules=(first, second),
                num_kept=len(one.kept),
                beside_bytes=one.beside_bytes,
            )
        )
    return runs


def _choices(capture: Capture, known: Found, budget: float) -> dict[str, SolvedChoice]:
    """Return the choices by name; of equal ones the first."""
    graphs = [loaded(capture, known, k) for k in range(len(capture.graphs))]
    request = SolveRequest(memory_cap=MemoryCap(), options=SolveOptions(budget=budget))
    quiet = Progress(quiet=True)
    step = Step.of(graphs, request, quiet)
    named = named_choices(step.parameters)
    found = {name: step.solve(named[name]) for name in _NAMED if name in named}
    found[AUTO] = solve_step(step).best
    cap_bytes = (found[NONE].peak_bytes + found[ALL].peak_bytes) // 2
    tight = replace(request, memory_cap=MemoryCap(size_bytes=cap_bytes))
    found[TIGHT] = solve_step(Step.of(graphs, tight, quiet)).best
    distinct: dict[frozenset[str], str] = {}
    for name, one in found.items():
        if one.fits:
            distinct.setdefault(one.kept, name)
    return {name: found[name] for name in distinct.values()}


def loaded(capture: Capture, known: Found, k: int) -> LoadedGraph:
    """Return graph ``k`` at the costs found, with their contention."""
    graph = loaded_graph(
        capture.graphs[k],
        known.queues,
        cluster="cpu",
        group_ranks=ranks_of(capture),
        progress=Progress(quiet=True),
    )
    return replace(graph, problem=with_contention(graph.problem, known.contention))


def _sent(one: SolvedChoice) -> _Chosen:
    return _Chosen(
        kept=tuple(sorted(one.kept)),
        beside_bytes=one.beside_bytes,
        schedules=tuple(r.best.schedule for r in one.results if r.best is not None),
    )
