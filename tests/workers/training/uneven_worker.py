"""One of three gloo processes that train a model whose parameters do not divide by three, with
apsched and without; writes what it found as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
import os
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import init_device_mesh

from apsched.compiler import schedule_graph
from tests.helpers.graphs.small_models import shard
from tests.workers.training.compiler_worker import NUM_STEPS, Record, compared, train


def odd_layers() -> nn.Module:
    """Shards of 22, 22 and 20, of 22, 22 and 21, and of 1, 1 and none."""
    return nn.Sequential(
        nn.Linear(64, 65), nn.GELU(), nn.Linear(65, 64), nn.GELU(), nn.Linear(64, 2), nn.GELU()
    )


def odd_case() -> tuple[nn.Module, list[tuple[torch.Tensor, ...]]]:
    """Return module and inputs, the same in each call."""
    torch.manual_seed(0)
    module = shard(odd_layers(), init_device_mesh("cpu", (dist.get_world_size(),)))
    torch.manual_seed(dist.get_rank())
    return module, [(torch.randn(4, 64),)] * NUM_STEPS


@cache
def without(plain: str) -> Record:
    """Return what training under torch's backend records, once for all settings of apsched."""
    return train(*odd_case(), plain)


def odd(plain: str, **settings: object) -> dict[str, object]:
    return compared(*odd_case(), without(plain), **settings)


def one_fails(**settings: object) -> dict[str, object]:
    """Process rank 1 cannot capture any graph."""
    before = schedule_graph.capture_graph

    def fails(*arguments: object, **more: object) -> object:
        raise ZeroDivisionError("a bug")

    try:
        if dist.get_rank() == 1:
            schedule_graph.capture_graph = fails
        return odd(on_error="fallback", **settings)
    finally:
        schedule_graph.capture_graph = before


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.parent / "inductor")  # kernels of all ranks
    # torch's own cache of joint graphs takes the shards of one process rank for those of another
    functorch_config.enable_autograd_cache = False
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=600)
    )
    found = {
        "kept": odd(plain="aot_eager"),
        "gathered again": odd(plain="aot_eager", reshard_after_forward=True),
        "no deadline": odd(plain="aot_eager", deadline_s=None),
        "inductor": odd(plain="inductor", inductor=True),
        "one fails": one_fails(plain="aot_eager"),
        "one fails under Inductor": one_fails(plain="inductor", inductor=True),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
