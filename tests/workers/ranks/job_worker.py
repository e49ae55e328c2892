"""One of several gloo processes that schedule graphs together, in every way that may go wrong;
writes what happened as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER, SCENARIO, PORT)``, see ``processes.run_jobs``
"""

import json
import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from apsched.capture.captured import CapturedGraph
from apsched.capture.fake_world import world
from apsched.compiler import schedule_captured as scheduled
from apsched.compiler.ranks.launches import launches_of, order_digest
from apsched.compiler.schedule_graph import prepare_joint, schedule_graph
from apsched.compiler.settings import Settings
from apsched.errors import ApschedError, InputError
from apsched.graph.export.export import export_graph
from apsched.graph.identity import graph_hash
from apsched.models.build import build
from apsched.models.mesh import MeshSpec
from apsched.models.preset_capture import capture_built
from apsched.schedule.result import SolveResult
from apsched.schedule.schedule import as_captured
from apsched.torch_compat.graphs import process_group_names
from tests.helpers.graphs.toy_graphs import FlatCosts, captured_function, toy_inputs, toy_step
from tests.helpers.spoilt_disks import full_disk, read_only_disk

DEADLINE_S = 6.0
"""Where somebody is waited for in vain."""
PATIENT_S = 60.0
"""Where nobody is: a busy machine may take its time."""
SOLVES: list[str] = []

Case = Callable[[], object]


def counted_solve(problem, caps, options, **how) -> SolveResult:
    SOLVES.append(problem.name)
    return scheduled_solve(problem, caps, options, **how)


scheduled_solve, scheduled_answered = scheduled.solve_requested, scheduled.answered
scheduled.solve_requested = counted_solve


@contextmanager
def instead(name: str, value: object):
    """Let the compiler use ``value`` for one of its parts."""
    before = getattr(scheduled, name)
    setattr(scheduled, name, value)
    try:
        yield
    finally:
        setattr(scheduled, name, before)


