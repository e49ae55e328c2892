"""One of several gloo processes on a slow network: calibrate, solve, write back, and run every
schedule for real, by turns.

usage: execution_worker.py PROCESS_RANK WORLD_SIZE FOLDER

``FOLDER/request.json`` has the settings; process rank 0 writes ``FOLDER/0.json``.
"""

import gc
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from apsched.capture.captured import Capture, CapturedGraph
from apsched.config import Caps, SolveOptions
from apsched.costs.measured_model import MeasuredCostModel
from apsched.graph.export.export import export_graph
from apsched.models.build import BuiltModel, build
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions
from apsched.models.preset_capture import capture_built
from apsched.models.training import forward_inputs
from apsched.pipeline.inductor_baseline import run_inductor
from apsched.problem.build import build_problem
from apsched.problem.contention import Contention, contention_json
from apsched.problem.problem import Problem, with_contention
from apsched.schedule.schedule import as_captured
from apsched.schedule.simulate import simulate
from apsched.solver import least_memory, solve
from apsched.units import ticks_to_us
from apsched.writeback.write_back import write_back
from benchmarks.common.live_bytes import live_bytes_of, run_counting
from benchmarks.execution.calibration import Calibration, Found, ranks_of, run, timed_step
from benchmarks.execution.machine import ordered_gloo
from benchmarks.execution.machine.load import (
    MOST_TRIES,
    Load,
    everywhere,
    is_quiet,
    others_cores,
    undisturbed,
)
from benchmarks.execution.machine.steady import own_core

WARM_UPS = 2
"""The first profiles of a process are slow."""


@dataclass(frozen=True, kw_only=True)
class Runnable:
    """A schedule of both graphs, ready to run."""

    name: str
    modules: tuple[GraphModule, GraphModule]
    fits: tuple[bool, ...]
    """Whether the schedule fits, for each memory cap."""


