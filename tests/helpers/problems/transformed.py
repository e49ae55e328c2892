"""The same problem in another guise: nodes, storages, keys and streams in another order, or
everything larger by a factor.
"""

import math
import random
from dataclasses import replace

from apsched.config import Caps
from apsched.costs.price_curve import PriceCurve
from apsched.kinds import NodeKind
from apsched.problem.problem import Key, Problem, Storage, check_problem


def enlarged(problem: Problem, ticks: int, size: int) -> Problem:
    """Return ``problem`` with every time ``ticks`` and every number of bytes ``size`` times as
    large.
    """

    def curve(price: PriceCurve) -> PriceCurve:
        return PriceCurve(
            size_bytes=tuple(b * size for b in price.size_bytes),
            price_ticks=tuple(t * ticks for t in price.price_ticks),
        )

    return replace(
        problem,
        duration_ticks=tuple(t * ticks for t in problem.duration_ticks),
        copy_price=curve(problem.copy_price),
        keys=tuple(
            replace(k, price=curve(k.price), launch_ticks=k.launch_ticks * ticks)
            for k in problem.keys
        ),
        storages=tuple(replace(s, size_bytes=s.size_bytes * size) for s in problem.storages),
        collectives=tuple(
            replace(
                c,
                **{
                    name: getattr(c, name) * size
                    for name in ("size_bytes", "input_bytes", "output_bytes", "cast_bytes")
                },
            )
            for c in problem.collectives
        ),
    )


def enlarged_caps(caps: Caps, size: int) -> Caps:
    """Return ``caps`` with every number of bytes ``size`` times as large."""
    names = ("memory_cap_bytes", "bucket_cap_bytes", "in_flight_cap_bytes")
    return replace(
        caps, **{name: value * size for name in names if (value := getattr(caps, name)) is not None}
    )


def exact_ticks(problem: Problem) -> int:
    """Return the least factor of all ticks that leaves no price of any number of bytes to be
    rounded.
    """
    curves = [problem.copy_price, *(key.price for key in problem.keys)]
    runs = [
        b - a
        for curve in curves
        for a, b in zip(curve.size_bytes, curve.size_bytes[1:], strict=False)
    ]
    return math.lcm(*runs)


def permuted(problem: Problem, rng: random.Random) -> Problem:
    """Return ``problem`` with everything renumbered and renamed that means nothing.

    Nodes stand in another legal order (inputs first, compute that keeps its order in it, the output
    last), so that collectives are numbered anew; storages, keys and streams are shuffled.
    """
    order = _another_order(problem, rng)
    rank = {node: i for i, node in enumerate(order)}
    storages, keys, streams = (
        _shuffled(len(values), rng) for values in (problem.storages, problem.keys, problem.streams)
    )
    storage_at, key_at, stream_at = (
        {old: new for new, old in enumerate(values)} for values in (storages, keys, streams)
    )

    def nodes(old: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(rank[node] for node in old))

    def storage(s: Storage) -> Storage:
        return replace(s, birth=rank.get(s.birth, -1), uses=nodes(s.uses))

    collectives = [
        replace(
            c,
            start=rank[c.start],
            wait=rank[c.wait],
            key=key_at[c.key],
            input_storage=storage_at[c.input_storage],
            output_storage=storage_at[c.output_storage],
            prologue=nodes(c.prologue),
            cast=nodes(c.cast),
            epilogue=nodes(c.epilogue),
        )
        for c in problem.collectives
    ]
    result = replace(
        problem,
        name="permuted",
        node_names=tuple(f"n{rng.random()}" for _ in order),
        kinds=tuple(problem.kinds[node] for node in order),
        duration_ticks=tuple(problem.duration_ticks[node] for node in order),
        predecessors=tuple(nodes(problem.predecessors[node]) for node in order),
        modules=tuple(problem.modules[node] for node in order),
        storages=tuple(storage(problem.storages[old]) for old in storages),
        keys=tuple(_key(problem.keys[old], stream_at[problem.keys[old].stream]) for old in keys),
        collectives=tuple(sorted(collectives, key=lambda c: c.start)),
        streams=tuple(f"group{new}" for new, _ in enumerate(streams)),
    )
    check_problem(result)
    return result


def _key(key: Key, stream: int) -> Key:
    return replace(key, stream=stream, group=f"group{stream}")


def _shuffled(count: int, rng: random.Random) -> list[int]:
    return rng.sample(range(count), count)


def _another_order(problem: Problem, rng: random.Random) -> list[int]:
    """Return a random topological order that keeps the compute order."""
    compute_rank = {node: k for k, node in enumerate(problem.compute_order)}
    missing = [set(before) for before in problem.predecessors]
    for node, k in compute_rank.items():
        if k:
            missing[node].add(problem.compute_order[k - 1])
    inputs = [node for node, kind in enumerate(problem.kinds) if kind is NodeKind.INPUT]
    order = rng.sample(inputs, len(inputs))
    left = [node for node in range(problem.num_nodes) if node not in set(inputs)]
    done = set(order)
    while left:
        ready = [
            node
            for node in left
            if missing[node] <= done
            and (problem.kinds[node] is not NodeKind.OUTPUT or len(left) == 1)
        ]
        order.append(rng.choice(ready))
        done.add(order[-1])
        left.remove(order[-1])
    return order
