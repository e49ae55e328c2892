"""One of several gloo processes that schedule graphs together, in every way that may go wrong; writes what happened as JSON.

usage: job_worker.py PROCESS_RANK WORLD_SIZE FOLDER [SCENARIO PORT]
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.fx import GraphModule
from toy_graphs import FlatCosts, captured_function, toy_inputs, toy_step

from apsched.agreement.launches import launches_of, order_digest
from apsched.capture.captured import CapturedGraph
from apsched.compiler import scheduled
from apsched.compiler.schedule_graph import schedule_graph
from apsched.compiler.settings import Settings
from apsched.errors import ApschedError
from apsched.graph.export import export
from apsched.graph.identity import graph_hash
from apsched.models.build import build
from apsched.models.mesh import MeshSpec
from apsched.models.preset_capture import capture_built
from apsched.result import SolveResult
from apsched.schedule import as_captured
from apsched.torch_private import process_group_names

DEADLINE_S = 6.0
SOLVES: list[str] = []

Case = Callable[[], object]


def counted_solve(problem, caps, options, **how) -> SolveResult:
    SOLVES.append(problem.name)
    return scheduled_solve(problem, caps, options, **how)


scheduled_solve, scheduled_answered = scheduled.solve, scheduled.answered
scheduled.solve = counted_solve


@contextmanager
def instead(name: str, value: object):
    """Let the compiler use ``value`` for one of its parts."""
    before = getattr(scheduled, name)
    setattr(scheduled, name, value)
    try:
        yield
    finally:
        setattr(scheduled, name, before)


def toy(group: dist.ProcessGroup, shards: int = 3, width: int = 8) -> CapturedGraph:
    size, rank = group.size(), dist.get_rank(group)
    return captured_function(toy_step(group.group_name, size), toy_inputs(size, shards, rank, width), parameters=shards)


def schedule(captured: CapturedGraph, **more: object) -> GraphModule:
    chosen = Settings.of({"cost_model": FlatCosts(), "budget": 0.02, "deadline_s": DEADLINE_S, "cache": False, **more})
    return schedule_graph(captured.module, chosen, parameter_names=captured.parameter_names)


def outcome(run: Case) -> dict[str, object]:
    """Return what ``run`` returns or raises, how long that took, and what was solved here."""
    SOLVES.clear()
    began_s = time.monotonic()
    try:
        found: dict[str, object] = {"value": run()}
    except ApschedError as error:
        found = {"error": type(error).__name__, "message": str(error)}
    return found | {"seconds": time.monotonic() - began_s, "solves": len(SOLVES)}


def orders(fast: GraphModule, captured: CapturedGraph) -> list[str]:
    return sorted(order_digest(launches) for launches in launches_of(fast, captured.module).values())


# four processes


def cases(rank: int, folder: Path) -> dict[str, Case]:
    world = dist.group.WORLD
    stage = dist.new_group([0, 1]), dist.new_group([2, 3])
    mine = stage[rank // 2]

    def scheduled_and_run(**more: object) -> object:
        captured = toy(world)
        fast, inputs = schedule(captured, **more), toy_inputs(4, 3, rank)
        with torch.no_grad():
            close = [torch.allclose(a, b, rtol=1e-4) for a, b in zip(fast(*inputs), captured.module(*inputs), strict=True)]
        return {"orders": orders(fast, captured), "moved": fast is not captured.module, "close": all(close)}

    def another_graph() -> object:
        return schedule(toy(world, width=16 if rank == 2 else 8)).code

    def another_schedule() -> object:
        def as_it_was(problem, caps, options, solve, *, sources, round_) -> SolveResult:
            answer = scheduled_answered(problem, caps, options, solve, sources=sources, round_=round_)
            base = next(b for b in answer.baselines if b.schedule == as_captured(problem.num_nodes))
            return scheduled.replace(answer, best=base, bound_ticks=0, peak_bound_bytes=0, launches_bound=0)

        with instead("answered", as_it_was if rank == 1 else scheduled_answered):
            return schedule(toy(world)).code

    def broken_solver() -> object:
        def breaks(*arguments: object, **more: object) -> SolveResult:
            raise ZeroDivisionError("a bug")

        with instead("solve", breaks):
            return schedule(toy(world)).code

    def late(seconds: float) -> Case:
        def run() -> object:
            if rank == 3:
                time.sleep(seconds)
            return outcome(lambda: schedule(toy(world)).code)

        return run

    def nothing_fits(on_error: str) -> Case:
        def run() -> object:
            captured = toy(world)
            return schedule(captured, memory_cap=1, on_error=on_error) is captured.module

        return run

    def own_error() -> object:
        """One process rank cannot export its graph."""
        captured = toy(world)
        if rank == 1:
            del next(iter(captured.module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default))).meta["val"]
        return schedule(captured, on_error="fallback") is captured.module

    def stages() -> object:
        """Two stages of a pipeline: other graphs, and one has two of them."""
        graphs = [toy(mine, shards=3 + rank // 2), *([toy(mine, shards=2)] if rank < 2 else [])]
        return [orders(schedule(captured), captured) for captured in graphs]

    def other_settings() -> object:
        return schedule(toy(world), max_prefetch=3 if rank == 3 else None).code

    def cached(damage: bool = False, **more: object) -> Case:
        def run() -> object:
            dist.barrier()
            if damage and rank == 0:
                for path in (folder / "cache").glob("*.answer"):
                    path.write_bytes(path.read_bytes()[:-7])
            dist.barrier()
            return scheduled_and_run(cache=folder / "cache", **more)

        return run

    return {
        "usual": scheduled_and_run,
        "another graph": another_graph,
        "another schedule": another_schedule,
        "broken solver": broken_solver,
        "a bit late": late(0.4 * DEADLINE_S),
        "too late": late(1.6 * DEADLINE_S),
        "nothing fits": nothing_fits("raise"),
        "nothing fits, fallback": nothing_fits("fallback"),
        "own error": own_error,
        "stages": stages,
        "other settings": other_settings,
        "cache, first": cached(),
        "cache, again": cached(),
        "cache, damaged": cached(damage=True),
        "cache, after": cached(),
        "no cache": lambda: scheduled_and_run(cache="/proc/none"),
        "alone": lambda: scheduled_and_run(deadline_s=None),
        "again": scheduled_and_run,
    }


def four(rank: int, folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, case in cases(rank, folder).items():
        dist.barrier()  # each case begins at the same time
        found[name] = outcome(case)
    dist.barrier()
    mesh = MeshSpec.parse("fsdp=2,tp=2")
    graphs = capture_built(build("llama3-debug", mesh=mesh, seq_len=64, num_layers=1)).graphs
    found["llama hashes"] = [graph_hash(export(g, FlatCosts(), group_ranks=process_group_names())) for g in graphs]
    found["llama groups"] = len({*launches_of(graphs[1].module, graphs[1].module)})
    dist.barrier()
    found["llama"] = outcome(lambda: [orders(schedule(g), g) for g in graphs])
    return found


# two processes, of which one comes to harm


def two(rank: int, scenario: str) -> dict[str, object]:
    def ends(*arguments: object, **more: object) -> SolveResult:
        time.sleep(0.5)  # the other waits by then
        if scenario.startswith("stopped"):
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(9)

    with instead("solve", ends):
        return outcome(lambda: schedule(toy(dist.group.WORLD)).code)


def main(rank: int, world_size: int, folder: Path, scenario: str = "four", port: str = "") -> None:
    torch.set_num_threads(1)
    if port:  # a store of its own process, as torchrun has
        store: dist.Store = dist.TCPStore("127.0.0.1", int(port), is_master=False, timeout=timedelta(seconds=60))
    elif scenario == "four":
        store = dist.FileStore(str(folder / "store"), world_size)
    else:  # process rank 0 holds it
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
        if server is not None:
            (folder / "port.new").write_text(str(server.port))
            os.rename(folder / "port.new", folder / "port")
        while not (folder / "port").exists():
            time.sleep(0.05)
        store = server or dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
    found = four(rank, folder) if scenario == "four" else two(rank, scenario)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if scenario == "four":
        dist.barrier()
        dist.destroy_process_group()
    else:
        os._exit(0)  # the group has lost a member


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
