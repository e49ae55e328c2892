"""One of four gloo processes that train a model under tensor parallelism and ``fully_shard``, tuned
by ``tune_fsdp2`` and not; of eight with two replicas, too. Reports as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import apsched
from tests.helpers.graphs.tensor_parallel import PLANS, built, tied_again
from tests.workers.training.tune_layouts_worker import QUICK, tokens_of, trained


def tuned(
    build: Callable[[], nn.Module], tokens: torch.Tensor, **settings: object
) -> dict[str, object]:
    model = build()
    found = apsched.tune_fsdp2(model, (tokens,), **QUICK, **settings)
    return {
        "settings": str(found.settings),
        "units": [unit.name for unit in found.settings.units],
        "times": [found.step_time_us, found.untuned_us],
        "on the path": [sum(c.on_path for c in r.problem.collectives) for r in found.results],
        "trained": trained(model, {"tokens": tokens}),
    }


def other_on_one(rank: int, tokens: torch.Tensor) -> bool:
    """Return whether the model stays as it is where process rank 1, which shares a tensor-parallel
    group with rank 0 alone, has another choice.
    """
    keep = "all" if rank == 1 else "none"
    model = built(PLANS[0])
    found = apsched.tune_fsdp2(model, (tokens,), keep=keep, **QUICK, on_error="fallback")
    return found.settings is None


def replicated(tokens: torch.Tensor) -> dict[str, object]:
    build = partial(built, PLANS[1], replicas=2)
    return {
        "as it was": trained(build(), {"tokens": tokens}),
        "tuned": tuned(build, tokens, keep="auto"),
    }


def in_one_replica(rank: int, tokens: torch.Tensor) -> dict[str, object]:
    ways = {plan: partial(built, plan) for plan in PLANS} | {"tied again": tied_again}
    report: dict[str, object] = {
        name: {
            "as it was": trained(build(), {"tokens": tokens}),
            "tuned": tuned(build, tokens),
            "kept": tuned(build, tokens, keep="auto"),
        }
        for name, build in ways.items()
    }
    return report | {"other on one": other_on_one(rank, tokens)}


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=400)
    )
    tokens = tokens_of(rank // 2)  # those of one tensor-parallel group have the same
    report = replicated(tokens) if world_size == 8 else in_one_replica(rank, tokens)
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
