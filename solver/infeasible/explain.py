"""The reasons why nothing fits: the caps that clash, the nodes where, the live tensors there, and
the least value of each cap that fits.
"""

from dataclasses import replace

from apsched.config import Caps, SolveOptions
from apsched.kinds import NodeKind
from apsched.problem.problem import Problem, without_plan
from apsched.problem.storage_origins import BUFFERS, KEPT, origin
from apsched.quantities import show_bytes
from apsched.schedule.memory import lifetimes
from apsched.schedule.result import WITHOUT_PLAN, FullPlace, Infeasibility, Relaxation
from apsched.schedule.schedule import Schedule, StepKind
from apsched.schedule.simulate import simulate
from apsched.solver.arrays.instance import Instance
from apsched.solver.infeasible.clashing_caps import Clash, FeasibilityOracle, clashes, relaxations
from apsched.solver.infeasible.clashing_plan import plan_clashes, rules_with_places
from apsched.solver.program.to_schedule import expand
from apsched.solver.search.just_in_time import just_in_time, without_caps_on_launches

_MEMORY = "memory_cap_bytes"
_NODES_NAMED = 5
_PLACES = 3
_LARGEST = 4
"""Entries of live tensors at a place, before the rest."""
_WORDS = {
    "memory_cap_bytes": "memory cap",
    "in_flight_cap_bytes": "in-flight cap",
    "max_prefetch": "prefetch cap",
    "max_topo_span": "topo-span cap",
    "bucket_cap_bytes": "bucket cap",
}


def explain(instance: Instance, options: SolveOptions) -> Infeasibility:
    """Return the explanation for caps under which no schedule was found."""
    problem, caps = instance.problem, instance.caps
    oracle = FeasibilityOracle(instance, options)
    found, proven = clashes(oracle, caps)
    relaxed = relaxations(oracle, caps, found, proven, options)
    names = {name for clash in found for name in clash}
    places = _full_places(instance) if "memory_cap_bytes" in names else ()
    nodes = [place.node for place in places]
    if caps.in_flight_cap_bytes is not None and "in_flight_cap_bytes" in names:
        big = [c for c in problem.collectives if c.output_bytes > caps.in_flight_cap_bytes]
        nodes += [problem.node_names[c.start] for c in big[:_NODES_NAMED]]
    planned = {clash.cap: clash for clash in plan_clashes(problem, caps)}
    sentences = []
    for clash in found:
        by_plan = planned.get(clash[0]) if len(clash) == 1 else None
        sentences.append(by_plan.message if by_plan else _clash_text(caps, clash, relaxed, proven))
        nodes += by_plan.nodes[:_NODES_NAMED] if by_plan else ()
    if "max_prefetch" in names and "max_prefetch" not in planned:
        rules = rules_with_places(problem)
        sentences += [f"the plan places launches: {rules}"] if rules else []
    if not found:
        sentences.append("no schedule was found that keeps the plan")
    if "memory_cap_bytes" in names:
        sentences += _without_plan(problem, caps)
    nodes = list(dict.fromkeys(nodes))
    return Infeasibility(
        clashes=found,
        proven=proven,
        nodes=tuple(nodes),
        relaxations=relaxed,
        places=places,
        message=f"no schedule fits: {'; '.join(sentences)}"
        + (f" (at {', '.join(nodes)})" if nodes else ""),
    )


def with_less_memory(
    why: Infeasibility, caps: Caps, least_bytes: int, bound_bytes: int
) -> Infeasibility:
    """Return ``why`` with a schedule that needs ``least_bytes``, and ``bound_bytes`` as the proven
    bound, where the cap on memory has none that needs less.
    """
    relaxed = tuple(
        replace(
            r,
            least=least_bytes if r.least is None else min(r.least, least_bytes),
            bound=min(r.bound, bound_bytes),
        )
        if r.cap == _MEMORY
        else r
        for r in why.relaxations
    )
    message = why.message
    if (_MEMORY,) in why.clashes:
        before, after = (
            _clash_text(caps, (_MEMORY,), known, why.proven) for known in (why.relaxations, relaxed)
        )
        message = message.replace(before, after)
    return replace(why, relaxations=relaxed, message=message)


