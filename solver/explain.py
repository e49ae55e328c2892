"""Why nothing fits: the caps that clash, the nodes where, and the least of each cap that would do."""

from dataclasses import replace

from apsched.config import Caps
from apsched.problem import Problem
from apsched.result import Infeasibility
from apsched.schedule import Schedule, StepKind
from apsched.simulate import Timeline, simulate
from apsched.solver.compact import Compact, compact
from apsched.solver.expand import expand
from apsched.solver.floor import just_in_time
from apsched.solver.plan_clash import plan_clashes

_NODES_NAMED = 5


def explain(problem: Problem, small: Compact, caps: Caps, floor_bytes: int, floor_bound_bytes: int, *, proven: bool) -> Infeasibility:
    """Return the explanation for caps under which no schedule was found."""
    clashing, least, sentences = [], [], []
    nodes: list[str] = []
    floor = just_in_time(problem, small, replace(caps, in_flight_cap_bytes=None))
    assert floor is not None  # it keeps every cap but the one on bytes in flight
    schedule = expand(problem, small, floor.program)
    timeline = simulate(problem, schedule)
    largest = max((c.output_bytes for c in problem.collectives if not c.on_path), default=0)
    if caps.in_flight_cap_bytes is not None and caps.in_flight_cap_bytes < largest:
        clashing.append("in_flight_cap_bytes")
        least.append(("in_flight_cap_bytes", largest))
        big = [problem.node_names[c.start] for c in problem.collectives if not c.on_path and c.output_bytes > caps.in_flight_cap_bytes]
        nodes += big[:_NODES_NAMED]
        sentences.append(f"one collective alone has {largest} bytes in flight, more than the in-flight cap of {caps.in_flight_cap_bytes}")
    if caps.memory_cap_bytes is not None and caps.memory_cap_bytes < floor_bytes:
        clashing.append("memory_cap_bytes")
        least.append(("memory_cap_bytes", floor_bytes))
        nodes += _fullest(problem, _step_names(problem, schedule), timeline, caps.memory_cap_bytes)
        least_is = "the least memory cap that would do" if floor_bound_bytes >= floor_bytes else "the least memory cap known to do"
        sentences.append(f"{least_is} is {floor_bytes} bytes, more than the cap of {caps.memory_cap_bytes}")
        sentences += _without_plan(problem, caps)
    for clash in plan_clashes(problem, caps):
        if clash.cap not in clashing:
            clashing.append(clash.cap)
            least.append((clash.cap, clash.least))
            nodes += clash.nodes[:_NODES_NAMED]
            sentences.append(clash.message)
    if not clashing:
        clashing = [name for name in ("memory_cap_bytes", "in_flight_cap_bytes", "max_prefetch") if getattr(caps, name) is not None]
        sentences.append("no schedule keeps these caps together" if proven else "no schedule was found that keeps these caps together")
    return Infeasibility(
        caps=tuple(clashing),
        nodes=tuple(dict.fromkeys(nodes)),
        least=tuple(least),
        message=f"no schedule fits: {'; '.join(sentences)}" + (f" (at {', '.join(dict.fromkeys(nodes))})" if nodes else ""),
    )


def _without_plan(problem: Problem, caps: Caps) -> list[str]:
    """Return what the cap on memory would have to be without the user's plan, where that would do."""
    if problem.unrestricted is None or caps.memory_cap_bytes is None:
        return []
    free = just_in_time(problem.unrestricted, compact(problem.unrestricted), replace(caps, in_flight_cap_bytes=None))
    if free is None or free.peak_memory_bytes > caps.memory_cap_bytes:
        return []
    return [f"without the plan {free.peak_memory_bytes} bytes would do"]


def _step_names(problem: Problem, schedule: Schedule) -> list[str]:
    return [
        problem.node_names[s.index] if s.kind is StepKind.NODE else f"{s.kind.name.lower().replace('_', '-')} {s.index}"
        for s in schedule.steps
    ]


def _fullest(problem: Problem, names: list[str], timeline: Timeline, cap: int) -> list[str]:
    over = sorted((k for k, live in enumerate(timeline.live_bytes) if live > cap), key=lambda k: -timeline.live_bytes[k])
    return [names[k] for k in over[:_NODES_NAMED]]
