"""Run the collectives of graphs on the process groups of this job, at their own sizes and those of
buckets; every process rank takes part.

On a CPU each transfer follows a stretch of work, as in a job. Right after a barrier, process ranks
start within microseconds of each other and gloo's threads are awake: small messages then look up to
four times too cheap, and large gathers fall at random into one of two modes. In gloo a receiver
says that it is ready on the connection that it sends its data on (sendNotifyRecvReady,
gloo/transport/tcp/pair.cc): ranks that start at once say so before they send, and both directions
run together; where one starts later, its word waits behind its own data and half of the transfer
goes one way at a time, 1.5 times as long. In a job one always starts later. Buckets, larger than
any message of the graphs, are timed one behind the other, as schedules have them: in a queue every
gather takes the slow mode, and times vary little.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import networkx as nx
import torch
import torch.distributed as dist

from apsched.calibrate.stopwatch import timing_event
from apsched.costs.clusters.cluster import Cluster
from apsched.costs.measured import Transfers, fitted_bytes_per_us, rising
from apsched.costs.network.alpha_beta import group_shape
from apsched.graph.records import priced_kind
from apsched.kinds import PRICED_KINDS, CollectiveKind
from apsched.torch_compat.graphs import group_of_name

SOURCE = "measured"
_c10d: Any = torch.ops._c10d_functional
_REPEATS, _REPEATS_OF_SMALL = 10, 30
_SMALL_BYTES = 2**20
_QUEUES, _QUEUES_OF_SMALL, _IN_QUEUE = 5, 10, 3
_PRODUCTS_BETWEEN = 16
"""Matrix products between two transfers on a CPU, a millisecond or two of work."""
_LARGEST_BYTES = 256 * 2**20


def measure_collectives(
    dags: Sequence[nx.DiGraph], cluster: Cluster, device: torch.device
) -> tuple[tuple[Transfers, ...], Mapping[CollectiveKind, float]]:
    """Return the transfers of every kind on every group that ``dags`` name, and on a CPU the time
    to launch a bucket of each kind.

    All process ranks of the job call this at once, with the same graphs, which determine the
    measurements and their order.
    """
    found: list[Transfers] = []
    launches: dict[CollectiveKind, list[float]] = {}
    for kind, group_name, ranks, sizes, largest in _wanted(dags):
        points, launch_us = [], []
        for size_bytes in sizes:
            measured = queued_us if device.type == "cpu" and size_bytes > largest else _transfer_us
            transfer, launch = measured(kind, group_name, len(ranks), size_bytes, device)
            points.append((size_bytes, transfer))
            if size_bytes > largest or sizes[-1] <= largest:
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
    launch_by_kind = (
        {kind: median(times) for kind, times in launches.items()} if device.type == "cpu" else {}
    )
    return tuple(one_each[shape] for shape in sorted(one_each)), launch_by_kind


def _wanted(
    dags: Sequence[nx.DiGraph],
) -> list[tuple[CollectiveKind, str, tuple[int, ...], list[int], int]]:
    """Return kind, group, its process ranks, sizes (each one's own, and by fours up to all those of
    one graph in one bucket), and the size of the largest message.
    """
    messages: dict[tuple[CollectiveKind, str], list[int]] = {}
    most: dict[tuple[CollectiveKind, str], int] = {}
    ranks: dict[str, tuple[int, ...]] = {}
    for dag in dags:
        of_graph: dict[tuple[CollectiveKind, str], int] = {}
        for rank in range(dag.number_of_nodes()):
            collective = dag.nodes[rank]["record"].collective
            if (
                collective is not None
                and collective.group_size > 1
                and priced_kind(collective.kind) in PRICED_KINDS
            ):
                key = priced_kind(collective.kind), collective.group
                messages.setdefault(key, []).append(collective.size_bytes)
                of_graph[key] = of_graph.get(key, 0) + collective.size_bytes
                ranks[collective.group] = dag.graph["group_ranks"].get(collective.group) or tuple(
                    range(collective.group_size)
                )
        most |= {key: max(total, most.get(key, 0)) for key, total in of_graph.items()}
    return [
        (kind, group, ranks[group], _sizes(sizes, most[kind, group], len(ranks[group])), max(sizes))
        for (kind, group), sizes in sorted(messages.items())
    ]


def _sizes(messages: Sequence[int], most: int, num_ranks: int) -> list[int]:
    """Return the measured sizes, in whole float32 elements for each process rank."""
    step = 4 * num_ranks
    grid = [size for size in messages if size <= _LARGEST_BYTES]
    size, most = min(messages), min(most, _LARGEST_BYTES)
    while size < most:
        grid.append(size)
        size *= 4
    grid.append(most)
    return sorted({-(-size // step) * step for size in grid})


def _transfer_us(
    kind: CollectiveKind, group_name: str, num_ranks: int, size_bytes: int, device: torch.device
) -> tuple[float, float]:
    """Return the time of the transfer and the time of the host to launch it, means over repeats
    without the extremes.

    They are means, since a step adds them up: times of small messages have a long tail, and a
    hundred messages take more than a hundred medians.
    """
    start = _starter(kind, group_name, num_ranks, size_bytes, device)
    once = _once_on_gpu if device.type == "cuda" else _once_on_cpu
    group = group_of_name(group_name)
    repeats = _REPEATS_OF_SMALL if size_bytes <= _SMALL_BYTES else _REPEATS
    dist.barrier(group)
    once(start, group)  # sets up connections
    transfers, launches = zip(*(once(start, group) for _ in range(repeats)), strict=True)
    return _inner_mean(transfers), _inner_mean(launches)


def queued_us(
    kind: CollectiveKind, group_name: str, num_ranks: int, size_bytes: int, device: torch.device
) -> tuple[float, float]:
    """Return the time of a transfer that begins when another one ends and that of the host to
    launch it, on a CPU; all ranks call this.
    """
    start = _starter(kind, group_name, num_ranks, size_bytes, device)
    dist.barrier(group_of_name(group_name))
    queues = _QUEUES_OF_SMALL if size_bytes <= _SMALL_BYTES else _QUEUES
    transfers, launches = [], []
    for _ in range(queues):
        part_ranks()
        before = time.perf_counter_ns()
        results = [start() for _ in range(_IN_QUEUE)]
        launches.append((time.perf_counter_ns() - before) / 1e3 / _IN_QUEUE)
        ends = []
        for result in results:
            _c10d.wait_tensor(result)
            ends.append(time.perf_counter_ns())
        transfers.append((ends[-1] - ends[0]) / 1e3 / (_IN_QUEUE - 1))
    cut = queues // 5
    return fmean(sorted(transfers)[cut:-cut]), fmean(launches)


def _once_on_gpu(start: Callable[[], torch.Tensor], group: Any) -> tuple[float, float]:
    dist.barrier(group)
    begin, end = timing_event(), timing_event()
    begin.record()
    _c10d.wait_tensor(start())
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3, 0.0


def _once_on_cpu(start: Callable[[], torch.Tensor], _group: Any) -> tuple[float, float]:
    part_ranks()
    before = time.perf_counter_ns()
    result = start()
    launched = time.perf_counter_ns()
    _c10d.wait_tensor(result)
    return (time.perf_counter_ns() - launched) / 1e3, (launched - before) / 1e3


def part_ranks() -> None:
    """Work a while on the CPU: the call before brought the process ranks into step, and work takes
    them apart, as in a job.
    """
    square = torch.full((256, 256), 0.5)
    for _ in range(_PRODUCTS_BETWEEN):
        square @ square


def _inner_mean(times: Sequence[float]) -> float:
    """Return the mean without the largest and the smallest tenth."""
    cut = len(times) // 10
    return fmean(sorted(times)[cut : len(times) - cut])


def _starter(
    kind: CollectiveKind, group_name: str, num_ranks: int, size_bytes: int, device: torch.device
) -> Callable[[], torch.Tensor]:
    """Return a function that starts a collective as graphs do, of ``size_bytes``, counted once."""
    whole = torch.zeros(size_bytes // 4, device=device)
    part = torch.zeros(whole.numel() // num_ranks, device=device)
    splits = [part.numel()] * num_ranks
    starters: dict[CollectiveKind, Callable[[], torch.Tensor]] = {
        CollectiveKind.ALL_GATHER: lambda: _c10d.all_gather_into_tensor(
            part, num_ranks, group_name
        ),
        CollectiveKind.REDUCE_SCATTER: lambda: _c10d.reduce_scatter_tensor(
            whole, "sum", num_ranks, group_name
        ),
        CollectiveKind.ALL_REDUCE: lambda: _c10d.all_reduce_(whole, "sum", group_name),
        CollectiveKind.ALL_TO_ALL: lambda: _c10d.all_to_all_single(
            whole, splits, splits, group_name
        ),
    }
    return starters[kind]
