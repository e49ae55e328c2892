"""One of four gloo processes that train TorchTitan's debug model under its own eager tensor and
sequence parallelism and FSDP2, tuned by ``tune_fsdp2`` and not; reports as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import copy
import json
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torchtitan.distributed.parallel_dims
import torchtitan.tools.utils
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import utils as titan_distributed
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.experiments.graph_trainer.llama3 import model_registry
from torchtitan.models.llama3 import parallelize_llama

import apsched
from tests.helpers.graphs.eager_fsdp2 import digest, shards_of
from tests.workers.training.tune_layouts_worker import QUICK

NUM_LAYERS, NUM_STEPS, BATCH_SIZE, SEQ_LEN, VOCABULARY = 2, 3, 2, 32, 2048
BACKEND = "partial_dtensor"
"""The default of torchtitan 0.3 does not run with torch 2.13."""
CASES = {"plain": None, "selective checkpointing": SelectiveAC.Config()}
"""Name -> configuration of activation checkpointing."""


def built(checkpointing: object) -> nn.Module:
    """Return the model as TorchTitan's trainer sets it up, on two ranks for each of both."""
    titan_distributed.set_spmd_backend(BACKEND)
    world_size = dist.get_world_size()
    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=-1,
        cp=1,
        tp=2,
        pp=1,
        ep=1,
        world_size=world_size,
        spmd_backend=BACKEND,
    )
    dims.build_mesh()
    parallelism = ParallelismConfig(tensor_parallel_degree=2, spmd_backend=BACKEND)
    training = TrainingConfig(seq_len=SEQ_LEN, local_batch_size=BATCH_SIZE)
    uncompiled = CompileConfig(enable=False)
    config = copy.deepcopy(model_registry("debugmodel", attn_backend="sdpa").model)
    config.layers = config.layers[:NUM_LAYERS]
    config.update_from_config(
        config=SimpleNamespace(
            parallelism=parallelism,
            training=training,
            debug=DebugConfig(),
            compile=uncompiled,
            activation_checkpoint=checkpointing,
        )
    )
    with torch.device("meta"):
        model = config.build()
    model = parallelize_llama(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=uncompiled,
        ac_config=checkpointing,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def trained(model: nn.Module) -> list[object]:
    """Return the losses, and a digest of the weights at the end."""
    loss_of = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY).build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank() // 2)
    seen: list[object] = []
    for _ in range(NUM_STEPS):
        shape = (BATCH_SIZE, SEQ_LEN + 1)
        tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
        labels = tokens[:, 1:].contiguous()
        count = torch.tensor(float(labels.numel() * dist.get_world_size()))
        loss, _ = loss_of(model(tokens[:, :-1].contiguous()), labels, count)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return [*seen, digest(shards_of(model))]


def tuned(checkpointing: object, **settings: object) -> dict[str, object]:
    model = built(checkpointing)
    tokens = torch.zeros(BATCH_SIZE, SEQ_LEN, dtype=torch.long)
    found = apsched.tune_fsdp2(model, (tokens,), **QUICK, **settings)
    return {"times": [found.step_time_us, found.untuned_us], "trained": trained(model)}


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    for module in (torchtitan.tools.utils, torchtitan.distributed.parallel_dims):
        module.device_type = "cpu"
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=400)
    )
    report = {
        name: {
            "as it was": trained(built(checkpointing)),
            "tuned": tuned(checkpointing),
            "kept": tuned(checkpointing, keep="auto"),
        }
        for name, checkpointing in CASES.items()
    }
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
