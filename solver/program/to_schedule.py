"""Program -> Schedule: every node in its place, views right after what they depend on."""

import heapq

from apsched.graph.dag import NodeKind
from apsched.problem import Problem
from apsched.schedule import Bucket, Schedule, Step, StepKind
from apsched.solver.compact import ALL_GATHER, Compact
from apsched.solver.emitter import Emitter
from apsched.solver.evaluate import COPY_OUT, FIRE, LAUNCH, PREPARE, SPINE, WAIT, Program
from apsched.solver.partition import Members


def expand(problem: Problem, compact: Compact, program: Program) -> Schedule:
    """Return the schedule that ``program`` stands for."""
    return _Expansion(problem, compact, program).schedule()


class _Expansion(Emitter):
    def __init__(self, problem: Problem, compact: Compact, program: Program) -> None:
        moved = {*problem.spine, *problem.travels, *problem.collective_of_node}
        super().__init__(problem, [i not in moved and problem.kinds[i] is not NodeKind.OUTPUT for i in range(problem.num_nodes)])
        self.compact, self.program = compact, program
        groups = program.partition.buckets
        self.bucket_index = {b: i for i, b in enumerate(b for b, members in enumerate(groups) if len(members) > 1)}
        self.flat = program.partition.flat.tolist()
        self.members = groups

    def schedule(self) -> Schedule:
        problem = self.problem
        for node in range(problem.num_nodes):
            if self.follows[node] and not problem.predecessors[node] and problem.kinds[node] is NodeKind.INPUT:
                self._emit(node)
        for node in range(problem.num_nodes):
            if self.follows[node] and not problem.predecessors[node] and problem.kinds[node] is not NodeKind.INPUT:
                heapq.heappush(self.ready, node)
        self._release()
        for operation, argument in zip(self.program.operation.tolist(), self.program.argument.tolist(), strict=True):
            if operation == SPINE:
                self._emit(problem.spine[argument])
            elif operation in (LAUNCH, PREPARE, FIRE):
                if operation != FIRE:
                    self._prepare(argument)
                if operation != PREPARE:
                    self._start(argument)
            elif operation == WAIT:
                self._wait(argument)
            elif operation == COPY_OUT:
                self._copy_out(argument)
            self._release()
        for node in range(problem.num_nodes):
            if problem.kinds[node] is NodeKind.OUTPUT:
                self._emit(node)
        buckets = tuple(Bucket(self._payload(b), coalesced=not self.flat[b]) for b in self.bucket_index)
        return Schedule(buckets=buckets, steps=tuple(self.steps))

    def _payload(self, b: int) -> Members:
        """Return the members of a bucket in payload order: as the plan asks, else as they are."""
        return tuple(sorted(self.members[b], key=lambda c: self.problem.collectives[c].restriction.payload))

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
            if self.flat[b] and self.compact.kind[members[0]] == ALL_GATHER:
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
