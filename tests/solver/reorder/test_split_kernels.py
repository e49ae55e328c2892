"""Which cut of a kernel is tried first, by hand."""

from dataclasses import replace

from apsched.config import Caps, SolveOptions
from apsched.kinds import KernelCut
from apsched.solver.arrays.instance import Instance
from apsched.solver.reorder.min_memory import least_memory_with
from apsched.solver.reorder.reorder import ComputeMover
from apsched.solver.reorder.split_kernels import Fitting, _cuts_at_peak
from tests.helpers.problems.by_hand import ByHand

KIB = 1024


def test_the_cut_that_may_free_the_most_comes_first_though_others_are_nearer_to_the_peak() -> None:
    """Two kernels of two nodes: the second node of the one leaves 64 KiB for the end, that of the
    other 4 KiB, and stands nearer to the node of 128 KiB at which the peak is.
    """
    hand = ByHand()
    gather = hand.start("all_gather", "ag", hand.input("s", 512, kept=True), 512, 512)
    x = hand.compute("x", 1, hand.wait("w", gather), size=512)
    far = hand.compute("far", 1, x, size=512)
    large = hand.compute("large", 1, far, size=64 * KIB)
    near = hand.compute("near", 1, x, size=512)
    small = hand.compute("small", 1, near, size=4 * KIB)
    top = hand.compute("top", 1, x, size=128 * KIB)
    problem = hand.output(hand.compute("end", 1, top, large, small, size=512))
    kernels = [-1] * problem.num_nodes
    kernels[far] = kernels[large] = 0
    kernels[near] = kernels[small] = 1
    cuts = tuple(KernelCut(node=node, nodes=(node,), extra_ticks=(1,)) for node in (large, small))
    instance = Instance.of(
        replace(problem, kernels=tuple(kernels), cuts=cuts), Caps(max_compute_move=None)
    )
    floor = replace(least_memory_with(instance, None, SolveOptions()), lowered=())
    fitting = Fitting(instance=instance, mover=ComputeMover(instance), floor=floor)
    assert [cut.node for cut in _cuts_at_peak(fitting)] == [large, small]
