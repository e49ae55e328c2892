"""Which pairs of gathers are left alone because of their groups; on a fake process group, since
nothing is computed.
"""

from dataclasses import replace

import pytest
from torch.distributed.device_mesh import init_device_mesh

from apsched.capture.fake_world import world
from apsched.capture.joint import capture_module
from apsched.errors import InputError
from apsched.fx.collectives import is_all_gather
from apsched.fx.passes.chained_gathers import flat_mesh, fuse_chained_gathers
from apsched.fx.passes.run_passes import run_passes
from tests.helpers.graphs.mesh_modules import WIDTH, ByHand, nothing, values


def num_gathers(module) -> int:
    return sum(is_all_gather(node) for node in module.graph.nodes)


def test_only_pairs_over_both_axes_of_the_mesh_are_fused():
    with world(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        flat = flat_mesh(mesh)
        assert (flat.sizes, flat.size) == ((2, 4), 8)
        module = (
            capture_module(
                ByHand(mesh, ("dp", "tp"), nothing), (values(7, 3, WIDTH),), source="pair"
            )
            .graphs[0]
            .module
        )
        same_axis = (
            capture_module(
                ByHand(mesh, ("tp", "tp"), nothing), (values(7, 3, WIDTH),), source="pair"
            )
            .graphs[0]
            .module
        )
        left = {
            "axes of another mesh": replace(flat, axes=("elsewhere", flat.axes[1])),
            "sizes that don't multiply to the mesh": replace(flat, sizes=(2, 2)),
        }
        assert num_gathers(run_passes(module, (fuse_chained_gathers(flat),)).module) == 1
        for why, other in left.items():
            assert num_gathers(run_passes(module, (fuse_chained_gathers(other),)).module) == 2, why
        assert num_gathers(run_passes(same_axis, (fuse_chained_gathers(flat),)).module) == 2, (
            "one axis twice"
        )


def test_groups_are_made_once_and_stand_in_the_order_of_rows_and_columns():
    with world(8) as running:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        flat = flat_mesh(mesh)
        ranks = running.group_ranks
        assert ranks[flat.by_rows] == (0, 1, 2, 3, 4, 5, 6, 7)
        assert ranks[flat.by_columns] == (0, 4, 1, 5, 2, 6, 3, 7)
        assert flat_mesh(mesh) == flat
        assert running.group_ranks == ranks


def test_a_mesh_has_two_axes():
    with world(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        assert flat_mesh(mesh["dp", "tp"]).size == 4
        with pytest.raises(
            InputError,
            match=(
                r"expected a mesh of two axes, found 3; take the two that gathers are chained over"
            ),
        ):
            flat_mesh(mesh)
