"""``ddp_buckets``: the buckets of eager DDP that end a training step first, as its reducer makes
them.

DDP reduces gradients in the order in which backward finishes them, in runs of that order: a bucket
is closed by the gradient with which it reaches its limit
(torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size). From its second step
on the buckets are these.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from apsched.capture.captured import Capture
from apsched.capture.fake_copy import Inputs, fake_call, fake_copy, inputs_of, traced
from apsched.capture.joint import capture_module
from apsched.compiler.ranks.agreement import GraphAgreement
from apsched.compiler.ranks.job import running_job
from apsched.compiler.schedule_captured import running_groups
from apsched.compiler.settings import Settings
from apsched.costs.model import CostModel
from apsched.errors import InputError
from apsched.graph.export.export import export_graph
from apsched.graph.export.prices import launch_us
from apsched.kinds import CollectiveKind
from apsched.problem.build import build_problem
from apsched.quantities import show_us
from apsched.torch_compat.compilers import uncompiled
from apsched.torch_compat.ddp import (
    first_bucket_bytes,
    ignored_names,
    reducer_buckets,
    takes_limits_of_buckets,
)
from apsched.torch_compat.graphs import gradient_of, process_group_names
from apsched.torch_compat.random_draws import DecidedDraws
from apsched.units import ticks_to_us

_MIB = 1 << 20
_DEFAULT_CAP_MB = 25
_CAPS_MB = (1, 2, 5, 10, 25, 50, 100, 200, 500, 1000)
_SLACK = 1e-3
"""Share of the step time that fewer launches may cost."""
_MOST_BUCKETS = 64
"""Of the exact search, which takes a pass over all pairs of gradients for each number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpBuckets:
    """The settings of eager DDP, and their effect."""

    bucket_cap_mb: float | None
    """Limit of every bucket but the first; ``None`` where each has its own."""
    bucket_cap_mb_list: tuple[float, ...]
    """Limits of the buckets, the last one for all that follow, as DDP takes them."""
    first_bucket_bytes: int
    buckets: tuple[tuple[str, ...], ...]
    """Names of parameters, in the order in which they are reduced."""
    bucket_bytes: tuple[int, ...]
    step_time_us: float
    """As the costs predict it."""
    default_us: float
    """The same with DDP's own limits: 1 MiB, then 25 MiB."""

    @property
    def parameter_order(self) -> tuple[str, ...]:
        """Names of the parameters in the order in which backward finishes their gradients."""
        return tuple(name for bucket in self.buckets for name in bucket)

    @property
    def gain(self) -> float:
        """Share of the step time that is saved, as the costs predict it."""
        return 1 - self.step_time_us / self.default_us if self.default_us else 0.0

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments for ``DistributedDataParallel``: none where its own limits are the best."""
        if self.bucket_cap_mb_list == tuple(limit / _MIB for limit in _own_limits()):
            return {}
        if len(self.bucket_cap_mb_list) == 1:
            return {"bucket_cap_mb": self.bucket_cap_mb}
        return {"bucket_cap_mb_list": list(self.bucket_cap_mb_list)}

    def __str__(self) -> str:
        """Return one line about it."""
        number = "1 bucket" if len(self.buckets) == 1 else f"{len(self.buckets)} buckets"
        return (
            f"DDP: {number}, the first of {self.first_bucket_bytes} bytes, step time"
            f" {show_us(self.step_time_us)} predicted, {show_us(self.default_us)} with DDP's own"
            f" ({100 * self.gain:.1f} % less)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backward:
    """Gradients in the order in which backward finishes them."""

    names: tuple[str, ...]
    parameters: tuple[torch.Tensor, ...]
    """Fake."""
    ready_us: tuple[float, ...]
    """From the begin of the step."""
    end_us: float
    """Of compute."""
    launch_us: float
    """Of one all-reduce, on the compute stream."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each gradient."""
        return tuple(p.numel() * p.element_size() for p in self.parameters)


