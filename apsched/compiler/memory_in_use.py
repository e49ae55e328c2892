"""The memory that a job holds on its device beside its graphs, as measured when a graph is
compiled: other models, NCCL, other processes.

The account of the device (:mod:`apsched.pipeline.device_memory`) assumes a context, communicators
and the state of an optimizer. Anything above that is other memory, which no schedule can use.
Cached blocks that hold no tensor count as free: the allocator gives them to the graph.
"""

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from apsched.compiler.ranks.agreement import GraphAgreement
from apsched.compiler.ranks.job import running_job
from apsched.compiler.settings import Settings
from apsched.config import RESERVE_OF_FIXED_SEGMENTS
from apsched.costs.optimizer_state import JobOptimizer, StatedOptimizer, job_optimizer
from apsched.costs.optimizer_step import CountedOptimizer, state_bytes
from apsched.names import direction_named
from apsched.pipeline.device_memory import BesideGraph
from apsched.pipeline.load import LoadedGraph
from apsched.pipeline.solve_graph import SolveRequest
from apsched.torch_compat.graphs import process_group_names

_STEP_BYTES = 256 * 2**20
"""Other memory counts in multiples of this, so that small changes keep the answer."""
_LEAST: dict[int, int] = {}
"""Device -> the least bytes of tensors that were measured there, without state of optimizers of
the job.
"""
_NO_LIMIT = 2**62
"""Bytes of no device: more than any has."""
_EXPANDABLE = "expandable_segments:true"
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_warned: list[bool] = []

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInUse:
    """Memory of the device of this process rank, in bytes."""

    total_bytes: int | None = None
    """``None``: it has no device."""
    outside_bytes: int = 0
    """Taken outside of torch's allocator: the context, NCCL, other processes."""
    allocated_bytes: int = 0
    """Of all tensors of this process, the least that was measured: activations of a step that runs
    do not count, and the first graph is compiled before a step. Without the state of the optimizers
    that the job states as such: the account counts it, whether it exists yet or not.
    """


