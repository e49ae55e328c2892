"""The nodes of several micro-batches in a row whose values are kept gathered, for pictures."""

from collections.abc import Sequence

from apsched.pipeline.load import LoadedGraph
from apsched.whole_step.accumulation.step import SolvedAccumulation, gradients_of
from apsched.whole_step.pair import kept_tensors, pair_of


def held_tensors(
    graphs: Sequence[LoadedGraph], found: SolvedAccumulation
) -> dict[str, tuple[str, ...]]:
    """Return graph -> nodes whose values are kept gathered, from forward to backward or until the
    next micro-batch, in ``found``, made of the pair ``graphs``: outputs of a graph, inputs of the
    next.
    """
    again = pair_of(graphs)
    kinds = (gradients_of(again[1], of_shards=of_shards) for of_shards in (False, True))
    sums = {one for kind in kinds for ones in kind.values() for one in ones}
    gradients = {name for one in sums for name in one.sum_names}
    return {
        name: tuple(sorted(set(tensors) - gradients))
        for pair in found.pairs
        for name, tensors in kept_tensors(again, pair.graphs).items()
    }
