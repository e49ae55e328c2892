"""Program -> Schedule: every node in its place, views right after the nodes that they depend on."""

import heapq
from collections.abc import Sequence

from apsched.kinds import NodeKind
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Bucket, Schedule, Step, StepKind
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.partition import Members
from apsched.solver.arrays.problem_arrays import ALL_GATHER
from apsched.solver.program.program import COPY_IN, COPY_OUT, LAUNCH, NODE, START, WAIT, Program


class Emitter:
    """Collects steps. Where ``follows`` holds, a node is emitted by ``_release`` as soon as all
    that it needs is done.
    """

    def __init__(self, problem: Problem, follows: Sequence[bool]) -> None:
        self.problem, self.follows = problem, follows
        self.waiting_for = [len(before) for before in problem.predecessors]
        self.ready: list[int] = []
        self.steps: list[Step] = []

    def _emit(self, node: int) -> None:
        self.steps.append(Step(StepKind.NODE, node))
        self._done(node)

    def _done(self, node: int) -> None:
        for after in self.problem.successors[node]:
            self.waiting_for[after] -= 1
            if not self.waiting_for[after] and self.follows[after]:
                heapq.heappush(self.ready, after)

    def _release(self) -> None:
        while self.ready:
            self._emit(heapq.heappop(self.ready))


def expand(instance: Instance, program: Program) -> Schedule:
    """Return the schedule that ``program`` stands for."""
    return _Expansion(instance, program).schedule()


class _Expansion(Emitter):
    def __init__(self, instance: Instance, program: Program) -> None:
        problem = instance.problem
        moved = {*problem.compute_order, *problem.travels, *problem.collective_of_node}
        super().__init__(
            problem,
            [
                i not in moved and problem.kinds[i] is not NodeKind.OUTPUT
                for i in range(problem.num_nodes)
            ],
        )
        self.arrays, self.program = instance.arrays, program
        groups = program.partition.buckets
        self.bucket_index = {
            b: i for i, b in enumerate(b for b, members in enumerate(groups) if len(members) > 1)
        }
        self.flat = program.partition.flat.tolist()
        self.members = groups

    def schedule(self) -> Schedule:
        problem = self.problem
        for node in range(problem.num_nodes):
            if (
                self.follows[node]
                and not problem.predecessors[node]
                and problem.kinds[node] is NodeKind.INPUT
            ):
                self._emit(node)
        for node in range(problem.num_nodes):
            if (
                self.follows[node]
                and not problem.predecessors[node]
                and problem.kinds[node] is not NodeKind.INPUT
            ):
                heapq.heappush(self.ready, node)
        self._release()
        for operation, argument in zip(
            self.program.operation.tolist(), self.program.argument.tolist(), strict=True
        ):
            if operation == NODE:
                self._emit(problem.compute_order[argument])
            elif operation in (LAUNCH, COPY_IN, START):
                if operation != START:
                    self._prepare(argument)
                if operation != COPY_IN:
                    self._start(argument)
            elif operation == WAIT:
                self._wait(argument)
            elif operation == COPY_OUT:
                self._copy_out(argument)
            self._release()
        for node in range(problem.num_nodes):
            if problem.kinds[node] is NodeKind.OUTPUT:
                self._emit(node)
        buckets = tuple(
            Bucket(self._payload(b), coalesced=not self.flat[b]) for b in self.bucket_index
        )
        return Schedule(buckets=buckets, steps=tuple(self.steps))

    def _payload(self, b: int) -> Members:
        """Return the members of a bucket in payload order: that of the plan, else the given one."""
        return tuple(
            sorted(self.members[b], key=lambda c: self.problem.collectives[c].restriction.payload)
        )

    def _prepare(self, b: int) -> None:
        members = self.members[b]
        for c in members:
            left_out = self.problem.collectives[c].cast if self.flat[b] else ()
            for node in self.problem.collectives[c].prologue:
                if node not in left_out:
                    self._emit(node)
                    self._release()
        if self.flat[b]:
            self.steps.append(Step(StepKind.COPY_IN, self.bucket_index[b]))

    def _start(self, b: int) -> None:
        members = self.members[b]
        if len(members) == 1:
            self._emit(self.problem.collectives[members[0]].start)
            return
        self.steps.append(Step(StepKind.START, self.bucket_index[b]))
        for c in members:
            self._done(self.problem.collectives[c].start)

    def _wait(self, b: int) -> None:
        members = self.members[b]
        if len(members) == 1:
            self._emit(self.problem.collectives[members[0]].wait)
        else:
            self.steps.append(Step(StepKind.WAIT, self.bucket_index[b]))
            if self.flat[b] and self.arrays.kind[members[0]] == ALL_GATHER:
                return
            for c in members:
                self._done(self.problem.collectives[c].wait)
        self._release()
        for c in members:
            self._epilogue(c)

    def _copy_out(self, c: int) -> None:
        self.steps.append(Step(StepKind.COPY_OUT, c))
        self._done(self.problem.collectives[c].wait)
        self._release()
        self._epilogue(c)

    def _epilogue(self, c: int) -> None:
        for node in self.problem.collectives[c].epilogue:
            self._emit(node)
            self._release()
