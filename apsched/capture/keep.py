"""The choice between a parameter that is kept from forward to backward and one that is gathered
again, on captured graphs.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from apsched.capture.captured import CapturedGraph
from apsched.errors import InputError
from apsched.fx.keep import GatheredAgain, gathered_again, passed_values, with_kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepable:
    """A parameter that both graphs gather, and that can be kept in between."""

    name: str
    """Fully qualified name of the parameter; of one without a name, its forward placeholder."""
    again: GatheredAgain


def keepable(forward: CapturedGraph, backward: CapturedGraph) -> tuple[Keepable, ...]:
    """Return the parameters of a pair of graphs that are gathered in both, in the order of the
    placeholders of forward.
    """
    found = gathered_again(forward.module, backward.module)
    return tuple(
        Keepable(name=forward.parameter_names.get(shard, shard), again=again)
        for shard, again in found.items()
        if shard in forward.kept_inputs
    )


def keep(
    forward: CapturedGraph, backward: CapturedGraph, names: Collection[str]
) -> tuple[CapturedGraph, CapturedGraph]:
    """Return the pair of graphs with the gathered parameters ``names`` kept from forward to
    backward; the given graphs stay unchanged.

    Forward returns the gathered tensor, or the cast or transposed copy of it that backward reads,
    and backward takes it as an input that the caller does not hold: it is freed at its last use.

    Raises
    ------
    InputError
        for a name that is no parameter which both graphs gather.
    """
    by_name: Mapping[str, GatheredAgain] = {k.name: k.again for k in keepable(forward, backward)}
    for name in names:
        if name not in by_name:
            known = ", ".join(list(by_name)[:3])
            raise InputError(
                f"keep: expected parameters that forward and backward both gather, found {name!r};"
                f" there are {len(by_name)}" + (f" ({known}, ...)" if by_name else "")
            )
    chosen = [again for name, again in by_name.items() if name in names]
    modules = with_kept(forward.module, backward.module, chosen)
    gone = {again.passed for again in chosen if again.frees_shard}
    return replace(forward, module=modules[0]), replace(
        backward,
        module=modules[1],
        kept_inputs=backward.kept_inputs - gone,
        parameter_names={k: v for k, v in backward.parameter_names.items() if k not in gone},
    )


def kept_tensors(
    again: tuple[CapturedGraph, CapturedGraph], kept: tuple[CapturedGraph, CapturedGraph]
) -> dict[str, tuple[str, ...]]:
    """Return graph -> nodes that hold the kept tensors in ``kept``, which :func:`keep` made of
    ``again``: outputs of forward, inputs of backward.
    """
    names = [[set(passed_values(graph.module)) for graph in pair] for pair in (again, kept)]
    return {graph.name: tuple(sorted(names[1][k] - names[0][k])) for k, graph in enumerate(kept)}
