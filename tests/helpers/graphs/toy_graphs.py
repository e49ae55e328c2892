"""A small sharded MLP with every kind of collective, captured by hand: gathers, reduce-scatters,
all-reduces, one on the path.
"""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.capture.captured import CapturedGraph
from apsched.fx.collectives import tensors_of

c10d = torch.ops._c10d_functional


def toy_step(group: str, world_size: int, on_path: str | None = None):
    """Return a training step of stacked ``x = tanh(x @ W)``; each W has a shard in float32 and is
    gathered in bfloat16 or float32.

    ``on_path`` is the group of the sum between two matrix products, with the process ranks of
    ``group``.
    """

    def wait(x):
        return c10d.wait_tensor(x)

    def step(x, scale, *shards):
        saved, outputs = [], []
        for k, shard in enumerate(shards):
            payload = shard.to(torch.bfloat16) if k % 3 == 0 else shard
            whole = wait(c10d.all_gather_into_tensor(payload, world_size, group)).to(torch.float32)
            saved.append((x, whole))
            x = torch.tanh(x @ whole)
        gradient = wait(
            c10d.all_reduce(x * scale, "sum", on_path or group)
        )  # on the path of compute
        loss = gradient.sum()
        for k, (before, whole) in reversed(list(enumerate(saved))):
            weight_gradient = before.t() @ gradient
            gradient = gradient @ whole.t()
            if k % 4 == 3:
                outputs.append(wait(c10d.all_reduce(weight_gradient, "sum", group)))
                continue
            reduced = wait(
                c10d.reduce_scatter_tensor(
                    weight_gradient, "sum" if k % 2 else "avg", world_size, group
                )
            )
            if k % 4 == 1:
                reduced = wait(c10d.all_reduce(reduced, "sum", group))
            outputs.append(reduced * 0.5 if k % 4 == 2 else reduced)
        return (loss, *outputs)

    return step


def toy_inputs(
    world_size: int, num_shards: int, process_rank: int, width: int = 8
) -> tuple[torch.Tensor, ...]:
    """Return inputs of ``toy_step`` on one process rank."""
    generator = torch.Generator().manual_seed(process_rank)
    x, scale = torch.randn(4, width, generator=generator), torch.tensor(0.3)
    return (
        x,
        scale,
        *(torch.randn(width // world_size, width, generator=generator) for _ in range(num_shards)),
    )


def capture_toy(
    group: str, world_size: int, *, num_shards: int = 8, process_rank: int = 0, width: int = 8
) -> CapturedGraph:
    """Return the captured step; the shards are parameters that the caller keeps."""
    inputs = toy_inputs(world_size, num_shards, process_rank, width)
    return captured_function(toy_step(group, world_size), inputs, parameters=num_shards)


def captured_function(
    function, inputs: tuple[torch.Tensor, ...], *, parameters: int
) -> CapturedGraph:
    """Return the graph of ``function``; the last inputs are parameters, which the caller keeps."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    shards = [node.name for node in module.graph.find_nodes(op="placeholder")][
        len(inputs) - parameters :
    ]
    names = {name: f"layers.{k}.weight" for k, name in enumerate(shards)}
    return CapturedGraph(
        name="graph", module=module, kept_inputs=frozenset(shards), parameter_names=names
    )


class FlatCosts:
    """A cost model of round numbers: bytes moved on the compute stream, bytes and a latency on the
    network.
    """

    def compute_us(self, node: torch.fx.Node) -> float:
        """Return a launch price for a collective, else a time that grows with the result."""
        target = str(node.target)
        if "_c10d_functional" in target:
            return 3.0 + (
                node.meta["val"].nbytes / 100 if target.endswith("all_reduce.default") else 0.0
            )
        if node.op != "call_function" or any(
            view in target for view in ("view", "slice", "aten.t.", "empty", "getitem")
        ):
            return 0.0
        return 1.0 + sum(tensor.nbytes for tensor in tensors_of(node)) / 100

    def collective_us(self, kind: str, group_name: str, group_size: int, size_bytes: int) -> float:
        """Return latency and time on the wire."""
        return 10.0 + size_bytes / 20


class CoalescedCosts(FlatCosts):
    """The same, with a price for launches of several transfers."""

    def coalesced_member_us(self, kind: str, group_name: str, group_size: int) -> float:
        """Return what each member adds."""
        return 1.5
