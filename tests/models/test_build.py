"""Options that do not fit together are refused before anything is built."""

import re
from typing import Any

import pytest
import torch

from apsched.capture.fake_world import world
from apsched.errors import InputError
from apsched.models.build import build
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama4", {}, "a preset is one of llama3-debug, llama3-small, llama3-1b,"),
        (
            "llama3-8b",
            {"mesh": MeshSpec(fsdp=8, ep=2)},
            "llama3-8b has no experts, so mesh axis 'ep' can't be used",
        ),
        (
            "llama3-8b",
            {"mesh": MeshSpec(tp=16)},
            "tp must divide the 8 key-value heads of llama3-8b; found tp=16",
        ),
        (
            "deepseek-v3-16b",
            {"mesh": MeshSpec(tp=2)},
            "deepseek-v3-16b has no tensor-parallel form; found tp=2",
        ),
        (
            "deepseek-v3-16b",
            {"mesh": MeshSpec(fsdp=256, ep=128)},
            "ep must divide the 64 experts of deepseek-v3-16b; found ep=128",
        ),
        (
            "deepseek-v3-16b",
            {"seq_len": 10},
            "balanced routing needs batch x seq_len x 6 to be a multiple of the 64 experts",
        ),
        ("llama3-8b", {"seq_len": 0}, "seq_len must be at least 1; found 0"),
        ("llama3-8b", {"batch": -1}, "batch must be at least 1; found -1"),
        ("llama3-8b", {"num_layers": 0}, "num_layers must be at least 1; found 0"),
        (
            "llama3-8b",
            {"mesh": MeshSpec(tp=8), "seq_len": 12},
            "batch x seq_len must be a multiple of tp",
        ),
    ],
)
def test_refused(name: str, options: dict[str, Any], message: str) -> None:
    mesh = options.pop("mesh", MeshSpec(fsdp=2))
    with world(mesh.world_size), pytest.raises(InputError, match=re.escape(message)):
        build(name, mesh=mesh, **options)


@pytest.mark.parametrize("text", ["all", "every-0", "every-", "every-two", "Full"])
def test_unknown_activation_checkpointing_is_refused(text: str) -> None:
    with pytest.raises(
        InputError, match="activation_checkpoint must be none, full, selective or every-N"
    ):
        ModelOptions(activation_checkpoint=text)


def test_dtypes_must_be_floating_point() -> None:
    with pytest.raises(
        InputError, match=r"param_dtype must be a floating-point torch\.dtype; found torch\.int8"
    ):
        ModelOptions(param_dtype=torch.int8)
