"""The longest common subsequence of two sequences: what a graph says and what a profiler saw, matched in order."""

from collections.abc import Hashable, Sequence


def aligned(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return pairs of places with equal items, rising on both sides, as many as there can be.

    Row by row of the table of lengths L, as bits that say where L does *not* rise along ``left`` (Hyyrö, "Bit-parallel LCS-length
    computation revisited", 2004):  V' = (V + (V & M)) | (V & ~M),  M = places of the row's item in ``left``.
    """
    places: dict[Hashable, int] = {}
    for k, item in enumerate(left):
        places[item] = places.get(item, 0) | 1 << k
    full = (1 << len(left)) - 1
    flat, rows = full, []
    for item in right:
        here = flat & places.get(item, 0)
        flat = ((flat + here) | (flat & ~here)) & full
        rows.append(flat)
    pairs = []
    i, j = len(left), len(right)
    while i and j:
        if rows[j - 1] >> (i - 1) & 1:
            i -= 1  # L[i][j] = L[i - 1][j]
            continue
        j -= 1
        if j and not rows[j - 1] >> (i - 1) & 1:
            continue  # L[i][j + 1] = L[i][j]: the rise was there before this row
        i -= 1
        pairs.append((i, j))
    return pairs[::-1]
