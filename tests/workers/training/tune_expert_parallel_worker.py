"""One of four gloo processes that train a model with experts under ``fully_shard``, tuned by
``tune_fsdp2`` and not; reports as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

import apsched
from apsched.capture.fsdp2 import capture_fsdp2
from apsched.fx.collectives import collective_kind, is_collective
from tests.helpers.graphs.expert_parallel import built, ways
from tests.workers.training.tune_layouts_worker import QUICK, tokens_of, trained


def tuned(way: str, tokens: torch.Tensor, **settings: object) -> dict[str, object]:
    model = built(way)
    found = apsched.tune_fsdp2(model, (tokens,), **QUICK, **settings)
    return {
        "settings": str(found.settings),
        "units": [unit.name for unit in found.settings.units],
        "times": [found.step_time_us, found.untuned_us],
        "trained": trained(model, {"tokens": tokens}),
    }


def exchanges(way: str, tokens: torch.Tensor) -> dict[str, list[int]]:
    """Return the number of exchanges of tokens in forward and in backward, as captured and as run;
    and the gathers and the reductions of units as run.
    """
    model = built(way)
    graphs = capture_fsdp2(model, (tokens,)).graphs
    captured = [
        sum(
            is_collective(node) and str(collective_kind(node)) == "all_to_all"
            for node in graph.module.graph.nodes
        )
        for graph in graphs
    ]
    with CommDebugMode() as forward:
        loss = model(tokens).square().mean()
    with CommDebugMode() as backward:
        loss.backward()
    counts = [
        Counter({op.__name__: n for op, n in ran.get_comm_counts().items()})
        for ran in (forward, backward)
    ]
    names = "all_to_all_single", "_allgather_base_", "_reduce_scatter_base_"
    ran, gathers, reductions = ([count[name] for count in counts] for name in names)
    return {"captured": captured, "ran": ran, "gathers": gathers, "reductions": reductions}


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=400)
    )
    tokens = tokens_of(rank)
    report = {
        way: {
            "as it was": trained(built(way), {"tokens": tokens}),
            "tuned": tuned(way, tokens),
            "kept": tuned(way, tokens, keep="auto"),
            "exchanges": exchanges(way, tokens),
        }
        for way in ways()
    }
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
