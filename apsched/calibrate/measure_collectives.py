"""Run the collectives of graphs on the process groups at hand, at their own sizes and those of buckets; every process rank takes part."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import networkx as nx
import torch
import torch.distributed as dist

from apsched.calibrate.stopwatch import timing_event
from apsched.costs.alpha_beta import KINDS, group_shape
from apsched.costs.cluster import Cluster
from apsched.costs.measured import Transfers, fitted_bytes_per_us, rising
from apsched.graph.curve_names import asked_kind
from apsched.torch_private import group_of_name

SOURCE = "measured"
_c10d: Any = torch.ops._c10d_functional
_REPEATS = 9
_LARGEST_BYTES = 256 * 2**20


def measure_collectives(
    dags: Sequence[nx.DiGraph], cluster: Cluster, device: torch.device
) -> tuple[tuple[Transfers, ...], Mapping[str, float]]:
    """Return the transfers of every kind on every group that ``dags`` name, and on a CPU what launching each kind takes.

    All process ranks of the job call this at once, with the same graphs: what is measured, and in which order, follows from them.
    """
    found: list[Transfers] = []
    launches: dict[str, list[float]] = {}
    for kind, group_name, ranks, sizes in _wanted(dags):
        points, launch_us = [], []
        for size_bytes in sizes:
            transfer, launch = _transfer_us(kind, group_name, len(ranks), size_bytes, device)
            points.append((size_bytes, transfer))
            launch_us.append(launch)
        shape = group_shape(cluster, ranks)
        curve = rising(points, [1.0] * len(points))
        found.append(
            Transfers(
                kind=kind,
                num_ranks=shape.num_ranks,
                num_nodes=shape.num_nodes,
                source=SOURCE,
                points=curve,
                bytes_per_us=fitted_bytes_per_us(curve),
            )
        )
        launches.setdefault(kind, []).append(median(launch_us))
    one_each = {(t.kind, t.num_ranks, t.num_nodes): t for t in reversed(found)}
    launch_by_kind = {kind: median(times) for kind, times in launches.items()} if device.type == "cpu" else {}
    return tuple(one_each[shape] for shape in sorted(one_each)), launch_by_kind


def _wanted(dags: Sequence[nx.DiGraph]) -> list[tuple[str, str, tuple[int, ...], list[int]]]:
    """Return kind, group, its process ranks, and sizes: each one's own, and by fours up to all of them in one bucket."""
    messages: dict[tuple[str, str], list[int]] = {}
    ranks: dict[str, tuple[int, ...]] = {}
    for dag in dags:
        for rank in range(dag.number_of_nodes()):
            collective = dag.nodes[rank]["record"].collective
            if collective is not None and collective.group_size > 1 and asked_kind(collective.kind) in KINDS:
                messages.setdefault((asked_kind(collective.kind), collective.group), []).append(collective.size_bytes)
                ranks[collective.group] = dag.graph["group_ranks"].get(collective.group) or tuple(range(collective.group_size))
    return [(kind, group, ranks[group], _sizes(sizes, len(ranks[group]))) for (kind, group), sizes in sorted(messages.items())]


def _sizes(messages: Sequence[int], num_ranks: int) -> list[int]:
    """Return what is measured, in whole float32 elements for each process rank."""
    step = 4 * num_ranks
    grid = [size for size in messages if size <= _LARGEST_BYTES]
    size, most = min(messages), min(sum(messages), _LARGEST_BYTES)
    while size < most:
        grid.append(size)
        size *= 4
    grid.append(most)
    return sorted({-(-size // step) * step for size in grid})


def _transfer_us(kind: str, group_name: str, num_ranks: int, size_bytes: int, device: torch.device) -> tuple[float, float]:
    """Return the median time of the transfer, and that of the host to launch it."""
    start = _starter(kind, group_name, num_ranks, size_bytes, device)
    group = group_of_name(group_name)
    transfers, launches = [], []
    for repeat in range(_REPEATS + 1):
        dist.barrier(group)
        if device.type == "cuda":
            begin, end = timing_event(), timing_event()
            begin.record()
            _c10d.wait_tensor(start())
            end.record()
            torch.cuda.synchronize()
            transfer, launch = float(begin.elapsed_time(end)) * 1e3, 0.0
        else:
            before = time.perf_counter_ns()
            result = start()
            launched = time.perf_counter_ns()
            _c10d.wait_tensor(result)
            transfer, launch = (time.perf_counter_ns() - launched) / 1e3, (launched - before) / 1e3
        if repeat:  # the first one sets up connections
            transfers.append(transfer)
            launches.append(launch)
    return median(transfers), median(launches)


def _starter(kind: str, group_name: str, num_ranks: int, size_bytes: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """Return what starts a collective as graphs do, whose bytes, counted once, are ``size_bytes``."""
    whole = torch.zeros(size_bytes // 4, device=device)
    part = torch.zeros(whole.numel() // num_ranks, device=device)
    splits = [part.numel()] * num_ranks
    starters: dict[str, Callable[[], torch.Tensor]] = {
        "all_gather": lambda: _c10d.all_gather_into_tensor(part, num_ranks, group_name),
        "reduce_scatter": lambda: _c10d.reduce_scatter_tensor(whole, "sum", num_ranks, group_name),
        "all_reduce": lambda: _c10d.all_reduce_(whole, "sum", group_name),
        "all_to_all": lambda: _c10d.all_to_all_single(whole, splits, splits, group_name),
    }
    return starters[kind]
