"""One of several gloo processes that train under full Inductor with its cache on disk; writes what
each step found there as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER, JOB)``, see ``processes.run_jobs``
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.resources import files
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh

import apsched
from apsched.compiler import fingerprint
from apsched.compiler.ranks import agreement as round
from tests.helpers.graphs.inductor_code import calls_of
from tests.helpers.graphs.small_models import WIDTH, shard

USUAL = {"budget": 0.0, "memory_cap": "none", "bucket_cap": 0, "deadline_s": 60.0}
PLAN = apsched.Plan((apsched.Rule(match=".*", forbid=True),))


def products() -> nn.Module:
    """Return a model of which Inductor makes calls of products and collectives, and no kernel that
    needs a C++ compiler.
    """
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))


def step(cache: Path, **settings: object) -> dict[str, object]:
    """Compile and run one step with code from the directory ``cache``, if there is any."""
    dist.barrier()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    module = shard(products(), init_device_mesh("cpu", (dist.get_world_size(),)))
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    backend = apsched.backend(inductor=True, **{**USUAL, **settings})
    compiled = torch.compile(module, backend=backend)
    losses = []

    def train() -> None:
        y = compiled(x)
        y.backward(torch.ones_like(y))
        losses.append(y.sum().item())

    _, codes = run_and_get_code(train)
    found = counters["inductor"]
    return {
        "hits, misses": [found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]],
        "launches": [r.best.num_launches for r in backend.results],
        "calls": _used([calls_of(code) for code in codes]),
        "numbers": [*losses, *(p.grad.to_local().sum().item() for p in module.parameters())],
        "left": [key for key in found if "apsched" in str(key)],
    }


def _used(codes: list[list[str]]) -> list[list[str]]:
    """Return the code of forward and backward that was found or made last."""
    return [
        next(calls for calls in reversed(codes) if kind in calls)
        for kind in ("all_gather", "reduce_scatter")
    ]


def first_job(cache: Path, rank: int, folder: Path) -> dict[str, object]:
    found = {"cold": step(cache)}
    with instead(
        round, "order_digest", lambda launches: "another"
    ):  # as if it had launched something else
        found["another order"] = step(cache.with_name(f"other_{rank}"))
    return found


def second_job(cache: Path, rank: int, folder: Path) -> dict[str, object]:
    found: dict[str, object] = {"warm": step(cache)}
    found["another cap"] = step(cache, max_prefetch=1)
    found["another plan"] = step(cache, plan=PLAN)
    found["another cost file"] = step(
        cache, cluster=_dearer_network(folder / f"dearer_{rank}.toml")
    )
    with instead(fingerprint, "_versions", lambda: ("another torch",)):
        found["another version"] = step(cache)
    if rank == 1:
        shutil.rmtree(cache / "fxgraph")
    found["cold on one"] = step(cache)
    found["then warm"] = step(cache)
    mixed = cache if rank == 0 else cache.with_name(f"other_{rank}")
    found["another order on one"] = step(mixed)
    found["then warm again"] = step(mixed)
    found["key of the pass alone"] = apsched.inductor_pass(budget=0.0).uuid()
    return found


@contextmanager
def instead(module: object, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _dearer_network(path: Path) -> Path:
    """Write the file of a cluster whose links take longer."""
    text = Path(str(files("apsched.costs") / "clusters" / "h100.toml")).read_text()
    path.write_text(re.sub(r"(?m)^launch_us = [0-9.]+", r"launch_us = 40.0", text, count=1))
    assert path.read_text() != text
    return path


def main(rank: int, world_size: int, folder: Path, job: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store_{job}"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=300)
    )
    run = {"first": first_job, "second": second_job}[job]
    (folder / f"{rank}.json").write_text(json.dumps(run(folder / f"inductor_{rank}", rank, folder)))
    dist.barrier()
    dist.destroy_process_group()
