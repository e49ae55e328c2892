"""The captured graphs of several micro-batches in a row: parameters that stay gathered from one to
the next, and gradients that are added before they are reduced.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from apsched.capture.captured import CapturedGraph
from apsched.fx.accumulate import (
    HeldValue,
    Reduction,
    backward_of,
    forward_of,
    gradient_bytes,
    held_values,
    reductions,
)
from apsched.units import allocated_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a micro-batch in its step."""

    first: bool
    last: bool


def held_parameters(
    forward: CapturedGraph, backward: CapturedGraph
) -> dict[str, tuple[HeldValue, ...]]:
    """Return name of a parameter that forward gathers -> the values that stay gathered."""
    found = held_values(forward.module, backward.module)
    return {
        forward.parameter_names.get(shard, shard): values
        for shard, values in found.items()
        if shard in forward.kept_inputs
    }


def summed_gradients(
    backward: CapturedGraph, starts: Mapping[str, str], *, of_shards: bool = False
) -> dict[str, tuple[Reduction, ...]]:
    """Return name of a parameter -> the reductions of its gradient, or ``of_shards`` those of its
    shards; ``starts`` has the nodes that start one, each with its parameter.
    """
    found: dict[str, list[Reduction]] = {}
    for start, one in reductions(backward.module, starts, of_shards=of_shards).items():
        found.setdefault(starts[start], []).append(one)
    return {name: tuple(ones) for name, ones in found.items()}


def parameter_gradient_bytes(backward: CapturedGraph) -> int:
    """Return the bytes of the gradients of all parameters, as allocated."""
    return sum(map(allocated_bytes, gradient_bytes(backward.module).values()))


def micro_batch_forward(
    forward: CapturedGraph, held: Collection[HeldValue], place: Place, name: str
) -> CapturedGraph:
    """Return forward of the micro-batch at ``place``, called ``name``, with the values ``held``.
    All micro-batches but the first share one forward.
    """
    module = forward_of(forward.module, held, first=place.first)
    return replace(forward, module=module, name=name)


def micro_batch_backward(
    pair: tuple[CapturedGraph, CapturedGraph],
    held: Collection[HeldValue],
    summed: Collection[Reduction],
    place: Place,
    name: str,
) -> CapturedGraph:
    """Return backward of the micro-batch at ``place``, called ``name``: it returns the values
    ``held``, and adds the gradients ``summed``.
    """
    forward, backward = pair
    values = {
        node.name: node.meta["val"] for node in forward.module.graph.nodes if "val" in node.meta
    }
    values = {v.forward: values[v.forward] for v in held}
    module = backward_of(backward.module, held, summed, values, first=place.first, last=place.last)
    return replace(backward, module=module, name=name)
