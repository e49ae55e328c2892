"""Forms of buckets: flat or coalesced, as search tries them, and the charges of bounds where
buckets may be coalesced.

A coalesced bucket is one launch of several transfers, without buffer and copies: it pays for each
member on its stream, and a flat bucket pays copies. Search notes for each collective whether a
bucket that it is the first of is coalesced (``Policy.coalesced``); a *flip* changes that for all
members of a bucket.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from apsched.solver.arrays.problem_arrays import Bools, Ints, ProblemArrays
from apsched.solver.search.launch_policy import Policy


def in_forms(arrays: ProblemArrays, policies: Iterable[Policy]) -> Iterator[Policy]:
    """Yield ``policies``, each with flat buckets and, where some may be, with all of those
    coalesced.
    """
    everything = arrays.coalesces.tobytes()
    for policy in policies:
        yield policy
        if arrays.coalesces.any():
            yield replace(policy, coalesced=everything)


def like(policy: Policy, policies: Iterable[Policy]) -> tuple[Policy, ...]:
    """Return ``policies`` with buckets of the forms that ``policy`` has."""
    return (
        tuple(replace(other, coalesced=policy.coalesced) for other in policies)
        if policy.coalesced
        else tuple(policies)
    )


def flips(
    arrays: ProblemArrays,
    labels: Ints,
    policy: Policy,
    alike: dict[int, tuple[tuple[int, ...], int]],
) -> Iterator[Bools]:
    """Yield sets of collectives, as masks, whose buckets to flip: those of a key in one form, those
    of all repeated layers, single ones.
    """
    now = policy.coalesced_of(len(labels))
    several = (np.bincount(labels, minlength=len(labels))[labels] > 1) & arrays.coalesces
    for key in np.unique(arrays.key[several]):
        for form in (True, False):
            yield (arrays.key == key) & (now != form)
    heads = [int(h) for h in np.unique(labels[several])]
    for row in dict.fromkeys(alike[h][0] for h in heads if h in alike):
        yield np.isin(labels, labels[list(row)])
    for h in heads:
        yield labels == h


def flipped(policy: Policy, mask: Bools) -> Policy:
    """Return ``policy`` with the form of the collectives of ``mask`` changed."""
    now = policy.coalesced_of(len(mask)) ^ mask
    return replace(policy, coalesced=now.tobytes() if now.any() else b"")
