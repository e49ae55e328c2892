"""One warning where a model is parallel in a way that graphs of a compiler do not show."""

import logging

from apsched.torch_compat.ddp import reduces_in_graphs, runs_in_ddp
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
_PYTHON_REDUCER = 'optimize_ddp = "python_reducer"'
_WARNED: set[str] = set()


def warn_of_hidden_collectives(process_rank: int, direction: str) -> None:
    """Warn, once in a job, where a graph of ``direction`` without collectives belongs to a model
    whose collectives run outside of it.
    """
    if direction == "backward" and reduces_in_graphs() and _PYTHON_REDUCER not in _WARNED:
        _WARNED.add(_PYTHON_REDUCER)
        if process_rank == 0:  # compiled autograd compiles no backward graph by itself
            logger.warning(
                "expected the all-reduces of DDP in the graph of backward, as torch._dynamo.config"
                ".%s asks for, found a backward graph without collectives: apsched schedules none"
                " of them; set torch._dynamo.config.compiled_autograd = True before torch.compile"
                " is called, and call loss.backward() in the compiled function"
                " (docs/integrations.md)",
                _PYTHON_REDUCER,
            )
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
