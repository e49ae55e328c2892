"""gloo, with one thread for each group: its collectives run one after another, as NCCL's do on a
stream, and as the machine model has it.

By default a gloo group has two threads and runs two collectives at once
(``ProcessGroupGloo::Options``, torch): transfers that wait for each other in the model then share
the link, and a gather that sends while nothing comes in has its gaps filled by the next.
"""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from apsched.torch_compat.gloo import avoid_coalesced_gathers

NAME = "ordered_gloo"


def init(rank: int, world_size: int, init_method: str, timeout: timedelta) -> None:
    """Join the default process group; groups made later have one thread, too."""
    avoid_coalesced_gathers()
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _one_thread, devices=["cpu"])
    dist.init_process_group(
        NAME, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout
    )


def _one_thread(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._threads = 1
    options._timeout = timeout
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    options._devices = [
        gloo.create_device(interface=name) if name else gloo.create_default_device()
    ]
    return gloo(store, rank, world_size, options)
