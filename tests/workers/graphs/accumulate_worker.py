"""One of four gloo processes that run the graphs of three micro-batches in a row, and the pair of
one graph by graph; reports as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from apsched.capture.captured import CapturedGraph
from apsched.capture.joint import capture_module
from apsched.capture.keep import keep
from apsched.fx.accumulate import HeldValue, Reduction
from apsched.fx.collectives import is_all_gather, is_collective
from apsched.fx.keep import outputs_of
from apsched.whole_step.accumulation.graphs import (
    Place,
    held_parameters,
    micro_batch_backward,
    micro_batch_forward,
    summed_gradients,
)
from tests.helpers.graphs.sharded_layers import ShardedLayers

WIDTHS, TOKENS, NUM_MICRO_BATCHES = (32, 64, 128), 16, 3
NAMES = ("weights.0", "weights.1")
CASES: dict[str, tuple[Sequence[str], Sequence[str], Sequence[str]]] = {
    "kept": (NAMES, (), ()),
    "stay gathered": ((), NAMES, ()),
    "gathered once": (NAMES, NAMES, ()),
    "reduced once": ((), (), NAMES),
    "once": (NAMES, NAMES, NAMES),
    "some": (NAMES[:1], NAMES[1:], NAMES[:1]),
}
"""Parameters that are kept, stay gathered, and whose gradients are added."""
SHARDS = "shards reduced once"
"""A case of two shards and two replicas."""
Values = dict[str, Any]


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=240)
    )
    graphs, shards = captured(ShardedLayers(WIDTHS, cast=torch.bfloat16), rank)
    batches = [torch.randn(TOKENS, WIDTHS[0]) for _ in range(NUM_MICRO_BATCHES)]
    report = {name: same_bits(*graphs, shards, batches, *case) for name, case in CASES.items()}
    module = ShardedLayers(WIDTHS, cast=torch.bfloat16, ranks=2, replicas=2)
    graphs, shards = captured(module, rank)
    replicas = module.mesh.get_group(1)
    report[SHARDS] = same_bits(*graphs, shards, batches, NAMES, NAMES, NAMES[1:], replicas)
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def captured(
    module: ShardedLayers, rank: int
) -> tuple[tuple[CapturedGraph, CapturedGraph], Values]:
    """Return the graphs of ``module``, and values of its shards."""
    with module.mode:
        x = torch.empty(TOKENS, WIDTHS[0], requires_grad=True)
    forward, backward = capture_module(module, (x,), source="layers").graphs
    torch.manual_seed(rank)
    shards = {
        node.name: torch.randn(node.meta["val"].shape)
        for node in forward.module.graph.find_nodes(op="placeholder")
        if node.name in forward.parameter_names
    }
    return (forward, backward), shards


def same_bits(
    forward: CapturedGraph,
    backward: CapturedGraph,
    shards: Values,
    batches: Sequence[torch.Tensor],
    kept: Sequence[str],
    held: Sequence[str],
    summed: Sequence[str],
    replicas: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return whether losses and gradients are bit for bit those of the pair of one micro-batch,
    with sums by hand; and the collectives of each micro-batch. With ``replicas`` shards of
    gradients are added.
    """
    starts = {
        node.name: backward_parameter(node)
        for node in backward.module.graph.nodes
        if is_collective(node) and not is_all_gather(node)
    }
    losses, gradients = by_hand(forward, backward, starts, shards, batches, summed, replicas)
    one, two = keep(forward, backward, kept)
    values = [v for name in held for v in held_parameters(one, two)[name]]
    known = summed_gradients(two, starts, of_shards=replicas is not None)
    sums = [r for name in summed for r in known[name]]
    found, reduced, counts = in_a_row(one, two, values, sums, shards, batches)
    return {
        "losses": all(map(torch.equal, losses, found)),
        "gradients": all(map(torch.equal, gradients, reduced)),
        "moved": [float(g.abs().sum()) > 0 for g in reduced],
        "collectives": counts,
    }


def backward_parameter(node: torch.fx.Node) -> str:
    return str(node.meta["custom"]["apsched_parameter"])


