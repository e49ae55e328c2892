"""Meshes by name."""

import re
from collections.abc import Sequence

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from apsched.capture.fake_world import world
from apsched.errors import InputError
from apsched.models.mesh import ALONE, MeshSpec, build_meshes, group_of
from apsched.models.options import ModelOptions
from apsched.models.sharding import ParameterSharding


@pytest.mark.parametrize(
    ("text", "world_size", "data_parallel_size"),
    [
        ("fsdp=64", 64, 64),
        ("fsdp=16,tp=8", 128, 16),
        ("replicate=4,fsdp=16", 64, 64),
        ("replicate=64", 64, 64),
        ("fsdp=64,ep=8", 64, 64),
        ("tp=2 , fsdp=3", 6, 3),
        ("fsdp=1", 1, 1),
    ],
)
def test_a_mesh_is_read_and_written(text: str, world_size: int, data_parallel_size: int) -> None:
    mesh = MeshSpec.parse(text)
    assert (mesh.world_size, mesh.data_parallel_size) == (world_size, data_parallel_size)
    assert MeshSpec.parse(str(mesh)) == mesh


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("dp=64", MeshSpec(fsdp=64)),
        ("ddp=64", MeshSpec(replicate=64)),
        ("hsdp=4x16", MeshSpec(replicate=4, fsdp=16)),
        ("hsdp = 4 x 16, tp=2", MeshSpec(replicate=4, fsdp=16, tp=2)),
        ("dp=16,tp=8", MeshSpec(fsdp=16, tp=8)),
    ],
)
def test_other_names_of_meshes_are_understood(text: str, mesh: MeshSpec) -> None:
    assert MeshSpec.parse(text) == mesh


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a mesh is a list of axis=size such as"),
        ("64", "a mesh is a list of axis=size such as"),
        ("fsdp=64,", "a mesh is a list of axis=size such as"),
        ("pp=64", "hsdp=NxM name some of them); found 'pp'"),
        ("dp=4,fsdp=4", "mesh axis 'fsdp' is given twice"),
        ("hsdp=4", "takes two sizes, hsdp=NxM for N copies"),
        ("fsdp=99999999999", "a mesh has at most 1048576 process ranks"),
        ("replicate=2048,fsdp=1024", "found 2097152 in replicate=2048,fsdp=1024: state"),
        ("fsdp=four", "the size of mesh axis 'fsdp' must be a whole number; found 'four'"),
        ("fsdp=4.0", "the size of mesh axis 'fsdp' must be a whole number; found '4.0'"),
        ("fsdp=", "the size of mesh axis 'fsdp' must be a whole number; found ''"),
        ("fsdp=4,fsdp=4", "mesh axis 'fsdp' is given twice"),
        ("fsdp=0", "the size of mesh axis 'fsdp' must be at least 1; found 0"),
        ("tp=-2", "the size of mesh axis 'tp' must be at least 1; found -2"),
        (
            "fsdp=64,ep=7",
            "mesh axis 'ep' lies inside 'fsdp' and must divide it; found ep=7 and fsdp=64",
        ),
    ],
)
def test_a_broken_mesh_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        MeshSpec.parse(text)


def test_groups_of_tp_are_neighbours_and_those_of_fsdp_are_not() -> None:
    with world(8, rank=5) as running:
        meshes = build_meshes(MeshSpec(fsdp=4, tp=2), "cpu")
        fsdp, tp = group_of(meshes.dense, "fsdp"), group_of(meshes.dense, "tp")
        assert running.group_ranks[fsdp.name] == (1, 3, 5, 7)
        assert running.group_ranks[tp.name] == (4, 5)
        assert (fsdp.rank, tp.rank) == (2, 1)


def test_experts_take_neighbours_of_fsdp() -> None:
    with world(8) as running:
        meshes = build_meshes(MeshSpec(fsdp=8, ep=2), "cpu")
        assert running.group_ranks[group_of(meshes.expert, "ep").name] == (0, 1)
        assert running.group_ranks[group_of(meshes.expert, "fsdp").name] == (0, 2, 4, 6)
        assert group_of(meshes.dense, "fsdp").size == 8


def test_the_running_process_group_must_have_the_size_of_the_mesh() -> None:
    with (
        world(4),
        pytest.raises(
            InputError, match="mesh fsdp=8 needs 8 process ranks; the process group has 4"
        ),
    ):
        build_meshes(MeshSpec(fsdp=8), "cpu")


def test_no_mesh_is_made_while_a_parameter_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter is gathered during the trace, in which torch 2.11 cannot make a mesh."""

    def refused(*_: object) -> None:
        raise AssertionError("a mesh is made in the trace")

    with world(4):
        sharding = ParameterSharding(
            mesh=build_meshes(MeshSpec(fsdp=2, tp=2), "cpu").dense,
            inner=ALONE,
            inner_dim=0,
            fsdp_dim=0,
            inner_shape=(4, 4),
            options=ModelOptions(),
        )
        monkeypatch.setattr(DeviceMesh, "__getitem__", refused)
        assert sharding.gather_local(torch.zeros(2, 4)).shape == (4, 4)


@pytest.mark.parametrize(
    ("mesh", "ranks", "axes"),
    [
        ("replicate=2,fsdp=8", range(8), "fsdp"),
        ("replicate=2,fsdp=8", (0, 8), "replicate"),
        ("replicate=2,fsdp=8", range(16), ""),
        ("replicate=2,fsdp=4,tp=2", (0, 2, 4, 6), "fsdp"),
        ("fsdp=4,tp=2", (0, 1), "tp"),
        ("fsdp=8,ep=4", (0, 1, 2, 3), "ep"),
        ("fsdp=8,ep=4", (0, 4), "fsdp of experts"),
        ("fsdp=8,ep=8", range(8), "fsdp/ep"),
        ("fsdp=8", (), ""),
    ],
)
def test_a_group_is_named_by_its_axis(mesh: str, ranks: Sequence[int], axes: str) -> None:
    assert MeshSpec.parse(mesh).axes_of(ranks) == axes
