"""A problem by hand for tests of plans: four gathers for four compute nodes, two reductions behind
them.
"""

from dataclasses import replace

from apsched.problem.problem import Problem
from tests.helpers.problems.by_hand import ByHand, line

KIB = 1024


def gathers_and_reductions() -> Problem:
    """Gathers 0 to 3 (2 and 3 in a process group of their own) are needed by compute nodes 0 to 3;
    reductions 4 and 5 follow 2 and 3.
    """
    hand = ByHand(prices={"all_gather": line(5, 1), "reduce_scatter": line(5, 1)})
    shards = [hand.input(f"shard_{i}", KIB, kept=True) for i in range(4)]
    starts = [
        hand.start(
            "all_gather",
            f"gather_{i}",
            shard,
            KIB,
            2 * KIB,
            group="dp" if i < 2 else "ep",
            launch_ticks=1,
        )
        for i, shard in enumerate(shards)
    ]
    results, last = [], []
    for i, start in enumerate(starts):
        last = [
            hand.compute(f"compute_{i}", 10, *last, hand.wait(f"wait_{i}", start), size=2 * KIB)
        ]
        if i >= 2:
            reduction = hand.start(
                "reduce_scatter", f"reduce_{i}", last[0], 2 * KIB, KIB, launch_ticks=1
            )
            results.append(hand.wait(f"reduced_{i}", reduction))
    return replace(hand.output(*last, *results), name="random")
