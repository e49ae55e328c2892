"""The optimizer of a solved step, beside the last reductions and the first gathers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apsched.names import direction_named
from apsched.pipeline.device_memory import BYTES_OF_DTYPE
from apsched.pipeline.result import Result
from apsched.problem.problem import Problem
from apsched.schedule.optimizer_beside import last_reductions, step_beside_optimizer
from apsched.units import ticks_to_us, us_to_ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerEnds:
    """Times of a whole step: forward, backward and optimizer."""

    behind_us: float
    """All parameters are updated behind backward."""
    beside_us: float
    """Each parameter is updated by itself (:mod:`apsched.schedule.optimizer_beside`)."""
    bound_us: float
    """The same takes no less, under any schedules of the graphs."""

    @property
    def saved(self) -> float:
        """Share of the whole step."""
        return 1 - self.beside_us / self.behind_us


def optimizer_ends(results: Sequence[Result], bound_us: float) -> OptimizerEnds | None:
    """Return the times of the step of ``results``, of which no schedules take less than
    ``bound_us`` without the optimizer; ``None`` where the step is not one forward and one backward
    graph, where names of parameters or the time of the optimizer are not known, and under
    contention.
    """
    graphs = {direction_named(result.problem.name): result for result in results}
    if len(results) != 2 or set(graphs) != {"forward", "backward"}:
        return None
    forward, backward = graphs["forward"], graphs["backward"]
    account = backward.account
    if account is None or not account.optimizer_us or backward.schedule is None:
        return None
    if forward.schedule is None or forward.problem.contention or backward.problem.contention:
        return None
    num_values = _values_reduced(backward.problem)
    if not num_values or "" in num_values:
        return None
    total = max(account.beside.shards.bf16_bytes // 2, sum(num_values.values()))
    optimizer_ticks = us_to_ticks(account.optimizer_us)
    ticks = {name: optimizer_ticks * number // total for name, number in num_values.items()}
    beside_ticks = step_beside_optimizer(
        (forward.problem, forward.schedule),
        (backward.problem, backward.schedule),
        ticks,
        optimizer_ticks - sum(ticks.values()),
    )
    compute_ticks = sum(
        result.problem.duration_ticks[node]
        for result in (forward, backward)
        for node in result.problem.compute_order
    )
    step_us = sum(result.step_time_us or 0.0 for result in (forward, backward))
    return OptimizerEnds(
        behind_us=step_us + ticks_to_us(optimizer_ticks),
        beside_us=ticks_to_us(beside_ticks),
        bound_us=max(bound_us, ticks_to_us(compute_ticks + optimizer_ticks)),
    )


def _values_reduced(backward: Problem) -> Mapping[str, int]:
    """Return the number of values of the gradient of each parameter that ``backward`` reduces, in
    the shard of a process rank; none where a gradient has another dtype than parameters have.
    """
    found: dict[str, int] = {}
    for c, names in last_reductions(backward).items():
        collective = backward.collectives[c]
        value_bytes = BYTES_OF_DTYPE.get(backward.keys[collective.key].dtype)
        if value_bytes is None:
            return {}
        found.update((name, collective.output_bytes // value_bytes) for name in names)
    return found