def _clash_text(caps: Caps, clash: Clash, relaxed: tuple[Relaxation, ...], proven: bool) -> str:
    """Return one clash in words."""
    if len(clash) > 1:
        words = [f"{_WORDS[name]} of {_show(name, getattr(caps, name))}" for name in clash]
        return (
            f"{'no schedule keeps' if proven else 'no schedule was found that keeps'}"
            f" {' and '.join(words)} together"
        )
    name = clash[0]
    found = next(r for r in relaxed if r.cap == name)
    limit = f"the cap of {_show(name, getattr(caps, name))}"
    if name == "in_flight_cap_bytes" and found.proven:
        return f"one collective alone has {_show(name, found.bound)} in flight, more than {limit}"
    if found.least is None and found.bound <= found.stated:
        stated = _show(name, found.stated)
        return f"no schedule was found that keeps the {_WORDS[name]} of {stated}"
    if found.least is None:
        return (
            f"the {_WORDS[name]} has to be at least {_show(name, found.bound)}, more than {limit}"
        )
    fits = "that fits" if found.proven else "known to fit"
    return f"the least {_WORDS[name]} {fits} is {_show(name, found.least)}, more than {limit}"


def _without_plan(problem: Problem, caps: Caps) -> list[str]:
    """Return the cap on memory that fits without the user's plan, if relaxing it is enough."""
    free = without_plan(problem)
    if free is problem or caps.memory_cap_bytes is None:
        return []
    least = just_in_time(Instance.of(free, caps))
    if least is None or least.peak_memory_bytes > caps.memory_cap_bytes:
        return []
    return [f"{WITHOUT_PLAN} {show_bytes(least.peak_memory_bytes)} is enough"]


def _show(name: str, value: int) -> str:
    return show_bytes(value) if name.endswith("bytes") else str(value)


def _full_places(instance: Instance) -> tuple[FullPlace, ...]:
    """Return the fullest compute nodes, one of each module, of the schedule that holds everything
    as briefly as it can.
    """
    problem = instance.problem
    floor = just_in_time(instance.within(without_caps_on_launches(instance.caps)))
    assert floor is not None  # it keeps every other cap
    schedule = expand(instance, floor.program)
    live = simulate(problem, schedule).live_bytes
    cap = instance.caps.memory_cap_bytes or 0
    places: dict[str, FullPlace] = {}
    for k in sorted((k for k in range(len(live)) if live[k] > cap), key=lambda k: -live[k]):
        step = schedule.steps[k]
        if (
            step.kind is not StepKind.NODE
            or problem.kinds[step.index] is not NodeKind.COMPUTE
            or problem.modules[step.index] in places
        ):
            continue
        places[problem.modules[step.index]] = FullPlace(
            node=problem.node_names[step.index],
            live_bytes=live[k],
            alive=_alive(problem, schedule, k),
        )
        if len(places) == _PLACES:
            break
    return tuple(places.values())


def _alive(problem: Problem, schedule: Schedule, k: int) -> tuple[tuple[str, int, int], ...]:
    """Return the live tensors at step ``k``: like tensors of all layers together, the largest
    first.
    """
    total: dict[str, tuple[int, int]] = {}
    for life in lifetimes(problem, schedule):
        if life.first <= k <= life.last:
            label = BUFFERS if life.storage < 0 else origin(problem, life.storage)
            count, size = total.get(label, (0, 0))
            total[label] = count + 1, size + life.size_bytes
    kept = [s.size_bytes for s in problem.storages if s.kept]
    if kept:
        total[KEPT] = len(kept), sum(kept)
    ranked = sorted(total.items(), key=lambda item: (-item[1][1], item[0]))
    shown = [(label, *figures) for label, figures in ranked[:_LARGEST]]
    rest = [figures for _, figures in ranked[_LARGEST:]]
    if rest:
        shown.append(("the rest", sum(count for count, _ in rest), sum(size for _, size in rest)))
    return tuple(shown)
