"""The pass lists that apsched itself runs: values, to be joined, cut and added to."""

from apsched.passes.manager import PassList
from apsched.passes.recompute import recompute_gathers
from apsched.passes.roles import classify


def joint_passes(*, reshard_after_forward: bool = True) -> PassList:
    """Return what runs on a joint graph before it is partitioned."""
    return (classify(), recompute_gathers(reshard_after_forward=reshard_after_forward))
