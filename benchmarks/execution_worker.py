"""One of several gloo processes on a slow network: calibrate, solve, write back, and run every schedule for real, by turns.

usage: execution_worker.py PROCESS_RANK WORLD_SIZE FOLDER

``FOLDER/request.json`` has the settings; process rank 0 writes ``FOLDER/0.json``.
"""

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule
from torch.profiler import ProfilerActivity, profile

from apsched.build_problem import build_problem
from apsched.calibrate.job import job
from apsched.calibrate.measure_collectives import part_ranks
from apsched.calibrate.profile import profile_costs
from apsched.calibrate.trace import load_trace
from apsched.capture.captured import Capture, CapturedGraph
from apsched.config import Caps, SolveOptions
from apsched.contention import Contention, contention_json
from apsched.costs.cluster import load_cluster
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.measured import completed
from apsched.costs.measured_model import MeasuredCostModel
from apsched.graph.export import export
from apsched.inductor_baseline import run_inductor
from apsched.models.build import BuiltModel, build
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions
from apsched.models.preset_capture import capture_built
from apsched.models.training import forward_inputs, run_step
from apsched.problem import Problem, with_contention
from apsched.schedule import as_captured
from apsched.simulate import simulate
from apsched.solver import least_memory, solve
from apsched.units import ticks_to_us
from apsched.writeback.write_back import write_back
from benchmarks import ordered_gloo
from benchmarks.live_bytes import live_bytes_of, run_counting
from benchmarks.load import Load, everywhere, is_quiet, least_disturbed, others_cores, undisturbed
from benchmarks.queued_gathers import with_queued_gathers
from benchmarks.slowdown import measured_contention
from benchmarks.steady import own_core

CPU = load_cluster("cpu")
_WARM_UPS = 2
"""The first profiles of a process are slow."""


@dataclass(frozen=True, kw_only=True)
class Runnable:
    """A schedule of both graphs, ready to run."""

    name: str
    modules: tuple[GraphModule, GraphModule]
    fits: tuple[bool, ...]
    """Under each memory cap."""


