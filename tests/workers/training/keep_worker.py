"""One of several gloo processes that train with parameters kept from forward to backward; writes
how far that is from all gathered again, as JSON.

usage: ``main(PROCESS_RANK, WORLD_SIZE, FOLDER)``, see ``processes.run_jobs``
"""

import json
import os
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy

import apsched
from apsched.capture.keep import keep, keepable
from apsched.fx.passes.parameters import is_backward, serves_alone
from apsched.models.preset_capture import capture_built
from apsched.models.training import run_step
from tests.helpers.graphs.small_models import WIDTH, ResidualBlock, layers, shard
from tests.workers.training.compiler_worker import (
    NUM_STEPS,
    QUICK,
    compare,
    small,
    train,
)
from tests.workers.training.eager_worker import built_model

TWO_NODES = """\
base = "h100-tcpx"
name = "two-nodes"
ranks_per_node = 2
"""
WIDE = 64


class Sum(nn.Module):
    """A loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


def gathers(results: list[apsched.Result]) -> dict[str, list[str]]:
    """Return graph -> parameters that it gathers."""
    return {
        r.problem.name: sorted(
            c.module
            for c in r.problem.collectives
            if r.problem.keys[c.key].kind == "all_gather" and not c.on_path
        )
        for r in results
    }


def gather_sizes(results: list[apsched.Result]) -> dict[str, list[int]]:
    """Return graph -> numbers of process ranks on which it gathers parameters."""
    return {
        r.problem.name: sorted(
            {
                r.problem.keys[c.key].group_size
                for c in r.problem.collectives
                if r.problem.keys[c.key].kind == "all_gather" and not c.on_path
            }
        )
        for r in results
    }


def compiled() -> dict[str, object]:
    """Train under ``torch.compile`` with each choice; all are compared with all gathered again."""
    module, inputs = small(partial(layers, 4), [4] * NUM_STEPS)

    def trained(**choice: object) -> tuple[list[torch.Tensor], list[apsched.Result]]:
        backend = apsched.backend(**{**QUICK, **choice})
        return train(module, inputs, backend), backend.results

    again = trained(keep="none")
    kept = gathers(again[1])["backward"][0]
    runs = {
        "none": again,
        "all": trained(keep="all"),
        "one": trained(keep=[kept]),
        "auto": trained(keep="auto"),
        "no memory": trained(keep="auto", memory_cap="floor"),
    }
    found: dict[str, object] = {"kept": kept}
    for label, (record, results) in runs.items():
        found[label] = compare(again[0], record) | {
            "gathers": gathers(results),
            "exact": all(r.round_trip_exact for r in results),
        }
    return found


def other_on_one() -> dict[str, object]:
    """Train with another choice on process rank 1, which has to be that of nobody."""
    module, inputs = small(partial(layers, 4), [4] * NUM_STEPS)
    found: dict[str, object] = {}
    for label, inductor in (("aot_eager", False), ("inductor", True)):
        expected = train(module, inputs, label)
        choices = {"keep": "all"} if dist.get_rank() == 1 else {"reshard_after_forward": True}
        backend = apsched.backend(inductor=inductor, **choices, **{**QUICK, "on_error": "fallback"})
        found[label] = compare(expected, train(module, inputs, backend))
    return found


def failed_on_one() -> dict[str, object]:
    """Train where process rank 1 fails before the process ranks agree on a joint graph: it finds no
    names of parameters, or cannot place the sums of gradients.
    """
    found: dict[str, object] = {}
    for label, where, settings in (
        ("names", "backend.dynamo_parameters", {"reshard_after_forward": True}),
        ("names, inductor", "backend.dynamo_parameters", {"reshard_after_forward": True}),
        ("sums, inductor", "inductor_pass.put_sums_first", {"reduce": "once"}),
    ):
        inductor = label.endswith("inductor")
        module, inputs = small(lambda: nn.Sequential(*layers(4), Sum()), [4] * NUM_STEPS)
        step = apsched.micro_batches(module, 2) if "reduce" in settings else module
        expected = train(step, inputs, "inductor" if inductor else "aot_eager")
        broken = mock.patch(f"apsched.compiler.{where}", side_effect=ZeroDivisionError)
        choices = {**settings, **QUICK, "on_error": "fallback"}
        with broken if dist.get_rank() == 1 else nullcontext():
            backend = apsched.backend(inductor=inductor, **choices)
            found[label] = compare(expected, train(step, inputs, backend))
    return found


TAGGED: list[str] = []
"""The graphs that :func:`tagged` got."""


def tagged(joint: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
    """Tag nodes as the joint passes for activation checkpointing that AutoParallel sets do: results
    of products are saved, gathers and the rest of forward are repeated in backward.
    """
    TAGGED.append(type(joint).__name__)
    for node in joint.graph.nodes:
        if node.op == "call_function" and not is_backward(node):
            saved = node.target is torch.ops.aten.addmm.default
            node.meta["recompute"] = (
                CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
            )
            if serves_alone(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = 100_000
    return joint


def behind_a_joint_pass() -> dict[str, object]:
    """Train with each choice where a joint pass of the user's has tagged the nodes."""
    found: dict[str, object] = {}
    module, inputs = small(lambda: nn.Sequential(*map(ResidualBlock, [WIDTH] * 2)), [4] * NUM_STEPS)
    with torch._functorch.config.patch(joint_custom_pass=tagged):
        for form in ("aot_eager", "inductor"):
            expected = train(module, inputs, form)
            found[form] = {}
            for label in ("none", "all", "auto"):
                backend = apsched.backend(keep=label, inductor=form == "inductor", **QUICK)
                before = len(TAGGED)
                record = train(module, inputs, backend)
                found[form][label] = compare(expected, record) | {
                    "gathers": gathers(backend.results),
                    "tagged": len(TAGGED) - before,
                }
    return found


