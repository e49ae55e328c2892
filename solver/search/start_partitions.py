"""Partitions to start from: neighbours by bytes, by block, and small members apart from large ones.

If latency counts, buckets of small members pay (their copies are cheap, their latencies are not),
also across other members between them; if it does not, no bucket is best.
"""

from collections.abc import Iterator

import numpy as np

from apsched.config import Caps
from apsched.names import part_of
from apsched.solver.arrays.partition import Pricer
from apsched.solver.arrays.problem_arrays import Ints
from apsched.solver.search.grouping import group

BYTE_CAPS = (2**16, 2**20, 2**23, 2**25, 2**26, 2**27, 2**28, 2**29, 2**30)
_SMALL_BYTES = (2**17, 2**23, 2**24, 2**25, 2**26, 2**27)
_REACHES = (0.5, 1.0, 2.0, 4.0, 8.0, 1000.0)
"""Longest bucket of small members, in blocks."""
_BLOCKS_TOGETHER = (2, 3, 4, 8)
"""Blocks of a bucket under a cap on prefetch: such a bucket starts late, so that little of it is
hidden, and few buckets are best.
"""


def families(pricer: Pricer, caps: Caps) -> Iterator[Ints]:
    """Yield labels of partitions of all collectives within ``caps``, each once."""
    seen = set()
    for labels in _all(pricer, caps):
        if labels.tobytes() not in seen:
            seen.add(labels.tobytes())
            yield labels


def _all(pricer: Pricer, caps: Caps) -> Iterator[Ints]:
    keys = range(len(pricer.problem.keys))
    blocks = [part_of(c.module) for c in pricer.problem.collectives]
    numbers = {block: i for i, block in enumerate(dict.fromkeys(blocks))}
    tags = np.array([numbers[block] for block in blocks], dtype=np.int64)
    any_size = Caps(bucket_cap_bytes=caps.bucket_cap_bytes, max_topo_span=caps.max_topo_span)
    for byte_cap in (0, *BYTE_CAPS):
        limits = _within(caps, byte_cap)
        yield group(pricer, limits, keys)
        yield group(pricer, limits, keys, tags=tags)
    if caps.max_prefetch is not None:
        for number in _BLOCKS_TOGETHER:
            yield group(pricer, any_size, keys, tags=tags // number)
    slots_per_block = len(pricer.arrays.compute_ticks) / max(len({b for b in blocks if b}), 1)
    for most_bytes in _SMALL_BYTES:
        for reach in _REACHES:
            yield group(
                pricer,
                any_size,
                keys,
                most_bytes=most_bytes,
                reach_slots=int(reach * slots_per_block),
            )


def _within(caps: Caps, byte_cap: int) -> Caps:
    return Caps(
        bucket_cap_bytes=byte_cap
        if caps.bucket_cap_bytes is None
        else min(byte_cap, caps.bucket_cap_bytes),
        max_topo_span=caps.max_topo_span,
    )
