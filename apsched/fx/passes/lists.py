"""The pass lists that apsched itself runs: values, to be joined, cut and added to."""

from collections.abc import Collection

from apsched.fx.passes.checkpointing import recompute_gathers
from apsched.fx.passes.roles import classify
from apsched.fx.passes.run_passes import PassList
from apsched.fx.passes.summed_scatters import fuse_summed_scatters
from apsched.fx.passes.sums_last import sums_last


def joint_passes(*, reshard_after_forward: bool = True, kept: Collection[str] = ()) -> PassList:
    """Return the passes that run on a joint graph before it is partitioned; parameters ``kept`` are
    not gathered again in backward.
    """
    return (classify(), recompute_gathers(reshard_after_forward=reshard_after_forward, kept=kept))


def add_before_reducing() -> PassList:
    """Return the passes that add the gradients of several micro-batches before they are reduced."""
    return (fuse_summed_scatters(),)


def add_at_the_end() -> PassList:
    """Return the passes that add the reduced gradients of several micro-batches at the end."""
    return (sums_last(),)
