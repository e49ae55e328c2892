"""Problems of equal layers, made by hand: a head, layers of gathers, compute and (backward)
reductions, a tail.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from apsched.problem.problem import Problem
from tests.helpers.problems.by_hand import ByHand, line


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: a compute node for each entry, each with a parameter to gather, and in backward a
    gradient to reduce.
    """

    ticks: tuple[int, ...] = (40, 60)
    shard_bytes: tuple[int, ...] = (2048, 8192)
    """0: this node has no parameter."""
    saved_bytes: int = 1024
    """Activation that each node leaves behind for backward (forward), or takes from forward
    (backward).
    """
    on_path: bool = False
    """An all-reduce on the path (tensor parallelism) before the last node."""
    chained: bool = False
    """The reduce-scatter is followed by an all-reduce over replicas (HSDP)."""


WORLD = 4
LAUNCH_TICKS = 1


def layered(
    layers: Sequence[Layer], *, backward: bool = False, ticks: tuple[int, int] = (10, 1)
) -> Problem:
    """Return a problem of ``layers``; ``ticks`` is latency and price per KiB of a transfer."""
    price = line(*ticks)
    b = ByHand(
        prices={"all_gather": price, "reduce_scatter": price, "all_reduce": price},
        copy_price=line(1, 0),
        bucket_launch_ticks=LAUNCH_TICKS,
    )
    parameters = [
        [
            b.input(f"p{i}_{j}", size, kept=True) if size else -1
            for j, size in enumerate(x.shard_bytes)
        ]
        for i, x in enumerate(layers)
    ]
    saved = [
        [b.input(f"a{i}_{j}", x.saved_bytes) for j in range(len(x.ticks))] if backward else []
        for i, x in enumerate(layers)
    ]
    x = b.input("x", 512)
    x = b.compute("head", 5, x, size=512)
    outputs = []
    for i, layer in enumerate(layers):
        x = _layer(b, i, layer, x, parameters[i], saved[i], outputs, backward)
    x = b.compute("tail", 7, x, size=512)
    return b.output(x, *outputs)


def _layer(
    b: ByHand,
    i: int,
    layer: Layer,
    x: int,
    parameters: list[int],
    saved: list[int],
    outputs: list[int],
    backward: bool,
) -> int:
    for j, (ticks, shard) in enumerate(zip(layer.ticks, layer.shard_bytes, strict=True)):
        taken = [x]
        if layer.on_path and j == len(layer.ticks) - 1:
            partial = b.compute(f"partial{i}", 3, x, size=512)
            taken = [
                b.wait(
                    f"tpw{i}",
                    b.start(
                        "all_reduce",
                        f"tp{i}",
                        partial,
                        512,
                        512,
                        group="tp",
                        on_path=True,
                        bucketable=False,
                    ),
                )
            ]
        if shard:
            start = b.start(
                "all_gather",
                f"ag{i}_{j}",
                parameters[j],
                shard,
                shard * WORLD,
                launch_ticks=LAUNCH_TICKS,
            )
            taken.append(b.wait(f"agw{i}_{j}", start))
        if backward:
            taken.append(saved[j])
        x = b.compute(f"f{i}_{j}", ticks, *taken, size=512)
        if not backward:
            outputs.append(b.compute(f"keep{i}_{j}", 1, x, size=layer.saved_bytes))
        elif shard:
            gradient = b.compute(f"g{i}_{j}", ticks, x, size=shard * WORLD)
            start = b.start(
                "reduce_scatter",
                f"rs{i}_{j}",
                gradient,
                shard * WORLD,
                shard,
                launch_ticks=LAUNCH_TICKS,
            )
            result = b.wait(f"rsw{i}_{j}", start)
            if layer.chained:
                start = b.start(
                    "all_reduce",
                    f"ar{i}_{j}",
                    result,
                    shard,
                    shard,
                    group="replicate",
                    launch_ticks=LAUNCH_TICKS,
                )
                result = b.wait(f"arw{i}_{j}", start)
            outputs.append(result)
    return x
