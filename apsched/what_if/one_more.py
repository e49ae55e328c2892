"""The gain from one more of a resource, found by solving again: memory, network bandwidth,
prefetch.

A schedule that is known stays possible where a cap is loosened, so the gain is never negative. Two
searches differ by chance, so a gain counts as proven only by bounds: the best schedule within
the old caps needs at least the old bound.
"""

from collections import Counter
from dataclasses import dataclass, replace

from apsched.config import Caps, SolveOptions
from apsched.names import part_of
from apsched.problem.faster_network import FasterNetwork
from apsched.problem.problem import Problem
from apsched.quantities import show_bytes
from apsched.schedule.result import SolveResult
from apsched.schedule.simulate import simulate
from apsched.solver import solve_requested

MORE_MEMORY_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """One thing that was given more of, and the answer."""

    name: str
    """``memory``, ``network`` or ``prefetch``."""
    change: str
    """The exact change, or why nothing was solved."""
    step_time_ticks: int | None
    """Of the best schedule then; ``None`` where nothing was solved."""
    bound_ticks: int | None
    gain_ticks: int
    """The gain over the present schedule: its step time less the new one."""
    proven_ticks: int
    """The old bound less the new step time: gained over any schedule there could be now; 0 where
    that is not positive.
    """
    possible_ticks: int
    """The present step time less the new bound: no schedule gains more."""

    @property
    def verdict(self) -> str:
        """``gains`` (proven), ``gains nothing`` (proven), ``nothing provable`` or ``not
        solved``.
        """
        if self.step_time_ticks is None:
            return "not solved"
        if self.proven_ticks > 0:
            return "gains"
        return "gains nothing" if self.possible_ticks <= 0 else "nothing provable"


def relaxed(
    problem: Problem,
    caps: Caps,
    options: SolveOptions,
    answer: SolveResult,
    network: FasterNetwork | None,
) -> tuple[Relaxed, ...]:
    """Return the gain from one more GiB, one more Gb/s a process rank and one more layer of
    prefetch over ``answer``.
    """
    assert answer.best is not None
    return (
        _more_memory(problem, caps, options, answer),
        _faster(caps, options, answer, network),
        _more_prefetch(problem, caps, options, answer),
    )


def _more_memory(
    problem: Problem, caps: Caps, options: SolveOptions, answer: SolveResult
) -> Relaxed:
    if caps.memory_cap_bytes is None:
        return _not_solved("memory", "no memory cap is set")
    cap = caps.memory_cap_bytes + MORE_MEMORY_BYTES
    change = f"memory cap {show_bytes(caps.memory_cap_bytes)} -> {show_bytes(cap)}"
    return _solved("memory", change, problem, replace(caps, memory_cap_bytes=cap), options, answer)


def _faster(
    caps: Caps, options: SolveOptions, answer: SolveResult, network: FasterNetwork | None
) -> Relaxed:
    if network is None:
        return _not_solved(
            "network",
            "the cluster is not known here, so neither is which groups leave a node (--cluster)",
        )
    groups = {"priced again": network.priced_anew, "bytes scaled, latency kept": network.scaled}
    rate = f"{network.gbit_per_s_before:g} -> {network.gbit_per_s_after:g} Gb/s a process rank"
    changes = "; ".join(f"{_groups(names)} {how}" for how, names in groups.items() if names)
    if not changes:
        where = (
            f"{_groups(network.unchanged)}: the links inside the nodes are slower"
            if network.unchanged
            else "no group leaves its node"
        )
        return _not_solved("network", f"{where}: no price changes")
    return _solved("network", f"{rate}: {changes}", network.problem, caps, options, answer)


def _groups(names: tuple[str, ...]) -> str:
    return f"group{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _more_prefetch(
    problem: Problem, caps: Caps, options: SolveOptions, answer: SolveResult
) -> Relaxed:
    if caps.max_prefetch is None:
        return _not_solved("prefetch", "no prefetch cap is set, so none binds")
    num_nodes = len(problem.compute_order)
    if caps.max_prefetch > num_nodes:  # a shorter distance of the answer alone proves nothing
        why = f"does not bind: the graph has {num_nodes}"
        return _not_solved("prefetch", f"the cap of {caps.max_prefetch} compute nodes {why}")
    cap = caps.max_prefetch + block_nodes(problem)
    change = (
        f"prefetch cap {caps.max_prefetch} -> {cap} compute nodes (a layer has"
        f" {block_nodes(problem)})"
    )
    return _solved("prefetch", change, problem, replace(caps, max_prefetch=cap), options, answer)


def block_nodes(problem: Problem) -> int:
    """Return the compute nodes of a transformer block: of the most common number, the larger; all
    nodes where there are no blocks.
    """
    blocks = Counter(
        part_of(problem.modules[node]) for node in problem.compute_order if problem.modules[node]
    )
    sizes = Counter(size for name, size in blocks.items() if name[-1].isdigit())
    return (
        max(sizes, key=lambda size: (sizes[size], size))
        if sizes
        else max(len(problem.compute_order), 1)
    )


def _solved(
    name: str, change: str, problem: Problem, caps: Caps, options: SolveOptions, known: SolveResult
) -> Relaxed:
    assert known.best is not None
    again = simulate(
        problem, known.best.schedule
    ).step_time_ticks  # it still fits: only prices or caps got lower or looser
    found = solve_requested(problem, caps, options)
    ticks = min(
        again, known.best.step_time_ticks, *([found.best.step_time_ticks] if found.best else [])
    )
    bound = min(found.bound_ticks, ticks)
    return Relaxed(
        name=name,
        change=change,
        step_time_ticks=ticks,
        bound_ticks=bound,
        gain_ticks=max(known.best.step_time_ticks - ticks, 0),
        proven_ticks=max(known.bound_ticks - ticks, 0),
        possible_ticks=max(known.best.step_time_ticks - bound, 0),
    )


def _not_solved(name: str, why: str) -> Relaxed:
    return Relaxed(
        name=name,
        change=why,
        step_time_ticks=None,
        bound_ticks=None,
        gain_ticks=0,
        proven_ticks=0,
        possible_ticks=0,
    )
