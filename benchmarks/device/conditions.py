"""Times of operators under the conditions of a step on a GPU: caches that other work has filled,
and the clocks of a busy device. The sums over a graph tell which condition explains that compute
takes longer in a step than its operators take alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import networkx as nx
import torch
from torch.fx import GraphModule

from apsched.calibrate.arguments import real_call
from apsched.calibrate.measure import distinct_operations
from apsched.calibrate.stopwatch import timing_event
from apsched.kinds import NodeKind
from apsched.torch_compat.graphs import hold_stream

_CALLS = 10
_POOL_BYTES = 256 * 2**20
_SIZE, _PRODUCTS = 8192, 100
"""A tenth to a fifth of a second of matrix products: the clocks then are those of load."""
_HELD_US = 3_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Sums over the compute nodes of one graph, in microseconds."""

    graph: str
    alone_us: float
    cold_us: float
    """With caches that other bytes fill."""
    busy_us: float
    """Right behind a stretch of matrix products."""
    cold_and_busy_us: float


def conditions(
    graphs: Sequence[tuple[str, GraphModule, nx.DiGraph]], device: torch.device
) -> list[Conditions]:
    """Return the sums of each graph; operations that cannot run here are left out. None on a CPU,
    which has no such clocks.
    """
    if device.type != "cuda":
        return []
    bench = _Bench(device)
    found = distinct_operations([(module, dag) for _, module, dag in graphs], fused=False)
    times: dict[str, tuple[float, ...]] = {}
    with torch.no_grad():
        for operation, node in found.items():
            try:
                target, args, kwargs = real_call(node, device)
                times[operation] = bench.times(partial(target, *args, **kwargs))
            except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
                continue
    sums = []
    for name, _, dag in graphs:
        records = [dag.nodes[rank]["record"] for rank in range(dag.number_of_nodes())]
        known = [
            times[r.operation]
            for r in records
            if r.kind is NodeKind.COMPUTE and r.operation in times
        ]
        alone, cold, busy, both = (sum(column) for column in zip(*known, strict=True))
        sums.append(
            Conditions(
                graph=name, alone_us=alone, cold_us=cold, busy_us=busy, cold_and_busy_us=both
            )
        )
    return sums


class _Bench:
    """Buffers that fill caches and keep the device busy."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.empty(_POOL_BYTES, dtype=torch.uint8, device=device)
        self._factor = torch.randn(_SIZE, _SIZE, device=device).to(torch.bfloat16)
        self._product = torch.empty_like(self._factor)
        self._empty_us = 0.0
        self._empty_us = self._us(lambda: None, cold=False, busy=False)

    def times(self, call: Callable[[], object]) -> tuple[float, ...]:
        """Return the times alone, cold, busy, and cold and busy."""
        return tuple(
            self._us(call, cold=cold, busy=busy)
            for cold, busy in ((False, False), (True, False), (False, True), (True, True))
        )

    def _us(self, call: Callable[[], object], *, cold: bool, busy: bool) -> float:
        call()
        torch.cuda.synchronize()
        if busy:
            for _ in range(_PRODUCTS):
                torch.mm(self._factor, self._factor, out=self._product)
        else:
            hold_stream(_HELD_US)
        marks = []
        for _ in range(_CALLS):
            if cold:
                self._pool.zero_()
            marks.append((timing_event(), timing_event()))
            marks[-1][0].record()
            call()
            marks[-1][1].record()
        torch.cuda.synchronize()
        measured_us = median(float(begin.elapsed_time(end)) * 1e3 for begin, end in marks)
        return max(measured_us - self._empty_us, 0.0)


def condition_rows(sums: Sequence[Conditions]) -> list[str]:
    """Return the table; empty without sums."""
    if not sums:
        return []
    return [
        "",
        "| compute of | alone, ms | cold caches, ms | busy device, ms | both, ms |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {one.graph} | {one.alone_us / 1e3:.2f} | {one.cold_us / 1e3:.2f} |"
            f" {one.busy_us / 1e3:.2f} | {one.cold_and_busy_us / 1e3:.2f} |"
            for one in sums
        ),
    ]
