"""One of four gloo processes that train TorchTitan's debug models under its own eager tensor,
sequence and expert parallelism and FSDP2, tuned by ``tune_fsdp2`` and not; reports as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
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
from torchtitan.experiments.graph_trainer import llama3, qwen3
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.models.qwen3 import parallelize_qwen3

import apsched
from tests.helpers.graphs.eager_fsdp2 import digest, shards_of
from tests.workers.training.tune_layouts_worker import QUICK

NUM_LAYERS, NUM_STEPS, BATCH_SIZE, SEQ_LEN, VOCABULARY = 2, 3, 2, 32, 2048
BACKEND = "partial_dtensor"
"""The default of torchtitan 0.3 does not run with torch 2.13."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and its parallelism."""

    model: object
    parallelize: Callable[..., nn.Module]
    checkpointing: object = None
    """Configuration of activation checkpointing."""
    tp: int = 1
    ep: int = 1

    @property
    def rank_of_data(self) -> int:
        """Process ranks of a tensor-parallel group have the same batches."""
        return dist.get_rank() // self.tp


def _llama(checkpointing: object = None) -> Case:
    model = llama3.model_registry("debugmodel", attn_backend="sdpa").model
    return Case(model=model, parallelize=parallelize_llama, checkpointing=checkpointing, tp=2)


def _experts() -> Case:
    model = qwen3.model_registry(
        "debugmodel_moe", attn_backend="sdpa", moe_comm_backend="standard"
    ).model
    return Case(model=model, parallelize=parallelize_qwen3, ep=2)


CASES: dict[str, Callable[[], Case]] = {
    "plain": _llama,
    "selective checkpointing": lambda: _llama(SelectiveAC.Config()),
    "experts": _experts,
}


def built(case: Case) -> nn.Module:
    """Return the model as TorchTitan's trainer sets it up, on two ranks for each parallelism."""
    titan_distributed.set_spmd_backend(BACKEND)
    world_size = dist.get_world_size()
    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=-1,
        cp=1,
        tp=case.tp,
        pp=1,
        ep=case.ep,
        world_size=world_size,
        spmd_backend=BACKEND,
    )
    dims.build_mesh()
    parallelism = ParallelismConfig(
        tensor_parallel_degree=case.tp, expert_parallel_degree=case.ep, spmd_backend=BACKEND
    )
    training = TrainingConfig(seq_len=SEQ_LEN, local_batch_size=BATCH_SIZE)
    uncompiled = CompileConfig(enable=False)
    config = copy.deepcopy(case.model)
    config.layers = config.layers[:NUM_LAYERS]
    config.update_from_config(
        config=SimpleNamespace(
            parallelism=parallelism,
            training=training,
            debug=DebugConfig(),
            compile=uncompiled,
            activation_checkpoint=case.checkpointing,
        )
    )
    with torch.device("meta"):
        model = config.build()
    model = case.parallelize(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=uncompiled,
        ac_config=case.checkpointing,
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


def trained(case: Case, model: nn.Module) -> list[object]:
    """Return the losses, and a digest of the weights at the end."""
    loss_of = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY).build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(case.rank_of_data)
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


def tuned(case: Case, **settings: object) -> dict[str, object]:
    model = built(case)
    tokens = torch.zeros(BATCH_SIZE, SEQ_LEN, dtype=torch.long)
    found = apsched.tune_fsdp2(model, (tokens,), **QUICK, **settings)
    return {"times": [found.step_time_us, found.untuned_us], "trained": trained(case, model)}


def reported(case: Case) -> dict[str, object]:
    return {
        "as it was": trained(case, built(case)),
        "tuned": tuned(case),
        "kept": tuned(case, keep="auto"),
    }


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    for module in (torchtitan.tools.utils, torchtitan.distributed.parallel_dims):
        module.device_type = "cpu"
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=400)
    )
    report = {name: reported(make()) for name, make in CASES.items()}
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
