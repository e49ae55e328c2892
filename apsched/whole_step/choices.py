"""Parameters that may be kept, or resharded in their node; common choices, and the order in which
keeping pays.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from apsched.names import block_of, in_node, is_in_node, name_of

NONE, ALL = "none", "all"
THRESHOLD_ELEMENTS = 100_000
"""DeepSpeed's ``stage3_param_persistence_threshold``: parameters up to this size are kept."""

Choice = frozenset[str]
"""Names of the parameters that are kept, and those with ``@node`` that are resharded."""


def kept_whole(choice: Choice) -> Choice:
    """Return the parameters that are kept as a whole."""
    return Choice(entry for entry in choice if not is_in_node(entry))


def kept_in_node(choice: Choice) -> Choice:
    """Return the names of the parameters that are resharded in their node."""
    return Choice(name_of(entry) for entry in choice if is_in_node(entry))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter that forward and backward both gather."""

    name: str
    size_bytes: int
    """Bytes passed from forward to backward if it is kept."""
    num_elements: int
    beside_bytes: int
    """Of its shard, which lives on though backward does not take it where the parameter is kept."""
    gathers: tuple[int, ...]
    """Collectives of backward that keeping it saves."""
    values: tuple[str, ...] = ()
    """Nodes of forward that it is passed from if it is kept, and the inputs of backward that take
    them.
    """
    node_bytes: int = 0
    """Bytes passed if it is resharded in its node; 0 where it cannot be."""
    together: str = ""
    """Name of the first of the parameters that the plan gathers in one bucket, which are decided on
    alike; empty or its own where it is alone.
    """

    @property
    def need(self) -> int:
        """Place of its first gather among the collectives of backward, as captured."""
        return min(self.gathers, default=-1)

    @property
    def entries(self) -> dict[str, int]:
        """Entries of a choice that are about it -> bytes passed from forward to backward."""
        whole = {self.name: self.size_bytes}
        return whole | ({in_node(self.name): self.node_bytes} if self.node_bytes else {})


def named_choices(parameters: Sequence[Parameter]) -> dict[str, Choice]:
    """Return the choices that people make, by name; only the first of equal choices.

    ``none``            all gathered again (FULL_SHARD)
    ``all``             all kept (SHARD_GRAD_OP, ZeRO-2)
    ``last_block``      the block that backward needs first, and parameters after it (FSDP2 habit)
    ``fsdp2``           parameters outside of blocks: FSDP2 does not reshard its root module
    ``threshold``       up to 100,000 elements (DeepSpeed)
    ``in_node``         resharded in their node (``reshard_after_forward=8``, ZeRO++'s hpZ)
    """
    blocks = [block_of(p.name) for p in sorted(parameters, key=lambda p: p.need)]
    last = next((block for block in blocks if block), "")
    after = min((p.need for p in parameters if block_of(p.name) == last), default=0)
    made = {
        NONE: Choice(),
        ALL: Choice(p.name for p in parameters),
        "last_block": Choice(
            p.name for p in parameters if last and (block_of(p.name) == last or p.need < after)
        ),
        "fsdp2": Choice(p.name for p in parameters if not block_of(p.name)),
        "threshold": Choice(p.name for p in parameters if p.num_elements <= THRESHOLD_ELEMENTS),
        "in_node": Choice(in_node(p.name) for p in parameters if p.node_bytes),
    }
    distinct: dict[Choice, str] = {}
    for name, choice in made.items():
        distinct.setdefault(choice, name)
    return {name: choice for choice, name in distinct.items()}


def decided_alike(parameters: Sequence[Parameter]) -> list[tuple[Parameter, ...]]:
    """Return the parameters, those that the plan gathers in one bucket together."""
    found: dict[str, list[Parameter]] = {}
    for p in parameters:
        found.setdefault(p.together or p.name, []).append(p)
    return [tuple(members) for members in found.values()]


def splits(choice: Choice, alike: Iterable[Sequence[Parameter]]) -> bool:
    """Return whether ``choice`` decides differently on parameters that are decided on alike."""
    return any(
        len({(p.name in choice, in_node(p.name) in choice) for p in members}) > 1
        for members in alike
    )


def units(parameters: Sequence[Parameter]) -> list[tuple[tuple[Parameter, ...], ...]]:
    """Return the parameters, those that are decided on alike together, in the order in which
    keeping them pays; those that belong together are one unit.

    Small ones first: a launch of their own costs most per byte. Then block by block as backward
    needs them: nothing runs that could hide the first gathers, and a parameter that forward used
    last and backward needs first is held for the shortest time.
    """
    small: list[tuple[Parameter, ...]] = []
    large: list[tuple[Parameter, ...]] = []
    for members in decided_alike(parameters):
        is_small = all(p.num_elements <= THRESHOLD_ELEMENTS for p in members)
        (small if is_small else large).append(members)
    by_unit: dict[str, list[tuple[Parameter, ...]]] = {}
    for members in sorted(large, key=lambda ps: min(p.need for p in ps)):
        first = members[0].name
        by_unit.setdefault(block_of(first) or first, []).append(members)
    return ([tuple(small)] if small else []) + [tuple(unit) for unit in by_unit.values()]
