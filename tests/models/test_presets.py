"""Presets have the published numbers of parameters, and nothing of them is allocated."""

import pytest
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from apsched.capture.fake_world import world
from apsched.models.build import build
from apsched.models.mesh import MeshSpec
from apsched.models.presets import PRESETS

PUBLISHED = {
    "llama3-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "deepseek-v3-16b": 15_706_484_224,
    "deepseek-v3-671b": 671_026_404_352,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_number_of_parameters_is_the_published_one(name: str) -> None:
    with world(1):
        assert build(name, mesh=MeshSpec(), seq_len=1024).num_parameters == PUBLISHED[name]


def test_every_preset_is_listed() -> None:
    assert set(PRESETS) == {*PUBLISHED, "llama3-debug", "llama3-small", "deepseek-v3-debug"}


def test_shards_are_fake_and_add_up() -> None:
    with world(64):
        built = build("llama3-8b", mesh=MeshSpec(fsdp=64), num_layers=2)
    shards = [parameter.data for parameter in built.module.parameters()]
    assert all(
        isinstance(shard, DTensor) and isinstance(shard.to_local(), FakeTensor) for shard in shards
    )
    assert sum(shard.to_local().numel() for shard in shards) * 64 == built.num_parameters
