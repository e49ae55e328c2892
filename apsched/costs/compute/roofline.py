"""Compute priced by a roofline: the larger of operations over peak and bytes over bandwidth, and
the floor of a kernel.

    t = max(FLOPs / (peak(dtype) * efficiency(shape)), bytes / (bandwidth * efficiency)) + kernel_us

Pointwise chains and the reductions at their ends are priced as the kernels that Inductor makes of
them (``apsched.costs.compute.fusion``), or, with ``fused=False``, every node as a kernel of its
own, as eager execution and ``aot_eager`` run it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from apsched.costs.clusters.cluster import Cluster, Device
from apsched.costs.compute.efficiency import attention_efficiency, product_efficiency
from apsched.costs.compute.flops import count_flops, is_attention, is_grouped
from apsched.costs.compute.fused_graph import fused_graph
from apsched.costs.compute.fusion import Share
from apsched.costs.compute.traffic import (
    COLLECTIVE_NAMESPACES,
    op_name,
    touches_nothing,
    traffic_bytes,
)
from apsched.errors import InputError
from apsched.fx.operands import bound_arguments, result_of, tensors_in, touched_bytes, value_of

# clone their input and work in place on the clone (torch/csrc/distributed/c10d/Functional.cpp)
_CLONING = ("::all_reduce", "::all_reduce_coalesced", "::broadcast")


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Prices nodes of an FX graph on the device of a cluster."""

    cluster: Cluster
    allow_tf32: bool = False
    """Products of fp32 matrices run in TF32, as after
    ``torch.set_float32_matmul_precision("high")``; off is torch's default.
    """
    fused: bool = True
    """Price chains as Inductor fuses them."""

    def compute_us(self, node: torch.fx.Node) -> float:
        """Return the time of ``node`` on the compute stream, in microseconds; of a start node, the
        price of its launch.

        Raises ``InputError`` for a node without ``meta["val"]``, and for calls of modules and
        methods, which hide operators.
        """
        return self._price_us(node, self._alone_us)

    def takes_time(self, node: torch.fx.Node) -> bool:
        """Return whether :meth:`compute_us` is above 0; it counts no operations for that, unless
        a kernel of no work takes no time on the device.
        """
        if self.cluster.device.kernel_us > 0:
            return self._price_us(node, lambda *_: self.cluster.device.kernel_us) > 0
        return self.compute_us(node) > 0

    def _price_us(self, node: torch.fx.Node, alone_us: Callable[..., float]) -> float:
        """Return the time of ``node``; ``alone_us``, called as :meth:`_alone_us` is, prices a node
        that is a kernel of its own.
        """
        if node.op in ("placeholder", "get_attr", "output"):
            return 0.0
        if node.op != "call_function":
            raise InputError(
                f"node {node.name!r} is a {node.op}; expected a graph of operators: trace it with"
                " make_fx or AOTAutograd"
            )
        name = op_name(node.target)
        if name.startswith(COLLECTIVE_NAMESPACES):
            return 0.0 if name.endswith("::wait_tensor") else self._launch_us(node, name)
        arguments, result = bound_arguments(node), result_of(node)
        if touches_nothing(node.target, arguments, result):
            return 0.0
        if self.fused and (share := fused_graph(node.graph).shares.get(node)) is not None:
            return self._share_us(share)
        return alone_us(node, name, arguments, result)

    def cut_us(self, graph: torch.fx.Graph) -> dict[torch.fx.Node, dict[torch.fx.Node, float]]:
        """Return for each node before which a kernel of ``graph`` may be cut the times that its
        nodes then take, in microseconds.
        """
        return {
            first: {node: self._piece_us(node, share) for node, share in shares.items()}
            for first, shares in (fused_graph(graph).shares_if_cut if self.fused else {}).items()
        }

    def _piece_us(self, node: torch.fx.Node, share: Share | None) -> float:
        if share is not None:
            return self._share_us(share)
        return self._alone_us(node, op_name(node.target), bound_arguments(node), result_of(node))

    def _share_us(self, share: Share) -> float:
        return share.traffic_bytes / self.cluster.device.memory_bytes_per_us + (
            self.cluster.device.kernel_us if share.first else 0.0
        )

    def _alone_us(
        self, node: torch.fx.Node, name: str, arguments: dict[str, object], result: object
    ) -> float:
        flops = count_flops(node, arguments, result)
        memory_us = (
            traffic_bytes(node.target, arguments, result) / self.cluster.device.memory_bytes_per_us
        )
        return (
            max(self._flops_us(flops, name, arguments, result), memory_us)
            + self.cluster.device.kernel_us
        )

    def _flops_us(
        self, flops: int, name: str, arguments: dict[str, object], result: object
    ) -> float:
        if not flops:
            return 0.0
        device = self.cluster.device
        dtype = next(tensors_in(list(arguments.values()))).dtype
        if is_attention(name):
            efficiency = attention_efficiency(device, name)
        else:
            efficiency = product_efficiency(device, arguments, result, grouped=is_grouped(name))
        return flops / (peak_tflops(device, dtype, allow_tf32=self.allow_tf32) * 1e6 * efficiency)

    def _launch_us(self, node: torch.fx.Node, name: str) -> float:
        if not name.endswith(_CLONING):
            return self.cluster.launch_us
        cloned_bytes = sum(map(touched_bytes, tensors_in(value_of(node.args[0]))))
        return (
            self.cluster.launch_us
            + 2 * cloned_bytes / self.cluster.device.memory_bytes_per_us
            + self.cluster.device.kernel_us
        )


def peak_tflops(device: Device, dtype: torch.dtype, *, allow_tf32: bool) -> float:
    """Return the dense peak of ``device`` for products of ``dtype``, in TFLOP/s."""
    peak = device.peak_tflops
    if dtype == torch.bfloat16:
        return peak.bf16
    if dtype == torch.float16:
        return peak.fp16
    if dtype in (torch.float64, torch.complex128):
        return peak.fp64 or peak.fp32 / 2
    if dtype.itemsize == 1:
        return peak.fp8 or peak.bf16
    return peak.tf32 if allow_tf32 else peak.fp32