def main(process_rank: int, world_size: int, folder: Path) -> None:
    """Write what was found to ``FOLDER/0.json``."""
    request = json.loads((folder / "request.json").read_text())
    gc.disable()  # as TorchTitan does: with one trace in memory a collection takes 0.3 s, in whichever step
    ordered_gloo.init(process_rank, world_size, f"file://{folder}/store", timedelta(seconds=300))
    options = ModelOptions(param_dtype=torch.float32, reduce_dtype=torch.float32)
    built = build("llama3-small", mesh=MeshSpec.parse(f"fsdp={world_size}"), seq_len=request["seq_len"], options=options, materialize=True)
    capture = capture_built(built)
    calibration = Calibration(built, capture, folder)
    for _ in range(_WARM_UPS + request["profiled_steps"]):
        calibration.profile_step()
    first, _ = calibration.models(since=_WARM_UPS)
    contention, solved_at = calibration.contention, len(calibration.steps)
    problems = [exported(captured, captured.module, first, capture) for captured in capture.graphs]
    caps, runnables = schedules(capture, problems, first, contention, request["budget"])
    times, cores = by_turns(built, runnables, request["rounds"], calibration.profile_step)
    model, without_queues = calibration.models(since=solved_at)
    found = [
        {
            "name": runnable.name,
            "fits": runnable.fits,
            "measured_us": [times[runnable.name][k] for k in undisturbed(cores[runnable.name])],
            "others_cores": cores[runnable.name],
            "predicted_alone_us": predicted_us(priced, None),
            "predicted_us": predicted_us(priced, contention),
            "memory": memory(built, runnable, capture, model),
        }
        for runnable in runnables
        for priced in [as_run(runnable, capture, model, without_queues)]
    ]
    at_first = [exported(captured, captured.module, without_queues, capture) for captured in capture.graphs]
    timelines = [simulate(problem, as_captured(problem.num_nodes)) for problem in at_first]
    report = {
        "schedules": found,
        "memory_caps_bytes": caps,
        "contention": contention_json(contention),
        "others_cores": max(calibration.cores),
        "captured_beside_profiler_us": {
            "first": calibration.profiled_us(_WARM_UPS, solved_at),
            "in_rounds": calibration.profiled_us(solved_at, len(calibration.steps)),
        },
        "compute_us": sum(ticks_to_us(timeline.compute_ticks) for timeline in timelines),
        "transfer_us": sum(ticks_to_us(t.end_ticks - t.begin_ticks) for timeline in timelines for t in timeline.transfers),
    }
    (folder / f"{process_rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def captured_modules(capture: Capture) -> tuple[GraphModule, GraphModule]:
    """Return the modules of both graphs, as captured."""
    forward, backward = capture.graphs
    return forward.module, backward.module


def exported(captured: CapturedGraph, module: GraphModule, model: MeasuredCostModel, capture: Capture) -> Problem:
    """Return the problem of ``module``, which stands for the captured graph."""
    return build_problem(export(replace(captured, module=module), model, group_ranks=ranks_of(capture)))


def ranks_of(capture: Capture) -> dict[str, tuple[int, ...]]:
    """Return the process ranks of every group."""
    return {name: ranks for name, ranks in capture.group_ranks.items() if ranks}


class Calibration:
    """What operators and messages take, and how compute and collectives slow each other down, measured on this very link.

    A virtual machine is faster or slower by some per cent from one minute to the next. So a step as captured is profiled in each round of
    steps that are timed: schedules are solved with what was known before, and foretold with what operators and messages took meanwhile.
    """

    def __init__(self, built: BuiltModel, capture: Capture, folder: Path) -> None:
        self._built, self._capture, self._folder = built, capture, folder
        self._formulas = ClusterCostModel(CPU, capture.group_ranks)
        self._dags = [export(captured, self._formulas, group_ranks=ranks_of(capture), cluster_name="cpu") for captured in capture.graphs]
        graphs = list(zip(captured_modules(capture), self._dags, strict=True))
        with job() as here:
            self._measured, beside_measuring = least_disturbed(lambda: here.measure(graphs, "cpu", CPU, fused=False).costs)
        latency_us = fmean(transfers.points[0][1] for transfers in self._measured.transfers)
        self.contention, beside_both = least_disturbed(lambda: measured_contention(graphs, latency_us))
        self.cores = [beside_measuring, beside_both]
        """That others kept busy during each part."""
        self.steps: list[tuple[float, float]] = []
        """Step times in microseconds beside the profiler, of the slowest process rank each, and the cores that others kept busy."""

    def profile_step(self) -> None:
        """Profile a step as captured, after another one like it; what earlier profiles left, which slowed steps by a fifth, goes first."""
        gc.collect()
        modules = captured_modules(self._capture)
        timed_step(self._built, modules)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            before = Load.now()
            mine = timed_step(self._built, modules), Load.now().since(before)
        profiler.export_chrome_trace(str(self._trace(len(self.steps), dist.get_rank())))
        of_ranks = everywhere(mine)
        self.steps.append((max(time_us for time_us, _ in of_ranks), others_cores([load for _, load in of_ranks])))

    def models(self, since: int) -> tuple[MeasuredCostModel, MeasuredCostModel]:
        """Return costs where gathers queue and where none does, by the undisturbed steps from ``since`` on; all process ranks call this.

        A profile says what operators and messages take in a step; copies are timed alone, buckets and gathers one behind the other.
        """
        counted = self._counted(since, len(self.steps))
        traces = [load_trace(self._trace(k, rank)) for rank in range(dist.get_world_size()) for k in counted]
        alone = profile_costs(self._dags, traces, CPU, "cpu").costs
        queued, beside_queues = least_disturbed(lambda: with_queued_gathers(alone))
        self.cores += [fmean(self.steps[k][1] for k in counted), beside_queues]
        both = (completed(costs, self._measured) for costs in (queued, alone))
        queues, no_queues = (MeasuredCostModel(costs, self._formulas, self._capture.group_ranks) for costs in both)
        return queues, no_queues

    def profiled_us(self, begin: int, end: int) -> list[float]:
        """Return the undisturbed times of these steps."""
        return [self.steps[k][0] for k in self._counted(begin, end)]

    def _counted(self, begin: int, end: int) -> list[int]:
        return [begin + k for k in undisturbed([cores for _, cores in self.steps[begin:end]])]

    def _trace(self, step: int, process_rank: int) -> Path:
        return self._folder / f"trace.{step}.{process_rank}.json"


def schedules(
    capture: Capture, problems: Sequence[Problem], model: MeasuredCostModel, contention: Contention, budget: float
) -> tuple[list[list[int | None]], list[Runnable]]:
    """Return memory caps (for each, one a graph) and what runs; all process ranks have the answers of process rank 0."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        contended = [with_contention(problem, contention) for problem in problems]
        options = SolveOptions(budget=budget)
        free = [solve(problem, Caps(), options) for problem in contended]
        floors = [least_memory(problem, Caps(), options)[0] for problem in contended]
        tight = [
            floor + (answer.best.peak_memory_bytes - floor) // 4 if answer.best else floor
            for floor, answer in zip(floors, free, strict=True)
        ]
        bound = [solve(problem, Caps(memory_cap_bytes=cap), options) for problem, cap in zip(contended, tight, strict=True)]
        chosen = {f"apsched, {what}": answers for what, answers in (("no cap", free), ("tight cap", bound))}
        by_name = {name: [answer.best.schedule for answer in answers if answer.best] for name, answers in chosen.items()}
        for k, baseline in enumerate(free[0].baselines):
            by_name[baseline.name] = [answer.baselines[k].schedule for answer in free]
        found = [([[None] * len(problems), tight], by_name)]
    dist.broadcast_object_list(found)
    caps, by_name = found[0]
    modules = {
        name: [write_back(c.module, p, s) for c, p, s in zip(capture.graphs, problems, chosen, strict=True)]
        for name, chosen in by_name.items()
    }
    modules["torch"] = [run_inductor(captured, model, group_ranks=ranks_of(capture)).module for captured in capture.graphs]
    runnables = []
    for name, (forward, backward) in modules.items():
        peaks = [
            simulate(p := exported(captured, module, model, capture), as_captured(p.num_nodes)).peak_memory_bytes
            for captured, module in zip(capture.graphs, (forward, backward), strict=True)
        ]
        fits = tuple(all(cap is None or peak <= cap for peak, cap in zip(peaks, row, strict=True)) for row in caps)
        runnables.append(Runnable(name=name, modules=(forward, backward), fits=fits))
    return caps, runnables


def timed_step(built: BuiltModel, modules: Sequence[GraphModule]) -> float:
    """Return the microseconds of a step, from when all process ranks are there, as far apart as work takes them.

    Right after a barrier a large gather, which is what some schedules begin with, takes two thirds of its time in a job.
    """
    dist.barrier()
    part_ranks()
    begin = time.perf_counter_ns()
    with torch.no_grad():
        run_step(built, *modules)
    return (time.perf_counter_ns() - begin) / 1e3


def by_turns(
    built: BuiltModel, runnables: Sequence[Runnable], rounds: int, before_each: Callable[[], None]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the step times of every schedule, of the slowest process rank each, and how many cores others kept busy meanwhile.

    ``before_each`` is called before each round. A round runs each schedule twice, in changing order, and times the second: before a step of
    a job comes another like it, which is what caches and connections remember. More rounds follow, as many again at most, until each has so
    many steps that nobody disturbed.
    """
    times: dict[str, list[float]] = {runnable.name: [] for runnable in runnables}
    cores: dict[str, list[float]] = {runnable.name: [] for runnable in runnables}
    for number in range(-1, 2 * rounds):
        if number >= rounds and all(sum(map(is_quiet, of_steps)) >= rounds for of_steps in cores.values()):
            break
        before_each()
        turn = max(number, 0) % len(runnables)
        steps: dict[str, tuple[float, Load]] = {}
        for runnable in (*runnables[turn:], *runnables[:turn]):
            timed_step(built, runnable.modules)
            before = Load.now()
            time_us = timed_step(built, runnable.modules)
            steps[runnable.name] = time_us, Load.now().since(before)
        of_all = everywhere(steps)
        for name in steps if number >= 0 else ():
            same = [of_rank[name] for of_rank in of_all]
            times[name].append(max(time_us for time_us, _ in same))
            cores[name].append(others_cores([load for _, load in same]))
    return times, cores


def as_run(runnable: Runnable, capture: Capture, model: MeasuredCostModel, without_queues: MeasuredCostModel) -> list[Problem]:
    """Return the graphs as they run, priced by ``model``, and each in which no transfer queues by ``without_queues``."""
    problems = []
    for captured, module in zip(capture.graphs, runnable.modules, strict=True):
        problem = exported(captured, module, model, capture)
        timeline = simulate(problem, as_captured(problem.num_nodes))
        queues = any(transfer.begin_ticks > timeline.end_ticks[transfer.start_step] for transfer in timeline.transfers)
        problems.append(problem if queues else exported(captured, module, without_queues, capture))
    return problems


def predicted_us(problems: Sequence[Problem], contention: Contention | None) -> float:
    """Return what the graphs, in the order that each has, take by the machine model."""
    contended = [with_contention(problem, contention) for problem in problems]
    return sum(ticks_to_us(simulate(problem, as_captured(problem.num_nodes)).step_time_ticks) for problem in contended)


def memory(built: BuiltModel, runnable: Runnable, capture: Capture, model: MeasuredCostModel) -> list[dict[str, int]]:
    """Return for each graph the peak of live bytes as counted while it runs for real, and as predicted."""
    forward, backward = capture.graphs
    rows: list[dict[str, int]] = []

    def counted(captured: CapturedGraph, module: GraphModule, boxed: list[Any]) -> Any:
        dag = export(replace(captured, module=module), model, group_ranks=ranks_of(capture))
        told = live_bytes_of(dag)
        outputs, live = run_counting(module, boxed, dag, captured.kept_inputs, expected=told)
        apart = sum(a != b for a, b in zip(live, told, strict=True))
        rows.append({"counted_bytes": max(live), "predicted_bytes": max(told), "nodes_apart": apart})
        return outputs

    loss, *saved = counted(forward, runnable.modules[0], list(forward_inputs(built)))
    boxed = [*saved, torch.ones_like(loss)]
    del saved
    counted(backward, runnable.modules[1], boxed)
    return rows


if __name__ == "__main__":
    own_core(int(sys.argv[1]))
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
