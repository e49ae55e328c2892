"""Two gathers beside a chain of compute, worked out by hand."""

from apsched.problem.problem import Problem
from tests.helpers.problems.by_hand import ByHand, line


def two_gathers(*, needed_by: tuple[int, int], chained: bool = False) -> Problem:
    """Return a chain of four compute nodes of 10 ticks and two gathers of 25, each for one of the
    nodes; ``chained``: the second one gathers the result of the first one once more.
    """
    b = ByHand(prices={"all_gather": line(25)})
    x, gathered = b.input("x", 512), []
    for i in range(2):
        of = gathered[0] if chained and i else b.input(f"s{i}", 512, kept=True)
        start = b.start("all_gather", f"ag{i}", of, 512, 512, group=f"g{chained and i}")
        gathered.append(b.wait(f"w{i}", start))
    for k in range(4):
        needs = [gathered[i] for i in range(2) if needed_by[i] == k]
        x = b.compute(f"k{k}", 10, x, *needs, size=512)
    return b.output(x)
