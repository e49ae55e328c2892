"""The pass lists that apsched itself runs: values, to be joined, cut and added to."""

from collections.abc import Collection

from apsched.fx.passes.checkpointing import recompute_gathers
from apsched.fx.passes.duplicates import deduplicate_gathers, fuse_summed_scatters
from apsched.fx.passes.roles import classify
from apsched.fx.passes.round_trips import undo_round_trips
from apsched.fx.passes.run_passes import PassList, without


def joint_passes(*, reshard_after_forward: bool = True, kept: Collection[str] = ()) -> PassList:
    """Return what runs on a joint graph before it is partitioned; parameters ``kept`` are not
    gathered again in backward.
    """
    return (classify(), recompute_gathers(reshard_after_forward=reshard_after_forward, kept=kept))


def add_before_reducing() -> PassList:
    """Return what adds the gradients of several micro-batches before they are reduced."""
    return (fuse_summed_scatters(),)


def shortening_passes(*, bitwise: bool) -> PassList:
    """Return what takes work out of a joint graph, to be handed to ``capture_module``; with
    ``bitwise`` only what rounds nothing anew.
    """
    passes = (deduplicate_gathers(), undo_round_trips(), fuse_summed_scatters())
    return without(passes, "fuse_summed_scatters") if bitwise else passes
