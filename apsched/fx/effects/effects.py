"""The record of the effects of one call beside its result."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """Effects of one call; arguments are given by their values (nodes, values, or lists of
    them).
    """

    writes: tuple[Any, ...] = ()
    out: tuple[Any, ...] = ()
    """Of those written, the ones whose former content is not read (``out=``)."""
    shares: tuple[tuple[Any, ...], ...] = ()
    """For each return value the arguments that it shares storage with."""
    by_identity: bool = False
    """``shares`` says nothing: a shared fake storage is a shared storage."""
    draws: bool = False
    """Takes numbers from the generator, or sets its state."""
    acts: bool = False
    """Is there for its effect: it returns nothing and writes no argument (asserts, prints), or its
    operator declares an effect."""
    idle: bool = False
    """Python on numbers, sizes and containers: it takes no time, and touches no bytes of a
    tensor.
    """
    unknown: bool = False
    """A barrier: it may write and share every tensor that it is handed, draw, and act; no effect
    crosses it."""
    sets_context: bool = False
    """A barrier that nothing crosses: it neither takes nor gives a tensor, and serves the calls
    after it (autocast)."""

    communicates: tuple[str, ...] = ()
    """Process groups on which it communicates in addition to the scheduled collectives
    (:data:`apsched.fx.collectives.ANY_GROUP` if it does not name one): none of their collectives
    crosses it.
    """

    @property
    def any(self) -> bool:
        """Whether the order of this call among others with effects is part of the meaning of the
        graph.
        """
        return (
            bool(self.writes)
            or self.draws
            or self.acts
            or self.unknown
            or self.sets_context
            or bool(self.communicates)
        )


def unknown_effects(arguments: Iterable[Any], *, communicates: tuple[str, ...] = ()) -> Effects:
    """Return the effects of a call that may do anything with ``arguments``."""
    return Effects(
        writes=tuple(arguments),
        by_identity=True,
        draws=True,
        acts=True,
        unknown=True,
        communicates=communicates,
    )
