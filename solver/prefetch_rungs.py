"""Search under ever looser caps on prefetch: a sequence that is the same for every problem, as far
as it is below the stated cap, and then the stated cap.

The search under each cap also starts from the schedules found under the caps before. So the search
under a cap of the sequence is a part of that under any looser cap, whose schedule is never slower.
Under a tight cap few large buckets win, to which single moves from many small ones do not lead.
"""

_FIRST, _DENSE, _NEXT, _FAR = 2, 16, 2, 4
"""The first cap; up to the second one each is twice the one before, behind it four times."""


def prefetch_rungs(max_prefetch: int | None) -> tuple[int, ...]:
    """Return the caps of the sequence below ``max_prefetch``, ascending; none without a cap, since
    each takes as long as the search without one.
    """
    found, rung = [], _FIRST
    while max_prefetch is not None and rung < max_prefetch:
        found.append(rung)
        rung *= _NEXT if rung < _DENSE else _FAR
    return tuple(found)
