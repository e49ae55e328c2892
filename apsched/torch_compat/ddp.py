"""Private functions of torch around DistributedDataParallel."""

import inspect
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
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    return ddp._get_active_ddp_module() is not None


def reduces_in_graphs() -> bool:
    """Return whether DDP leaves its all-reduces to the graphs of compiled autograd
    (torch/_dynamo/config.py, optimize_ddp).
    """
    config: Any = torch._dynamo.config
    return bool(config.optimize_ddp == "python_reducer")


def first_bucket_bytes() -> int:
    """Return the limit of DDP's first bucket where none is stated
    (torch/nn/parallel/distributed.py, _BucketCapacityConfig).
    """
    private: Any = dist
    return int(private._DEFAULT_FIRST_BUCKET_BYTES)


def ignored_names(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of parameters and buffers of ``model`` that DDP neither copies nor reduces
    (torch/nn/parallel/distributed.py, _set_params_and_buffers_to_ignore_for_model).
    """
    return frozenset(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def takes_limits_of_buckets() -> bool:
    """Return whether the DDP of this torch takes a limit for each bucket, ``bucket_cap_mb_list``
    (torch/nn/parallel/distributed.py, __init__; torch 2.13 does).
    """
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    return "bucket_cap_mb_list" in inspect.signature(ddp.__init__).parameters


def reducer_buckets(parameters: Sequence[Any], limits: Sequence[int]) -> list[list[int]]:
    """Return the buckets, as positions, that DDP's reducer makes of parameters in the order in
    which their gradients are ready (torch/csrc/distributed/c10d/reducer.cpp,
    compute_bucket_assignment_by_size).
    """
    private: Any = dist
    made, _ = private._compute_bucket_assignment_by_size(
        list(parameters), list(limits), [], list(range(len(parameters)))
    )
    return sorted((sorted(bucket) for bucket in made), key=lambda bucket: bucket[-1])
