"""A process group of any size without processes, so that a job can be captured on one machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from apsched.errors import InputError
from apsched.torch_compat.graphs import fake_store, process_group_names


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The process group that is running, fake or real."""

    size: int
    rank: int
    """This process rank."""
    fake: bool
    """Collectives do nothing."""

    @property
    def group_ranks(self) -> dict[str, tuple[int, ...]]:
        """Group name -> process ranks, of every group so far that contains this process rank."""
        return dict(sorted(process_group_names().items()))


@contextmanager
def world(size: int, rank: int = 0) -> Iterator[World]:
    """Run the body as process rank ``rank`` of ``size``.

    Starts a fake process group and ends it afterwards. Where a process group runs already (a real
    job, or an outer ``world``) that one is used and left running, and ``size`` must be its size;
    ``rank`` is then the one it has.
    """
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() != size:
            raise InputError(
                f"{size} process ranks are needed; the running process group has"
                f" {dist.get_world_size()}: start that many, change the mesh, or end the process"
                " group to capture with a fake one"
            )
        yield World(size=size, rank=dist.get_rank(), fake=dist.get_backend() == "fake")
        return
    if size < 1 or not 0 <= rank < size:
        raise InputError(
            f"a world needs at least one process rank and a rank below its size; found size {size}"
            f" and rank {rank}"
        )
    dist.init_process_group(backend="fake", store=fake_store(), rank=rank, world_size=size)
    try:
        yield World(size=size, rank=rank, fake=True)
    finally:
        dist.destroy_process_group()
