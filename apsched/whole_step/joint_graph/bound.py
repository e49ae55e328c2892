"""A bound on the time of one graph of forward and backward, over every choice of kept parameters.

It is :class:`apsched.solver.bounds.whole_step.StepBound` for a step of one graph: g is the joint
graph with every parameter kept, and there is no f. Resharding a parameter in its node counts its
bytes, and no time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from apsched.config import Caps
from apsched.names import DIRECTIONS
from apsched.pipeline.load import LoadedGraph
from apsched.problem.problem import Problem
from apsched.solver.bounds.step_time import TimeBound
from apsched.solver.bounds.whole_step import StepBound, bytes_beside, with_more_moves
from apsched.solver.bounds.whole_step_rows import KeptItem
from apsched.whole_step.bounds import grouped
from apsched.whole_step.choices import Parameter
from apsched.whole_step.joint_graph.names import names_apart
from apsched.whole_step.pair import storages_behind


@dataclass(frozen=True, slots=True, kw_only=True)
class JointGraphs:
    """One graph of forward and backward with the least kept, with the most, and under choices in
    between.
    """

    least: LoadedGraph
    most: LoadedGraph
    between: tuple[LoadedGraph, ...] = ()

    def bound(
        self, parameters: Sequence[Parameter], caps: Caps, *, second_group: bool
    ) -> TimeBound:
        """Return a bound on the step time that no choice of ``parameters`` and no schedule beats.

        Parameters
        ----------
        parameters
            those that no rule decides on; their ``gathers`` are collectives of the backward half of
            ``least``.
        caps
            The loosest of the caps of all choices.
        """
        again, kept = self.least.problem, self._with_least_prices()
        items = self._items(parameters)
        copies = sum(len(p.values) for p in parameters if p.node_bytes)
        caps = with_more_moves(caps, copies)  # nodes that the graph with the most kept lacks
        free_bytes = self._free_bytes(parameters, caps)
        return min(
            (
                StepBound.of(
                    forward_ticks=0,
                    again=grouped(again, way),
                    kept=grouped(kept, way),
                    items=items,
                    caps=caps,
                    free_bytes=free_bytes,
                ).over_choices()
                for way in sorted({False, second_group})
            ),
            key=lambda bound: bound.ticks,
        )

    def _items(self, parameters: Sequence[Parameter]) -> list[KeptItem]:
        names, problem = names_apart(self.least), self.least.problem
        at = {names[problem.node_names[c.start]]: k for k, c in enumerate(problem.collectives)}
        backward = self.least.apart[1].problem
        gathers = [
            [backward.node_names[backward.collectives[c].start] for c in p.gathers]
            for p in parameters
        ]
        return [
            KeptItem(
                collectives=tuple(at[DIRECTIONS[1], name] for name in own),
                kept_bytes=parameter.size_bytes,
                node_bytes=parameter.node_bytes,
            )
            for own, parameter in zip(gathers, parameters, strict=True)
        ]

    def _free_bytes(self, parameters: Sequence[Parameter], caps: Caps) -> int | None:
        """Return the bytes that are left for kept parameters while all of them are alive."""
        cap_bytes = caps.memory_cap_bytes
        if cap_bytes is None:
            return None
        values = {(DIRECTIONS[0], value) for p in parameters for value in p.values}
        names = {name for name, apart in names_apart(self.most).items() if apart in values}
        return cap_bytes - bytes_beside(self.most.problem, caps, storages_behind(self.most, names))

    def _with_least_prices(self) -> Problem:
        """Return the problem with the most kept, each node at the lowest price of all graphs."""
        least: dict[tuple[str, str], int] = {}
        for graph in (self.least, self.most, *self.between):
            for name, ticks in _priced(graph):
                least[name] = min(ticks, least.get(name, ticks))
        lowest = tuple(least[name] for name, _ in _priced(self.most))
        return replace(self.most.problem, duration_ticks=lowest)


def _priced(graph: LoadedGraph) -> Iterable[tuple[tuple[str, str], int]]:
    names, problem = names_apart(graph), graph.problem
    for name, ticks in zip(problem.node_names, problem.duration_ticks, strict=True):
        yield names[name], ticks
