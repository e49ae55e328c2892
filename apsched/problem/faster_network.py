"""The same problem on a faster network: only the price of a byte between nodes changes. No torch,
so graph files suffice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from apsched.costs.clusters.cluster import Cluster
from apsched.costs.network.alpha_beta import collective_us, group_shape
from apsched.costs.price_curve import PriceCurve, sample_curve
from apsched.kinds import PRICED_KINDS
from apsched.problem.problem import Key, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class FasterNetwork:
    """A problem whose transfers between nodes were priced again, and the changes."""

    problem: Problem
    gbit_per_s_before: float
    gbit_per_s_after: float
    """Of each process rank."""
    priced_anew: tuple[str, ...]
    """Groups whose prices are those of the cluster's formulas, and stay so."""
    scaled: tuple[str, ...]
    """Groups with other prices (a table, a model of the user's own): the price of a byte was scaled
    by before / after, latency kept.
    """
    unchanged: tuple[str, ...]
    """Groups between nodes that this does not make faster: their links inside the nodes limit them.
    """


def faster_network(
    problem: Problem,
    cluster: Cluster,
    group_ranks: Mapping[str, Sequence[int]],
    more_gbit_per_s: float = 1.0,
) -> FasterNetwork:
    """Return ``problem`` with ``more_gbit_per_s`` for each process rank of ``cluster`` between
    nodes.

    The curves of groups on several nodes change, those within a node stay. Compute, copies and
    launches stay.
    """
    before = cluster.inter_node.gbit_per_s_per_rank
    after = before + more_gbit_per_s
    faster = replace(cluster, inter_node=replace(cluster.inter_node, gbit_per_s_per_rank=after))
    keys: list[Key] = []
    anew: list[str] = []
    scaled: list[str] = []
    unchanged: list[str] = []
    for key in problem.keys:
        ranks = group_ranks.get(key.group) or range(key.group_size)
        price = key.price
        if group_shape(cluster, tuple(ranks)).num_nodes > 1:
            if price == _formula(cluster, key, ranks):
                price = _formula(faster, key, ranks) or price
                (anew if price != key.price else unchanged).append(key.group)
            else:
                price = _scaled(price, before / after)
                scaled.append(key.group)
        keys.append(replace(key, price=price))
    changed = {*anew, *scaled}
    return FasterNetwork(
        problem=replace(problem, keys=tuple(keys)),
        gbit_per_s_before=before,
        gbit_per_s_after=after,
        priced_anew=tuple(dict.fromkeys(anew)),
        scaled=tuple(dict.fromkeys(scaled)),
        unchanged=tuple(group for group in dict.fromkeys(unchanged) if group not in changed),
    )


def _formula(cluster: Cluster, key: Key, ranks: Sequence[int]) -> PriceCurve | None:
    """Return the curve that the formulas of ``cluster`` give; ``None`` for a kind that they do not
    know.
    """
    if key.kind not in PRICED_KINDS:
        return None
    shape = group_shape(cluster, tuple(ranks))
    return sample_curve(lambda size_bytes: collective_us(cluster, key.kind, shape, size_bytes))


def _scaled(price: PriceCurve, share: float) -> PriceCurve:
    latency = price.price_ticks[0]
    return PriceCurve(
        size_bytes=price.size_bytes,
        price_ticks=tuple(latency + round((p - latency) * share) for p in price.price_ticks),
    )
