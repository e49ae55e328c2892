"""One of several gloo processes that train under torch.compile, with apsched and without; writes
how far apart they are as JSON.

Without is torch's backend of the same kind, or eager FSDP2.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import copy
import json
import math
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._inductor import config
from torch.distributed.device_mesh import init_device_mesh

import apsched
from apsched.compiler.memory_in_use import MemoryInUse
from apsched.models.build import build
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions
from apsched.schedule.schedule import StepKind
from tests.helpers.graphs.eager_fsdp2 import (
    descended,
    digest,
    fully_sharded,
    shards_of,
    trained_eagerly,
)
from tests.helpers.graphs.small_models import WIDTH, Blocks, Broken, layers, shard
from tests.workers.training.eager_worker import RATE, built_model, eager

NUM_STEPS = 3
QUICK = {"budget": 0.0, "memory_cap": "none", "deadline_s": 200.0}
"""Others wait while one compiles C++ on a busy machine."""
MESHES = {2: "fsdp=2", 4: "fsdp=2,tp=2"}

Record = list[torch.Tensor]


def train(module: nn.Module, inputs: list[tuple[torch.Tensor, ...]], backend: object) -> Record:
    """Return losses and gradients of some steps of gradient descent; the parameters are put
    back.
    """
    torch._dynamo.reset()
    start = [parameter.detach().clone() for parameter in module.parameters()]
    compiled = torch.compile(module, backend=backend)
    record = []
    for given in inputs:
        loss = compiled(*given).float().square().mean()
        loss.backward()
        record.append(loss.detach().clone())
        for parameter in module.parameters():
            record.append(parameter.grad.to_local().clone())
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            parameter.grad = None
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), start, strict=True):
            parameter.copy_(value)
    return record


def compare(expected: Record, found: Record) -> dict[str, float]:
    pairs = list(zip(expected, found, strict=True))
    distances = [
        ((a - b).abs().max() / a.abs().max().clamp_min(1e-30)).item() for a, b in pairs if a.numel()
    ]
    return {
        "num_unequal": sum(not torch.equal(a, b) for a, b in pairs),
        "largest_distance": max(distances),
    }


def compared(
    module: nn.Module,
    inputs: list[tuple[torch.Tensor, ...]],
    plain: str | Record,
    **settings: object,
) -> dict[str, object]:
    """Compare with ``plain``, a backend of torch, or what training under one has recorded."""
    backend = apsched.backend(**{**QUICK, **settings})
    expected = train(module, inputs, plain) if isinstance(plain, str) else plain
    found = train(module, inputs, backend)
    counts = [
        (r.problem.name, len(r.problem.collectives), r.best.num_launches) for r in backend.results
    ]
    return compare(expected, found) | {
        "graphs": counts,
        "exact": all(r.round_trip_exact for r in backend.results),
    }


def preset(mesh: str) -> tuple[nn.Module, list[tuple[torch.Tensor, ...]]]:
    options = ModelOptions(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    built = build(
        "llama3-debug",
        mesh=MeshSpec.parse(mesh),
        seq_len=32,
        options=options,
        materialize=True,
        num_layers=1,
    )
    return built.module, [built.inputs] * NUM_STEPS


def small(
    make: Callable[[], nn.Module], sizes: list[int]
) -> tuple[nn.Module, list[tuple[torch.Tensor, ...]]]:
    torch.manual_seed(0)
    module = shard(make(), init_device_mesh("cpu", (dist.get_world_size(),)))
    torch.manual_seed(dist.get_rank())
    return module, [(torch.randn(size, WIDTH),) for size in sizes]


def inference(module: nn.Module, x: torch.Tensor) -> dict[str, object]:
    torch._dynamo.reset()
    backend = apsched.backend(**QUICK)
    with torch.no_grad():
        expected, found = module(x), torch.compile(module, backend=backend)(x)
    return {
        "equal": torch.equal(expected, found),
        "names": [r.problem.name for r in backend.results],
    }


def in_use(rank: int, module: nn.Module, inputs: list[tuple[torch.Tensor, ...]]) -> dict[str, int]:
    """Return the other memory that counts for graphs, where each process rank has some in use."""
    torch._dynamo.reset()
    settings = {name: value for name, value in QUICK.items() if name != "memory_cap"}
    backend = apsched.backend(**settings, cluster="h100")
    used = MemoryInUse(allocated_bytes=(1 + rank) * 2**30)
    with mock.patch("apsched.compiler.memory_in_use.measured", return_value=used):
        torch.compile(module, backend=backend)(*inputs[0]).sum().backward()
    return {r.problem.name: r.account.beside.other_bytes for r in backend.results}


def kinds_and_bytes(result: apsched.Result) -> list[list[object]]:
    """Return what a schedule launches: kind, and bytes that are sent."""
    problem, found = result.problem, []
    number = {c.start: k for k, c in enumerate(problem.collectives)}
    for step in result.schedule.steps:
        if step.kind is StepKind.START or (step.kind is StepKind.NODE and step.index in number):
            members = (
                result.schedule.buckets[step.index].members
                if step.kind is StepKind.START
                else (number[step.index],)
            )
            of = [problem.collectives[c] for c in members]
            found.append([problem.keys[of[0].key].kind, sum(c.input_bytes for c in of)])
    return found


def launched(run: Callable[[], object]) -> list[list[object]]:
    """Return the same of what ``run`` launches, as torch's profiler sees it; an operator that
    another one of them calls is no launch of its own (:mod:`apsched.torch_compat.gloo`).
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profiler:
        run()
    seen = sorted(profiler.events(), key=lambda event: event.time_range.start)
    functional = "_c10d_functional::"
    ours = [
        event
        for event in seen
        if event.name.startswith(functional)
        and "wait" not in event.name
        and not (event.cpu_parent and event.cpu_parent.name.startswith(functional))
    ]
    kinds = [
        next(kind for kind in ("all_gather", "reduce_scatter", "all_reduce") if kind in event.name)
        for event in ours
    ]
    return [
        [kind, 4 * math.prod(event.input_shapes[0])]
        for kind, event in zip(kinds, ours, strict=True)
    ]


