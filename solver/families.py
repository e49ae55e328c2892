"""Partitions to start from: neighbours by bytes, by block, and small members apart from large ones.

Where latency counts, what pays is to bucket the small members (their copies are cheap, their latencies are not), also across
what lies between them; where it does not, the best bucket is none.
"""

from collections.abc import Iterator

from apsched.config import Caps
from apsched.solver.baselines import block_of, merge_runs
from apsched.solver.compact import ALL_GATHER
from apsched.solver.partition import Members, Pricer, need_order

BYTE_CAPS = (2**16, 2**20, 2**23, 2**25, 2**26, 2**27, 2**28, 2**29, 2**30)
_SMALL_BYTES = (2**17, 2**23, 2**24, 2**25, 2**26, 2**27)
_REACHES = (0.5, 1.0, 2.0, 4.0, 8.0, 1000.0)
"""How far a bucket of small members may reach, in blocks."""


def families(pricer: Pricer, caps: Caps) -> Iterator[tuple[Members, ...]]:
    """Yield partitions of all collectives within ``caps``, each once, in canonical order."""
    seen = set()
    for buckets in _all(pricer, caps):
        found = canonical(pricer, buckets)
        if found not in seen:
            seen.add(found)
            yield found


def _all(pricer: Pricer, caps: Caps) -> Iterator[list[Members]]:
    keys = range(len(pricer.problem.keys))
    blocks = [block_of(c.module) if c.module else "" for c in pricer.problem.collectives]
    for byte_cap in (0, *BYTE_CAPS):
        limits = _within(caps, byte_cap)
        yield merge_runs(pricer, limits, keys, lambda _: 0)
        yield merge_runs(pricer, limits, keys, blocks.__getitem__)
    gaps_per_block = len(pricer.compact.spine_ticks) / max(len({b for b in blocks if b}), 1)
    for small_bytes in _SMALL_BYTES:
        for reach in _REACHES:
            yield small_apart(pricer, _within(caps, 2**40), small_bytes, int(reach * gaps_per_block))


def _within(caps: Caps, byte_cap: int) -> Caps:
    return Caps(
        bucket_cap_bytes=byte_cap if caps.bucket_cap_bytes is None else min(byte_cap, caps.bucket_cap_bytes),
        max_topo_span=caps.max_topo_span,
    )


def small_apart(pricer: Pricer, limits: Caps, small_bytes: int, reach_gaps: int) -> list[Members]:
    """Return buckets of the members of at most ``small_bytes`` that are urgent within ``reach_gaps`` of each other; others stay alone."""
    compact = pricer.compact
    result: list[Members] = []
    for collectives in compact.collectives_of_key:
        run: list[int] = []
        for c in need_order(compact, collectives):
            if compact.size_bytes[c] > small_bytes or not compact.bucketable[c]:
                result.append((c,))
                continue
            near = run and urgency(pricer, (c,)) - urgency(pricer, (run[0],)) <= reach_gaps
            if run and not (near and pricer.same_depth((run[0], c)) and pricer.allowed((*run, c), limits)):
                result.append(tuple(run))
                run = []
            run.append(c)
        if run:
            result.append(tuple(run))
    return result


def canonical(pricer: Pricer, buckets: list[Members]) -> tuple[Members, ...]:
    """Return ``buckets`` key by key, each in order of urgency: neighbours in the list are neighbours to merge."""
    return tuple(sorted(buckets, key=lambda b: (int(pricer.compact.key[b[0]]), urgency(pricer, b), b)))


def urgency(pricer: Pricer, bucket: Members) -> int:
    """Return the gap that says how urgent a bucket is: a gather's need, anything else's readiness."""
    ready, need = pricer.figures(bucket)[5:7]
    return need if pricer.compact.kind[bucket[0]] == ALL_GATHER else ready
