"""The requirements of a plan on one collective, in a form that the solver, ``verify`` and the tests
read alike.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Restriction:
    """Limits on the bucket and the place of one collective."""

    alone: bool = False
    """It shares no launch."""
    group: int | None = None
    """Collectives with the same number are in one bucket."""
    closed: bool = False
    """No other collective joins the bucket of its group."""
    payload: int = 0
    """Members of a bucket stand in its buffer in ascending order of this; equals in any order."""
    flat: bool = False
    """Sums depend on where it lies in the buffer of its bucket, which therefore must have one."""
    start_slots: tuple[int, int] | None = None
    """First and last slot where its launch (copy-in included) may stand: slot g is the place right
    before the g-th compute node.
    """
    wait_slots: tuple[int, int] | None = None
    """First and last slot where its wait may stand; only for one that stays alone."""
    rules: tuple[int, ...] = ()
    """The rules of the plan (indices into ``Problem.rules``) that require this."""


UNRESTRICTED = Restriction()
