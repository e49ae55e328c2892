"""The time of the products of a graph at the peak of a device: the numerator of MFU."""

import torch

from apsched.costs.clusters.cluster import Device
from apsched.costs.compute.flops import count_flops, has_flops
from apsched.costs.compute.roofline import peak_tflops
from apsched.fx.operands import bound_arguments, result_of, tensors_in


def at_peak_us(graph: torch.fx.Graph, device: Device) -> float:
    """Return the time of all matrix products, convolutions and attention of ``graph`` at the dense
    peak of ``device`` for their dtypes, in microseconds.
    """
    total_us = 0.0
    for node in graph.nodes:
        if node.op != "call_function" or not has_flops(node.target):
            continue
        arguments = bound_arguments(node)
        flops = count_flops(node, arguments, result_of(node))
        if flops:
            dtype = next(tensors_in(list(arguments.values()))).dtype
            total_us += flops / (peak_tflops(device, dtype, allow_tf32=False) * 1e6)
    return total_us
