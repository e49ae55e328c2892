"""Kinds of nodes, of collectives, where kernels may be cut, and sizes that are assumed: words that
the graph, the problem and the solver share.

Members are equal to their text, which files and messages show. Text from outside becomes a member
where it is read.
"""

from dataclasses import dataclass
from enum import StrEnum


class NodeKind(StrEnum):
    """The action of a node."""

    INPUT = "input"  # placeholder, get_attr
    VIEW = "view"  # takes no time and no memory: views, getitem, symbolic sizes
    COMPUTE = "compute"
    START = "start"
    WAIT = "wait"
    OUTPUT = "output"


class CollectiveKind(StrEnum):
    """The operation of a collective on the data of its process ranks."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"


PRICED_KINDS = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_TO_ALL,
)
"""Kinds that a cost model prices; a broadcast is priced as an all-gather of its size."""

BUCKET_KINDS = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)
"""Kinds whose collectives may share a launch, and that a rule of a plan can name."""

COALESCED_KINDS = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
"""Kinds whose collectives may share a launch without a buffer; an all-reduce copies its input, as a
bucket does.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCut:
    """A place where a kernel of several nodes may be cut in two, and the price of that."""

    node: int
    """The first node of the second piece."""
    nodes: tuple[int, ...]
    """Nodes of the kernel, in either piece, that then take longer."""
    extra_ticks: tuple[int, ...]
    """Extra time of each of these nodes, in ticks: a value that passes between the pieces is
    written and read, and each piece has a floor.
    """


class SizeSource(StrEnum):
    """Source of the value that is assumed for a size that depends on data."""

    TORCH = "torch"
    """Torch's own hint."""
    STATED = "stated"
    """The user's hint."""
    PROFILE = "profile"
    """Seen in the profile that the costs come from."""
    BALANCED = "balanced"
    """An even share of a sum that is known: of the rows that an all-to-all sends or receives, or of
    a sum that the graph asserts.
    """
    FALLBACK = "fallback"
    """Nothing is known of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedSize:
    """A number that stands for a size that depends on data."""

    symbol: str
    """Name in the graph: ``u0``."""
    value: int
    source: SizeSource
