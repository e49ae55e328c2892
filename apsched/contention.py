"""Who slows whom: streams that share a link share its bandwidth, and compute is slower while a collective runs. Integers only.

The machine of the design, with two more rules (each is off unless asked for):

- A transfer first takes its latency (the price of no bytes), which hinders nobody, and then moves its bytes. While n transfers on a link
  move bytes, each moves at 1/n of the speed that it has alone; one on several links at the speed that the fullest of them leaves.
- While any transfer runs, the compute stream works at 1/f of its speed, f >= 1 a ratio of integers.

What runs ends with the first whole tick by which its work is done. Nothing ever becomes faster, so no schedule takes less time than without
these rules (``docs/formulation.md``), and whatever is a lower bound without them is one with them.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from apsched.errors import InputError

MOST_STREAMS_ON_A_LINK = 16
"""Shares of a link are counted in parts of lcm(1, ..., n), which must stay far below 2**63."""
_LARGEST_TERM = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """The two rules for one problem."""

    links: tuple[str, ...] = ()
    """Names of the links that are shared; empty where bandwidth is not."""
    links_of_group: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Group -> indices of the links that its transfers use, ascending."""
    slowdown: tuple[int, int] = (1, 1)
    """f as numerator and denominator, in lowest terms."""

    def __post_init__(self) -> None:
        above, below = self.slowdown
        if not 1 <= below <= above <= _LARGEST_TERM:
            raise InputError(f"slowdown: expected a ratio of whole numbers from 1 to {_LARGEST_TERM}, at least 1; found {above}/{below}")
        for group, links in self.links_of_group:
            if list(links) != sorted(set(links)) or not all(0 <= link < len(self.links) for link in links):
                raise InputError(
                    f"contention: expected links below {len(self.links)} in ascending order for group {group!r}, found {links}"
                )
        for link, name in enumerate(self.links):
            users = sum(link in links for _, links in self.links_of_group)
            if users > MOST_STREAMS_ON_A_LINK:
                raise InputError(f"contention: expected at most {MOST_STREAMS_ON_A_LINK} groups on {name}, found {users}")

    @property
    def factor(self) -> Fraction:
        """f."""
        return Fraction(*self.slowdown)

    def links_of(self, group: str) -> tuple[int, ...]:
        """Return the links of ``group``; none for one that is not known."""
        return dict(self.links_of_group).get(group, ())

    def parts(self) -> int:
        """Return a number that every count of transfers on a link divides: a tick of a transfer alone is that many parts of its work."""
        users = (sum(link in links for _, links in self.links_of_group) for link in range(len(self.links)))
        return lcm(*range(1, max(users, default=1) + 1))

    def __str__(self) -> str:
        said = []
        for link, name in enumerate(self.links):
            groups = [group for group, links in self.links_of_group if link in links]
            said.append(f"{name} shared by {' and '.join(groups)}" if len(groups) > 1 else f"{name} not shared")
        if self.slowdown != (1, 1):
            said.append(f"compute slower by {float(self.factor):.4g} while a collective runs")
        return "; ".join(said) or "none"


def contention_json(contention: Contention) -> dict[str, object]:
    """Return what reports and schedule files say of ``contention``."""
    groups = {group: [contention.links[link] for link in links] for group, links in contention.links_of_group}
    return {"links": groups, "compute_slowdown": float(contention.factor)}
