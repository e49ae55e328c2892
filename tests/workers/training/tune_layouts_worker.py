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
from apsched.integrations.fsdp2_units import units_of
from tests.helpers.graphs.eager_fsdp2 import digest, shards_of
from tests.helpers.graphs.fine_tuned import FINE_TUNED
from tests.helpers.graphs.unit_layouts import LAYOUTS
from tests.workers.training.tune_micro_batches_worker import set_by_hand, switches_of

NUM_STEPS = 3
SHARED = ("tied in a unit", "units in units", "blocks that run again in backward")
"""Layouts that are also tuned for several micro-batches, which share all that they may."""
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


def shared(build: Callable[[], nn.Module], tokens: torch.Tensor) -> dict[str, list[object]]:
    """Return three micro-batches a step, tuned, and with the same switches set by hand."""

    def losses(model: nn.Module, begin: Callable[[int], None]) -> list[object]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[object] = []
        for k in (0, 1, 2) * 2:
            begin(k)
            loss = model((tokens + 7 * k) % 65).square().mean()
            loss.backward()
            seen.append(loss.item())
            if k == 2:
                optimizer.step()
                optimizer.zero_grad()
        return [*seen, digest(shards_of(model))]

    model, by_hand = build(), build()
    found = apsched.tune_fsdp2(model, tokens, keep="all", accumulate=3, **QUICK)
    switches = [switches_of(found, k) for k in range(3)]
    handles = {unit.name: unit.handle for unit in units_of(by_hand)}
    return {
        "tuned": losses(model, found.begin),
        "by hand": losses(by_hand, set_by_hand(handles, switches)),
        "as it was": losses(build(), lambda k: None),
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
    report = {name: layout(build, inputs) for name, build in (LAYOUTS | FINE_TUNED).items()}
    for name in SHARED:
        report[name]["shared"] = shared(LAYOUTS[name], inputs["tokens"])
    if find_spec("transformers"):
        report["transformers"] = transformers(rank)
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
