"""What must hold of a random program: captured, solved within random caps and written back, it does
on real tensors what it did.
"""

import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.capture.graph_module import capture_graph
from apsched.config import Caps, SolveOptions
from apsched.graph.export.export import export_graph
from apsched.graph.export.signature import target_name
from apsched.problem.build import build_problem
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Schedule, as_captured
from apsched.schedule.simulate import simulate
from apsched.schedule.verify import verify
from apsched.solver import least_memory, solve
from apsched.writeback.round_trip import round_trip, with_names_checked
from apsched.writeback.write_back import write_back
from benchmarks.common.live_bytes import live_bytes_of, run_counting
from tests.fuzz.functions_by_hand import BODIES, BY_HAND, with_subgraphs
from tests.fuzz.random_fx import RandomProgram
from tests.helpers.graphs.instrumented import call, capture_of, traced
from tests.helpers.problems.random_schedules import random_schedule

_SYMBOLIC_EVERY = 5


@dataclass(frozen=True)
class RandomCosts:
    """Prices that depend on operator, size and seed: now latency counts, now bandwidth, now
    compute.
    """

    seed: int

    def compute_us(self, node: torch.fx.Node) -> float:
        if node.op != "call_function":
            return 0.0
        return random.Random(f"{self.seed} {target_name(node)}").choice([0.0, 1.0, 3.0, 20.0])

    def collective_us(self, kind: str, group_name: str, group_size: int, size_bytes: int) -> float:
        latency_us, us_per_byte = _line(self.seed, kind)
        return latency_us + size_bytes * us_per_byte


@cache
def _line(seed: int, kind: str) -> tuple[float, float]:
    """Return latency and time of a byte; a graph asks for hundreds of sizes."""
    rng = random.Random(f"{seed} {kind}")
    return rng.choice([1.0, 10.0, 50.0]), rng.choice([0.001, 0.02, 0.2])


def module_of(
    program: RandomProgram, groups: Sequence[str], *, symbolic: bool
) -> torch.fx.GraphModule:
    """Return the graph of ``program``, with fake values: the very operators, or, as make_fx traces
    them, with symbolic sizes.
    """
    names = {
        "aten": torch.ops.aten,
        "c10d": torch.ops._c10d_functional,
        "prims": torch.ops.prims,
        "higher_order": torch.ops.higher_order,
    }
    names |= {"torch": torch, "F": torch.nn.functional, "operator": operator, "call": call} | {
        f.__name__: f for f in (*BY_HAND, *BODIES)
    }
    exec(program.source(groups), names)
    if symbolic:
        return make_fx(names["program"], tracing_mode="symbolic")(*program.tensors(0))
    return with_subgraphs(traced(names["program"], program.tensors(0)))