def trained_compiled(
    module: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    results: list[apsched.Result],
    **how: object,
) -> dict[str, object]:
    """Train under torch.compile; return the hash of the weights after each step, and what is
    launched, as planned and as seen.
    """
    torch._dynamo.reset()
    compiled = torch.compile(module, **how)
    hashes, seen = [], []
    for k in range(NUM_STEPS):
        if k == NUM_STEPS - 1:
            seen = launched(lambda: compiled(*inputs).backward())
        else:
            compiled(*inputs).backward()
        descended(module, RATE)
        hashes.append(digest(shards_of(module)))
    planned = [launch for result in results for launch in kinds_and_bytes(result)]
    names = [
        [problem.collectives[c].module for c in bucket.members]
        for problem, schedule in ((result.problem, result.schedule) for result in results[1:])
        for bucket in schedule.buckets
        if problem.keys[problem.collectives[bucket.members[0]].key].kind == "reduce_scatter"
    ]
    return {"hashes": hashes, "planned": planned, "seen": seen, "reduced": names}


class WithLoss(nn.Module):
    """``Blocks`` and a loss whose gradient has no rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sum()


def against_eager_blocks(rank: int, world_size: int) -> dict[str, object]:
    """Train one model under ``fully_shard``, and under torch.compile in each form.

    A pass alone is told no names of parameters, which bitwise mode needs: its buckets are its own.
    """
    torch.manual_seed(0)
    whole = WithLoss()
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))
    order = [name for name, _ in whole.named_parameters()]
    given = {**QUICK, "bitwise": True, "parameter_order": order}
    found: dict[str, object] = {"order": order}

    def sharded() -> nn.Module:
        return shard(copy.deepcopy(whole), init_device_mesh("cpu", (world_size,)))

    for form, settings in {"aot_eager": {}, "inductor": {"inductor": True}}.items():
        backend = apsched.backend(reshard_after_forward=True, **given, **settings)
        found[form] = trained_compiled(sharded(), (x,), backend.results, backend=backend)
    own = apsched.inductor_pass(**QUICK)
    with config.patch(post_grad_custom_post_pass=own):
        found["pass"] = trained_compiled(sharded(), (x,), own.results, backend="inductor")
    model = copy.deepcopy(whole)
    found["eager"], _ = trained_eagerly(
        fully_sharded(model, model.inner.layers), (x,), NUM_STEPS, RATE
    )
    return found


def against_eager_llama(world_size: int) -> dict[str, object]:
    """The same of a preset, node by node."""
    built = built_model(world_size)
    whole = {
        name: parameter.detach().full_tensor()
        for name, parameter in built.module.named_parameters()
    }
    order = list(whole)
    backend = apsched.backend(
        reshard_after_forward=True, bitwise=True, parameter_order=order, **QUICK
    )
    found = trained_compiled(built.module, built.inputs, backend.results, backend=backend)
    found["eager"], _ = eager(whole, built.inputs, world_size)
    return found | {"order": order}


def report(rank: int, world_size: int) -> dict[str, object]:
    found: dict[str, object] = {"preset": compared(*preset(MESHES[world_size]), "aot_eager")}
    found["blocks"] = against_eager_blocks(rank, world_size)
    found["llama"] = against_eager_llama(world_size)
    found["in use"] = in_use(rank, *small(layers, [4]))
    if world_size == 2:
        found["inductor"] = compared(
            *small(layers, [4] * NUM_STEPS), "inductor", inductor=True, reshard_after_forward=True
        )
        found["reshard"] = compared(
            *small(layers, [4] * NUM_STEPS), "aot_eager", reshard_after_forward=True
        )
        found["graph breaks"] = compared(*small(Broken, [4] * NUM_STEPS), "aot_eager")
        found["sizes that change"] = compared(
            *small(layers, [4, 6, 10]), "aot_eager", deadline_s=None
        )
        module, inputs = small(Broken, [4])
        found["inference"] = inference(module, *inputs[0])
    return found


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.parent / "inductor")
    if world_size == 2:
        config.compile_threads = 2  # compiler processes, as in a job of a user
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=600)
    )
    (folder / f"{rank}.json").write_text(json.dumps(report(rank, world_size)))
    dist.barrier()
    dist.destroy_process_group()