def ddp_buckets(model: nn.Module, inputs: Any, **settings: Any) -> DdpBuckets:
    """Return the buckets with which ``DistributedDataParallel`` ends the step ``model(*inputs)``
    first (``model(**inputs)`` for a mapping)::

        found = apsched.ddp_buckets(model, (tokens,), cluster="h100")
        model = DistributedDataParallel(model, **found.arguments)

    The step is captured with fake tensors on the host; the order of gradients is that of torch's
    autograd engine. Call it on every process rank before DDP is made: all get the answer of the
    lowest one. ``settings`` are ``cluster`` or ``cost_model``, and ``deadline_s``
    (:class:`apsched.compiler.settings.Settings`).

    Raises
    ------
    InputError
        where the model cannot be captured, or no process group runs.
    """
    if strange := next((n for n in settings if n not in _SETTINGS), None):
        raise InputError(f"expected {', '.join(_SETTINGS)}, found {strange!r}; leave it out")
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError(
            "expected a process group, found none; call torch.distributed.init_process_group first"
        )
    chosen = Settings.of(settings)
    whole = _unwrapped(model)
    given = inputs_of(inputs)

    def solve() -> bytes:
        prices = chosen.prices(running_groups())
        return json.dumps(asdict(_best(_backward(whole, given, prices), prices))).encode()

    job, ranks = running_job(chosen.deadline_s), tuple(range(dist.get_world_size()))
    if job is None:
        return _parsed(solve())
    with GraphAgreement(job, {_whole_group(): ranks}) as agreement:
        shape = [[n, list(p.shape), str(p.dtype)] for n, p in whole.named_parameters()]
        stated = {name: repr(value) for name, value in settings.items() if name == "cluster"}
        answer, _ = agreement.shared(f"DDP of {shape}", stated, solve)
        agreement.check({})
    return _parsed(answer)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module around which ``torch.compile`` and DDP were called, in any order."""
    while True:
        inner: nn.Module = uncompiled(model)
        if isinstance(inner, nn.parallel.DistributedDataParallel):
            inner = inner.module
        if inner is model:
            return model
        model = inner


_SETTINGS = ("cluster", "cost_model", "deadline_s")


def _parsed(answer: bytes) -> DdpBuckets:
    fields = json.loads(answer)
    return DdpBuckets(
        **{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
        | {"buckets": tuple(map(tuple, fields["buckets"]))}
    )


def _whole_group() -> str:
    """Return the name of the group of all process ranks."""
    world = tuple(range(dist.get_world_size()))
    return next(name for name, ranks in process_group_names().items() if ranks == world)


def _backward(model: nn.Module, inputs: Inputs, prices: CostModel) -> _Backward:
    """Return when each gradient of a step is ready: in the order of the engine, at the times of the
    captured graphs.
    """

    def trace() -> Capture:
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        copy = fake_copy(model, mode)
        return capture_module(copy, fake_call(copy, inputs, mode), source=type(model).__name__)

    order, capture = traced(lambda: _gradient_order(model, inputs)), traced(trace)
    parameters = dict(model.named_parameters())
    at, end_us = _finished_us(capture, prices)
    ready, latest_us = [], 0.0
    for name in order:
        latest_us = max(latest_us, at.get(name, end_us))
        ready.append(latest_us)
    return _Backward(
        names=order,
        parameters=tuple(torch.empty_like(parameters[n], device="meta") for n in order),
        ready_us=tuple(ready),
        end_us=end_us,
        launch_us=launch_us(
            prices,
            CollectiveKind.ALL_REDUCE,
            _whole_group(),
            dist.get_world_size(),
            parameters[order[0]].device,
        ),
    )


def _gradient_order(model: nn.Module, inputs: Inputs) -> tuple[str, ...]:
    """Return parameters in the order in which the autograd engine accumulates their gradients."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    copy, order = fake_copy(model, mode), []
    ignored = ignored_names(model)
    for name, parameter in copy.named_parameters():
        tensor: Any = parameter
        if tensor.requires_grad and name not in ignored:
            tensor.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    given = fake_call(copy, inputs, mode)
    with mode, DecidedDraws():
        leaves = torch.utils._pytree.tree_leaves(copy(*given))
        results = [r for r in leaves if isinstance(r, torch.Tensor) and r.requires_grad]
        torch.autograd.backward(results, [torch.ones_like(r) for r in results])
    if not order:
        raise InputError(
            "expected parameters with gradients that DDP reduces, found none; hand in a model with"
            " a parameter that has requires_grad, reaches a result with a gradient, and is not"
            " among those that DDP ignores"
        )
    return tuple(order)


def _finished_us(capture: Capture, prices: CostModel) -> tuple[dict[str, float], float]:
    """Return when the gradient of each parameter is computed, and when compute ends."""
    finished: dict[str, float] = {}
    now_us = 0.0
    for graph in capture.graphs:
        problem = build_problem(export_graph(graph, prices, group_ranks=capture.group_ranks))
        nodes = list(graph.module.graph.nodes)
        ends: dict[torch.fx.Node, float] = {}
        for node, ticks in zip(nodes, problem.duration_ticks, strict=True):
            now_us += ticks_to_us(ticks)
            ends[node] = now_us
        output = graph.module.graph.output_node()
        described = output.meta.get("desc") or ()
        for value, descriptor in zip(output.args[0], described, strict=False):  # type: ignore[arg-type]
            if (name := gradient_of(descriptor)) is not None and isinstance(value, torch.fx.Node):
                finished[name] = ends[value]
    return finished, now_us


