"""The contention that a command or a call states, and its form for a problem on a cluster. No
torch, so graph files suffice.

The links are those of one process rank: its link inside the node, and its NIC. They stand for all
ranks, since all ranks do the same. A group inside a node uses the first link; a group across nodes
uses the second, and also the first if a node holds two or more of its ranks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from apsched.costs.clusters.cluster import Cluster
from apsched.errors import InputError
from apsched.problem.contention import Contention
from apsched.problem.problem import Problem, with_contention

NODE_LINK, NIC = 0, 1
_LINKS = ("links of the node", "NIC")
_FINEST = 1000
"""A factor is taken to so many parts of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentionChoice:
    """The stated contention; by default none."""

    links: bool = False
    """Groups on one link share its bandwidth."""
    compute: bool = False
    """Compute is slower while a collective runs."""
    compute_slowdown: float | None = None
    """By this factor; ``None``: by that of the cluster."""
    transfer_slowdown: float = 1.0
    """Transfers are slower by this factor while compute runs."""
    latency_slowdown: float = 1.0
    """Their latencies are longer by this factor then."""

    def __str__(self) -> str:
        """Return the text that ``parse_contention`` reads."""
        factors = {
            "compute": self.compute_slowdown if self.compute else None,
            "transfers": self.transfer_slowdown if self.transfer_slowdown != 1 else None,
            "latency": self.latency_slowdown if self.latency_slowdown != 1 else None,
        }
        stated = [f"{name}={factor!r}" for name, factor in factors.items() if factor is not None]
        if self.compute and self.compute_slowdown is None:
            stated.insert(0, "compute")
        return ",".join(["links"] * self.links + stated) or "none"


def contention_off(choice: ContentionChoice, cluster: Cluster) -> tuple[str, ...]:
    """Return a note where ``cluster`` states how much slower compute is beside collectives, and
    ``choice`` leaves that out; empty otherwise.
    """
    if cluster.compute_slowdown is None or choice.compute:
        return ()
    return (
        f"contention of compute is off: cluster {cluster.name} states that compute takes"
        f" {cluster.compute_slowdown:g} times as long during collectives;"
        " --contention compute includes that",
    )


def parse_contention(text: str, label: str = "--contention") -> ContentionChoice:
    """Return the contention in ``text``: ``links``, ``compute``, ``compute=1.2``,
    ``transfers=1.1``, ``latency=3``, several with commas, or ``none``.
    """
    words = "links, compute, compute=FACTOR, transfers=FACTOR, latency=FACTOR"
    expected = f"{label}: expected none, or {words} with commas between them; found {text!r}"
    if text.strip().lower() == "none":
        return ContentionChoice()
    stated: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        known = {
            "links": not equals,
            "compute": not equals or value,
            "transfers": value,
            "latency": value,
        }
        if name in stated or not known.get(name):
            raise InputError(expected)
        stated[name] = value
    try:
        factors = {name: float(value) for name, value in stated.items() if value}
    except ValueError:
        raise InputError(expected) from None
    return ContentionChoice(
        links="links" in stated,
        compute="compute" in stated,
        compute_slowdown=factors.get("compute"),
        transfer_slowdown=factors.get("transfers", 1.0),
        latency_slowdown=factors.get("latency", 1.0),
    )


def contended(
    problem: Problem,
    choice: ContentionChoice,
    cluster: Cluster | None,
    group_ranks: Mapping[str, Sequence[int]],
) -> Problem:
    """Return ``problem`` with the contention of ``choice`` on ``cluster``; ``problem`` itself if
    that changes nothing.

    ``InputError`` if the cluster (``None`` if it is not known) lacks a number that the choice
    needs.
    """
    contention = Contention(
        links=_LINKS if choice.links else (),
        links_of_group=_links_of_groups(problem, cluster, group_ranks) if choice.links else (),
        compute_slowdown=(
            _ratio(_compute_slowdown(choice, cluster), "compute is") if choice.compute else (1, 1)
        ),
        transfer_slowdown=_ratio(choice.transfer_slowdown, "transfers are"),
        latency_slowdown=_ratio(choice.latency_slowdown, "latency is"),
    )
    return problem if contention.changes_nothing else with_contention(problem, contention)


def with_stated_contention(
    problem: Problem,
    stated: str | Contention | None,
    cluster: Cluster | None,
    group_ranks: Mapping[str, Sequence[int]],
) -> Problem:
    """Return ``problem`` with the contention of a call: as text like that of the command line, or
    stated in full.
    """
    if isinstance(stated, str):
        return contended(problem, parse_contention(stated, "contention"), cluster, group_ranks)
    if not isinstance(stated, Contention | None):
        raise InputError(
            "contention: expected a text such as 'links,compute=1.2', a Contention or None;"
            f" found {stated!r}"
        )
    return problem if stated is None else with_contention(problem, stated)


def _links_of_groups(
    problem: Problem, cluster: Cluster | None, group_ranks: Mapping[str, Sequence[int]]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    if cluster is None:
        raise InputError(
            "contention: links follow from the cluster, which is not known here; state it"
            " (--cluster)"
        )
    sizes = {key.group: key.group_size for key in problem.keys}
    links = []
    for group in problem.streams:
        on_node = Counter(
            rank // cluster.ranks_per_node for rank in group_ranks.get(group) or range(sizes[group])
        )
        inside = max(on_node.values()) > 1
        links.append(
            (group, (*((NODE_LINK,) if inside else ()), *((NIC,) if len(on_node) > 1 else ())))
        )
    return tuple(links)


def with_node_groups(contention: Contention, node_groups: Mapping[str, str]) -> Contention:
    """Return ``contention`` with the ranks of a node, as a group of their own, on the links of the
    group around them, but for the network between nodes; ``node_groups``: group around -> theirs.
    """
    if not contention.links:
        return contention
    links_of = dict(contention.links_of_group)
    for around, inside in node_groups.items():
        links = links_of.get(around, ())
        in_node = tuple(link for link in links if link != NIC)
        links_of[inside] = in_node if contention.links == _LINKS else links
    return replace(contention, links_of_group=tuple(links_of.items()))


def _compute_slowdown(choice: ContentionChoice, cluster: Cluster | None) -> float:
    if choice.compute_slowdown is not None:
        return choice.compute_slowdown
    if cluster is not None and cluster.compute_slowdown is not None:
        return cluster.compute_slowdown
    where = (
        f"cluster {cluster.name!r} states no compute_slowdown"
        if cluster is not None
        else "the cluster is not known here"
    )
    raise InputError(
        f"contention: {where}; state the factor, as in compute=1.2, or add it to the cluster's file"
    )


def _ratio(factor: float, what: str) -> tuple[int, int]:
    if not 1 <= factor <= 10:
        raise InputError(
            f"contention: expected a factor from 1 to 10 by which {what} slower, found {factor:g}"
        )
    ratio = Fraction(round(factor * _FINEST), _FINEST)
    return ratio.numerator, ratio.denominator
