"""Which process group decides: the one that most parameters are gathered on."""

from collections import Counter
from collections.abc import Iterable


def primary_group(groups: Iterable[str]) -> str | None:
    """Return the group named most often, of several the first by name; ``None`` where none is named.

    ``groups`` has one entry for each all-gather of a parameter. A graph made by AutoParallel has gathers on other groups, too (norms on
    the combined mesh, one on the tensor-parallel group); those must not decide for the rest (AutoParallel #481).
    """
    counts = Counter(groups)
    return max(sorted(counts), key=counts.__getitem__) if counts else None
