"""One of several gloo processes on a slow network: calibrate, then run a whole step in each way, by
turns.

usage: worker.py PROCESS_RANK WORLD_SIZE FOLDER

``FOLDER/request.json`` has the settings; process rank 0 writes ``FOLDER/0.json``.
"""

import gc
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from apsched.capture.captured import Capture
from apsched.models.build import BuiltModel
from apsched.models.preset_capture import capture_built
from apsched.names import NEXT, SUM, mark_of
from apsched.problem.contention import contention_json
from benchmarks.execution.calibration import Calibration, Found
from benchmarks.execution.machine import ordered_gloo
from benchmarks.execution.machine.load import MOST_TRIES, everywhere, undisturbed
from benchmarks.execution.machine.steady import own_core
from benchmarks.execution.steps.accumulate import AccumulatedRun, accumulated_runs
from benchmarks.execution.steps.keep import keep_runs
from benchmarks.execution.steps.micro_batches import both_batches, capture_both, micro_batch_runs
from benchmarks.execution.steps.step_run import StepRun, is_close, is_same
from benchmarks.execution.worker import WARM_UPS, built_model, by_turns, predicted_us

MICRO_BATCHES = "micro_batches"
MADE: dict[str, Callable[..., Sequence[Any]]] = {
    "keep": keep_runs,
    MICRO_BATCHES: micro_batch_runs,
    "accumulate": accumulated_runs,
}
Run = StepRun | AccumulatedRun


def main(process_rank: int, world_size: int, folder: Path) -> None:
    """Run the job and write the report of this process rank to ``FOLDER``; that of rank 0 is
    ``0.json``.
    """
    request = json.loads((folder / "request.json").read_text())
    gc.disable()  # with one trace in memory a collection takes 0.3 s, in any step
    ordered_gloo.init(process_rank, world_size, f"file://{folder}/store", timedelta(seconds=600))
    built, capture = _captured(request, world_size)
    calibration = Calibration(
        built, capture, folder, most_tries=1 if request["once"] else MOST_TRIES
    )
    for _ in range(WARM_UPS + request["profiled_steps"]):
        calibration.observe()
    first, solved_at = calibration.found(since=WARM_UPS), len(calibration.steps)
    runs: Sequence[Run] = MADE[request["part"]](built, capture, first, request["budget"])
    expected = runs[0].run()
    same = {run.name: all(everywhere(is_same(run.run(), expected))) for run in runs}
    close = {run.name: all(everywhere(is_close(run.run(), expected))) for run in runs}
    times, cores = by_turns(
        {run.name: run.run for run in runs},
        request["rounds"],
        calibration.observe,
        most_rounds=request["rounds"] if request["once"] else None,
    )
    meanwhile, counted = calibration.found(since=solved_at), counted_rounds(cores)
    report = {
        "runs": [
            _figures(run, meanwhile)
            | {
                "measured_us": [times[run.name][k] for k in counted],
                "rounds_us": times[run.name],
                "others_cores": cores[run.name],
                "same_bits": same[run.name],
                "is_close": close[run.name],
            }
            for run in runs
        ],
        "contention": contention_json(meanwhile.contention),
        "others_cores": max(calibration.cores),
    }
    (folder / f"{process_rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def _captured(request: Mapping[str, Any], world_size: int) -> tuple[BuiltModel, Capture]:
    """Return the model with the inputs of the whole step, and its graphs."""
    keeps = request["part"] != MICRO_BATCHES
    built = built_model(request, f"{'fsdp' if keeps else 'tp'}={world_size}")
    if keeps:
        return built, capture_built(built)
    both = both_batches(built)
    return both, capture_both(both)


def _figures(run: Run, found: Found) -> dict[str, Any]:
    priced = run.priced(found)
    return {
        "name": run.name,
        **_counts(run),
        "predicted_us": predicted_us(priced, found.contention),
        "predicted_alone_us": predicted_us(priced, None),
        "memory": run.memory(found.queues),
    }


def _counts(run: Run) -> dict[str, int]:
    if isinstance(run, StepRun):
        return {"num_kept": run.num_kept}
    marks = [mark_of(entry) for entry in run.kept]
    return {
        "num_kept": marks.count(""),
        "num_held": marks.count(NEXT),
        "num_summed": marks.count(SUM),
    }


def counted_rounds(cores: Mapping[str, Sequence[float]]) -> list[int]:
    """Return the rounds that count, the same for every way to run the step: times of one round are
    alike disturbed. ``cores`` are those that others kept busy, by name and round.
    """
    return undisturbed([max(of_round) for of_round in zip(*cores.values(), strict=True)])


if __name__ == "__main__":
    own_core(int(sys.argv[1]))
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
