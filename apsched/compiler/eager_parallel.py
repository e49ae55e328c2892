"""One warning where a model is parallel in a way that graphs of a compiler do not show."""

import logging
from collections.abc import Callable

from apsched.torch_compat.ddp import reduces_in_graphs, runs_in_ddp
from apsched.torch_compat.fsdp import runs_in_fsdp

logger = logging.getLogger(__name__)

_WAYS: dict[str, tuple[Callable[[str], bool], str]] = {
    "fully_shard": (
        lambda _: runs_in_fsdp(),
        "apsched.tune_fsdp2(model, inputs) sets up its prefetches, and a model whose parameters"
        " are gathered when they are read (docs/compiler.md) is scheduled as a graph",
    ),
    "DistributedDataParallel": (
        lambda _: runs_in_ddp(),
        "apsched.ddp_buckets(model, inputs) says which buckets are best, and a model whose"
        " gradients are reduced by functional collectives (docs/compiler.md) is scheduled as a"
        " graph",
    ),
    'DistributedDataParallel with optimize_ddp="python_reducer"': (
        lambda direction: direction == "backward" and reduces_in_graphs(),
        "set torch._dynamo.config.compiled_autograd = True before torch.compile is called, and call"
        " loss.backward() in the compiled function (docs/integrations.md), so that its all-reduces"
        " are in the graph",
    ),
}
"""Name -> whether a graph of a direction (``forward``, ``backward``) belongs to such a model, and
how apsched schedules its collectives.
"""
_WARNED: set[str] = set()


def warn_of_hidden_collectives(process_rank: int, direction: str) -> None:
    """Warn, once in a job, where a graph of ``direction`` without collectives belongs to a model
    whose collectives run outside of it.
    """
    for name, (is_used, way) in _WAYS.items():
        if name in _WARNED or not is_used(direction):
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
