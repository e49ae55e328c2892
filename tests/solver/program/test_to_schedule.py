"""A program becomes a schedule of all nodes, each in a place that its dependences allow."""

import pytest

from apsched.config import Caps
from apsched.schedule.verify import verify
from apsched.solver.arrays.instance import Instance
from apsched.solver.arrays.partition import Pricer
from apsched.solver.program.to_schedule import expand
from apsched.solver.search.construct import construct
from apsched.solver.search.launch_policy import Policy
from tests.helpers.problems.by_hand import ByHand


@pytest.mark.parametrize("buckets", [[(0,), (1,)], [(0, 1)]])
def test_a_view_of_a_launch_that_is_not_waited_for_follows_the_launch(
    buckets: list[tuple[int, ...]],
) -> None:
    """The graph returns views of what is on its way, which take no time: they stand behind the
    launch, alone or in a bucket.
    """
    hand = ByHand()
    gradients = [hand.compute(f"g{i}", 10, hand.input(f"x{i}", 512), size=512) for i in range(2)]
    starts = [hand.start("all_reduce", f"ar{i}", g, 512, 512) for i, g in enumerate(gradients)]
    views = [hand.view(f"v{i}", start) for i, start in enumerate(starts)]
    waits = [hand.wait(f"w{i}", start) for i, start in enumerate(starts)]
    problem = hand.output(*views, *waits)
    instance = Instance.of(problem)
    pricer = Pricer(instance)
    policy = Policy(lead=0.0, copy_out_early=True)
    program = construct(pricer, pricer.partition(buckets), policy, Caps())
    assert verify(problem, expand(instance, program), Caps()) == ()
