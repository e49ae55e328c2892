"""Steps of a schedule in order; what follows of itself (views, epilogues) comes as soon as it can, smallest node first."""

import heapq
from collections.abc import Sequence

from apsched.problem import Problem
from apsched.schedule import Step, StepKind


class Emitter:
    """Collects steps. Where ``follows`` holds, a node is emitted by ``_release`` as soon as all that it needs is done."""

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
