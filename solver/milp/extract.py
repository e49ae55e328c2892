"""Order of events -> Schedule: nodes without an event of their own (views, epilogues) come as early
as possible, smallest node first.
"""

from collections.abc import Sequence

from apsched.kinds import NodeKind
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Bucket, Schedule, Step, StepKind
from apsched.solver.milp.events import Events
from apsched.solver.program.to_schedule import Emitter


def schedule_of(
    events: Events, buckets: Sequence[tuple[int, ...]], position: Sequence[int]
) -> Schedule:
    """Return the schedule with ``buckets`` (two or more members each) and events at ``position``:
    equal where they are one.
    """
    return _Extraction(events, tuple(sorted(buckets))).schedule(position)


class _Extraction(Emitter):
    def __init__(self, events: Events, buckets: tuple[tuple[int, ...], ...]) -> None:
        problem = events.problem
        decided = {
            *problem.compute_order,
            *problem.collective_of_node,
            *(n for c in problem.collectives for n in c.prologue),
        }
        follows = [
            node not in decided and kind is not NodeKind.OUTPUT
            for node, kind in enumerate(problem.kinds)
        ]
        super().__init__(problem, follows)  # inputs, views and epilogues
        self.events, self.buckets = events, buckets
        self.bucket_of = {c: b for b, members in enumerate(buckets) for c in members}
        self.ready = [n for n in range(problem.num_nodes) if follows[n] and not self.waiting_for[n]]

    def schedule(self, position: Sequence[int]) -> Schedule:
        inputs = [node for node in self.ready if self.problem.kinds[node] is NodeKind.INPUT]
        self.ready = [node for node in self.ready if self.problem.kinds[node] is not NodeKind.INPUT]
        for node in inputs:
            self._emit(node)
        self._release()
        for _, _, kind, index in sorted(self._decisions(position)):
            self._decide(kind, index)
        for node in range(self.problem.num_nodes):
            if self.problem.kinds[node] is NodeKind.OUTPUT:
                self._emit(node)
        return Schedule(
            buckets=tuple(Bucket(self._payload(members)) for members in self.buckets),
            steps=tuple(self.steps),
        )

    def _payload(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return members in the payload order of the user's plan."""
        return tuple(
            sorted(members, key=lambda c: (self.problem.collectives[c].restriction.payload, c))
        )

    def _decisions(self, position: Sequence[int]) -> list[tuple[int, int, StepKind, int]]:
        """Return (position, tie-break, kind, index) of every decided step; NODE with a collective's
        start stands for its launch.
        """
        events, found = self.events, []
        for k, node in enumerate(self.problem.compute_order):
            found.append((position[events.compute_order(k)], 0, StepKind.NODE, node))
        for c, collective in enumerate(self.problem.collectives):
            b = self.bucket_of.get(c)
            if b is None:
                found.append((position[events.take[c]], 0, StepKind.NODE, collective.start))
                found.append((position[events.wait[c]], 1, StepKind.NODE, collective.wait))
                continue
            if c == self.buckets[b][0]:
                found.append((position[events.take[c]], 0, StepKind.COPY_IN, b))
                found.append((position[events.start[c]], 0, StepKind.START, b))
                found.append((position[events.wait[c]], 0, StepKind.WAIT, b))
            if events.gathers(c):
                found.append((position[events.give[c]], 1, StepKind.COPY_OUT, c))
        return found

    def _decide(self, kind: StepKind, index: int) -> None:
        problem = self.problem
        if kind is StepKind.NODE:
            c = problem.collective_of_node.get(index)
            if c is not None and problem.collectives[c].start == index:
                self._prologues((c,), several=False)
            self._emit(index)
        elif kind is StepKind.COPY_IN:
            self._prologues(self.buckets[index], several=True)
            self.steps.append(Step(kind, index))
        else:
            self.steps.append(Step(kind, index))
            if kind is StepKind.COPY_OUT:
                self._done(problem.collectives[index].wait)
            else:
                for c in self.buckets[index]:
                    if kind is StepKind.START:
                        self._done(problem.collectives[c].start)
                    elif not self.events.gathers(c):
                        self._done(problem.collectives[c].wait)
        self._release()

    def _prologues(self, members: tuple[int, ...], *, several: bool) -> None:
        collectives = [self.problem.collectives[c] for c in members]
        for node in sorted(
            node for m in collectives for node in m.prologue if not (several and node in m.cast)
        ):
            self._emit(node)
            self._release()


def sequential_ticks(problem: Problem) -> int:
    """Return a step time that no sensible schedule exceeds: everything one after the other, each
    collective at its worst price.
    """
    total = sum(problem.duration_ticks)
    for c in problem.collectives:
        mates = [d for d in problem.collectives if d.key == c.key]
        key = problem.keys[c.key]
        total += key.price(sum(d.size_bytes for d in mates)) + key.launch_ticks
        total += problem.copy_price(sum(d.copied_bytes for d in mates)) + problem.copy_price(
            c.output_bytes
        )
    return total + 1