def _own_limits() -> tuple[int, int]:
    """Return the limits of DDP where none is stated: of the first bucket, and of the others."""
    return first_bucket_bytes(), _DEFAULT_CAP_MB * _MIB


def _best(backward: _Backward, prices: CostModel) -> DdpBuckets:
    """Return the limits that end the step first; of nearly equal ones those with the fewest
    buckets.
    """
    candidates: list[tuple[int, ...]] = [_own_limits(), *((mb * _MIB,) for mb in _CAPS_MB)]
    if takes_limits_of_buckets():
        candidates += [
            (first * _MIB, cap * _MIB) for first in (1, 5) for cap in _CAPS_MB if cap > first
        ]
        if len({(p.dtype, p.device) for p in backward.parameters}) == 1:
            candidates += _fastest_limits(backward, prices)
    judged = [_judged(backward, limits, prices) for limits in candidates]
    default_us = judged[0][0]
    within_us = min(us for us, _, _ in judged) * (1 + _SLACK)
    us, buckets, limits = min(
        (one for one in judged if one[0] <= within_us), key=lambda one: (len(one[1]), one[0])
    )
    sizes = [sum(backward.sizes[k] for k in bucket) for bucket in buckets]
    return DdpBuckets(
        bucket_cap_mb=limits[-1] / _MIB if len(limits) < 3 else None,
        bucket_cap_mb_list=tuple(limit / _MIB for limit in limits),
        first_bucket_bytes=sizes[0],
        buckets=tuple(tuple(backward.names[k] for k in bucket) for bucket in buckets),
        bucket_bytes=tuple(sizes),
        step_time_us=us,
        default_us=default_us,
    )


def _judged(
    backward: _Backward, limits: tuple[int, ...], prices: CostModel
) -> tuple[float, list[list[int]], tuple[int, ...]]:
    """Return the step time with these limits, the buckets that the reducer makes, and the
    limits. Each launch delays the compute behind it.
    """
    buckets = reducer_buckets(backward.parameters, limits)
    end_us = launched_us = 0.0
    for bucket in buckets:
        launched_us += backward.launch_us
        size = sum(backward.sizes[k] for k in bucket)
        ready_us = backward.ready_us[bucket[-1]] + launched_us
        end_us = max(end_us, ready_us) + _reduce_us(prices, size)
    return max(end_us, backward.end_us + launched_us), buckets, limits


def _fastest_limits(backward: _Backward, prices: CostModel) -> list[tuple[int, ...]]:
    """Return for each number of buckets the limits of the runs of gradients that are all reduced
    first (prices are interpolated in size): the end of the first j in k runs is the least over the
    last of them.
    """
    sizes = np.concatenate([[0], np.cumsum(backward.sizes)])
    count, ready = len(backward.sizes), np.array(backward.ready_us)
    grid = np.unique(np.geomspace(1, max(int(sizes[-1]), 2), 256).astype(np.int64))
    price = np.array([_reduce_us(prices, int(size)) for size in grid])
    ends = np.full(count + 1, np.inf)
    ends[0] = 0.0
    before: list[np.ndarray] = []
    found: list[tuple[int, ...]] = []
    for num_buckets in range(1, min(count, _MOST_BUCKETS) + 1):
        launched_us = num_buckets * backward.launch_us
        now, last_run = np.full(count + 1, np.inf), np.zeros(count + 1, dtype=np.int64)
        for last in range(num_buckets, count + 1):
            took = np.interp(sizes[last] - sizes[:last], grid, price)
            end = np.maximum(ends[:last], ready[last - 1] + launched_us) + took
            last_run[last] = int(np.argmin(end))
            now[last] = end[last_run[last]]
        ends = now
        before.append(last_run)
        found.append(_limits(before, sizes))
    return found


def _limits(before: Sequence[np.ndarray], sizes: np.ndarray) -> tuple[int, ...]:
    """Return the bytes of each run; ``before`` has the begin of the last run, by the number of runs
    and their end.
    """
    last, limits = len(sizes) - 1, []
    for last_run in reversed(before):
        limits.append(int(sizes[last] - sizes[last_run[last]]))
        last = int(last_run[last])
    return tuple(reversed(limits))


def _reduce_us(prices: CostModel, size_bytes: int) -> float:
    group = _whole_group()
    return float(
        prices.collective_us(CollectiveKind.ALL_REDUCE, group, dist.get_world_size(), size_bytes)
    )