def on_two_nodes(cluster: Path, *, inductor: bool) -> dict[str, object]:
    """Train layers whose parameters take several blocks of memory, kept, and resharded in their
    node: by the user, and as solved under a memory cap.
    """
    found: dict[str, object] = {}
    expected: list[torch.Tensor] = []
    for label, choice, memory_cap in (
        ("none", "none", "none"),
        ("all", "all", "none"),
        ("in node", [".* @node", "1.weight"], "none"),
        ("auto", "auto", "floor+24KiB"),
    ):
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(5)))
        module = shard(module, init_device_mesh("cpu", (dist.get_world_size(),)))
        inputs = [(torch.full((4, WIDE), dist.get_rank() + 0.5),)] * NUM_STEPS
        settings = {**QUICK, "memory_cap": memory_cap, "cluster": cluster, "on_error": "raise"}
        backend = apsched.backend(keep=choice, inductor=inductor, **settings)
        record = train(module, inputs, backend)
        expected = expected or record
        found[label] = compare(expected, record) | {
            "gathers": gathers(backend.results),
            "sizes": gather_sizes(backend.results),
            "exact": all(r.round_trip_exact for r in backend.results),
        }
    return found


def interpreted(world_size: int) -> dict[str, object]:
    """Run the graphs of a preset with choices made on the graphs themselves."""
    built = built_model(world_size)
    capture = capture_built(built)
    names = [k.name for k in keepable(*capture.graphs)]
    found: dict[str, object] = {"num": len(names)}
    with torch.no_grad():
        expected = run_step(built, *(g.module for g in capture.graphs))
        for label, kept in {"all": names, "some": names[::2]}.items():
            pair = keep(*capture.graphs, kept)
            loss, gradients = run_step(built, *(g.module for g in pair))
            found[label] = torch.equal(loss, expected[0]) and all(
                torch.equal(gradients[name], one) for name, one in expected[1].items()
            )
    return found


def report(world_size: int, folder: Path) -> dict[str, object]:
    cluster = folder / f"two-nodes-{dist.get_rank()}.toml"
    cluster.write_text(TWO_NODES)
    if world_size == 2:
        return {
            "compiled": compiled(),
            "other on one": other_on_one(),
            "failed on one": failed_on_one(),
            "behind a joint pass": behind_a_joint_pass(),
        }
    return {
        "graphs": interpreted(world_size),
        "two nodes": on_two_nodes(cluster, inductor=False),
        "two nodes, inductor": on_two_nodes(cluster, inductor=True),
    }


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.parent / "inductor")
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=600)
    )
    (folder / f"{rank}.json").write_text(json.dumps(report(world_size, folder)))
    dist.barrier()
    dist.destroy_process_group()
