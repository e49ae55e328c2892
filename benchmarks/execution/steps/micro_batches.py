"""A step of two micro-batches: one at a time, twice; both in one graph, in a row or interleaved."""

from dataclasses import replace

from apsched.capture.captured import Capture
from apsched.capture.micro_batches import REDUCE_EACH, MicroBatchChoice
from apsched.config import DEFAULT_COMPUTE_MOVE, Caps, SolveOptions
from apsched.models.build import BuiltModel
from apsched.models.preset_capture import capture_built
from apsched.problem.problem import with_contention
from apsched.schedule.result import ALTERNATING, IN_A_ROW
from apsched.schedule.schedule import Schedule
from apsched.solver import solve_requested
from apsched.writeback.write_back import write_back
from benchmarks.execution.calibration import Found
from benchmarks.execution.steps.step_run import StepRun, from_first_rank
from benchmarks.execution.worker import exported

ONE_AT_A_TIME, INTERLEAVED = "one at a time, twice", "interleaved"
_COUNT = 2
_CAPS = Caps(max_compute_move=DEFAULT_COMPUTE_MOVE)


def both_batches(built: BuiltModel) -> BuiltModel:
    """Return ``built`` with the inputs of two micro-batches; the second has the tokens of the first
    in reverse.
    """
    return replace(built, inputs=(*built.inputs, *(x.flip(1) for x in built.inputs)))


def capture_both(both: BuiltModel) -> Capture:
    """Return the graphs of both micro-batches."""
    choice = MicroBatchChoice(count=_COUNT, reduce=REDUCE_EACH)
    return capture_built(_split(both)[0], micro_batches=choice)


def micro_batch_runs(
    both: BuiltModel, capture: Capture, known: Found, budget: float
) -> list[StepRun]:
    """Return the step in each way, one at a time first; all process ranks have the schedules of
    process rank 0.
    """
    parts = _split(both)
    single = capture_built(parts[0])
    by_name: dict[str, list[Schedule]] = from_first_rank(
        lambda: {
            ONE_AT_A_TIME: _solved(single, known, budget)[INTERLEAVED],
            **_solved(capture, known, budget),
        }
    )
    runs = []
    for name, schedules in by_name.items():
        alone = name == ONE_AT_A_TIME
        of = single if alone else capture
        first, second = (
            write_back(c.module, exported(c, c.module, known.queues, of), schedule)
            for c, schedule in zip(of.graphs, schedules, strict=True)
        )
        inputs = parts if alone else (both,)
        runs.append(StepRun(name=name, inputs=inputs, capture=of, modules=(first, second)))
    return runs


def _split(both: BuiltModel) -> tuple[BuiltModel, ...]:
    """Return the model with the inputs of each micro-batch."""
    size = len(both.inputs) // _COUNT
    return tuple(
        replace(both, inputs=both.inputs[k * size : (k + 1) * size]) for k in range(_COUNT)
    )


def _solved(capture: Capture, known: Found, budget: float) -> dict[str, list[Schedule]]:
    """Return the schedules of both graphs by name: the best, and the baselines of several
    micro-batches where each graph has them; by turns only where that is not the best.
    """
    answers = [
        solve_requested(
            with_contention(exported(c, c.module, known.queues, capture), known.contention),
            _CAPS,
            SolveOptions(budget=budget),
        )
        for c in capture.graphs
    ]
    best = [a.best.schedule for a in answers if a.best is not None]
    found = {}
    for name in (IN_A_ROW, ALTERNATING):
        same = [b.schedule for a in answers for b in a.baselines if b.name == name]
        if len(same) == len(answers) and (name == IN_A_ROW or same != best):
            found[name] = same
    return found | {INTERLEAVED: best}
