"""What is surveyed: a case is one function that makes graphs, and what was found of it."""

from collections.abc import Callable
from dataclasses import dataclass

from apsched.capture.captured import CapturedGraph

TAKEN = "taken"
EQUAL = "equal"
EXACT = "exact"


class NotTracedError(Exception):
    """No graph came of a case: nothing that apsched or torch's scheduler could be asked of."""


class UnreadError(Exception):
    """apsched refuses the form in which a graph comes, before it has a graph."""

    def __init__(self, graph: CapturedGraph, error: Exception) -> None:
        super().__init__(str(error))
        self.graph, self.error = graph, error


Build = Callable[[], tuple[CapturedGraph, ...]]
"""Makes graphs in the process that examines them; process groups that they need go on running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing that people do, as graphs."""

    name: str
    group: str
    build: Build
    runs: bool = True
    """Whether its graphs have a size that one process can run."""
    smoke: bool = False
    """Whether it belongs to the part that runs with every change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOutcome:
    """What was found of one graph with collectives."""

    name: str
    num_nodes: int
    torch: str
    """:data:`TAKEN`, or why ``schedule_overlap_bucketing`` fails."""
    apsched: str
    """:data:`TAKEN`, or the first line of the refusal."""
    launches: int
    """Collectives as captured."""
    launches_after: int = 0
    bits: str = ""
    """:data:`EQUAL`, or what differs, or why nothing was run; empty where apsched refuses."""
    round_trip: str = ""
    """:data:`EXACT`, or what differs; empty where apsched refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOutcome:
    """What was found of one case."""

    name: str
    group: str
    graphs: tuple[GraphOutcome, ...] = ()
    not_traced: str = ""
    """Why there are no graphs."""
    seconds: float = 0.0
