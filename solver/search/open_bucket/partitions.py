"""Partitions to start a search from: points on the fronts of gathers with points on those of
reductions.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np

from apsched.config import Caps
from apsched.solver.arrays.partition import Pricer
from apsched.solver.arrays.plan_groups import plan_groups, whole
from apsched.solver.arrays.problem_arrays import Ints
from apsched.solver.search.launch_policy import base_times
from apsched.solver.search.open_bucket.front import Labels, front, spread
from apsched.solver.search.open_bucket.line import Line, lines
from apsched.solver.search.open_bucket.stretches import Stretches, stretches

_LONGEST = 256
"""Members of a line over which a bucket may be open."""
_LONGER = 1.15
"""Ratio of the lengths of stretches that are tried, from 8 members on."""
_MOST_LABELS = 24
_MOST_SIZES = 4
"""Largest sizes of riding members that are tried."""
_POINTS = 8
"""Partitions taken from one front."""
_VIEWS = {True: ((0.0, True), (0.5, True), (0.0, False)), False: ((0.0, True),)}
"""For gathers, and for reductions: the share of the transfers of the other direction that goes
before later needs; and whether copies take time on the compute stream, or hide.
"""


def open_bucket_partitions(pricer: Pricer, caps: Caps) -> Iterator[Ints]:
    """Yield labels of partitions within the ``caps`` on bytes and span, each once; collectives that
    are neither gathers nor reductions are alone.
    """
    known = lines(pricer, base_times(pricer.arrays).reached)
    groups, alone = plan_groups(pricer.arrays), np.arange(len(pricer.arrays.kind))
    of_gathers, of_reductions = (
        _choices(pricer, caps, [line for line in known if line.gathers == gathers])
        for gathers in (True, False)
    )
    seen = set()
    for gathers, reductions in product(of_gathers or [alone], of_reductions or [alone]):
        labels = whole(groups, np.where(gathers != alone, gathers, reductions))
        if known and labels.tobytes() not in seen:
            seen.add(labels.tobytes())
            yield labels


def _choices(pricer: Pricer, caps: Caps, known: list[Line]) -> list[Ints]:
    """Return partitions of the lines ``known``, all other collectives alone."""
    alone = np.arange(len(pricer.arrays.kind))
    found = []
    for share, copies in _VIEWS[known[0].gathers] if known else ():
        points = [_points(pricer, caps, line, share, copies) for line in known]
        for i in range(_POINTS):
            labels = alone
            for of_line in points:
                chosen = of_line[i * len(of_line) // _POINTS]
                labels = np.where(chosen != alone, chosen, labels)
            found.append(labels)
    return found


def _points(pricer: Pricer, caps: Caps, line: Line, share: float, copies: bool) -> list[Ints]:
    """Return labels of partitions on the front of ``line``, from the least time of the stream to
    the least time on the compute stream.
    """
    sizes = np.unique(pricer.arrays.size_bytes[line.members])
    found = stretches(
        pricer,
        line,
        caps,
        _lengths(len(line.members)),
        sizes[spread(len(sizes), _MOST_SIZES)],
        share=share,
        copies=copies,
    )
    launch_ticks = int(pricer.arrays.launch_ticks[line.members[0]])
    labels = front(found, line.first_ticks, launch_ticks, _MOST_LABELS)
    return [
        _partition(pricer, line, found, labels, point)
        for point in spread(len(labels[-1].before), _POINTS).tolist()
    ]


def _partition(
    pricer: Pricer, line: Line, found: Stretches, labels: list[Labels], point: int
) -> Ints:
    """Return the partition that a label at the end of ``line`` comes from."""
    result = np.arange(len(pricer.arrays.kind))
    past, size_bytes = len(line.members), pricer.arrays.size_bytes
    while past > 0:
        x, q = divmod(int(labels[past].stretch[point]), len(found.rider_bytes))
        point = int(labels[past].before[point])
        first = past - int(found.lengths[x])
        stretch = line.members[first:past]
        riders = stretch[size_bytes[stretch] <= found.rider_bytes[q]]
        result[riders] = riders.min()
        past = first
    return result


def _lengths(num_members: int) -> Ints:
    """Return the lengths of stretches that are tried: all short ones, and ever fewer long ones."""
    longest = min(_LONGEST, num_members)
    powers = _LONGER ** np.arange(np.ceil(np.log(longest) / np.log(_LONGER)) + 1)
    return np.unique(np.minimum(np.ceil(powers), longest).astype(np.int64))
