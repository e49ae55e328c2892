"""Architectures of Transformers at a tiny size, under FSDP and DDP as ``hf:`` shards them."""

import json
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from apsched.capture.captured import CapturedGraph
from apsched.models.mesh import MeshSpec
from benchmarks.intake.case import Case
from benchmarks.intake.cases.compiled import compiled_graphs
from benchmarks.intake.cases.parts import WORLD
from benchmarks.intake.cases.small_configs import ARCHITECTURES, small_fields
from benchmarks.intake.cases.worlds import running_world

_SEQ_LEN = 32
_SMOKE = ("gpt2 fsdp=2", "vit replicate=2")
_BY_PLAN = ("gpt_neox", "llama", "mixtral", "phi3", "qwen2", "starcoder2")
"""Architectures whose own plan of tensor parallelism is tried."""


_WITH_EXPERTS = ("mixtral", "qwen2_moe", "deepseek_v3")
"""Architectures whose own plan of expert parallelism is tried."""


def cases() -> Iterator[Case]:
    """Yield a case for each architecture and mesh."""
    meshes = [(kind, mesh) for kind in ARCHITECTURES for mesh in ("fsdp=2", "replicate=2")]
    meshes += [(kind, "fsdp=2,tp=2") for kind in _BY_PLAN]
    meshes += [(kind, mesh) for kind in _WITH_EXPERTS for mesh in ("fsdp=2,ep=2", "fsdp=4,ep=2")]
    for kind, mesh in meshes:
        name = f"{kind} {mesh}"
        yield Case(
            name=name,
            group="Transformers",
            build=partial(_graphs, kind, mesh),
            smoke=name in _SMOKE,
        )
    for kind in _WITH_EXPERTS:
        name, build = f"{kind} ep={WORLD}, compiled in parts", partial(_with_experts, kind)
        yield Case(name=name, group="Transformers", build=build)


def _with_experts(kind: str) -> tuple[CapturedGraph, ...]:
    """Return the graphs of a job whose experts Transformers spreads over the process ranks by the
    model's own plan (``base_model_ep_plan``). It reads the splits back to the host and branches on
    them, so torch compiles it in parts.
    """
    transformers: Any = import_module("transformers")
    distributed: Any = import_module("transformers.distributed")
    experts: Any = import_module("transformers.distributed.expert_parallel")
    running_world(WORLD)
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind].from_dict(small_fields(kind))
    model = transformers.AutoModelForCausalLM.from_config(config)
    chosen = distributed.DistributedConfig(ep_size=WORLD, fsdp_size=WORLD)
    plan = model._resolve_parallel_plans(chosen)[1]
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("tp", "ep"))
    experts.apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan, "all_to_all")

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    tokens = torch.randint(0, 200, (2, _SEQ_LEN))
    return compiled_graphs(step, (tokens,), fullgraph=False)


def _graphs(kind: str, mesh_text: str) -> tuple[CapturedGraph, ...]:
    from apsched.models.preset_capture import capture_built
    from apsched.models.transformers.config import build_from_config

    mesh = MeshSpec.parse(mesh_text)
    running_world(mesh.world_size)
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{kind}.json"
        path.write_text(json.dumps(small_fields(kind)))
        built = build_from_config(path, mesh=mesh, seq_len=_SEQ_LEN)
    return capture_built(built).graphs
