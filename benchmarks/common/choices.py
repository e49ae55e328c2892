"""Rows of choices under memory caps: those that people make, and the one found."""

from collections.abc import Sequence
from typing import Protocol, TypeVar


class ChoiceRow(Protocol):
    """One choice under one cap; the choice found is called ``apsched``."""

    @property
    def case(self) -> str: ...

    @property
    def cap(self) -> str: ...

    @property
    def choice(self) -> str: ...

    @property
    def step_ms(self) -> float | None: ...


R = TypeVar("R", bound=ChoiceRow)


def beaten(rows: Sequence[R]) -> list[R]:
    """Return the choices that people make that fit and are faster than the one found."""
    found = {(row.case, row.cap): row.step_ms for row in rows if row.choice == "apsched"}
    return [
        row
        for row in rows
        if row.step_ms is not None
        and (best := found.get((row.case, row.cap))) is not None
        and row.step_ms < best
    ]
