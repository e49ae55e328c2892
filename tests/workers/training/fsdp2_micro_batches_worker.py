"""One of several gloo processes that train a model under ``fully_shard`` with several micro-batches
a step: as a solved step says, with the same switches set by hand, and as torch has it; reports as
JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER[, NUM_REPLICAS])``, see ``processes.run_jobs``;
``FOLDER/NAME`` is the answer of ``apsched solve --accumulate`` for each of ``CASES``, with replicas
of ``HSDP``.
"""

import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from apsched.integrations.fsdp2_accumulation import apply_fsdp2_micro_batches
from apsched.models.llama import Llama
from tests.workers.training.fsdp2_worker import built_model, eager_model, watched

NUM_MICRO_BATCHES = 3
BLOCKS = ("layers.0", "layers.1", "layers.2")
ALL = (*BLOCKS, "norm+output", "(root)")
CASES: dict[str, dict[str, tuple[str, ...]]] = {
    "once": {"kept": (*BLOCKS, "norm+output"), "held": ALL, "summed": ALL},
    "reduced once": {"kept": (), "held": (), "summed": ALL},
    "some": {
        "kept": ("layers.2", "norm+output"),
        "held": ("layers.1", "layers.2", "norm+output"),
        "summed": ("layers.0", "(root)"),
    },
}
"""Units that are kept, stay gathered, and whose gradients are reduced once."""
HSDP: dict[str, dict[str, tuple[str, ...]]] = {
    "shards": {
        "kept": BLOCKS,
        "held": ("layers.0",),
        "summed": ("layers.2",),
        "shards": ("layers.0", "layers.1", "norm+output"),
    },
}
"""The same with ``shards``, those of which shards of gradients are all-reduced once."""


def main(rank: int, world_size: int, folder: Path, replicas: str = "1") -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=240)
    )
    num_replicas = int(replicas)
    cases = HSDP if num_replicas > 1 else CASES
    built = built_model(world_size, num_replicas=num_replicas)
    batches = [tuple(x.roll(k, -1) for x in built.inputs) for k in range(NUM_MICRO_BATCHES)]
    fewer = batches[: NUM_MICRO_BATCHES - 1]

    def model_of_job() -> Llama:
        return eager_model(world_size, num_replicas=num_replicas)

    report = {"untouched": trained(model_of_job(), batches, lambda k: None)}
    for name, units in cases.items():
        model = model_of_job()
        step = apply_fsdp2_micro_batches(model, folder / name)
        report[name] = {
            "solved": trained(model, batches, step.begin),
            "by hand": trained(*by_hand(model_of_job(), units, batches)),
            "solved, fewer": trained(
                model, fewer, lambda k, step=step: step.begin(k, last=k == len(fewer) - 1)
            ),
            "by hand, fewer": trained(*by_hand(model_of_job(), units, fewer)),
        }
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def by_hand(model: Llama, units: Mapping[str, tuple[str, ...]], batches: Any) -> Any:
    """Return a model, the batches, and the function that sets its switches for a micro-batch."""
    handles: dict[str, FSDPModule] = {"(root)": model, "norm+output": model.norm}
    handles |= {f"layers.{k}": block for k, block in enumerate(model.layers)}

    def switch(k: int) -> None:
        last = k == len(batches) - 1
        for name, handle in handles.items():
            handle.set_reshard_after_forward(name not in units["kept"], recurse=False)
            handle.set_reshard_after_backward(last or name not in units["held"], recurse=False)
            handle.set_requires_gradient_sync(last or name not in units["summed"], recurse=False)
            if not last and name in units.get("shards", ()):
                handle.set_requires_all_reduce(False, recurse=False)

    return model, batches, switch


def trained(model: Llama, batches: Any, begin: Callable[[int], None]) -> dict[str, Any]:
    """Return losses, gradients, and what happened in each forward and backward, of the second of
    two steps.
    """
    events = watched(model)
    for _ in range(2):
        losses, seen = [], []
        for parameter in model.parameters():
            parameter.grad = None
        for k, batch in enumerate(batches):
            begin(k)
            events.clear()
            loss = model(*batch)
            forward = list(events)
            events.clear()
            loss.backward()
            seen.append([forward, list(events)])
            losses.append(loss.item())
    gradients = [p.grad.to_local().double().sum().item() for p in model.parameters()]
    bits = [p.grad.to_local().view(torch.int32).sum().item() for p in model.parameters()]
    return {"losses": losses, "gradients": gradients, "bits": bits, "seen": seen}
