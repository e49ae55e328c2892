"""One of several gloo processes that train under ``fully_shard`` with several micro-batches a step:
tuned for all of them in one call, with the same switches set by hand, and as torch has it; reports
as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER[, NUM_REPLICAS])``, see ``processes.run_jobs``
"""

import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import apsched
from apsched.integrations.eager.tuning import Fsdp2Tuning
from apsched.models.llama import Llama
from tests.helpers.graphs.eager_fsdp2 import digest, shards_of
from tests.workers.training.fsdp2_worker import built_model, eager_model, watched

NUM_MICRO_BATCHES = 3
QUICK = {"budget": 0.0, "deadline_s": 60.0, "accumulate": NUM_MICRO_BATCHES}
CASES: dict[str, dict[str, Any]] = {
    "auto": {"memory_cap": "floor+150KiB"},
    "all": {"keep": "all", "memory_cap": "none"},
    "none": {"keep": "none", "memory_cap": "none"},
    "stated": {"keep": [r"layers\.1\..*", r"layers\.[02]\..* @next", r"(norm|output)\..* @sum"]},
}
SWITCHES = ("reshard_after_forward", "reshard_after_backward", "reduce_gradients")


def main(rank: int, world_size: int, folder: Path, replicas: str = "1") -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=240)
    )
    num_replicas = int(replicas)
    inputs = built_model(world_size, num_replicas=num_replicas).inputs
    batches = [tuple(x.roll(k + rank, -1) for x in inputs) for k in range(NUM_MICRO_BATCHES)]

    def model_of_job() -> Llama:
        return eager_model(world_size, num_replicas=num_replicas)

    report: dict[str, Any] = {"untouched": trained(model_of_job(), batches, lambda k: None)}
    for name, case in CASES.items():
        model = model_of_job()
        found = apsched.tune_fsdp2(model, batches[0], **QUICK, **case)
        by_hand = model_of_job()
        switches = [switches_of(found, k) for k in range(NUM_MICRO_BATCHES)]
        report[name] = {
            "text": str(found),
            "step_time_us": found.step_time_us,
            "choices": dict(found.choices),
            "switches": switches,
            "tuned": trained(model, batches, found.begin),
            "by hand": trained(by_hand, batches, set_by_hand(handles_of(by_hand), switches)),
        }
    report["differs"] = differs(rank, model_of_job(), batches[0])
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def switches_of(found: Fsdp2Tuning, micro_batch: int) -> dict[str, dict[str, bool]]:
    units = found.micro_batches.settings[micro_batch].units
    names = (*SWITCHES, "all_reduce_gradients")
    return {unit.name: {name: getattr(unit, name) for name in names} for unit in units}


def handles_of(model: Llama) -> dict[str, FSDPModule]:
    handles: dict[str, FSDPModule] = {"(root)": model, "norm+output": model.norm}
    return handles | {f"layers.{k}": block for k, block in enumerate(model.layers)}


def set_by_hand(
    handles: Mapping[str, FSDPModule], switches: list[Mapping[str, Mapping[str, bool]]]
) -> Callable[[int], None]:
    """Return the function that sets the switches of a micro-batch, without any prefetch."""

    def switch(micro_batch: int) -> None:
        for name, wanted in switches[micro_batch].items():
            handle = handles[name]
            handle.set_reshard_after_forward(wanted["reshard_after_forward"], recurse=False)
            handle.set_reshard_after_backward(wanted["reshard_after_backward"], recurse=False)
            handle.set_requires_gradient_sync(wanted["reduce_gradients"], recurse=False)
            both = wanted["reduce_gradients"] and wanted["all_reduce_gradients"]
            handle.set_requires_all_reduce(both, recurse=False)

    return switch


def trained(model: Llama, batches: Any, begin: Callable[[int], None]) -> dict[str, Any]:
    """Return the losses of two steps, the weights behind them, and the collectives of the
    second.
    """
    events = watched(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses: list[float] = []
    for _ in range(2):
        seen = []
        for k, batch in enumerate(batches):
            begin(k)
            events.clear()
            loss = model(*batch)
            loss.backward()
            seen.append([event for event in events if event.split()[0] in _COLLECTIVES])
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "weights": digest(shards_of(model)), "seen": seen}


_COLLECTIVES = ("gather", "reduce", "all-reduce")


def differs(rank: int, model: Llama, inputs: Any) -> list[str]:
    """One process rank states another number of micro-batches than the others."""
    try:
        apsched.tune_fsdp2(model, inputs, **{**QUICK, "accumulate": 2 + (rank == 1)})
    except apsched.ApschedError as error:
        return [type(error).__name__, str(error)]
    return []
