"""Contention of streams: streams on one link share its bandwidth; compute and collectives slow each
other down. Integers only.

The machine of the design, with three more rules (each is off unless asked for):

- A transfer first takes its latency (the price of no bytes), which slows no other transfer, and
  then moves its bytes. While n transfers on a link move bytes, each moves at 1/n of the speed that
  it has alone; a transfer on several links moves at the speed that the fullest of them leaves.
- While any transfer runs, the compute stream works at 1/f of its speed, f >= 1 a ratio of integers.
- While the compute stream works, transfers move bytes at 1/g of their speed, and their latency
  passes at 1/h of its, g, h >= 1 ratios of integers.

A transfer or compute step ends with the first whole tick by which its work is done. Nothing ever
becomes faster, so no schedule takes less time than without these rules (``docs/formulation.md``),
and a lower bound without them is also a lower bound with them.
"""

from dataclasses import dataclass
from math import lcm

from apsched.errors import InputError

MOST_STREAMS_ON_A_LINK = 16
"""Shares of a link are counted in parts of lcm(1, ..., n), which must stay far below 2**63."""
_LARGEST_TERM = 10_000
_MOST_PARTS = 10**9
"""With so many, a transfer of nine seconds is less than 2**63 of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """The three rules for one problem."""

    links: tuple[str, ...] = ()
    """Names of the links that are shared; empty where bandwidth is not."""
    links_of_group: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Group -> indices of the links that its transfers use, ascending."""
    compute_slowdown: tuple[int, int] = (1, 1)
    """f as numerator and denominator, in lowest terms."""
    transfer_slowdown: tuple[int, int] = (1, 1)
    """g in the same way."""
    latency_slowdown: tuple[int, int] = (1, 1)
    """h in the same way."""

    def __post_init__(self) -> None:
        for name, (above, below) in self.slowdowns.items():
            if not 1 <= below <= above <= _LARGEST_TERM:
                raise InputError(
                    f"{name}: expected a ratio of whole numbers from 1 to {_LARGEST_TERM}, at least"
                    f" 1; found {above}/{below}"
                )
        for group, links in self.links_of_group:
            if list(links) != sorted(set(links)) or not all(
                0 <= link < len(self.links) for link in links
            ):
                raise InputError(
                    f"contention: expected links below {len(self.links)} in ascending order for"
                    f" group {group!r}, found {links}"
                )
        for link, name in enumerate(self.links):
            users = sum(link in links for _, links in self.links_of_group)
            if users > MOST_STREAMS_ON_A_LINK:
                raise InputError(
                    f"contention: expected at most {MOST_STREAMS_ON_A_LINK} groups on {name}, found"
                    f" {users}"
                )
        if self.parts() > _MOST_PARTS:
            above, below = self.transfer_slowdown
            raise InputError(
                "transfer_slowdown: expected fewer digits with so many groups on a link, found"
                f" {above}/{below}"
            )

    @property
    def slowdowns(self) -> dict[str, tuple[int, int]]:
        """f, g and h by name."""
        return {
            name: getattr(self, name)
            for name in ("compute_slowdown", "transfer_slowdown", "latency_slowdown")
        }

    @property
    def changes_nothing(self) -> bool:
        """No two streams share a link, and nothing is slower."""
        return self.parts() == 1 and set(self.slowdowns.values()) == {(1, 1)}

    def links_of(self, group: str) -> tuple[int, ...]:
        """Return the links of ``group``; none for one that is not known."""
        return dict(self.links_of_group).get(group, ())

    def parts(self) -> int:
        """Return the parts that a transfer alone moves in a tick, so many that every speed is a
        whole number of them.
        """
        users = (
            sum(link in links for _, links in self.links_of_group)
            for link in range(len(self.links))
        )
        return lcm(*range(1, max(users, default=1) + 1)) * self.transfer_slowdown[0]

    def __str__(self) -> str:
        parts = []
        for link, name in enumerate(self.links):
            groups = [group for group, links in self.links_of_group if link in links]
            parts.append(
                f"{name} shared by {' and '.join(groups)}"
                if len(groups) > 1
                else f"{name} not shared"
            )
        if self.compute_slowdown != (1, 1):
            parts.append(
                f"compute slower by {_factor_text(self.compute_slowdown)} while a collective runs"
            )
        if self.transfer_slowdown != (1, 1):
            parts.append(
                f"transfers slower by {_factor_text(self.transfer_slowdown)} while compute runs"
            )
        if self.latency_slowdown != (1, 1):
            parts.append(
                f"latencies longer by {_factor_text(self.latency_slowdown)} while compute runs"
            )
        return "; ".join(parts) or "none"


def contention_json(contention: Contention) -> dict[str, object]:
    """Return ``contention`` for reports and schedule files."""
    groups = {
        group: [contention.links[link] for link in links]
        for group, links in contention.links_of_group
    }
    return {
        "links": groups,
        **{name: above / below for name, (above, below) in contention.slowdowns.items()},
    }


def _factor_text(slowdown: tuple[int, int]) -> str:
    return f"{slowdown[0] / slowdown[1]:.4g}"
