"""The compute nodes that a schedule moves."""

from bisect import bisect_left
from collections.abc import Sequence

from apsched.problem.problem import Problem
from apsched.schedule.schedule import Schedule, StepKind


def compute_places(problem: Problem, schedule: Schedule) -> tuple[int, ...]:
    """Return the compute nodes that do not travel with a collective as the schedule runs them: for
    each its place as captured.
    """
    place = {node: k for k, node in enumerate(problem.captured_order)}
    return tuple(
        place[step.index]
        for step in schedule.steps
        if step.kind is StepKind.NODE and step.index in place
    )


def moved_compute(problem: Problem, schedule: Schedule) -> frozenset[int]:
    """Return the fewest compute nodes that have to move to make the order of ``schedule`` out of
    the one as captured, in each chain.

    All others of a chain keep their order among each other: they are a longest increasing
    subsequence of places as captured.
    """
    captured = problem.captured_order
    now = compute_places(problem, schedule)
    moved: frozenset[int] = frozenset()
    for chain in map(frozenset, problem.captured_chains):
        places = [place for place in now if captured[place] in chain]
        moved |= chain - {captured[place] for place in _longest_ascending(places)}
    return moved


def _longest_ascending(places: Sequence[int]) -> set[int]:
    ends: list[int] = []  # smallest last place of an increasing subsequence of each length
    at: list[int] = []  # where in ``places`` that is
    before = [-1] * len(places)
    for k, place in enumerate(places):
        length = bisect_left(ends, place)
        before[k] = at[length - 1] if length else -1
        ends[length : length + 1], at[length : length + 1] = [place], [k]
    kept: set[int] = set()
    k = at[-1] if at else -1
    while k >= 0:
        kept.add(places[k])
        k = before[k]
    return kept


def furthest_move(problem: Problem, schedule: Schedule) -> int:
    """Return by how many places among the compute nodes of its chain the one stands apart from its
    own that does most.
    """
    captured, now = problem.captured_order, compute_places(problem, schedule)
    furthest = 0
    for chain in problem.captured_chains:
        place_in_chain = {node: k for k, node in enumerate(chain)}
        order = (
            place_in_chain[captured[place]] for place in now if captured[place] in place_in_chain
        )
        furthest = max(furthest, max((abs(k - own) for k, own in enumerate(order)), default=0))
    return furthest
