"""Parameters by block, in words."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from apsched.names import part_of


def kept_in_words(kept: Iterable[str], names: Sequence[str]) -> str:
    """Return the parameters ``kept`` of ``names`` by block: blocks that are kept whole, and those
    of which a part is.

    >>> kept_in_words(["a.0.w", "a.1.w", "a.2.w"], ["a.0.w", "a.1.w", "a.2.w", "a.2.b", "n.w"])
    'a.0-1; parts of a.2'
    """
    every, some = Counter(map(part_of, names)), Counter(map(part_of, kept))
    whole = _ranges(part for part in every if some[part] == every[part])
    parts = _ranges(part for part in every if 0 < some[part] < every[part])
    found = [", ".join(whole), f"parts of {', '.join(parts)}" if parts else ""]
    return "; ".join(words for words in found if words) or "nothing"


def _ranges(parts: Iterable[str]) -> list[str]:
    """Return ``parts`` in order, blocks that follow each other as one: ``layers.2-5``."""

    def numbered(part: str) -> tuple[str, int]:
        stem, _, number = part.rpartition(".")
        return (stem, int(number)) if stem and number.isdigit() else (part, -1)

    order = sorted(map(numbered, parts))
    found: list[str] = []
    for (stem, _), run in groupby(enumerate(order), key=lambda at: (at[1][0], at[1][1] - at[0])):
        numbers = [number for _, (_, number) in run]
        ends = dict.fromkeys((numbers[0], numbers[-1]))
        found.append(f"{stem}.{'-'.join(map(str, ends))}" if numbers[0] >= 0 else stem)
    return found
