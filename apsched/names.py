"""Parts of the name of a module or parameter: its transformer block, and the bucket of TorchTitan's
``transformer_block_bucketing``.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

DIRECTIONS = ("forward", "backward")

_GRAPH = re.compile(r"(forward|backward|joint|graph)(?:-\d+)?")
_BLOCK = re.compile(r"(?:[^.]+\.)*?[^.]+\.\d+(?=\.|$)")


def direction_named(graph_name: str) -> str:
    """Return ``forward`` or ``backward`` if the name of a graph has it, else an empty string. Of
    several pairs of graphs each has a number.

    >>> direction_named("forward"), direction_named("backward-2"), direction_named("joint")
    ('forward', 'backward', '')
    """
    found = _GRAPH.fullmatch(graph_name)
    return found[1] if found and found[1] in DIRECTIONS else ""


def is_graph_name(name: str) -> bool:
    """Return whether ``name`` is one that graphs of a source have: ``joint``, ``forward-2``."""
    return _GRAPH.fullmatch(name) is not None


def graph_order(name: str) -> tuple[int, int]:
    """Return the place of a graph among those of its source: pair by pair, forward first."""
    word, _, number = name.partition("-")
    return int(number or 0), ("forward", "backward", "joint", "graph").index(word)


def block_of(name: str) -> str:
    """Return the transformer block of a module or parameter, its name up to the first number; empty
    outside of blocks.

    >>> block_of("layers.3.attention.wq.weight"), block_of("norm.weight")
    ('layers.3', '')
    """
    found = _BLOCK.match(name)
    return found[0] if found else ""


def part_of(name: str) -> str:
    """Return the transformer block of a module or parameter; outside of blocks the first word of
    its name.
    """
    return block_of(name) or name.split(".")[0]


def bucket_labels(
    names: Sequence[str], block: Callable[[str], str] = block_of, *, depth: int = 1
) -> dict[str, str]:
    """Return the bucket of each of ``names``, parameters in order of registration: one for each
    block.

    Each module before the first block has a bucket, named by the first ``depth`` parts of its name
    (the embedding). Modules between blocks, or after the last one, share a bucket (norm and
    output).

    >>> names = ["embedding.weight", "layers.0.w", "layers.1.w", "norm.weight", "output.weight"]
    >>> list(bucket_labels(names).values())
    ['embedding', 'layers.0', 'layers.1', 'behind layers.1', 'behind layers.1']
    """
    labels: dict[str, str] = {}
    last = ""
    for name in names:
        if inside := block(name):
            last = inside
            labels[name] = inside
        else:
            labels[name] = f"behind {last}" if last else ".".join(name.split(".")[:depth])
    return labels


def primary_group(groups: Iterable[str]) -> str | None:
    """Return the group named most often, of several the first by name; ``None`` where none is
    named.

    ``groups`` has one entry for each all-gather of a parameter. A graph made by AutoParallel has
    gathers on other groups, too (norms on the combined mesh, one on the tensor-parallel group);
    those must not decide for the rest (AutoParallel #481).
    """
    counts = Counter(groups)
    return max(sorted(counts), key=counts.__getitem__) if counts else None


_SUFFIX = "+gathers"
RUNNING: dict[str, str] = {}
"""Name of a second group that runs in this process -> the group that it doubles."""


def second_name(group: str) -> str:
    """Return the name of the second group of ``group`` before it is made."""
    return group + _SUFFIX


def is_second(group: str) -> bool:
    """Whether ``group`` is called as a second group that is not made yet."""
    return group.endswith(_SUFFIX)


def first_name(group: str) -> str:
    """Return the group that ``group`` doubles, or ``group`` itself."""
    return RUNNING.get(group, group.removesuffix(_SUFFIX))


_IN_NODE = "+node"


def node_group_name(group: str) -> str:
    """Return the name for the ranks of ``group`` on one node, before a group of them is made."""
    return group + _IN_NODE


def base_of_node_group(group: str) -> str | None:
    """Return the process group whose ranks of one node ``group`` has; ``None`` if it is no such
    group.
    """
    return group.removesuffix(_IN_NODE) if group.endswith(_IN_NODE) else None


def nodes_of_part(value: str) -> tuple[str, str, str]:
    """Return the names of the forward nodes that copy a part of ``value``, the copy last.

    >>> *_, part = nodes_of_part("wait_tensor_2")
    >>> part, gather_of_part(part)
    ('wait_tensor_2_in_node', 'wait_tensor_2_in_node_gather')
    """
    return f"{value}_flat", f"{value}_part", f"{value}_in_node"


def gather_of_part(part: str) -> str:
    """Return the name of the backward node that starts the gather of ``part`` in a node."""
    return f"{part}_gather"


IN_NODE, NEXT, SUM, SUM_SHARDS = "@node", "@next", "@sum", "@sum-shards"
"""Marks of entries in a choice about parameters: resharded in its node; gathered from backward to
the next forward; gradients added before they are reduced; shards of gradients added before they are
all-reduced over the replicas of HSDP.
"""


def marked(name: str, mark: str) -> str:
    """Return the entry about the parameter ``name`` with a mark.

    >>> marked("norm.weight", NEXT), name_of("norm.weight @next"), mark_of("norm.weight")
    ('norm.weight @next', 'norm.weight', '')
    """
    return f"{name} {mark}"


def mark_of(entry: str) -> str:
    """Return the mark of an entry; empty for a parameter that is kept from forward to backward."""
    found = entry.rpartition(" ")[2]
    return found if found in (IN_NODE, NEXT, SUM, SUM_SHARDS) else ""


def name_of(entry: str) -> str:
    """Return the parameter that an entry is about."""
    mark = mark_of(entry)
    return entry.removesuffix(f" {mark}") if mark else entry


def in_node(name: str) -> str:
    """Return the entry for a parameter that is resharded in its node."""
    return marked(name, IN_NODE)


def is_in_node(entry: str) -> bool:
    """Return whether an entry is about a parameter that is resharded in its node."""
    return mark_of(entry) == IN_NODE


def ranks_text(ranks: Sequence[int]) -> str:
    """Return process ranks as people write them.

    >>> ranks_text([3]), ranks_text(range(8)), ranks_text([0, 1]), ranks_text([0, 8, 16])
    ('process rank 3', 'process ranks 0 to 7', 'process ranks 0, 1', 'process ranks 0 to 16 by 8')
    """
    if len(ranks) == 1:
        return f"process rank {ranks[0]}"
    step = ranks[1] - ranks[0]
    if len(ranks) > 2 and step > 0 and tuple(ranks) == tuple(range(ranks[0], ranks[-1] + 1, step)):
        return f"process ranks {ranks[0]} to {ranks[-1]}" + (f" by {step}" if step > 1 else "")
    return f"process ranks {', '.join(map(str, ranks[:8]))}" + (", ..." if ranks[8:] else "")