def main(process_rank: int, world_size: int, folder: Path) -> None:
    """Run the job and write the report of this process rank to ``FOLDER``; that of rank 0 is
    ``0.json``.
    """
    request = json.loads((folder / "request.json").read_text())
    # as TorchTitan does: with one trace in memory a collection takes 0.3 s, in whichever step
    gc.disable()
    ordered_gloo.init(process_rank, world_size, f"file://{folder}/store", timedelta(seconds=300))
    built = built_model(request, f"fsdp={world_size}")
    capture = capture_built(built)
    calibration = Calibration(
        built, capture, folder, most_tries=1 if request["once"] else MOST_TRIES
    )
    for _ in range(WARM_UPS + request["profiled_steps"]):
        calibration.observe()
    first, solved_at = calibration.found(since=WARM_UPS), len(calibration.steps)
    problems = [exported(c, c.module, first.queues, capture) for c in capture.graphs]
    caps, runnables = schedules(capture, problems, first, request["budget"])
    steps = {runnable.name: partial(run, built, runnable.modules) for runnable in runnables}
    times, cores = by_turns(
        steps,
        request["rounds"],
        calibration.observe,
        most_rounds=request["rounds"] if request["once"] else None,
    )
    meanwhile = calibration.found(since=solved_at)
    found = [
        {
            "name": runnable.name,
            "fits": runnable.fits,
            "measured_us": [times[runnable.name][k] for k in undisturbed(cores[runnable.name])],
            "others_cores": cores[runnable.name],
            "predicted_alone_us": predicted_us(priced, None),
            "predicted_us": predicted_us(priced, meanwhile.contention),
            "memory": memory(built, runnable.modules, capture, meanwhile.queues),
        }
        for runnable in runnables
        for priced in [as_run(runnable.modules, capture, meanwhile)]
    ]
    plain = [exported(c, c.module, meanwhile.no_queues, capture) for c in capture.graphs]
    timelines = [simulate(problem, as_captured(problem.num_nodes)) for problem in plain]
    report = {
        "schedules": found,
        "memory_caps_bytes": caps,
        "contention": contention_json(meanwhile.contention),
        "solved_with": contention_json(first.contention),
        "others_cores": max(calibration.cores),
        "captured_beside_profiler_us": {
            "first": calibration.profiled_us(WARM_UPS, solved_at),
            "in_rounds": calibration.profiled_us(solved_at, len(calibration.steps)),
        },
        "compute_us": sum(ticks_to_us(timeline.compute_ticks) for timeline in timelines),
        "transfer_us": sum(
            ticks_to_us(t.end_ticks - t.begin_ticks)
            for timeline in timelines
            for t in timeline.transfers
        ),
    }
    (folder / f"{process_rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def built_model(request: Mapping[str, Any], mesh: str) -> BuiltModel:
    """Return the model that runs on ``mesh``, with parameters and inputs of the request."""
    return build(
        "llama3-small",
        mesh=MeshSpec.parse(mesh),
        seq_len=request["seq_len"],
        num_layers=request["num_layers"],
        options=ModelOptions(param_dtype=torch.float32, reduce_dtype=torch.float32),
        materialize=True,
    )


def exported(
    captured: CapturedGraph, module: GraphModule, model: MeasuredCostModel, capture: Capture
) -> Problem:
    """Return the problem of ``module``, which stands for the captured graph."""
    return build_problem(
        export_graph(replace(captured, module=module), model, group_ranks=ranks_of(capture))
    )


def schedules(
    capture: Capture, problems: Sequence[Problem], known: Found, budget: float
) -> tuple[list[list[int | None]], list[Runnable]]:
    """Return the memory caps (for each, one a graph) and the schedules to run; all process ranks
    have the answers of process rank 0.
    """
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        contended = [with_contention(problem, known.contention) for problem in problems]
        options = SolveOptions(budget=budget)
        free = [solve(problem, Caps(), options) for problem in contended]
        floors = [least_memory(problem, Caps(), options)[0] for problem in contended]
        tight = [
            floor + (answer.best.peak_memory_bytes - floor) // 4 if answer.best else floor
            for floor, answer in zip(floors, free, strict=True)
        ]
        bound = [
            solve(problem, Caps(memory_cap_bytes=cap), options)
            for problem, cap in zip(contended, tight, strict=True)
        ]
        chosen = {
            f"apsched, {what}": answers
            for what, answers in (("no cap", free), ("tight cap", bound))
        }
        by_name = {
            name: [answer.best.schedule for answer in answers if answer.best]
            for name, answers in chosen.items()
        }
        for k, baseline in enumerate(free[0].baselines):
            by_name[baseline.name] = [answer.baselines[k].schedule for answer in free]
        found = [([[None] * len(problems), tight], by_name)]
    dist.broadcast_object_list(found)
    caps, by_name = found[0]
    modules = {
        name: [
            write_back(c.module, p, s)
            for c, p, s in zip(capture.graphs, problems, chosen, strict=True)
        ]
        for name, chosen in by_name.items()
    }
    modules["torch"] = [
        run_inductor(captured, known.queues, group_ranks=ranks_of(capture)).module
        for captured in capture.graphs
    ]
    runnables = []
    for name, (forward, backward) in modules.items():
        peaks = [
            simulate(
                p := exported(captured, module, known.queues, capture), as_captured(p.num_nodes)
            ).peak_memory_bytes
            for captured, module in zip(capture.graphs, (forward, backward), strict=True)
        ]
        fits = tuple(
            all(cap is None or peak <= cap for peak, cap in zip(peaks, row, strict=True))
            for row in caps
        )
        runnables.append(Runnable(name=name, modules=(forward, backward), fits=fits))
    return caps, runnables


def by_turns(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    before_each: Callable[[], None],
    *,
    most_rounds: int | None = None,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the times of every step by name, of the slowest process rank each, and the number of
    cores that others kept busy meanwhile.

    ``before_each`` is called before each round. A round runs each step twice, in changing order,
    and times the second run: in a job a step follows another like it, so caches and connections
    hold the state of that step. More rounds follow, ``most_rounds`` in all (default twice
    ``rounds``), until each of ``steps`` has run ``rounds`` times undisturbed.
    """
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    cores: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, 2 * rounds if most_rounds is None else most_rounds):
        if number >= rounds and all(
            sum(map(is_quiet, of_steps)) >= rounds for of_steps in cores.values()
        ):
            break
        before_each()
        turn = max(number, 0) % len(names)
        taken: dict[str, tuple[float, Load]] = {}
        for name in (*names[turn:], *names[:turn]):
            timed_step(steps[name])
            before = Load.now()
            time_us = timed_step(steps[name])
            taken[name] = time_us, Load.now().since(before)
        of_all = everywhere(taken)
        for name in names if number >= 0 else ():
            same = [of_rank[name] for of_rank in of_all]
            times[name].append(max(time_us for time_us, _ in same))
            cores[name].append(others_cores([load for _, load in same]))
    return times, cores


def as_run(modules: Sequence[GraphModule], capture: Capture, found: Found) -> list[Problem]:
    """Return the graphs as they run, with the prices of queues where transfers queue."""
    problems = []
    for captured, module in zip(capture.graphs, modules, strict=True):
        problem = exported(captured, module, found.queues, capture)
        timeline = simulate(problem, as_captured(problem.num_nodes))
        queues = any(
            transfer.begin_ticks > timeline.end_ticks[transfer.start_step]
            for transfer in timeline.transfers
        )
        problems.append(problem if queues else exported(captured, module, found.no_queues, capture))
    return problems


def predicted_us(problems: Sequence[Problem], contention: Contention | None) -> float:
    """Return the time of the graphs by the machine model, each in its own order."""
    contended = [with_contention(problem, contention) for problem in problems]
    return sum(
        ticks_to_us(simulate(problem, as_captured(problem.num_nodes)).step_time_ticks)
        for problem in contended
    )


def memory(
    built: BuiltModel, modules: Sequence[GraphModule], capture: Capture, model: MeasuredCostModel
) -> list[dict[str, int]]:
    """Return for each graph the peak of live bytes as counted while it runs for real, and as
    predicted.
    """
    forward, backward = capture.graphs
    inputs = list(forward_inputs(built))
    (loss, *saved), of_forward = counted(forward, modules[0], inputs, capture, model)
    boxed = [*saved, torch.ones_like(loss)]
    del saved
    return [of_forward, counted(backward, modules[1], boxed, capture, model)[1]]


def counted(
    captured: CapturedGraph,
    module: GraphModule,
    boxed: list[Any],
    capture: Capture,
    model: MeasuredCostModel,
) -> tuple[Any, dict[str, int]]:
    """Return the outputs of ``module`` on ``boxed``, which is emptied, and the peak of live bytes
    as counted while it runs, and as predicted.
    """
    dag = export_graph(replace(captured, module=module), model, group_ranks=ranks_of(capture))
    told = live_bytes_of(dag)
    outputs, live = run_counting(module, boxed, dag, captured.kept_inputs, expected=told)
    apart = sum(a != b for a, b in zip(live, told, strict=True))
    row = {"counted_bytes": max(live), "predicted_bytes": max(told), "nodes_apart": apart}
    return outputs, row


if __name__ == "__main__":
    own_core(int(sys.argv[1]))
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