def by_hand(
    forward: CapturedGraph,
    backward: CapturedGraph,
    starts: Mapping[str, str],
    shards: Values,
    batches: Sequence[torch.Tensor],
    summed: Sequence[str],
    replicas: dist.ProcessGroup | None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the losses and the gradients of the micro-batches, each by itself: reduced gradients
    are added, but of the parameters ``summed`` the tensors that the reduction takes, which are
    reduced here.
    """
    found = summed_gradients(backward, starts, of_shards=replicas is not None)
    losses, total, sums = [], {}, {}
    for batch in batches:
        values, outputs = run(forward, shards | inputs_of(forward, batch))
        losses.append(outputs[0])
        values, outputs = run(backward, values | shards | tangents_of(backward))
        for name, (reduction,) in found.items():
            (place,) = reduction.outputs
            total[name] = total[name] + outputs[place] if name in total else outputs[place]
            addend = values[reduction.addend]
            sums[name] = sums[name] + addend if name in sums else addend
    for name in summed:
        whole = sums[name].contiguous()
        if replicas is not None:
            dist.all_reduce(whole, group=replicas)
            total[name] = whole.to(total[name].dtype)
            continue
        part = torch.empty(
            (whole.shape[0] // dist.get_world_size(), *whole.shape[1:]), dtype=whole.dtype
        )
        dist.reduce_scatter_tensor(part, whole)
        total[name] = part.to(total[name].dtype)
    return losses, [total[name] for name in NAMES]


def in_a_row(
    forward: CapturedGraph,
    backward: CapturedGraph,
    held: Sequence[HeldValue],
    summed: Sequence[Reduction],
    shards: Values,
    batches: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[list[int]]]:
    """Return losses, gradients, and the number of collectives of each forward and backward."""
    losses: list[torch.Tensor] = []
    total: dict[str, torch.Tensor] = {}
    passed: Values = {}
    counts = []
    for k, batch in enumerate(batches):
        place = Place(first=k == 0, last=k == len(batches) - 1)
        first = micro_batch_forward(forward, held, place, "forward")
        second = micro_batch_backward((forward, backward), held, summed, place, "backward")
        counts.append([num_collectives(first), num_collectives(second)])
        values, outputs = run(first, shards | passed | inputs_of(forward, batch))
        losses.append(outputs[0])
        values, outputs = run(second, values | shards | passed | tangents_of(second))
        passed = {v.forward: values[v.backward or v.forward] for v in held}
        added = {place: r.start for r in summed for place in r.outputs}
        for at, name in places_of(backward):
            if at in added and not place.last:
                passed[f"{added[at]}_before"] = outputs[at]
            else:
                total[name] = total[name] + outputs[at] if name in total else outputs[at]
    return losses, [total[name] for name in NAMES], counts


def places_of(backward: CapturedGraph) -> list[tuple[int, str]]:
    """Return the place of each gradient of a parameter among the outputs."""
    starts = {
        node.name: backward_parameter(node)
        for node in backward.module.graph.nodes
        if is_collective(node) and not is_all_gather(node)
    }
    found = summed_gradients(backward, starts)
    return [(place, name) for name, (one,) in found.items() for place in one.outputs]


def num_collectives(graph: CapturedGraph) -> int:
    return sum(is_collective(node) for node in graph.module.graph.nodes)


def run(graph: CapturedGraph, values: Values) -> tuple[Values, list[Any]]:
    """Return the value of every node, and the outputs."""
    interpreter = torch.fx.Interpreter(graph.module, garbage_collect_values=False)
    nodes = graph.module.graph.find_nodes(op="placeholder")
    outputs = interpreter.run(*(values[node.name] for node in nodes))
    found = {node.name: value for node, value in interpreter.env.items()}
    passed = outputs_of(graph.module.graph)
    found |= {n.name: v for n, v in zip(passed, outputs, strict=True) if n is not None}
    return found, list(outputs)


def inputs_of(forward: CapturedGraph, batch: torch.Tensor) -> Values:
    placeholders = forward.module.graph.find_nodes(op="placeholder")
    return {n.name: batch for n in placeholders if n.name not in forward.parameter_names}


def tangents_of(backward: CapturedGraph) -> Values:
    return {
        node.name: torch.ones(node.meta["val"].shape)
        for node in backward.module.graph.find_nodes(op="placeholder")
        if node.name.startswith("tangents")
    }
