"""The greedy schedules that people run today, as they define them; each is a schedule with exact
figures.

``as_captured``         the order of the graph itself, nothing shared
``transformer_block``   one bucket a transformer block and kind, the next block's gather in flight
                        (FSDP2, TorchTitan's default)
``greedy_bytes``        consecutive collectives share a launch up to a byte cap (torch's bucketing,
                        AutoParallel #481 unconstrained)
``greedy_bytes_span``   the same, primary group only, within a topo-span (AutoParallel #481)

Knobs are those of AutoParallel's ``auto_bucketing`` (#481): buckets up to 500 MB, 50 compute nodes
of prefetch, 2 GB in flight, a topo-span of 1500.
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from apsched.config import Caps
from apsched.kinds import CollectiveKind
from apsched.names import bucket_labels, direction_named, primary_group
from apsched.problem.problem import Problem, without_plan
from apsched.schedule.result import AS_CAPTURED, Scored
from apsched.schedule.schedule import Schedule, as_captured
from apsched.schedule.score import score
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.partition import Pricer
from apsched.solver.program.to_schedule import expand
from apsched.solver.search.construct import construct
from apsched.solver.search.grouping import group, merge_runs
from apsched.solver.search.launch_policy import Policy

BUCKET_BYTES = 500 * 10**6
PREFETCH_NODES = 50
IN_FLIGHT_BYTES = 2 * 10**9
TOPO_SPAN = 1500


def baselines(instance: Instance) -> tuple[Scored, ...]:
    """Return every baseline with its figures and the caps that it breaks; none knows of the user's
    plan, so most break that.
    """
    schedules = _schedules(_unplanned(instance))
    return tuple(
        score(instance.problem, name, schedule, instance.caps)
        for name, schedule in schedules.items()
    )


def _unplanned(instance: Instance) -> Instance:
    """Return the instance without the user's plan."""
    free = without_plan(instance.problem)
    return instance if free is instance.problem else Instance.of(free, instance.caps)


def _schedules(instance: Instance) -> dict[str, Schedule]:
    problem = instance.problem
    pricer = Pricer(instance)
    knobs = Caps(max_prefetch=PREFETCH_NODES, in_flight_cap_bytes=IN_FLIGHT_BYTES)
    far = Policy(lead=np.inf, copy_out_early=True)

    def greedy(max_topo_span: int | None, keys: Iterable[int]) -> Schedule:
        limits = Caps(bucket_cap_bytes=BUCKET_BYTES, max_topo_span=max_topo_span)
        partition = pricer.partition_of(group(pricer, limits, keys))
        return expand(instance, construct(pricer, partition, far, knobs))

    return {
        AS_CAPTURED: as_captured(problem.num_nodes),
        "transformer_block": _transformer_block(instance, pricer),
        "greedy_bytes": greedy(None, range(len(problem.keys))),
        "greedy_bytes_span": greedy(TOPO_SPAN, _primary_keys(problem)),
    }


def _transformer_block(instance: Instance, pricer: Pricer) -> Schedule:
    problem = instance.problem
    labels = block_labels(problem)
    blocks = [labels[c.module] if c.module else f"?{i}" for i, c in enumerate(problem.collectives)]
    return _one_ahead(instance, pricer, blocks)


def with_units(problem: Problem, caps: Caps, name: str, units: Iterable[Collection[str]]) -> Scored:
    """Return the baseline ``name`` with one bucket for each unit (the parameters of each) and kind,
    which the plan has, and the gather of the next unit in flight.
    """
    instance = Instance.of(problem, caps)
    unit_of = {parameter: str(k) for k, unit in enumerate(units) for parameter in unit}
    labels = [unit_of.get(c.module, f"?{i}") for i, c in enumerate(problem.collectives)]
    return score(problem, name, _one_ahead(instance, Pricer(instance), labels), caps)


def _one_ahead(instance: Instance, pricer: Pricer, labels: Sequence[str]) -> Schedule:
    """Return the schedule with one bucket for each label of collectives, and one gather ahead."""
    keys = range(len(instance.problem.keys))
    partition = pricer.partition_of(merge_runs(pricer, Caps(), keys, labels.__getitem__))
    program = construct(
        pricer, partition, Policy(lead=np.inf, copy_out_early=True, one_ahead=True), Caps()
    )
    return expand(instance, program)


def block_labels(problem: Problem) -> dict[str, str]:
    """Return the bucket of each parameter that a collective serves, as TorchTitan's
    ``transformer_block_bucketing`` has it.

    In place of the order of registration stands that in which forward uses parameters: the order of
    backward, turned round.
    """
    named = direction_named(problem.name)
    backward = ["backward" in (named, c.direction) for c in problem.collectives]
    order = sorted(range(len(backward)), key=lambda c: (backward[c], -c if backward[c] else c))
    return bucket_labels(list(dict.fromkeys(problem.collectives[c].module for c in order)))


def _primary_keys(problem: Problem) -> list[int]:
    """Return the keys of the group with the most moving gathers."""
    gathers = (
        problem.keys[c.key]
        for c in problem.collectives
        if not c.on_path and problem.keys[c.key].kind == CollectiveKind.ALL_GATHER
    )
    primary = primary_group(key.group for key in gathers)
    return [k for k, key in enumerate(problem.keys) if primary in (None, key.group)]
