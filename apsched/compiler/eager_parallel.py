"""One warning where a model is parallel in a way that graphs of a compiler do not show."""

import logging

from apsched.torch_compat.ddp import runs_in_ddp
from apsched.torch_compat.fsdp import runs_in_fsdp

logger = logging.getLogger(__name__)

_WAYS = {
    "fully_shard": (
        runs_in_fsdp,
        "apsched.tune_fsdp2(model, inputs) sets up its prefetches, and a model whose parameters"
        " are gathered when they are read (docs/compiler.md) is scheduled as a graph",
    ),
    "DistributedDataParallel": (
        runs_in_ddp,
        "apsched.ddp_buckets(model, inputs) says which buckets are best, and a model whose"
        " gradients are reduced by functional collectives (docs/compiler.md) is scheduled as a"
        " graph",
    ),
}
_WARNED: set[str] = set()


def warn_of_hidden_collectives(process_rank: int) -> None:
    """Warn, once in a job, where a graph without collectives belongs to a model whose collectives
    run outside of it.
    """
    for name, (is_used, way) in _WAYS.items():
        if name in _WARNED or not is_used():
            continue
        _WARNED.add(name)
        if process_rank == 0:
            logger.warning(
                "found %s and no collective in a graph of torch.compile: %s launches its own"
                " collectives outside of graphs, and apsched schedules none of them; %s",
                name,
                name,
                way,
            )