@contextmanager
def logged(name: str):
    """Return the list that fills with what is logged under a name."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(name).removeHandler(handler)


def toy(group: dist.ProcessGroup, shards: int = 3, width: int = 8) -> CapturedGraph:
    size, rank = group.size(), dist.get_rank(group)
    return captured_function(
        toy_step(group.group_name, size), toy_inputs(size, shards, rank, width), parameters=shards
    )


def schedule(captured: CapturedGraph, **more: object) -> GraphModule:
    chosen = Settings.of(
        {"cost_model": FlatCosts(), "budget": 0.0, "deadline_s": PATIENT_S, "cache": False, **more}
    )
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
    return sorted(
        order_digest(launches) for launches in launches_of(fast, captured.module).values()
    )


def prepare() -> None:
    """Load what a first solve loads, so that no deadline passes meanwhile."""
    with world(2):
        schedule(toy(dist.group.WORLD), deadline_s=None)


# processes that all come to an end


def cases(rank: int, world_size: int, folder: Path) -> dict[str, Case]:
    everybody = dist.group.WORLD
    odd_graph, odd_schedule, late_one = min(2, world_size - 1), 1, world_size - 1

    def scheduled_and_run(**more: object) -> object:
        captured = toy(everybody)
        fast, inputs = schedule(captured, **more), toy_inputs(world_size, 3, rank)
        with torch.no_grad():
            close = [
                torch.allclose(a, b, rtol=1e-4)
                for a, b in zip(fast(*inputs), captured.module(*inputs), strict=True)
            ]
        return {
            "orders": orders(fast, captured),
            "moved": fast is not captured.module,
            "close": all(close),
        }

    def another_graph() -> object:
        return schedule(toy(everybody, width=16 if rank == odd_graph else 8)).code

    def another_schedule() -> object:
        def as_it_was(problem, caps, options, solve, **how) -> SolveResult:
            answer = scheduled_answered(problem, caps, options, solve, **how)
            base = next(b for b in answer.baselines if b.schedule == as_captured(problem.num_nodes))
            return scheduled.replace(
                answer, best=base, bound_ticks=0, peak_bound_bytes=0, launches_bound=0
            )

        with instead("answered", as_it_was if rank == odd_schedule else scheduled_answered):
            return schedule(toy(everybody)).code

    def broken_solver() -> object:
        def breaks(*arguments: object, **more: object) -> SolveResult:
            raise ZeroDivisionError("a bug")

        with instead("solve_requested", breaks):
            return schedule(toy(everybody)).code

    def too_late() -> object:
        if rank == late_one:
            time.sleep(1.6 * DEADLINE_S)
        stated = {"deadline_s": DEADLINE_S, "memory_cap": "none"}  # without it memory comes first
        return outcome(lambda: schedule(toy(everybody), **stated).code)

    def nothing_fits(on_error: str) -> Case:
        def run() -> object:
            captured = toy(everybody)
            return schedule(captured, memory_cap=1, on_error=on_error) is captured.module

        return run

    def own_error(odd: int) -> Case:
        """One process rank cannot export its graph."""

        def run() -> object:
            captured = toy(everybody)
            if rank == odd:
                taken = (n for n in captured.module.graph.find_nodes(op="placeholder") if n.users)
                del next(taken).meta["val"]
            return schedule(captured, on_error="fallback", deadline_s=PATIENT_S) is captured.module

        return run

    def another_graph_falls_back() -> object:
        captured = toy(everybody, width=16 if rank == odd_graph else 8)
        return schedule(captured, on_error="fallback") is captured.module

    def too_late_falls_back() -> object:
        if rank == late_one:
            time.sleep(1.6 * DEADLINE_S)
        captured = toy(everybody)
        fast = schedule(captured, on_error="fallback", deadline_s=DEADLINE_S)
        return fast is captured.module

    def unprepared(on_error: str) -> Case:
        """One process rank cannot prepare its joint graph."""

        def run() -> object:
            joint = toy(everybody).module
            settings = Settings(on_error=on_error, deadline_s=PATIENT_S)

            def prepare(_: object) -> GraphModule:
                if rank == odd_graph:
                    raise InputError("no role")
                return GraphModule(joint, joint.graph)

            return prepare_joint(joint, settings, prepare) is None

        return run

    def other_joint_settings(on_error: str) -> Case:
        """One process rank gathers again in backward, the others do not."""

        def run() -> object:
            joint = toy(everybody).module
            settings = Settings(on_error=on_error, deadline_s=PATIENT_S)
            stated = {"reshard_after_forward": rank == odd_graph}
            return prepare_joint(joint, settings, lambda _: joint, stated) is None

        return run

    def stages() -> object:
        """Two stages of a pipeline: other graphs, and one has two of them."""
        stage = dist.new_group([0, 1]), dist.new_group([2, 3])
        mine = stage[rank // 2]
        graphs = [toy(mine, shards=3 + rank // 2), *([toy(mine, shards=2)] if rank < 2 else [])]
        return [orders(schedule(captured), captured) for captured in graphs]

    def other_settings() -> object:
        return schedule(toy(everybody), max_prefetch=3 if rank == late_one else None).code

    def cached(damage: bool = False, **more: object) -> Case:
        def run() -> object:
            dist.barrier()
            if damage and rank == 0:
                for path in (folder / "cache").glob("*.answer"):
                    path.write_bytes(path.read_bytes()[:-7])
            dist.barrier()
            return scheduled_and_run(cache=folder / "cache", **more)

        return run

    def spoilt(disk: Callable[[Path], AbstractContextManager[None]]) -> Case:
        """The directory of answers is where nobody can write."""

        def run() -> object:
            directory = folder / f"{disk.__name__}"
            with (
                disk(directory) if rank == 0 else nullcontext(),
                logged("apsched.compiler.ranks.cache") as said,
            ):
                dist.barrier()
                found = scheduled_and_run(cache=directory)
                dist.barrier()
            return {**found, "said": said}

        return run

    of_any_size: dict[str, Case] = {
        "usual": scheduled_and_run,
        "another graph": another_graph,
        "another schedule": another_schedule,
        "other settings": other_settings,
    }
    if world_size == 2:
        return of_any_size
    return of_any_size | {
        "broken solver": broken_solver,
        "too late": too_late,
        "nothing fits": nothing_fits("raise"),
        "nothing fits, fallback": nothing_fits("fallback"),
        "own error": own_error(1),
        "own error of who solves": own_error(0),
        "another graph, fallback": another_graph_falls_back,
        "too late, fallback": too_late_falls_back,
        "unprepared": unprepared("raise"),
        "other joint settings": other_joint_settings("raise"),
        "other joint settings, fallback": other_joint_settings("fallback"),
        "unprepared, fallback": unprepared("fallback"),
        "stages": stages,
        "cache, first": cached(),
        "cache, again": cached(),
        "cache, damaged": cached(damage=True),
        "cache, after": cached(),
        "read-only disk": spoilt(read_only_disk),
        "full disk": spoilt(full_disk),
        "without a deadline": lambda: scheduled_and_run(deadline_s=None),
        "again": scheduled_and_run,
    }


def usual(rank: int, world_size: int, folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, case in cases(rank, world_size, folder).items():
        dist.barrier()  # each case begins at the same time
        found[name] = outcome(case)
    return found if world_size == 2 else found | mesh_of_groups()


def mesh_of_groups() -> dict[str, object]:
    """A preset on four processes, where each is in two groups."""
    found: dict[str, object] = {}
    dist.barrier()
    mesh = MeshSpec.parse("fsdp=2,tp=2")
    graphs = capture_built(build("llama3-debug", mesh=mesh, seq_len=64, num_layers=1)).graphs
    found["llama hashes"] = [
        graph_hash(export_graph(g, FlatCosts(), group_ranks=process_group_names())) for g in graphs
    ]
    found["llama groups"] = len({*launches_of(graphs[1].module, graphs[1].module)})
    dist.barrier()
    found["llama"] = outcome(lambda: [orders(schedule(g), g) for g in graphs])
    return found


def twenty_seconds(rank: int) -> dict[str, object]:
    """One process rank is that late for a job with the deadline that is the default."""
    dist.barrier()
    if rank == 1:
        time.sleep(20)
    return outcome(lambda: schedule(toy(dist.group.WORLD), deadline_s=Settings().deadline_s).code)


# processes of which one comes to harm


def harmed(scenario: str) -> dict[str, object]:
    def ends(*arguments: object, **more: object) -> SolveResult:
        time.sleep(0.5)  # the others wait by then
        if scenario.startswith("stopped"):
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(9)

    def run() -> object:
        captured = toy(dist.group.WORLD)
        on_error = "fallback" if scenario.endswith("fallback") else "raise"
        fast = schedule(captured, deadline_s=DEADLINE_S, on_error=on_error)
        return fast is captured.module

    dist.barrier()
    with instead("solve_requested", ends):
        return outcome(run)


def store_of(rank: int, world_size: int, folder: Path, scenario: str, port: str) -> dist.Store:
    if port:  # a store of its own process, as torchrun has
        return dist.TCPStore("127.0.0.1", int(port), is_master=False, timeout=timedelta(seconds=60))
    if scenario in ("usual", "20 s late"):
        return dist.FileStore(str(folder / "store"), world_size)
    if rank == 0:  # it holds the store
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "port.new").write_text(str(server.port))
        os.rename(folder / "port.new", folder / "port")
        return server
    while not (folder / "port").exists():
        time.sleep(0.05)
    return dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), is_master=False)


def main(rank: int, world_size: int, folder: Path, scenario: str, port: str) -> None:
    torch.set_num_threads(1)
    store = store_of(rank, world_size, folder, scenario, port)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=200)
    )
    match scenario:
        case "usual":
            found = usual(rank, world_size, folder)
        case "20 s late":
            found = twenty_seconds(rank)
        case _:
            found = harmed(scenario)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if scenario in ("usual", "20 s late"):
        dist.barrier()
        dist.destroy_process_group()
    else:
        os._exit(0)  # the group has lost a member
