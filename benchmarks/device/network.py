"""A network on one GPU: each collective of a graph takes its predicted time on the stream of its
process group, and the compute stream waits for it as it would wait for NCCL.

The collective itself is that of a fake process group, which only allocates. A kernel of one thread
then holds the stream for the predicted time, and a copy fills the output meanwhile, as a transfer
does. Other process ranks are missing, and so are the processors that NCCL's kernels take from
compute.
"""

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from apsched.fx.graph_copies import copied

_c10d: Any = torch.ops._c10d_functional
_NUM_VALUES = 2**26
_SMALL = 0.02
_CLOCK = r"""
extern "C" __global__ void begin(unsigned long long* at) {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(*at));
}
extern "C" __global__ void hold(const unsigned long long* at, int duration_ns) {
    unsigned long long now;
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now < *at + (unsigned long long)duration_ns);
}
"""


@dataclass(kw_only=True)
class Network:
    """The streams of process groups on ``device``; on a CPU nothing waits."""

    device: torch.device
    streams: dict[str, torch.cuda.Stream] = field(default_factory=dict)
    pools: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            compiled = torch.cuda._compile_kernel
            self._begin, self._hold = compiled(_CLOCK, "begin"), compiled(_CLOCK, "hold")

    def stream(self, group: str) -> torch.cuda.Stream:
        """Return the stream of a process group."""
        if group not in self.streams:
            self.streams[group] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self.streams[group]

    def transfer(self, outputs: Any, group: str, duration_us: float) -> Any:
        """Fill ``outputs`` on the stream of ``group``, behind the work of the current stream, and
        hold the stream for ``duration_us``; returns the event of the end. A transfer of no time
        does not touch the stream.
        """
        if self.device.type != "cuda" or not duration_us:
            return None
        stream, end = self.stream(group), torch.cuda.Event()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            at = torch.empty(1, dtype=torch.int64, device=self.device)
            self._begin(args=[at])
            for leaf in pytree.tree_leaves(outputs):
                self._fill(leaf)
            self._hold(args=[at, round(duration_us * 1000)])
        end.record(stream)
        return end

    def arrived(self, end: Any) -> None:
        """Let the current stream wait for a transfer."""
        if end is not None:
            torch.cuda.current_stream(self.device).wait_event(end)

    def _fill(self, tensor: torch.Tensor) -> None:
        """Write small values, since products of zeros are faster than others."""
        if not tensor.is_contiguous():
            return
        flat = tensor.detach().view(-1)
        pool = self.values(tensor.dtype)
        for begin in range(0, flat.numel(), _NUM_VALUES):
            part = flat[begin : begin + _NUM_VALUES]
            part.copy_(pool[: part.numel()])

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a pool of small values."""
        if dtype not in self.pools:
            values = torch.randn(_NUM_VALUES, device=self.device) * _SMALL
            self.pools[dtype] = values.to(dtype)
        return self.pools[dtype]


def on_network(
    module: GraphModule,
    network: Network,
    transfers: Mapping[str, tuple[str, float]],
) -> GraphModule:
    """Return a copy of ``module`` that runs on ``network``; ``transfers`` has the process group and
    the time in microseconds of each start node, by name. Of several waits for one launch each waits
    for all of it.
    """
    running = copied(module)
    num_waits = Counter(_start(n).name for n in running.graph.nodes if _is_wait(n))
    in_flight: dict[str, _InFlight] = {}
    for node in running.graph.nodes:
        if node.name in transfers:
            node.target = _launching(
                node, network, *transfers[node.name], num_waits[node.name], in_flight
            )
        elif _is_wait(node):
            node.target = _waiting(node, network, in_flight)
    running.recompile()
    return running


@dataclass(kw_only=True)
class _InFlight:
    """A transfer, and the inputs that NCCL holds until its wait."""

    end: Any
    held: Any
    num_waits: int


def _is_wait(node: Node) -> bool:
    return node.op == "call_function" and node.target is _c10d.wait_tensor.default


def _start(wait: Node) -> Node:
    node = wait.args[0]
    while isinstance(node, Node) and node.target is operator.getitem:
        node = node.args[0]
    if not isinstance(node, Node):
        raise AssertionError(f"{wait.name} waits for no node")
    return node


def _launching(
    node: Node,
    network: Network,
    group: str,
    duration_us: float,
    num_waits: int,
    in_flight: dict[str, _InFlight],
) -> Callable[..., Any]:
    name, target = node.name, node.target

    def launched(*args: Any, **kwargs: Any) -> Any:
        outputs = target(*args, **kwargs)  # type: ignore[operator]
        end = network.transfer(outputs, group, duration_us)
        in_flight[name] = _InFlight(end=end, held=(args, kwargs), num_waits=num_waits)
        return outputs

    launched.__name__ = launched.__qualname__ = f"launched_{name}"
    return launched


def _waiting(node: Node, network: Network, in_flight: dict[str, _InFlight]) -> Callable[..., Any]:
    target, start = node.target, _start(node).name

    def waited(*args: Any, **kwargs: Any) -> Any:
        transfer = in_flight[start]
        network.arrived(transfer.end)
        transfer.num_waits -= 1
        if not transfer.num_waits:
            del in_flight[start]
        return target(*args, **kwargs)  # type: ignore[operator]

    waited.__name__ = waited.__qualname__ = f"waited_{node.name}"
    return waited
