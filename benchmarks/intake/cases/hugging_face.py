"""Architectures of Transformers at a tiny size, under FSDP and DDP as ``hf:`` shards them."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from apsched.capture.captured import CapturedGraph
from apsched.models.mesh import MeshSpec
from benchmarks.intake.case import Case
from benchmarks.intake.cases.small_configs import ARCHITECTURES, small_fields
from benchmarks.intake.cases.worlds import running_world

_SEQ_LEN = 32
_SMOKE = ("gpt2 fsdp=2", "vit replicate=2")
_BY_PLAN = ("gpt_neox", "llama", "mixtral", "phi3", "qwen2", "starcoder2")
"""Architectures whose own plan of tensor parallelism is tried."""


def cases() -> Iterator[Case]:
    """Yield a case for each architecture and mesh."""
    meshes = [(kind, mesh) for kind in ARCHITECTURES for mesh in ("fsdp=2", "replicate=2")]
    meshes += [(kind, "fsdp=2,tp=2") for kind in _BY_PLAN]
    for kind, mesh in meshes:
        name = f"{kind} {mesh}"
        yield Case(
            name=name,
            group="Transformers",
            build=partial(_graphs, kind, mesh),
            smoke=name in _SMOKE,
        )


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
