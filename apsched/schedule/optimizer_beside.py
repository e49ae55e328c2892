"""The time of a training step whose optimizer runs beside collectives.

An optimizer that updates all parameters at once waits for the last reduction, and the first gather
of the next step waits for it. One that updates each parameter by itself (in a hook of its gradient,
``Tensor.register_post_accumulate_grad_hook``) shares the compute stream with the ends of both
graphs:

1. a parameter is updated behind the last compute of backward, once its gradient is reduced;
2. forward begins behind the last wait of backward; a gather is launched behind the updates of its
   parameters;
3. nothing else of forward begins before all parameters are updated.

While the compute stream waits for reductions at the end of backward, it updates parameters whose
gradients are reduced, in the order in which forward gathers them. No other order of updates, and no
other schedules, take less than

    max(B_backward + B_forward, compute_backward + updates + compute_forward)

with the bounds B on both graphs: the first, since forward begins behind backward, and updates make
neither faster; the second, since the compute stream does all of that work.
"""

from collections.abc import Iterable, Iterator, Mapping

from apsched.kinds import CollectiveKind
from apsched.problem.problem import Problem
from apsched.schedule.clocks import FreeClock
from apsched.schedule.schedule import Schedule, StepKind
from apsched.schedule.simulate import Replay

_REDUCTIONS = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)
Scheduled = tuple[Problem, Schedule]


def step_beside_optimizer(
    forward: Scheduled, backward: Scheduled, update_ticks: Mapping[str, int], rest_ticks: int = 0
) -> int:
    """Return the time of forward, backward and updates, in ticks.

    ``update_ticks`` has the time to update each parameter; ``rest_ticks`` is that of parameters
    whose gradients no collective reduces. Streams of both graphs are one where their process groups
    are. Contention is not known here.
    """
    groups = list(dict.fromkeys((*backward[0].streams, *forward[0].streams)))
    clock = FreeClock(len(groups))
    back, fore = (
        Replay(problem, schedule, clock, [groups.index(group) for group in problem.streams])
        for problem, schedule in (backward, forward)
    )
    updates = _Updates(clock, _by_need(forward[0], fore, update_ticks), rest_ticks)
    reduced_at = last_reductions(backward[0])
    behind = 1 + max((*back.launched_by, *_computing(*backward)), default=-1)
    for k in range(len(backward[1].steps)):
        if k >= behind and k in back.waited_by:
            updates.run_until(clock.ends[back.transfer_of(k)])
        back.run(k)
        for c in back.waited_by.get(k, ()):
            updates.may_run.update(reduced_at.get(c, ()))
    begin = min((*fore.waited_by, *_computing(*forward)), default=len(forward[1].steps))
    serving = _collectives_served(forward[0])
    for k in range(begin):
        step = forward[1].steps[k]
        members = fore.launched_by.get(k, ())
        if step.kind is StepKind.COPY_IN:
            members = forward[1].buckets[step.index].members
        elif step.kind is StepKind.NODE:
            members = (*members, *serving.get(step.index, ()))
        updates.run(forward[0].collectives[c].module for c in members)
        fore.run(k)
    updates.run(list(updates.left))
    for k in range(begin, len(forward[1].steps)):
        fore.run(k)
    return clock.finish()


class _Updates:
    """Updates that are left to do, in the order in which forward gathers the parameters."""

    def __init__(self, clock: FreeClock, ticks: Mapping[str, int], rest_ticks: int) -> None:
        self.left = {"": rest_ticks, **ticks}
        self.may_run = {""}
        self._clock = clock

    def run(self, parameters: Iterable[str]) -> None:
        """Update ``parameters``, but for those that are updated already."""
        for name in parameters:
            self._clock.run(self.left.pop(name, 0))

    def run_until(self, end_ticks: int) -> None:
        """Update parameters whose gradients are reduced, as long as an update begins before
        ``end_ticks``.
        """
        for name in [name for name in self.left if name in self.may_run]:
            if self._clock.now >= end_ticks:
                return
            self.run([name])


def _by_need(problem: Problem, replay: Replay, update_ticks: Mapping[str, int]) -> dict[str, int]:
    """Return ``update_ticks`` in the order in which forward launches the parameters."""
    launched = dict.fromkeys(
        problem.collectives[c].module for members in replay.launched_by.values() for c in members
    )
    order = [*(name for name in launched if name in update_ticks), *update_ticks]
    return {name: update_ticks[name] for name in order}


def _computing(problem: Problem, schedule: Schedule) -> Iterator[int]:
    """Yield the steps of compute that keeps its place."""
    compute_order = frozenset(problem.compute_order)
    for k, step in enumerate(schedule.steps):
        if step.kind is StepKind.NODE and step.index in compute_order:
            yield k


def last_reductions(problem: Problem) -> dict[int, tuple[str, ...]]:
    """Return for each collective the parameters whose gradients it reduces as the last one."""
    last: dict[str, int] = {}
    for c, collective in enumerate(problem.collectives):
        if problem.keys[collective.key].kind in _REDUCTIONS and not collective.on_path:
            before = last.get(collective.module)
            if before is None or problem.collectives[before].wait < collective.wait:
                last[collective.module] = c
    found: dict[int, tuple[str, ...]] = {}
    for name, c in last.items():
        found[c] = (*found.get(c, ()), name)
    return found


def _collectives_served(problem: Problem) -> dict[int, tuple[int, ...]]:
    """Return for each compute node that travels with starts the collectives that it serves."""
    found: dict[int, tuple[int, ...]] = {}
    for c, collective in enumerate(problem.collectives):
        for node in collective.prologue:
            found[node] = (*found.get(node, ()), c)
    return found
