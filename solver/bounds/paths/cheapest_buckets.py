"""The cheapest way to put collectives into buckets when a bucket costs a fee at its head and each
member a rate of its head.

    min sum over buckets (h, p) of fee_hp  +  sum over members c of rate_hp bytes_c + ride_c  +  sum
    over the others of alone_c

A bucket may be any subset of the collectives in order that begins with its head h. A member does
best in the bucket with the least rate that is open, whatever its bytes; so a head that does not
lower the rate is not worth its fee, and the heads that do form a path: dynamic programming over the
latest of them, in time quadratic in the collectives.
"""

import numpy as np
import numpy.typing as npt

from apsched.solver.arrays.jit import compiled
from apsched.solver.arrays.problem_arrays import Bools, Ints

Floats = npt.NDArray[np.float64]


@compiled
def cheapest_buckets(
    rate: Floats, fee: Floats, size_bytes: Floats, ride: Floats, alone: Floats, bucketable: Bools
) -> tuple[float, Ints, Ints]:
    """Return the least cost, (W2); for each collective the head whose bucket it rides in (-1:
    alone); for each head its line p.
    """
    n, num_lines = rate.shape
    reach = np.full(n + 1, np.inf)  # all before are assigned, and the next is a head (or the end)
    before = np.full((n + 1, 2), -1, np.int64)  # the head before, and its line
    cost = 0.0
    for c in range(n + 1):
        reach[c] = cost
        if c < n:
            cost += alone[c]
    for h in range(n):
        if not bucketable[h]:
            continue
        for p in range(num_lines):
            r = rate[h, p]
            cost = reach[h] + fee[h, p] + r * size_bytes[h] + ride[h]
            for c in range(h + 1, n + 1):
                if cost < reach[c]:
                    reach[c] = cost
                    before[c, 0], before[c, 1] = h, p
                if c < n:
                    riding = r * size_bytes[c] + ride[c]
                    cost += riding if bucketable[c] and riding < alone[c] else alone[c]
    head = np.full(n, -1, np.int64)
    line = np.full(n, -1, np.int64)
    past = n
    while before[past, 0] >= 0:
        h, p = before[past, 0], before[past, 1]
        head[h], line[h] = h, p
        for c in range(h + 1, past):
            if bucketable[c] and rate[h, p] * size_bytes[c] + ride[c] < alone[c]:
                head[c] = h
        past = h
    return float(reach[n]), head, line
