"""Private functions of torch around DistributedDataParallel."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from apsched.torch_compat.version import check_torch_version

check_torch_version()


def runs_in_ddp() -> bool:
    """Return whether the forward of a DistributedDataParallel is running
    (torch/nn/parallel/distributed.py, _active_ddp_module).
    """
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None


def first_bucket_bytes() -> int:
    """Return the limit of DDP's first bucket where none is stated
    (torch/nn/parallel/distributed.py, _BucketCapacityConfig).
    """
    return int(dist._DEFAULT_FIRST_BUCKET_BYTES)


def reducer_buckets(parameters: Sequence[Any], limits: Sequence[int]) -> list[list[int]]:
    """Return the buckets, as positions, that DDP's reducer makes of parameters in the order in
    which their gradients are ready (torch/csrc/distributed/c10d/reducer.cpp,
    compute_bucket_assignment_by_size).
    """
    made, _ = dist._compute_bucket_assignment_by_size(
        list(parameters), list(limits), [], list(range(len(parameters)))
    )
    return sorted((sorted(bucket) for bucket in made), key=lambda bucket: bucket[-1])