def measured(optimizer: JobOptimizer | None = None) -> MemoryInUse:
    """Return the memory in use on the current CUDA device, without the state of ``optimizer``;
    nothing where this process has no device.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return MemoryInUse()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    outside_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved()
    device, now_bytes = torch.cuda.current_device(), torch.cuda.memory_allocated()
    if optimizer is not None:
        now_bytes -= optimizer.alive_bytes(torch.device("cuda", device))
    _LEAST[device] = min(_LEAST.get(device, now_bytes), now_bytes)
    return MemoryInUse(
        total_bytes=total_bytes,
        outside_bytes=max(outside_bytes, 0),
        allocated_bytes=_LEAST[device],
    )


def agreed_memory(settings: Settings, agreement: GraphAgreement | None) -> MemoryInUse:
    """Return the most that any process rank of the graph has in use, so that all have the same cap;
    nothing where a cap is stated, or without other process ranks: no job runs there, and the graph
    may be for another machine. All process ranks call it at once.
    """
    if settings.solve_request.memory_cap is not None or agreement is None:
        return MemoryInUse()
    stated = settings.optimizer
    in_use = _largest(stated if isinstance(stated, JobOptimizer) else None, agreement)
    _warn_of_fragmentation(in_use, settings.solve_request.reserve, agreement.job.rank)
    return in_use


def working() -> ExitStack:
    """Return a context that reports to the other process ranks of the running job, if any, that
    this one works and answers later; it may be closed before it ends.
    """
    at_work, job = ExitStack(), running_job()
    if job is not None:
        at_work.enter_context(job.working())
    return at_work


def in_job_account(
    graphs: Sequence[LoadedGraph], request: SolveRequest, optimizer: StatedOptimizer
) -> tuple[LoadedGraph, ...]:
    """Return ``graphs``, one step, with the other memory that the running job has in use in their
    accounts; unchanged as for :func:`agreed_memory`. All process ranks that communicate in them
    call it at once.
    """
    if request.memory_cap is not None or (job := running_job()) is None:
        return tuple(graphs)
    running = process_group_names()
    groups = {n: running[n] for graph in graphs for n in graph.problem.streams if n in running}
    own = None if isinstance(optimizer, str) else job_optimizer(optimizer)
    with GraphAgreement(job, groups) as agreement:
        in_use = _largest(own, agreement)
    _warn_of_fragmentation(in_use, request.reserve, job.rank)
    return tuple(with_memory_in_use(graph, in_use, request.optimizer) for graph in graphs)


def _warn_of_fragmentation(in_use: MemoryInUse, reserve: float, rank: int) -> None:
    """Warn once in a job whose allocator may need more than ``reserve`` for fragmentation."""
    settings = [os.environ.get(name, "") for name in _ALLOCATOR_VARIABLES]
    is_expandable = any(_EXPANDABLE in text.replace(" ", "").lower() for text in settings)
    if in_use.total_bytes is None or is_expandable or reserve >= RESERVE_OF_FIXED_SEGMENTS:
        return
    if not _warned and rank == 0:
        _warned.append(True)
        logger.warning(
            "reserve: expected PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, found another"
            " setting of torch's allocator, whose fragmentation took up to %g %% of a device of 80"
            " GiB; %g %% are reserved: set it, or pass reserve=%g (docs/memory.md)",
            100 * RESERVE_OF_FIXED_SEGMENTS,
            100 * reserve,
            RESERVE_OF_FIXED_SEGMENTS,
        )


def _largest(optimizer: JobOptimizer | None, agreement: GraphAgreement) -> MemoryInUse:
    """Return the most that any process rank of ``agreement`` has in use."""
    own = measured(optimizer)
    total_bytes = _NO_LIMIT if own.total_bytes is None else own.total_bytes
    least, outside_bytes, allocated_bytes = agreement.largest(
        (-total_bytes, own.outside_bytes, own.allocated_bytes)
    )
    return MemoryInUse(
        total_bytes=None if least == -_NO_LIMIT else -least,
        outside_bytes=outside_bytes,
        allocated_bytes=allocated_bytes,
    )


def with_memory_in_use(
    graph: LoadedGraph, in_use: MemoryInUse, optimizer: str | CountedOptimizer
) -> LoadedGraph:
    """Return ``graph`` with the other memory of the device in its account, if it is for a GPU."""
    if graph.beside is None or not graph.beside.context_bytes or in_use == MemoryInUse():
        return graph
    held = _tensors_of(graph, graph.beside, optimizer)
    return replace(
        graph, beside=replace(graph.beside, other_bytes=other_bytes(in_use, graph.beside, held))
    )


def other_bytes(in_use: MemoryInUse, beside: BesideGraph, held_bytes: int) -> int:
    """Return the bytes in use that neither the account nor the graph counts, of whose tensors
    ``held_bytes`` are alive already; rounded up to 256 MiB.
    """
    found = (
        0 if in_use.total_bytes is None else beside.device_bytes - in_use.total_bytes,
        in_use.outside_bytes - beside.context_bytes - beside.communicator_bytes,
        in_use.allocated_bytes - held_bytes,
    )
    return -(-sum(size for size in found if size > 0) // _STEP_BYTES) * _STEP_BYTES


def _tensors_of(graph: LoadedGraph, beside: BesideGraph, optimizer: str | CountedOptimizer) -> int:
    """Return the bytes of tensors that the account or the peak of ``graph`` counts, and that may be
    alive before the step: parameters, inputs of forward, and the state of an optimizer that was not
    measured.
    """
    inputs = sum(s.size_bytes for s in graph.problem.storages if s.birth < 0)
    if direction_named(graph.problem.name) == "backward":
        inputs = 0  # those that forward saves are not alive yet
    state = 0 if isinstance(optimizer, CountedOptimizer) else state_bytes(optimizer, beside.shards)
    return max(beside.parameter_bytes, inputs) + state
