"""Kernels and memory traffic of a captured training step beside what Inductor's own scheduler makes
of it.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.costs.compute.flops import has_flops
from apsched.costs.compute.fusion import fused_shares
from apsched.costs.compute.traffic import (
    COLLECTIVE_NAMESPACES,
    op_name,
    touches_nothing,
    traffic_bytes,
)
from apsched.fx.operands import bound_arguments, result_of
from apsched.pipeline.sources import SourceRequest, opened

EXTERN = ("ExternKernelSchedulerNode", "NopKernelSchedulerNode")


@dataclass
class Found:
    kernels: int
    traffic_bytes: int


class _SchedulerIsDone(Exception):  # noqa: N818
    pass


def ours(graph: torch.fx.Graph, *, fused: bool = True) -> Found:
    """Return what is neither a product nor a collective."""
    shares = fused_shares(graph) if fused else {}
    found = Found(0, 0)
    for node in graph.nodes:
        if (
            node.op != "call_function"
            or has_flops(node.target)
            or op_name(node.target).startswith(COLLECTIVE_NAMESPACES)
        ):
            continue
        arguments, result = bound_arguments(node), result_of(node)
        if node in shares:
            found.kernels += shares[node].first
            found.traffic_bytes += shares[node].traffic_bytes
        elif not touches_nothing(node.target, arguments, result):
            found.kernels += 1
            found.traffic_bytes += traffic_bytes(node.target, arguments, result)
    return found


@contextmanager
def stopped_before_code(found: list[Found]) -> Iterator[None]:
    """Inductor goes as far as its scheduler: nothing is compiled."""

    def codegen(lowering: GraphLowering) -> None:
        lowering.init_wrapper_code()
        lowering._update_scheduler()
        nodes = [node for node in lowering.scheduler.nodes if type(node).__name__ not in EXTERN]
        found.append(Found(len(nodes), sum(node.get_read_write_buffers_sizes() for node in nodes)))
        raise _SchedulerIsDone

    with patch.object(GraphLowering, "codegen", codegen):
        yield


def inductors(module: torch.fx.GraphModule) -> Found:
    inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    mode = inputs[0].fake_mode
    mode.allow_non_fake_inputs = True
    found: list[Found] = []
    with (
        tracing(TracingContext(mode)),
        V.set_fake_mode(mode),
        stopped_before_code(found),
        pytest.raises(InductorError),
    ):
        compile_fx_inner(
            make_fx(module, decomposition_table=select_decomp_table())(*inputs), inputs
        )
    (only,) = found
    return only


def test_a_step_has_the_kernels_and_the_traffic_that_inductor_gives_it() -> None:
    """One layer, forward and backward: within a fifth, where every node for itself has half as much
    traffic again and more.
    """
    request = SourceRequest(source="llama3-debug", mesh="fsdp=2", seq_len=256, num_layers=1)
    compared = Counter()
    with opened(request) as source:
        for captured in source.capture.graphs:
            mine, theirs = ours(captured.module.graph), inductors(captured.module)
            assert mine.kernels == pytest.approx(theirs.kernels, rel=0.2), captured.name
            assert mine.traffic_bytes == pytest.approx(theirs.traffic_bytes, rel=0.2), captured.name
            assert (
                ours(captured.module.graph, fused=False).traffic_bytes > 1.5 * theirs.traffic_bytes
            )
            compared[captured.name] += 1
    assert compared == {"forward": 1, "backward": 1}
