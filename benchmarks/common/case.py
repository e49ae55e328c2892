"""One case in a process of its own: ``python -m benchmarks.common.case FILE``. FILE names the case,
and gets its record.

The steps have a fixed order, so that the memory of each part is known. First torch captures the
graphs; a small graph warms up the solver and torch's pass; the graphs are exported, solved under
each memory cap, and written back. Then torch's schedulers run on the same graphs, and each graph is
solved with the peak of torch's schedule as the cap. Last, one graph is solved again in other
processes.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch.fx

from apsched.artifacts.schedule_file import dump_schedule
from apsched.capture.captured import Capture
from apsched.config import Caps, SolveOptions
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import DEFAULT_CLUSTER, load_cluster
from apsched.pipeline.inductor_baseline import (
    INDUCTOR,
    INDUCTOR_MANUAL,
    InductorRun,
    run_inductor,
    run_inductor_manual,
    score_run,
)
from apsched.pipeline.load import LoadedGraph, loaded_graph, opening
from apsched.pipeline.result import Result
from apsched.pipeline.solve_graph import SolveRequest, resolve_caps, solve_graph
from apsched.pipeline.sources import SourceRequest
from apsched.problem.problem import Problem
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.report.explanation import explain_infeasible
from apsched.schedule.analysis.moved_compute import furthest_move, moved_compute
from apsched.schedule.result import Status
from apsched.schedule.schedule import Schedule
from apsched.writeback.round_trip import round_trip
from apsched.writeback.write_back import write_back
from benchmarks.common.grid import CAPS, COMPUTE_MOVE, TORCH_PEAK, Case, layer_bytes, more_memory
from benchmarks.common.meters import cpu_s, held_bytes, peak_bytes, reset_peak, timed
from benchmarks.common.processes import Asked
from benchmarks.common.records import (
    Baseline,
    CaseRecord,
    GraphSize,
    Memory,
    Row,
    TorchRun,
    save_case,
)
from benchmarks.moves.noise import noise_of, waits_at_the_end, waits_when_done
from benchmarks.solver.again import solve_again

_QUIET = Progress(quiet=True)
_AGAIN_CAP = "floor+1 layer"
_NEARLY = 0.001
"""Share of a cap by which the least memory may be above it: solved nevertheless, with that as the
cap.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _WarmUp:
    cpu_s: float
    held_bytes: int
    """Memory that stays in use afterwards: libraries and compiled code of the solver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """A graph that is measured."""

    loaded: LoadedGraph
    exact: dict[Schedule, bool] = field(default_factory=dict)
    """Whether the graph after write-back has the claimed figures, for every schedule so far."""

    @property
    def problem(self) -> Problem:
        return self.loaded.problem


class _Session:
    """The record of a case as it grows: every addition is written to the file at once, so that
    nothing finished gets lost.
    """

    def __init__(self, file: Path, record: CaseRecord) -> None:
        self._file, self.record, self._began = file, record, time.perf_counter()

    def add(self, **changes: object) -> None:
        """Replace fields of the record by ``changes``, and save it."""
        wall_s = time.perf_counter() - self._began
        self.record = replace(self.record, wall_s=wall_s, cpu_s=cpu_s(), **changes)  # type: ignore[arg-type]
        save_case(self._file, self.record)

    def say(self, text: str) -> None:
        """Tell on stderr how far it is."""
        print(
            f"{self.record.case} {time.perf_counter() - self._began:7.1f} s  {text}",
            file=sys.stderr,
            flush=True,
        )


def measure(case: Case, asked: Asked, session: _Session) -> None:
    """Measure ``case``; the record grows in ``session``."""
    warm = _warm_up(asked)
    session.add(warm_up_cpu_s=warm.cpu_s)
    session.say(f"warm, {warm.cpu_s:.1f} s of processor time")
    with opening(_request(case), _QUIET) as (source, _):
        assert source.capture is not None
        torch_bytes = held_bytes() - warm.held_bytes
        reset_peak()
        graphs = [_Graph(loaded=graph) for graph in _exported(source.capture)]
        session.say(
            "captured, "
            + ", ".join(f"{g.problem.name} {g.problem.num_nodes} nodes" for g in graphs)
        )
        if asked.moves:
            for graph in graphs:
                _with_and_without_moves(graph, case, session)
            session.add(finished=True)
            return
        again = None
        for graph in graphs:
            again = _solve_under_caps(graph, asked, session)
            session.add(memory=Memory(torch_bytes=torch_bytes, solver_peak_bytes=peak_bytes()))
        reset_peak()
        for graph in graphs:
            _compare_with_torch(graph, asked, session)
        assert session.record.memory is not None
        session.add(memory=replace(session.record.memory, torch_pass_peak_bytes=peak_bytes()))
        if case.again and again is not None:
            _solve_again(graphs[-1], again, session)
    session.add(finished=True)


def _request(case: Case) -> SourceRequest:
    return SourceRequest(
        source=case.model,
        mesh=case.mesh,
        seq_len=case.seq_len,
        batch=case.batch,
        num_layers=case.num_layers,
    )


def _exported(capture: Capture) -> list[LoadedGraph]:
    model = ClusterCostModel(load_cluster(DEFAULT_CLUSTER), capture.group_ranks)
    export = partial(
        loaded_graph,
        cost_model=model,
        cluster=DEFAULT_CLUSTER,
        group_ranks=capture.group_ranks,
        progress=_QUIET,
    )
    return [export(graph) for graph in capture.graphs]


def _warm_up(asked: Asked) -> _WarmUp:
    """Solve a small graph and let torch schedule it, so that imports and compilation are timed here
    and nowhere else.
    """
    request = SourceRequest(
        source="llama3-debug",
        mesh="fsdp=2,tp=2" if asked.moves else "fsdp=4",
        seq_len=64,
        num_layers=4,
    )
    free = Caps(max_compute_move=COMPUTE_MOVE if asked.moves else 0)
    with opening(request, _QUIET) as (source, _):
        assert source.capture is not None
        graphs = _exported(source.capture)
        before = held_bytes()
        with timed() as used:
            for graph in graphs:
                for above_floor in (True, False):
                    warm = SolveRequest(
                        caps=free,
                        memory_cap=MemoryCap(
                            size_bytes=0 if above_floor else None, above_floor=above_floor
                        ),
                    )
                    result = solve_graph(
                        graph,
                        replace(warm, options=SolveOptions(budget=2)),
                        _QUIET,
                        caps=resolve_caps(graph, warm, _QUIET),
                    )
                    assert result.best is not None
                    _write_back(graph, result)
        held = held_bytes() - before
        for graph in graphs:
            for name in (INDUCTOR, INDUCTOR_MANUAL):
                _run_torch(graph, name)
    return _WarmUp(cpu_s=used.cpu_s, held_bytes=held)


def _with_and_without_moves(graph: _Graph, case: Case, session: _Session) -> None:
    """Solve ``graph`` with the peak of torch's schedule as the cap, with compute as captured and
    moved, and moved with more memory.
    """
    problem = graph.problem
    size = _size(graph.problem, floor_bytes=0)
    record = _torch_record(graph.loaded, TorchRun(direction=problem.name, name=INDUCTOR))
    session.add(graphs=(*session.record.graphs, size), torch=(*session.record.torch, record))
    session.say(
        f"{problem.name} {record.name}: {record.message or f'{record.step_ticks / 1e6:.3f} ms'}"
    )
    caps = [(TORCH_PEAK, 0.0, move) for move in (0, COMPUTE_MOVE, *case.other_moves)]
    caps += [(more_memory(share), share, COMPUTE_MOVE) for share in case.more_memory]
    for cap, share, move in caps if not record.message else ():
        cap_bytes = int(record.peak_bytes * (1 + share))
        row, result = _solve(graph, cap, cap_bytes, move)
        if row.status == Status.INFEASIBLE and 0 < row.least_cap_bytes <= cap_bytes * (1 + _NEARLY):
            row, result = _solve(graph, cap, row.least_cap_bytes, move)
        if (
            result is not None
            and result.schedule is not None
            and not share
            and move in (0, COMPUTE_MOVE)
        ):
            kinds = {
                "as solved": result.schedule,
                "when done": waits_when_done(problem, result.schedule),
                "at the end": waits_at_the_end(problem, result.schedule),
            }
            row = replace(
                row,
                noise=tuple(
                    noise
                    for waits, schedule in kinds.items()
                    for noise in noise_of(problem, schedule, waits)
                ),
            )
        session.add(rows=(*session.record.rows, row))
        session.say(f"moved by at most {move}, {_told(row)}")


def _solve_under_caps(graph: _Graph, asked: Asked, session: _Session) -> Result | None:
    """Solve ``graph`` under each memory cap; returns the result under the one that is solved
    again.
    """
    problem = graph.problem
    floor = SolveRequest(memory_cap=MemoryCap(size_bytes=0, above_floor=True))
    floor_bytes = resolve_caps(graph.loaded, floor, _QUIET).memory_cap_bytes
    assert floor_bytes is not None
    size = _size(problem, floor_bytes)
    session.add(graphs=(*session.record.graphs, size))
    again = None
    for cap in asked.caps:
        layers = CAPS[cap]
        row, result = _solve(
            graph, cap, None if layers is None else floor_bytes + layers * size.layer_bytes
        )
        if result is not None:
            again = result if cap == _AGAIN_CAP else again
            size = replace(
                size, floor_bound_bytes=max(size.floor_bound_bytes, result.answer.floor_bound_bytes)
            )
            session.add(graphs=(*session.record.graphs[:-1], size))
        session.add(rows=(*session.record.rows, row))
        session.say(_told(row))
    return again


def _size(problem: Problem, floor_bytes: int) -> GraphSize:
    return GraphSize(
        direction=problem.name,
        num_nodes=problem.num_nodes,
        num_collectives=len(problem.collectives),
        compute_ticks=sum(problem.duration_ticks[node] for node in problem.compute_order),
        layer_bytes=layer_bytes(problem),
        floor_bytes=floor_bytes,
        floor_bound_bytes=0,
    )


def _solve(
    graph: _Graph, cap: str, memory_cap_bytes: int | None, compute_move: int = 0
) -> tuple[Row, Result | None]:
    """Return the figures of one solve + write-back; after a failure the row gives the error."""
    row = Row(
        direction=graph.problem.name,
        cap=cap,
        memory_cap_bytes=memory_cap_bytes,
        status="failed",
        max_compute_move=compute_move,
    )
    caps = Caps(memory_cap_bytes=memory_cap_bytes, max_compute_move=compute_move)
    try:
        with timed() as solving:
            result = solve_graph(graph.loaded, SolveRequest(), _QUIET, caps=caps)
        row = replace(row, solve_cpu_s=solving.cpu_s, solve_wall_s=solving.wall_s)
        if result.best is None:
            return _without_schedule(row, result), None
        with timed() as writing:
            module = _write_back(graph.loaded, result)
        row = replace(row, write_back_cpu_s=writing.cpu_s, write_back_wall_s=writing.wall_s)
        row = replace(row, round_trip_exact=_exact(graph, module, result))
        return _with_schedule(row, graph.problem, result), result
    except Exception as error:  # one failure must not lose the other cases
        return replace(row, status="failed", message=_first_line(error)), None


def _without_schedule(row: Row, result: Result) -> Row:
    why = result.answer.infeasibility
    least = {} if why is None else dict(why.least)
    return replace(
        row,
        status=result.answer.status,
        message=explain_infeasible(result),
        least_cap_bytes=least.get("memory_cap_bytes", 0),
    )


def _with_schedule(row: Row, problem: Problem, result: Result) -> Row:
    answer, best = result.answer, result.best
    assert best is not None
    assert result.timeline is not None
    return replace(
        row,
        status=answer.status,
        step_ticks=best.step_time_ticks,
        fastest_ticks=answer.fastest_ticks,
        bound_ticks=answer.bound_ticks,
        bound_source=answer.bound_source,
        solved_by=answer.solved_by,
        exposed_ticks=result.timeline.exposed_ticks,
        peak_bytes=best.peak_memory_bytes,
        peak_bound_bytes=answer.peak_bound_bytes,
        num_launches=best.num_launches,
        launches_bound=answer.launches_bound,
        baselines=tuple(
            Baseline(name=b.name, step_ticks=b.step_time_ticks, fits=b.fits)
            for b in answer.baselines
        ),
        deterministic_work=answer.deterministic_work,
        moved_nodes=len(moved_compute(problem, best.schedule)),
        compute_move=furthest_move(problem, best.schedule),
    )


def _write_back(graph: LoadedGraph, result: Result) -> torch.fx.GraphModule:
    assert graph.captured is not None
    assert result.best is not None
    return write_back(graph.captured.module, graph.problem, result.best.schedule)


def _exact(graph: _Graph, module: torch.fx.GraphModule, result: Result) -> bool:
    """Return whether ``module`` has the claimed figures; a schedule that was found before keeps its
    first answer.
    """
    loaded, schedule = graph.loaded, result.schedule
    assert loaded.captured is not None
    assert loaded.cost_model is not None
    assert result.timeline is not None
    assert schedule is not None
    if schedule not in graph.exact:
        graph.exact[schedule] = round_trip(
            module, loaded.captured, loaded.cost_model, loaded.group_ranks, result.timeline
        ).exact
    return graph.exact[schedule]


def _compare_with_torch(graph: _Graph, asked: Asked, session: _Session) -> None:
    """Run torch's schedulers on ``graph``, and solve it with the peak of each as the cap."""
    problem = graph.problem
    for name in (INDUCTOR, INDUCTOR_MANUAL):
        record = TorchRun(direction=problem.name, name=name)
        if asked.torch_up_to_nodes is not None and problem.num_nodes > asked.torch_up_to_nodes:
            record = replace(record, message=f"not run: more than {asked.torch_up_to_nodes} nodes")
        else:
            record = _torch_record(graph.loaded, record)
        if not record.message:
            record = replace(record, ours=_solve(graph, f"peak of {name}", record.peak_bytes)[0])
        session.add(torch=(*session.record.torch, record))
        session.say(
            f"{problem.name} {name}:"
            f" {record.message or f'{record.step_ticks / 1e6:.3f} ms in {record.cpu_s:.1f} s'}"
        )
        if record.ours is not None:
            session.say(_told(record.ours))


