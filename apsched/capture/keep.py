"""The choice for each parameter on captured graphs: kept from forward to backward, resharded in its
node, or gathered again.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from apsched.capture.captured import CapturedGraph
from apsched.errors import InputError
from apsched.fx.keep import GatheredAgain, gathered_again, passed_values, with_kept
from apsched.fx.node_shards import NodeGroup
from apsched.names import in_node, is_in_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepable:
    """A parameter that both graphs gather, and that can be kept in between."""

    name: str
    """Fully qualified name of the parameter; of one without a name, its forward placeholder."""
    again: GatheredAgain
    node: NodeGroup | None = None
    """The process ranks that can share it; ``None`` where it cannot be resharded in a node."""

    @property
    def entries(self) -> tuple[str, ...]:
        """Its name, and the entry for its parts in a node."""
        return (self.name,) if self.node is None else (self.name, in_node(self.name))


def keepable(
    forward: CapturedGraph,
    backward: CapturedGraph,
    nodes: Mapping[str, NodeGroup] | None = None,
) -> tuple[Keepable, ...]:
    """Return the parameters of a pair of graphs that are gathered in both, in the order of the
    placeholders of forward. ``nodes`` has the node of this process rank in each process group.
    """
    found = gathered_again(forward.module, backward.module)
    return tuple(
        Keepable(
            name=forward.parameter_names.get(shard, shard),
            again=again,
            node=_node_of(again, nodes or {}),
        )
        for shard, again in found.items()
        if shard in forward.kept_inputs
    )


def keep(
    forward: CapturedGraph,
    backward: CapturedGraph,
    names: Collection[str],
    nodes: Mapping[str, NodeGroup] | None = None,
) -> tuple[CapturedGraph, CapturedGraph]:
    """Return the pair of graphs with the gathered parameters ``names`` kept from forward to
    backward; the given graphs stay unchanged.

    Forward returns the gathered tensor, or the cast or transposed copy of it that backward reads,
    and backward takes it as an input that the caller does not hold: it is freed at its last use. Of
    an entry ``NAME @node`` forward returns one part of that tensor, and backward gathers the parts
    on the group of ``nodes``.

    Raises
    ------
    InputError
        for a name that is no parameter which both graphs gather, or which cannot be resharded in a
        node.
    """
    by_entry = {
        entry: found for found in keepable(forward, backward, nodes) for entry in found.entries
    }
    for name in names:
        if name not in by_entry:
            known = ", ".join(list(by_entry)[:3])
            raise InputError(
                f"keep: expected parameters that forward and backward both gather, found {name!r};"
                f" there are {len(by_entry)}" + (f" ({known}, ...)" if by_entry else "")
            )
    chosen = {entry: found for entry, found in by_entry.items() if entry in names}
    shared = {
        found.again.shard: found.node
        for entry, found in chosen.items()
        if is_in_node(entry) and found.node is not None
    }
    kept = [found.again for found in chosen.values()]
    first, second, parts = with_kept(forward.module, backward.module, kept, shared)
    gone = {again.passed for again in kept if again.frees_shard}
    named = {k: v for k, v in backward.parameter_names.items() if k not in gone}
    named |= {part: forward.parameter_names.get(shard, shard) for part, shard in parts.items()}
    return replace(forward, module=first), replace(
        backward,
        module=second,
        kept_inputs=backward.kept_inputs - gone,
        parameter_names=named,
    )


def _node_of(again: GatheredAgain, nodes: Mapping[str, NodeGroup]) -> NodeGroup | None:
    node = nodes.get(again.group)
    return node if node is not None and again.divisor % node.num_ranks == 0 else None


def kept_tensors(
    again: tuple[CapturedGraph, CapturedGraph], kept: tuple[CapturedGraph, CapturedGraph]
) -> dict[str, tuple[str, ...]]:
    """Return graph -> nodes that hold the kept tensors in ``kept``, which :func:`keep` made of
    ``again``: outputs of forward, inputs of backward.
    """
    names = [[set(passed_values(graph.module)) for graph in pair] for pair in (again, kept)]
    return {graph.name: tuple(sorted(names[1][k] - names[0][k])) for k, graph in enumerate(kept)}
