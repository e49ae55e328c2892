"""Parameters by block, in words."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from apsched.names import is_in_node, name_of, part_of
from apsched.quantities import show_bytes


def kept_in_words(kept: Collection[str], names: Sequence[str]) -> str:
    """Return the parameters ``kept`` of ``names`` by block: blocks that are kept whole, and those
    of which a part is; then those that are resharded in their node.

    >>> names = ["a.0.w", "a.1.w", "a.2.w", "a.2.b", "n.w"]
    >>> kept_in_words(["a.0.w", "a.1.w", "a.2.w"], names)
    'a.0-1; parts of a.2'
    >>> kept_in_words(["n.w", "a.0.w @node", "a.1.w @node"], names)
    'n; in the node: a.0-1'
    """
    whole = [entry for entry in kept if not is_in_node(entry)]
    parts = [name_of(entry) for entry in kept if is_in_node(entry)]
    words = [_in_words(whole, names)] if whole or not parts else []
    return "; ".join(words + ([f"in the node: {_in_words(parts, names)}"] if parts else []))


def told_apart(choices: Sequence[Collection[str]], names: Sequence[str]) -> list[str]:
    """Return :func:`kept_in_words` of each of ``choices``. Where that is the same of different
    ones, the number of entries follows, or the entries that not all of these have.

    >>> names = ["a.0.w", "a.0.v", "a.0.b", "a.0.c"]
    >>> told_apart([["a.0.w"], ["a.0.w", "a.0.b"]], names)
    ['parts of a.0 (1)', 'parts of a.0 (2)']
    >>> told_apart([["a.0.w", "a.0.b"], ["a.0.v", "a.0.b"], ["a.0.v", "a.0.b"]], names)
    ['parts of a.0 (a.0.w)', 'parts of a.0 (a.0.v)', 'parts of a.0 (a.0.v)']
    """
    alike: dict[str, set[frozenset[str]]] = {}
    words = [kept_in_words(kept, names) for kept in choices]
    for text, kept in zip(words, choices, strict=True):
        alike.setdefault(text, set()).add(frozenset(kept))
    return [
        f"{text} ({_difference(frozenset(kept), alike[text])})" if len(alike[text]) > 1 else text
        for text, kept in zip(words, choices, strict=True)
    ]


def _difference(kept: frozenset[str], alike: Collection[frozenset[str]]) -> str:
    """Return the difference of ``kept`` from the others of ``alike`` in words."""
    if len({len(one) for one in alike}) == len(alike):
        return str(len(kept))
    return ", ".join(sorted(kept - frozenset.intersection(*alike))) or "no more"


def kept_count(num_kept: int, num_in_node: int) -> str:
    """Return the number of parameters kept, and of those resharded in their node.

    >>> kept_count(3, 0), kept_count(3, 26)
    ('3', '3 + 26 in node')
    """
    return f"{num_kept} + {num_in_node} in node" if num_in_node else str(num_kept)


def summed_count(num_summed: int, num_shards_summed: int) -> str:
    """Return the number of parameters whose gradients are added, and of those whose shards are.

    >>> summed_count(3, 0), summed_count(0, 26)
    ('3', '0 + 26 of shards')
    """
    return f"{num_summed} + {num_shards_summed} of shards" if num_shards_summed else str(num_summed)


def _in_words(kept: Iterable[str], names: Sequence[str]) -> str:
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


def no_choice(least_bytes: int, cap_bytes: int | None) -> str:
    """Return that no choice fits the memory cap, and the least memory that is known to fit."""
    return (
        f"no choice fits the memory cap of {show_bytes(cap_bytes)}; the least memory known to fit"
        f" is {show_bytes(least_bytes)} ({least_bytes} bytes)"
    )
