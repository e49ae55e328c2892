"""One of two gloo processes that train models of other layouts under ``fully_shard``, tuned by
``tune_fsdp2`` and not; reports as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import apsched
from tests.helpers.graphs.eager_fsdp2 import digest, shards_of
from tests.helpers.graphs.unit_layouts import LAYOUTS

NUM_STEPS = 3
QUICK = {"budget": 0.0, "memory_cap": "none", "deadline_s": 200.0}


def trained(model: nn.Module, inputs: dict[str, object]) -> list[object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[object] = []
    for _ in range(NUM_STEPS):
        found = model(**inputs)
        loss = getattr(found, "logits", found).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return [*seen, digest(shards_of(model))]


def tokens_of(rank: int) -> torch.Tensor:
    return torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(rank))


def layout(build: Callable[[], nn.Module], inputs: dict[str, object]) -> dict[str, object]:
    model = build()
    found = apsched.tune_fsdp2(model, inputs, **QUICK)
    return {
        "units": [unit.name for unit in found.settings.units],
        "times": [found.step_time_us, found.untuned_us],
        "tuned": trained(model, inputs),
        "as it was": trained(build(), inputs),
    }


def language_model() -> nn.Module:
    """Return a causal model of Transformers with its usual settings: it returns a cache of keys and
    values, and looks at the values of the mask.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def causal() -> nn.Module:
    model = language_model()
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def transformers(rank: int) -> dict[str, object]:
    tokens = tokens_of(rank)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": None}
    buckets = apsched.ddp_buckets(language_model(), inputs)
    return layout(causal, inputs) | {"ddp": list(buckets.parameter_order)}


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=400)
    )
    inputs = {"tokens": tokens_of(rank)}
    report = {name: layout(build, inputs) for name, build in LAYOUTS.items()}
    if find_spec("transformers"):
        report["transformers"] = transformers(rank)
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
