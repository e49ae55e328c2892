"""Step times of one GPU beside their predictions: compute and its launches are real, the network
takes the predicted time (:mod:`benchmarks.device.network`).
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch.fx import GraphModule

from apsched.calibrate.stopwatch import timing_event
from apsched.capture.captured import CapturedGraph
from apsched.costs.model import CostModel
from apsched.graph.export.export import export_graph
from apsched.problem.build import build_problem
from apsched.schedule.schedule import as_captured
from apsched.schedule.simulate import simulate
from apsched.torch_compat.sizes import size_hint
from apsched.units import ticks_to_us
from benchmarks.device.network import Network, on_network

_WARM_UPS, _ROUNDS, _ROUNDS_BY_HOST = 3, 10, 3
ALONE = "without a network"
"""The graph as captured, with collectives that take no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Times of one graph under one schedule."""

    schedule: str
    graph: str
    predicted_us: float
    replayed_us: float | None
    """As a CUDA graph: no host between the kernels. ``None`` where it could not be one."""
    by_host_us: float | None
    """Launched node by node from Python."""
    compute_us: float
    """Predicted time of the compute stream, without waits."""
    failed: str = ""


def step_times(
    graphs: Sequence[CapturedGraph],
    modules: Mapping[str, Sequence[GraphModule]],
    model: CostModel,
    group_ranks: Mapping[str, tuple[int, ...]],
    device: torch.device,
) -> list[StepTime]:
    """Return the times of every schedule of ``modules``, and of the first one without a network."""
    network, found = Network(device=device), []
    first = next(iter(modules.values()))
    runs = {ALONE: first, **modules}
    for name, pair in runs.items():
        for captured, module in zip(graphs, pair, strict=True):
            problem = build_problem(
                export_graph(replace(captured, module=module), model, group_ranks=group_ranks)
            )
            timeline = simulate(problem, as_captured(problem.num_nodes))
            nodes = list(module.graph.nodes)
            transfers = {}
            for one in timeline.transfers:
                collective = problem.collectives[one.members[0]]
                duration_us = ticks_to_us(one.end_ticks - one.begin_ticks)
                transfers[nodes[collective.start].name] = (
                    str(problem.keys[collective.key].stream),
                    0.0 if name == ALONE else duration_us,
                )
            compute_us = ticks_to_us(timeline.compute_ticks)
            running = on_network(module, network, transfers)
            replayed_us, by_host_us, failed = _timed(running, network, device)
            found.append(
                StepTime(
                    schedule=name,
                    graph=captured.name,
                    predicted_us=compute_us
                    if name == ALONE
                    else ticks_to_us(timeline.step_time_ticks),
                    replayed_us=replayed_us,
                    by_host_us=by_host_us,
                    compute_us=compute_us,
                    failed=failed,
                )
            )
    return found


def _timed(
    module: GraphModule, network: Network, device: torch.device
) -> tuple[float | None, float | None, str]:
    """Return the time as a CUDA graph, the time by the host, and why there is no CUDA graph."""
    inputs = [
        _input(node.meta["val"], network) for node in module.graph.find_nodes(op="placeholder")
    ]

    def call() -> Any:
        with torch.no_grad():
            return module(*inputs)

    if device.type != "cuda":
        call()
        return None, None, "no GPU"
    by_host_us, replayed_us, failed = None, None, ""
    try:
        by_host_us = median(_times(call, 1 + _ROUNDS_BY_HOST)[1:])
        _empty()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = call()
        replayed_us = median(_times(graph.replay, _WARM_UPS + _ROUNDS)[_WARM_UPS:])
        graph.reset()
        del outputs
    except Exception as error:
        failed = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    inputs.clear()
    _empty()
    return replayed_us, by_host_us, failed


def _times(call: Callable[[], object], number: int) -> list[float]:
    """Return the times of calls, each from an idle device to an idle device."""
    found = []
    for _ in range(number):
        torch.cuda.synchronize()
        begin, end = timing_event(), timing_event()
        begin.record()
        result = call()
        end.record()
        torch.cuda.synchronize()
        del result
        found.append(float(begin.elapsed_time(end)) * 1e3)
    return found


def _empty() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _input(value: Any, network: Network) -> Any:
    """Return an input of small values; tokens are 0."""
    if not isinstance(value, torch.Tensor):
        return size_hint(value)
    size, stride = tuple(map(size_hint, value.shape)), tuple(map(size_hint, value.stride()))
    made = torch.empty_strided(size, stride, dtype=value.dtype, device=network.device)
    return made.normal_(std=0.02) if value.dtype.is_floating_point else made.zero_()


def step_rows(times: Sequence[StepTime]) -> list[str]:
    """Return the table."""
    lines = [
        "",
        (
            "| schedule | graph | predicted, ms | as a CUDA graph, ms | off | node by node from"
            " Python, ms | |"
        ),
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for one in times:
        replayed = (
            (
                f"{one.replayed_us / 1e3:.2f}",
                f"{100 * (one.predicted_us / one.replayed_us - 1):+.1f} %",
            )
            if one.replayed_us
            else ("", "")
        )
        by_host = f"{one.by_host_us / 1e3:.2f}" if one.by_host_us else ""
        lines.append(
            f"| {one.schedule} | {one.graph} | {one.predicted_us / 1e3:.2f} | {replayed[0]} |"
            f" {replayed[1]} | {by_host} | {one.failed} |"
        )
    return lines