def _torch_record(graph: LoadedGraph, record: TorchRun) -> TorchRun:
    assert graph.captured is not None
    assert graph.cost_model is not None
    try:
        run = _run_torch(graph, record.name)
        score = score_run(
            run,
            graph.captured,
            graph.problem,
            graph.cost_model,
            Caps(),
            group_ranks=graph.group_ranks,
        )
    except Exception as error:  # torch's assertions are its own
        return replace(record, message=_first_line(error))
    return replace(
        record,
        step_ticks=score.step_time_ticks,
        peak_bytes=score.peak_memory_bytes,
        num_launches=score.num_launches,
        cpu_s=run.cpu_seconds,
        wall_s=run.seconds,
    )


def _run_torch(graph: LoadedGraph, name: str) -> InductorRun:
    assert graph.captured is not None
    assert graph.cost_model is not None
    if name == INDUCTOR:
        return run_inductor(graph.captured, graph.cost_model, group_ranks=graph.group_ranks)
    return run_inductor_manual(graph.captured, graph.problem)


def _solve_again(graph: _Graph, result: Result, session: _Session) -> None:
    """Solve ``graph`` in two other processes, and compare their schedule files with that of
    ``result``.
    """
    name, dag = graph.problem.name, graph.loaded.dag
    for again in solve_again(
        dag, name, _AGAIN_CAP, result.caps.memory_cap_bytes, dump_schedule(result)
    ):
        session.add(again=(*session.record.again, again))
        session.say(
            f"{name} again, {again.how}:"
            f" {again.message or ('the same bytes' if again.same_bytes else 'OTHER BYTES')}"
        )


def _told(row: Row) -> str:
    head = f"{row.direction} {row.cap}: "
    if not row.solved:
        return f"{head}{row.status}, {row.message}"
    return (
        f"{head}{row.step_ticks / 1e6:.3f} ms, bound {row.bound_ticks / 1e6:.3f}"
        f" ({row.bound_source}), gap {100 * row.gap:.3f} %, {row.solve_cpu_s:.1f} +"
        f" {row.write_back_cpu_s:.1f} s"
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"


def main(arguments: Sequence[str]) -> int:
    """Measure the case that the file names, and replace the file by its record."""
    file = Path(arguments[0])
    content = json.loads(file.read_text())
    case = Case(**content.pop("case"))
    asked = Asked(**content)
    record = CaseRecord(
        case=case.name, model=case.model, mesh=case.mesh, seq_len=case.seq_len, commit=asked.commit
    )
    session = _Session(file, record)
    session.add()
    try:
        measure(case, asked, session)
    except Exception as error:
        session.add(message=_first_line(error))
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
