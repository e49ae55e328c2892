"""Contention as arrays, for compiled code; see ``apsched.problem.contention``."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from apsched.problem.problem import Problem

Ints = npt.NDArray[np.int64]


class ContentionArrays(NamedTuple):
    """Contention of streams. CSR pairs end in ``_begin`` and ``_list``."""

    num_links: int
    link_begin: Ints
    link_list: Ints
    """Links of each stream."""
    latency_ticks: Ints
    """(C,) price of no bytes of the key of each collective: the time of a transfer before it moves
    bytes.
    """
    member_ticks: Ints
    """(C,) ticks that each member adds to that in a coalesced bucket."""
    parts: int
    """A transfer alone on its links moves so many parts of its bytes in a tick; n of them on a link
    share it.
    """
    full_move: int
    slow_move: int
    """Beside compute, a transfer moves ``slow_move / full_move`` of that."""
    full_latency: int
    slow_latency: int
    """A tick of latency is ``full_latency`` units, of which ``slow_latency`` pass in a tick beside
    compute.
    """
    full_speed: int
    """Work that the compute stream does in a tick while nothing is transferred; a tick of work is
    so much.
    """
    slow_speed: int
    """The same while something is."""


def shares(problem: Problem) -> ContentionArrays | None:
    """Return the contention of ``problem``; ``None`` where it has none."""
    contention = problem.contention
    if contention is None:
        return None
    links = [contention.links_of(group) for group in problem.streams]
    begin = np.zeros(len(links) + 1, dtype=np.int64)
    begin[1:] = np.cumsum([len(group_links) for group_links in links])
    full_speed, slow_speed = contention.compute_slowdown
    full_move, slow_move = contention.transfer_slowdown
    full_latency, slow_latency = contention.latency_slowdown
    return ContentionArrays(
        num_links=len(contention.links),
        link_begin=begin,
        link_list=np.array([link for group_links in links for link in group_links], dtype=np.int64),
        latency_ticks=np.array(
            [problem.keys[c.key].price(0) for c in problem.collectives], dtype=np.int64
        ),
        member_ticks=np.array(
            [problem.keys[c.key].coalesced_member_ticks or 0 for c in problem.collectives],
            dtype=np.int64,
        ),
        parts=contention.parts(),
        full_move=full_move,
        slow_move=slow_move,
        full_latency=full_latency,
        slow_latency=slow_latency,
        full_speed=full_speed,
        slow_speed=slow_speed,
    )
