"""The cases of the survey: a case is one function that makes graphs, and has an outcome."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
    processes: int = 1
    """Processes of gloo that run it; 1: one, with collectives of its own."""
    smoke: bool = False
    """Whether it belongs to the part that runs with every change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOutcome:
    """The outcome of one graph with collectives."""

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
    """:data:`EQUAL`, or the difference, or why nothing was run; empty where apsched refuses."""
    round_trip: str = ""
    """:data:`EXACT`, or the difference; empty where apsched refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOutcome:
    """The outcome of one case."""

    name: str
    group: str
    graphs: tuple[GraphOutcome, ...] = ()
    not_traced: str = ""
    """Why there are no graphs."""
    seconds: float = 0.0


def joined(outcomes: Sequence[CaseOutcome]) -> CaseOutcome:
    """Return one outcome for the outcomes of one case in several processes: for each column the
    first value that is not the expected one, and the longest time.
    """
    first = next((o for o in outcomes if not o.graphs), outcomes[0])
    graphs = tuple(
        replace(
            same[0],
            torch=_first_but(TAKEN, [graph.torch for graph in same]),
            apsched=_first_but(TAKEN, [graph.apsched for graph in same]),
            bits=_first_but(EQUAL, [graph.bits for graph in same]),
            round_trip=_first_but(EXACT, [graph.round_trip for graph in same]),
        )
        for same in zip(*(outcome.graphs for outcome in outcomes), strict=False)
    )
    return replace(first, graphs=graphs, seconds=max(outcome.seconds for outcome in outcomes))


def _first_but(expected: str, found: Sequence[str]) -> str:
    return next((text for text in found if text != expected), expected)
