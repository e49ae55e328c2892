"""By how much compute and collectives slow each other down, measured with a graph's own operators."""

import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import cycle
from statistics import fmean
from typing import Any

import networkx as nx
import torch
import torch.distributed as dist
from torch.fx import GraphModule

from apsched.calibrate.arguments import real_call
from apsched.contention import Contention
from apsched.graph.dag import NodeKind

_LARGEST_TERM = 1000
_GATHERED_ELEMENTS = 2**21
"""8 MiB: a tenth of a second at 1 Gb/s, in which most operators come by."""
_ROUNDS = 8


def measured_contention(graphs: Sequence[tuple[GraphModule, nx.DiGraph]]) -> Contention:
    """Return how compute of ``graphs`` and collectives slow each other down; every process rank calls this, and all get the same.

    Each distinct operator runs alone and, as they come, beside gathers and reductions, and these run alone and beside operators; ratios
    are of sums, for compute over all nodes. One matrix product would not do: it lives in the cache, and what gloo's threads take away
    most is memory bandwidth and turns on the core.
    """
    calls, counts = _operators(graphs)
    alone: list[list[float]] = [[] for _ in calls]
    beside: list[list[float]] = [[] for _ in calls]
    moving: dict[bool, list[float]] = {True: [], False: []}
    """Of collectives: with compute beside, and without."""
    turns = cycle(range(len(calls)))
    with torch.no_grad():
        for call in calls:
            call()
        for number in range(4 * _ROUNDS):
            computing = number % 2 == 0
            dist.barrier()
            for k, call in enumerate(calls):
                alone[k].append(_us(call))
            begin = time.perf_counter_ns()
            work, kept = _collective(gather=number % 4 < 2)
            while computing and not work.is_completed():
                k = next(turns)
                time_us = _us(calls[k])
                if not work.is_completed():  # else part of it ran alone
                    beside[k].append(time_us)
            work.wait()
            moving[computing].append((time.perf_counter_ns() - begin) / 1e3)
            del kept
    both = [k for k in range(len(calls)) if beside[k]]
    compute = sum(counts[k] * fmean(beside[k]) for k in both) / sum(counts[k] * fmean(alone[k]) for k in both) if both else 1.0
    ratios = torch.tensor([compute, sum(moving[True]) / sum(moving[False])], dtype=torch.float64)
    dist.all_reduce(ratios)
    of_all = [max(Fraction(1), Fraction(ratio / dist.get_world_size()).limit_denominator(_LARGEST_TERM)) for ratio in ratios.tolist()]
    return Contention(compute_slowdown=of_all[0].as_integer_ratio(), transfer_slowdown=of_all[1].as_integer_ratio())


def _operators(graphs: Sequence[tuple[GraphModule, nx.DiGraph]]) -> tuple[list[Callable[[], object]], list[int]]:
    """Return a call for each distinct operation of compute nodes, and how many nodes do it."""
    calls: dict[str, Callable[[], object]] = {}
    counts: dict[str, int] = {}
    for module, dag in graphs:
        for rank, node in enumerate(module.graph.nodes):
            record = dag.nodes[rank]["record"]
            if record.kind is NodeKind.COMPUTE and record.operation:
                counts[record.operation] = counts.get(record.operation, 0) + 1
                if record.operation not in calls:
                    target, args, kwargs = real_call(node, torch.device("cpu"))
                    calls[record.operation] = lambda target=target, args=args, kwargs=kwargs: target(*args, **kwargs)  # type: ignore[misc]
    return list(calls.values()), list(counts.values())


def _collective(*, gather: bool) -> tuple[Any, object]:
    """Start a gather, or what gloo makes of a reduce-scatter, an all-reduce; return it with the tensors that must live on."""
    whole = torch.zeros(_GATHERED_ELEMENTS // dist.get_world_size() * dist.get_world_size())
    part = torch.zeros(whole.numel() // dist.get_world_size())
    work = dist.all_gather_into_tensor(whole, part, async_op=True) if gather else dist.all_reduce(whole, async_op=True)
    return work, (whole, part)


def _us(call: Callable[[], object]) -> float:
    begin = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begin) / 1e3
