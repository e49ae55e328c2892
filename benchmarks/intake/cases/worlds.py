"""Process groups for the rest of this process."""

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from apsched.capture.fake_world import world
from apsched.torch_compat.gloo import avoid_coalesced_gathers

_OPEN = ExitStack()
_TIMEOUT = timedelta(seconds=120)


def running_world(size: int) -> None:
    """Start a fake process group of ``size`` that ends with the process; a running one is used."""
    _OPEN.enter_context(world(size))


def gloo_world(rank: int, size: int, folder: str) -> None:
    """Join the gloo processes that meet in ``folder``."""
    meeting = (Path(folder) / "store").resolve().as_uri()
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=size, timeout=_TIMEOUT
    )
    avoid_coalesced_gathers()
