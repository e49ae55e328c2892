"""Moves of search: join two buckets, cut one in two, let a member change buckets; in one place, or
in every layer at once.

A move names collectives, not buckets, so that it stays meaningful after others were taken, and so
that its translates along the repeated layers are the same move with other names.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from apsched.solver.arrays.jit import compiled
from apsched.solver.arrays.layers import find_periods
from apsched.solver.arrays.plan_groups import plan_groups, whole
from apsched.solver.arrays.problem_arrays import Ints, ProblemArrays
from apsched.solver.search.grouping import canonical, urgencies

JOIN, CUT, CHANGE = 0, 1, 2
_NEIGHBOURS = 3
"""Largest distance, in order of urgency, of two buckets that a move joins."""
_DISTANCES = (1, 1, 1, 2, 3, -1, -1, -1, -2, -3)
_RANDOM_KINDS = (JOIN, CUT, CHANGE, CHANGE, CHANGE)
_SHARE_OF_LAYERS = 0.15
"""Share of random moves that are made in all layers."""
_STRIDES = (1, 2, 4)
"""Every how many layers a move that crosses layers is repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One kind of change for each pair (of, to): join their buckets; cut before ``of``; ``of`` goes
    to the bucket of ``to``.
    """

    kind: int
    of: Ints
    to: Ints


class Neighbourhood:
    """The moves that a problem allows."""

    def __init__(self, arrays: ProblemArrays) -> None:
        self.arrays = arrays
        self.plan_groups = plan_groups(arrays)
        urgency = urgencies(arrays)
        self.order = np.lexsort((np.arange(len(urgency)), urgency, arrays.key))
        self.place = np.empty(len(urgency), dtype=np.int64)
        self.place[self.order] = np.arange(len(urgency))
        self.pairs = self._pairs()
        self._find_layers()

    def applied(self, move: Move, labels: Ints) -> Ints:
        """Return ``labels`` after ``move``."""
        return whole(self.plan_groups, apply(labels, move.kind, move.of, move.to, self.place))

    def local(self, labels: Ints) -> Iterator[Move]:
        """Yield the moves of single buckets and single members, from the first to the last in order
        of urgency.
        """
        for buckets in self._buckets(labels):
            for i, bucket in enumerate(buckets):
                for other in buckets[i + 1 : i + 1 + _NEIGHBOURS]:
                    yield _single(JOIN, bucket[0], other[0])
                for member in bucket[1:]:
                    yield _single(CUT, member, member)
                if i + 1 < len(buckets) and len(bucket) > 1:
                    yield _single(CHANGE, bucket[-1], buckets[i + 1][0])
                if i and len(bucket) > 1:
                    yield _single(CHANGE, bucket[0], buckets[i - 1][0])

    def periodic(self, labels: Ints) -> Iterator[Move]:
        """Yield moves seen in the middle of the repeated layers, each with all its translates."""
        for buckets in self._buckets(labels):
            for bucket, other in pairwise(buckets):
                if self._in_the_middle(bucket[0]):
                    for stride in _STRIDES:
                        yield from self._translated(JOIN, bucket[-1], other[0], stride)
                        if len(bucket) > 1:
                            yield from self._translated(CHANGE, bucket[-1], other[0], stride)
                        if len(other) > 1:
                            yield from self._translated(CHANGE, other[0], bucket[-1], stride)
            for bucket in buckets:
                for member in bucket[1:]:
                    if self._in_the_middle(member):
                        for stride in _STRIDES:
                            yield from self._translated(CUT, member, member, stride)

    def at_random(self, rng: random.Random) -> Move:
        """Return a move of two neighbours in order of urgency, in one layer or in all; there must
        be ``pairs``.
        """
        of, to = self.pairs[rng.randrange(len(self.pairs))]
        kind = rng.choice(_RANDOM_KINDS)
        if rng.random() < _SHARE_OF_LAYERS:
            for move in self._translated(kind, of, to, rng.choice(_STRIDES)):
                return move
        return _single(kind, of, to)

    def _pairs(self) -> list[tuple[int, int]]:
        """Return neighbours that may share a bucket, the closer the more often."""
        order, c = self.order.tolist(), self.arrays
        near = [
            (order[i], order[i + d])
            for d in _DISTANCES
            for i in range(len(order))
            if 0 <= i + d < len(order)
        ]
        return [
            (of, to)
            for of, to in near
            if c.key[of] == c.key[to] and c.bucketable[of] and c.bucketable[to]
        ]

    def joins(self, labels: Ints) -> Iterator[Move]:
        """Yield the moves that join a bucket and the next."""
        for buckets in self._buckets(labels):
            for bucket, other in pairwise(buckets):
                yield _single(JOIN, bucket[0], other[0])

    def _buckets(self, labels: Ints) -> list[list[list[int]]]:
        """Return for each key its buckets in order of urgency, each with its members in that
        order.
        """
        keys: dict[int, dict[int, list[int]]] = defaultdict(dict)
        for c, label in zip(self.order.tolist(), labels[self.order].tolist(), strict=True):
            keys[int(self.arrays.key[c])].setdefault(label, []).append(c)
        return [list(buckets.values()) for _, buckets in sorted(keys.items())]

    # repeated layers

    def _find_layers(self) -> None:
        """Find for each collective of a repeated layer those in its place in the other layers, and
        its layer among them.
        """
        self.alike: dict[int, tuple[tuple[int, ...], int]] = {
            c: (row, layer)
            for period in find_periods(self.arrays)
            for row in period.collectives
            for layer, c in enumerate(row)
        }

    def _in_the_middle(self, c: int) -> bool:
        """Whether ``c`` is in one of the layers that moves are read off: as many as the longest
        stride, around the middle.
        """
        if c not in self.alike:
            return False
        group, i = self.alike[c]
        first = max(len(group) - _STRIDES[-1], 0) // 2
        return first <= i < first + _STRIDES[-1]

    def _translated(self, kind: int, of: int, to: int, stride: int) -> Iterator[Move]:
        if of not in self.alike or to not in self.alike:
            return
        (group, i), (other, j) = self.alike[of], self.alike[to]
        pairs = [
            (group[k], other[k + j - i])
            for k in range(i % stride, len(group), stride)
            if 0 <= k + j - i < len(other)
        ]
        if len(pairs) > 1:
            yield Move(
                kind=kind, of=np.array([a for a, _ in pairs]), to=np.array([b for _, b in pairs])
            )


@dataclass(slots=True)
class TriedMoves:
    """Moves of single collectives that need no second try: the buckets of both have not changed
    since the first.
    """

    num_collectives: int
    _clock: int = 0
    _labels: Ints | None = None
    _layout: object = None
    _changed: Ints = field(init=False)
    """Time of the last change of the bucket of each collective."""
    _tried: dict[tuple[int, int, int], int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._changed = np.zeros(self.num_collectives, dtype=np.int64)

    def is_new(self, move: Move, labels: Ints, layout: object) -> bool:
        """Return whether ``move`` of ``labels`` needs a try, and note it; ``layout`` has all other
        inputs of its value.
        """
        if labels is not self._labels or layout != self._layout:
            self._see(labels, layout)
        if len(move.of) > 1:
            return True
        of, to = int(move.of[0]), int(move.to[0])
        tried = self._tried.get((move.kind, of, to), 0)
        self._tried[move.kind, of, to] = self._clock
        return tried < max(int(self._changed[of]), int(self._changed[to]))

    def _see(self, labels: Ints, layout: object) -> None:
        self._clock += 1
        if self._labels is None or layout != self._layout:
            self._changed[:] = self._clock
        else:
            differ = self._labels != labels
            touched = np.zeros(self.num_collectives, dtype=np.bool_)
            touched[self._labels[differ]] = touched[labels[differ]] = True
            self._changed[touched[self._labels] | touched[labels]] = self._clock
        self._labels, self._layout = labels, layout


def _single(kind: int, of: int, to: int) -> Move:
    return Move(kind=kind, of=np.array([of]), to=np.array([to]))


@compiled
def apply(labels: Ints, kind: int, of: Ints, to: Ints, place: Ints) -> Ints:
    """Return ``labels``, a bucket named by its lowest member, after the moves."""
    result = labels
    for i in range(len(of)):
        before = result
        result = before.copy()
        label, other_label = before[of[i]], before[to[i]]
        if kind == JOIN:
            for c in range(len(labels)):
                if before[c] == other_label:
                    result[c] = label
        elif kind == CUT:
            # either part is named by a member of its own
            rest = -1
            for c in range(len(labels)):
                if before[c] == label:
                    if place[c] >= place[of[i]]:
                        result[c] = of[i]
                    else:
                        rest = c if rest < 0 else rest
                        result[c] = rest
        elif label != other_label:
            rest = -1
            for c in range(len(labels)):
                if before[c] == label and c != of[i]:
                    rest = c if rest < 0 else rest
                    result[c] = rest
            result[of[i]] = other_label
        result = canonical(result)
    return result
