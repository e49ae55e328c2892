"""Which contention a command or a call asks for, and what that is for a problem on a cluster. No torch, so graph files will do.

Links are those of one process rank, which stand for all ranks, since all do the same: what it has inside its node, and its NIC. A group
inside a node uses the first; one across nodes the second, and the first, too, where a node holds two or more of its ranks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from apsched.contention import Contention
from apsched.costs.cluster import Cluster
from apsched.errors import InputError
from apsched.problem import Problem, with_contention

NODE_LINK, NIC = 0, 1
_LINKS = ("links of the node", "NIC")
_FINEST = 1000
"""A factor is taken to so many parts of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentionChoice:
    """What is asked for; by default nothing."""

    links: bool = False
    """Groups on one link share its bandwidth."""
    compute: bool = False
    """Compute is slower while a collective runs."""
    slowdown: float | None = None
    """By this factor; ``None``: by that of the cluster."""


def parse_contention(text: str, label: str = "--contention") -> ContentionChoice:
    """Return what ``text`` asks for: ``links``, ``compute``, ``compute=1.2``, several with commas, or ``none``."""
    expected = f"{label}: expected none, or links, compute or compute=FACTOR with commas between them; found {text!r}"
    if text.strip().lower() == "none":
        return ContentionChoice()
    asked: dict[str, str | None] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in ("links", "compute") or name in asked or (equals and name == "links"):
            raise InputError(expected)
        asked[name] = value if equals else None
    factor = asked.get("compute")
    if factor is None:
        return ContentionChoice(links="links" in asked, compute="compute" in asked)
    try:
        slowdown = float(factor)
    except ValueError:
        raise InputError(expected) from None
    return ContentionChoice(links="links" in asked, compute=True, slowdown=slowdown)


def contended(problem: Problem, choice: ContentionChoice, cluster: Cluster | None, group_ranks: Mapping[str, Sequence[int]]) -> Problem:
    """Return ``problem`` with the contention that ``choice`` asks for on ``cluster``; ``problem`` itself where that changes nothing.

    ``InputError`` where the cluster (``None`` where it is not known) would have to say what it does not.
    """
    contention = Contention(
        links=_LINKS if choice.links else (),
        links_of_group=_links_of_groups(problem, cluster, group_ranks) if choice.links else (),
        slowdown=_slowdown(choice, cluster) if choice.compute else (1, 1),
    )
    if contention.parts() == 1 and contention.slowdown == (1, 1):
        return problem
    return with_contention(problem, contention)


def as_asked(
    problem: Problem, asked: str | Contention | None, cluster: Cluster | None, group_ranks: Mapping[str, Sequence[int]]
) -> Problem:
    """Return ``problem`` with the contention that a call asks for: as text like that of the command line, or stated in full."""
    if isinstance(asked, str):
        return contended(problem, parse_contention(asked, "contention"), cluster, group_ranks)
    return problem if asked is None else with_contention(problem, asked)


def _links_of_groups(
    problem: Problem, cluster: Cluster | None, group_ranks: Mapping[str, Sequence[int]]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    if cluster is None:
        raise InputError("contention: links follow from the cluster, which is not known here; state it (--cluster)")
    sizes = {key.group: key.group_size for key in problem.keys}
    links = []
    for group in problem.streams:
        on_node = Counter(rank // cluster.ranks_per_node for rank in group_ranks.get(group) or range(sizes[group]))
        inside = max(on_node.values()) > 1
        links.append((group, (*((NODE_LINK,) if inside else ()), *((NIC,) if len(on_node) > 1 else ()))))
    return tuple(links)


def _slowdown(choice: ContentionChoice, cluster: Cluster | None) -> tuple[int, int]:
    factor = choice.slowdown if choice.slowdown is not None else cluster.compute_slowdown if cluster is not None else None
    if factor is None:
        where = f"cluster {cluster.name!r} states no compute_slowdown" if cluster is not None else "the cluster is not known here"
        raise InputError(f"contention: {where}; state the factor, as in compute=1.2, or add it to the cluster's file")
    if not 1 <= factor <= 10:
        raise InputError(f"contention: expected a factor from 1 to 10 by which compute is slower, found {factor:g}")
    ratio = Fraction(round(factor * _FINEST), _FINEST)
    return ratio.numerator, ratio.denominator
