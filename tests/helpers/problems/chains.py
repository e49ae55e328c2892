"""Small problems of several chains that do not depend on each other."""

import random
from dataclasses import replace

from apsched.problem.problem import Problem
from tests.helpers.problems.by_hand import ByHand, line


def random_chains(
    rng: random.Random,
    *,
    num_chains: int = 2,
    num_stages: int,
    late: float = 0.0,
    num_gathers: int = 0,
) -> Problem:
    """Return chains of compute with a collective on the path behind each node but the last, on one
    stream or two; with the chance ``late`` its result is needed one node later. All chains share
    the parameters that are gathered.
    """
    kinds = {"all_reduce": "tp", "all_to_all": rng.choice(("tp", "ep"))}
    gathered = line(rng.randint(1, 20), rng.randint(1, 20))
    b = ByHand(
        prices={kind: line(rng.randint(1, 30)) for kind in kinds} | {"all_gather": gathered},
        bucket_launch_ticks=rng.randint(0, 2),
    )
    shards = [b.input(f"p{i}", 512, kept=True) for i in range(num_gathers)]
    parameters = [
        b.wait(f"g{i}", b.start("all_gather", f"ag{i}", shard, 512, 1024))
        for i, shard in enumerate(shards)
    ]
    needed = {rng.randrange(num_stages): parameter for parameter in parameters}
    chains: list[int] = []
    ends = []
    for chain in range(num_chains):
        x = b.input(f"x{chain}", 512)
        chains += [-1] * (len(b.names) - len(chains))
        results = [x]
        for stage in range(num_stages):
            is_late = len(results) > 1 and rng.random() < late
            taken = [x, results[-2 if is_late else -1], needed.get(stage, x)]
            x = b.compute(f"c{chain}{stage}", rng.randint(0, 30), *taken, size=512)
            if stage < num_stages - 1:
                kind = rng.choice(tuple(kinds))
                start = b.start(
                    kind,
                    f"s{chain}{stage}",
                    x,
                    512,
                    512,
                    group=kinds[kind],
                    on_path=True,
                    bucketable=False,
                    launch_ticks=b.bucket_launch_ticks,
                )
                results.append(b.wait(f"w{chain}{stage}", start))
        ends.append(b.compute(f"e{chain}", rng.randint(0, 9), x, results[-1], size=512))
        chains += [chain] * (len(b.names) - len(chains))
    problem = b.output(*ends)
    return replace(problem, chains=(*chains, -1))


def chains_of(works: tuple[tuple[int, ...], ...], transfer_ticks: int) -> Problem:
    """Return a chain for each of ``works``, with a collective between two of its nodes."""
    b = ByHand(prices={"all_reduce": line(transfer_ticks)})
    chains: list[int] = []
    ends = []
    for chain, work in enumerate(works):
        x = b.input(f"x{chain}", 512)
        chains += [-1] * (len(b.names) - len(chains))
        for k, ticks in enumerate(work):
            x = b.compute(f"c{chain}{k}", ticks, x, size=512)
            if k + 1 < len(work):
                start = b.start(
                    "all_reduce", f"s{chain}{k}", x, 512, 512, on_path=True, bucketable=False
                )
                x = b.wait(f"w{chain}{k}", start)
        ends.append(x)
        chains += [chain] * (len(b.names) - len(chains))
    return replace(b.output(*ends), chains=(*chains, -1))