def failure_of(program: RandomProgram, groups: Sequence[str], seed: int, *, solved: bool) -> str:
    """Return what does not hold of ``program``; empty where all does. Every process rank of
    ``groups`` calls this at once.
    """
    try:
        symbolic = (
            seed % _SYMBOLIC_EVERY == 0 and "rng_state" not in program.source()
        )  # make_fx saves a real state
        module = module_of(program, groups, symbolic=symbolic)
        placeholders = module.graph.find_nodes(op="placeholder")
        kept = frozenset(
            node.name for node, i in zip(placeholders, program.inputs, strict=True) if i.kept
        )
        captured = capture_graph(module, name="graph", kept_inputs=kept, parameter_names={})
        module = captured.module
        costs = RandomCosts(seed)
        dag = export_graph(captured, costs)
        problem = build_problem(dag)
        caps, schedule, claimed_peak = _scheduled(problem, seed, solved=solved)
        if violations := list(verify(problem, schedule, caps)):
            return f"verify: {violations[0]}"
        rewritten = write_back(module, problem, schedule)
        claimed = simulate(problem, schedule)
        trip = with_names_checked(
            round_trip(rewritten, captured, costs, {}, claimed), rewritten, problem, schedule
        )
        if not trip.exact:
            return f"round trip: {trip.difference}"
        if claimed_peak is not None and claimed.peak_memory_bytes != claimed_peak:
            return (
                f"the solver claims a peak of {claimed_peak} bytes, simulate of"
                f" {claimed.peak_memory_bytes}"
            )
        again = export_graph(capture_of(rewritten, sorted(kept)), costs)
        before = _run(module, dag, program, kept, seed)
        after = _run(rewritten, again, program, kept, seed)
    except Exception as error:  # whatever it is, it is a finding
        return f"{type(error).__name__}: {error}"
    for name, found, told in (
        ("captured", before.live, live_bytes_of(dag)),
        ("rewritten", after.live, live_bytes_of(again)),
    ):
        unknown = any(
            node.target in BY_HAND for node in module.graph.nodes
        )  # its result may be what it was handed
        if wrong := [
            k
            for k, (a, b) in enumerate(zip(found, told, strict=True))
            if a > b or (a != b and not unknown)
        ]:
            at = wrong[0]
            return (
                f"memory of the {name} graph: {found[at]} bytes counted at node {at}, {told[at]}"
                " told"
            )
    if caps.memory_cap_bytes is not None and max(after.live) > caps.memory_cap_bytes:
        return f"memory: {max(after.live)} bytes counted, cap {caps.memory_cap_bytes}"
    for what, a, b in (
        ("output", before.outputs, after.outputs),
        ("input", before.inputs, after.inputs),
        ("generator", [before.generator], [after.generator]),
    ):
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            if not torch.equal(x.nan_to_num(), y.nan_to_num()):
                return f"{what} {k} differs by {(x.double() - y.double()).abs().max().item():.3g}"
    return ""


def _scheduled(problem: Problem, seed: int, *, solved: bool) -> tuple[Caps, Schedule, int | None]:
    """Return caps, a schedule that keeps them, and the peak that the solver claims for it."""
    rng, options = random.Random(seed), SolveOptions(budget=0.05, seed=seed % 1000)
    if not solved:
        return Caps(max_compute_move=None), random_schedule(problem, seed), None
    caps = Caps(
        bucket_cap_bytes=rng.choice([None, None, 256, 1024]),
        max_topo_span=rng.choice([None, None, 5, 30]),
        max_prefetch=rng.choice([None, None, 2, 10]),
        max_compute_move=rng.choice([0, 3, 200]),
        in_flight_cap_bytes=rng.choice([None, None, 512, 4096]),
    )
    if rng.random() < 0.7:
        floor_bytes, _ = least_memory(problem, caps, options)
        caps = replace(caps, memory_cap_bytes=floor_bytes + rng.choice([0, 512, 4096]))
    answer = solve(problem, caps, options)
    if answer.best is None:
        if solve(problem, replace(caps, memory_cap_bytes=None), options).best is None:
            return (
                Caps(),
                as_captured(problem.num_nodes),
                None,
            )  # no schedule is known that keeps the other caps alone
        raise AssertionError(
            f"no schedule fits {caps}, though the least memory was asked for:"
            f" {answer.infeasibility}"
        )
    if answer.bound_ticks > answer.best.step_time_ticks:
        raise AssertionError(
            f"bound {answer.bound_ticks} above the step time {answer.best.step_time_ticks}"
        )
    if answer.best.step_time_ticks != simulate(problem, answer.best.schedule).step_time_ticks:
        raise AssertionError("the solver's step time is not that of simulate")
    return caps, answer.best.schedule, answer.best.peak_memory_bytes


@dataclass(frozen=True)
class _Ran:
    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor]
    live: list[int]
    generator: torch.Tensor


def _run(
    module: torch.fx.GraphModule, dag, program: RandomProgram, names: frozenset[str], seed: int
) -> _Ran:
    inputs = program.tensors(100 * seed + dist.get_rank())
    kept = [tensor for tensor, i in zip(inputs, program.inputs, strict=True) if i.kept]
    torch.manual_seed(seed + dist.get_rank())
    outputs, live = run_counting(module, inputs, dag, names, expected=live_bytes_of(dag))
    return _Ran(list(outputs), kept, live, torch.get_rng_state())
