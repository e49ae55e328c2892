"""What the name of a module or parameter says: its transformer block, and the bucket of TorchTitan's ``transformer_block_bucketing``."""

import re
from collections.abc import Callable, Sequence

_BLOCK = re.compile(r"(?:[^.]+\.)*?[^.]+\.\d+(?=\.|$)")


def block_of(name: str) -> str:
    """Return the transformer block of a module or parameter, its name up to the first number; empty outside of blocks.

    >>> block_of("layers.3.attention.wq.weight"), block_of("norm.weight")
    ('layers.3', '')
    """
    found = _BLOCK.match(name)
    return found[0] if found else ""


def part_of(name: str) -> str:
    """Return the transformer block of a module or parameter; outside of blocks the first word of its name."""
    return block_of(name) or name.split(".")[0]


def bucket_labels(names: Sequence[str], block: Callable[[str], str] = block_of, *, depth: int = 1) -> dict[str, str]:
    """Return the bucket of each of ``names``, parameters in order of registration: one for each block.

    What stands before the first block has a bucket for each module, the first ``depth`` parts of its name (the embedding). What lies
    between blocks, or behind the last one, shares one (norm and output).

    >>> list(bucket_labels(["embedding.weight", "layers.0.w", "layers.1.w", "norm.weight", "output.weight"]).values())
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
