"""One of two gloo processes that pass schedules to eager FSDP2: not the same, none on one of them,
and then the same; reports as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import apsched
from apsched.compiler.memory_in_use import MemoryInUse
from apsched.integrations.fsdp2 import apply_fsdp2, fsdp2_plan
from apsched.integrations.fsdp2_accumulation import apply_fsdp2_micro_batches
from apsched.report.answer.step import StepResult
from apsched.torch_compat.fsdp import resharded_to
from tests.helpers.graphs.small_models import Residual

apply, apply_several = (
    partial(one, deadline_s=60.0) for one in (apply_fsdp2, apply_fsdp2_micro_batches)
)
TOKENS = torch.zeros(1, 2, dtype=torch.long)


def sharded() -> nn.Module:
    torch.manual_seed(0)
    model = Residual()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def solved(keep: str, accumulate: int = 1) -> StepResult:
    model = sharded()
    return apsched.solve_step(
        model,
        (TOKENS,),
        keep=keep,
        accumulate=accumulate,
        plan=fsdp2_plan(model, *apsched.capture(model, (TOKENS,))),
        caps=apsched.Caps(max_compute_move=0),
        memory_cap="none",
        budget=0.0,
    )


def in_use(rank: int, accumulate: int) -> dict[str, list[int | None]]:
    """Return the other memory in the accounts of a step in the job, and its memory caps, where each
    process rank has some in use.
    """
    used = MemoryInUse(allocated_bytes=(1 + rank) * 2**30)
    with mock.patch("apsched.compiler.memory_in_use.measured", return_value=used):
        step = apsched.solve_step(
            sharded(), (TOKENS,), accumulate=accumulate, in_job=True, budget=0.0
        )
    return {
        r.problem.name: [r.account.beside.other_bytes, r.caps.memory_cap_bytes]
        for r in step.results
        if r.account is not None
    }


def state_of(model: nn.Module) -> list[Any]:
    """Return the settings that apsched changes."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    states = [unit._get_fsdp_state() for unit in units]
    ahead = [
        len(s._states_to_forward_prefetch) + len(s._states_to_backward_prefetch) for s in states
    ]
    return [[resharded_to(unit) for unit in units], ahead]


def outcome(change: Callable[[nn.Module], object]) -> dict[str, Any]:
    """Return the error of ``change``, and the settings before and behind it."""
    model = sharded()
    before, error = state_of(model), None
    try:
        change(model)
    except apsched.ApschedError as raised:
        error = [type(raised).__name__, str(raised)]
    changed, losses = before != state_of(model), []
    for _ in range(2):
        loss = model(TOKENS)
        loss.backward()
        losses.append(loss.item())
    return {"error": error, "changed": changed, "losses": losses}


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=240)
    )
    kept = {words: solved(words).results for words in ("none", "all")}
    steps = {words: solved(words, accumulate=2) for words in ("none", "all")}
    own, missing = ("none", "all")[rank], folder / "missing"
    wrong = missing if rank else kept["none"]
    report = {
        "in use": {several: in_use(rank, several) for several in (1, 3)},
        "untouched": outcome(lambda model: None),
        "same": outcome(lambda model: apply(model, kept["all"])),
        "differ": outcome(lambda model: apply(model, kept[own])),
        "fails": outcome(lambda model: apply(model, wrong)),
        "micro-batches": outcome(lambda model: apply_several(model, steps[own])),
        "same again": outcome(lambda model: apply(model, kept["all"])),
        # the last: process rank 1 counts one comparison less from here on
        "late": outcome(lambda model: rank or apply_fsdp2(model, kept["all"], deadline_s=2.0)),
    }
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
