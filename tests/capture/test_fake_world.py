"""A world of any size on one machine."""

import re
from pathlib import Path

import pytest
import torch.distributed as dist

from apsched.capture.fake_world import world
from apsched.errors import InputError


def test_a_fake_world_ends_with_its_body() -> None:
    with world(16, rank=3) as running:
        assert (dist.get_world_size(), dist.get_rank(), running.fake) == (16, 3, True)
    assert not dist.is_initialized()


def test_a_world_ends_when_its_body_fails() -> None:
    with pytest.raises(KeyError), world(2):
        raise KeyError("x")
    assert not dist.is_initialized()


def test_group_ranks_are_those_of_groups_with_this_process_rank() -> None:
    with world(8, rank=5) as running:
        pairs = [dist.new_group([first, first + 1]) for first in range(0, 8, 2)]
        assert running.group_ranks[pairs[2].group_name] == (4, 5)
        assert sorted(running.group_ranks.values()) == [tuple(range(8)), (4, 5)]


def test_a_running_process_group_is_used_and_left(tmp_path: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        with world(1) as running:
            assert not running.fake
        assert dist.is_initialized()
        with (
            pytest.raises(
                InputError, match="4 process ranks are needed; the running process group has 1"
            ),
            world(4),
        ):
            pass
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("size", "rank"), [(0, 0), (4, 4), (4, -1)])
def test_a_rank_outside_the_world_is_refused(size: int, rank: int) -> None:
    with (
        pytest.raises(InputError, match=re.escape(f"found size {size} and rank {rank}")),
        world(size, rank),
    ):
        pass
