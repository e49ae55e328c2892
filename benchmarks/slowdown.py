"""By how much compute and collectives slow each other down, measured with a graph's own operators."""

import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import cycle, islice, product
from statistics import fmean
from typing import Any

import networkx as nx
import torch
import torch.distributed as dist
from torch.fx import GraphModule

from apsched.calibrate.arguments import real_call
from apsched.contention import Contention
from apsched.graph.dag import NodeKind

_LARGEST_TERM = 100
_SMALL_ELEMENTS, _LARGE_ELEMENTS = 2**16, 2**21
"""256 KiB, of which a gather's two modes are 3 ms apart at 200 Mb/s; 8 MiB, a tenth of a second at 1 Gb/s: most operators come by."""
_ROUNDS = {_SMALL_ELEMENTS: 32, _LARGE_ELEMENTS: 10}
"""Differences of small messages say what latency takes, and are of the size of their own noise."""

_PARTS = 4
"""That part of all operators runs before each message, to be timed alone."""


def measured_contention(graphs: Sequence[tuple[GraphModule, nx.DiGraph]], latency_us: float) -> Contention:
    """Return how compute of ``graphs`` and collectives, which have such a latency, slow each other down.

    Every process rank calls this, and all get the same. Each distinct operator runs alone and, as they come, beside gathers and
    reductions of two sizes, and these run alone and beside operators; ratios are of sums, for compute over all nodes. One matrix product
    would not do: it lives in the cache, and what gloo's threads take away most is memory bandwidth and turns on the core. With t(s) what
    messages of s bytes take, and the latency l,

        t_beside(s) = h l + g (t_alone(s) - l)

    Each small message is launched on an idle stream, which makes h larger (one that queues behind another takes 1 ms more beside compute,
    not 3) and stands for what a job adds: process ranks launch operators apart, and the early one waits for the late one. Large ones begin
    together, and compute is noted beside them alone: an operator beside a message that waits for the other rank loses nothing. A message
    ends when gloo's thread says so; the operator that runs meanwhile may end tens of milliseconds later.
    """
    calls, counts = _operators(graphs)
    alone: list[list[float]] = [[] for _ in calls]
    beside: list[list[float]] = [[] for _ in calls]
    turns, turns_alone = cycle(range(len(calls))), cycle(range(len(calls)))

    def one_by_one(work: Any, *, noted: bool) -> None:
        while not work.is_completed():
            k = next(turns)
            time_us = _us(calls[k])
            if noted and not work.is_completed():  # else part of it ran alone
                beside[k].append(time_us)

    def message_us(*, elements: int, gather: bool, computing: bool) -> float:
        small = elements == _SMALL_ELEMENTS
        if small:
            dist.barrier()
        for k in islice(turns_alone, -(-len(calls) // _PARTS)):
            alone[k].append(_us(calls[k]))
        if not small:
            dist.barrier()
        ends: list[int] = []
        begin = time.perf_counter_ns()
        work, kept = _collective(elements=elements, gather=gather)
        ended = work.get_future().then(lambda _: ends.append(time.perf_counter_ns()))
        if computing:
            one_by_one(work, noted=not small)
        ended.wait()
        del kept
        return (ends[0] - begin) / 1e3

    with torch.no_grad():
        for call in calls:
            call()
        times: dict[tuple[int, bool, bool], list[float]] = {}
        for elements, rounds in _ROUNDS.items():
            for _, gather, computing in product(range(rounds), (True, False), (False, True)):
                time_us = message_us(elements=elements, gather=gather, computing=computing)
                times.setdefault((elements, gather, computing), []).append(time_us)
    taken = {
        (elements, computing): fmean(_typical(times[elements, gather, computing]) for gather in (True, False))
        for elements, computing in product(_ROUNDS, (False, True))
    }
    both = [k for k in range(len(calls)) if beside[k]]
    compute = sum(counts[k] * fmean(beside[k]) for k in both) / sum(counts[k] * fmean(alone[k]) for k in both) if both else 1.0
    of_bytes = max(
        1.0, (taken[_LARGE_ELEMENTS, True] - taken[_SMALL_ELEMENTS, True]) / (taken[_LARGE_ELEMENTS, False] - taken[_SMALL_ELEMENTS, False])
    )
    of_latency = (taken[_SMALL_ELEMENTS, True] - of_bytes * (taken[_SMALL_ELEMENTS, False] - latency_us)) / latency_us
    ratios = torch.tensor([compute, of_bytes, of_latency], dtype=torch.float64)
    dist.all_reduce(ratios)
    f, g, h = (max(1.0, ratio / dist.get_world_size()) for ratio in ratios.tolist())
    return Contention(compute_slowdown=_ratio(f), transfer_slowdown=_ratio(g), latency_slowdown=_ratio(h))


def _typical(times: Sequence[float]) -> float:
    """Return the mean of the middle half."""
    quarter = len(times) // 4
    return fmean(sorted(times)[quarter : len(times) - quarter])


def _ratio(factor: float) -> tuple[int, int]:
    return Fraction(factor).limit_denominator(_LARGEST_TERM).as_integer_ratio()


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


def _collective(*, elements: int, gather: bool) -> tuple[Any, object]:
    """Start a gather, or what gloo makes of a reduce-scatter, an all-reduce; return it with the tensors that must live on."""
    whole = torch.zeros(elements // dist.get_world_size() * dist.get_world_size())
    part = torch.zeros(whole.numel() // dist.get_world_size())
    work = dist.all_gather_into_tensor(whole, part, async_op=True) if gather else dist.all_reduce(whole, async_op=True)
    return work, (whole, part)


def _us(call: Callable[[], object]) -> float:
    begin = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begin) / 1e3
