"""``python -m benchmarks.device``: the memory and the times of a GPU beside their predictions.
Without a GPU, the command prints that and stops.

A fake process group stands for the job (collectives do nothing), so one device runs one process
rank of 64: the graphs of LLaMA-3 8B, forward and backward, are run for real, as captured and under
every schedule. Memory: ``torch.cuda.max_memory_allocated`` against the predicted peak,
``max_memory_reserved`` beside it. Compute: each distinct operator timed alone (as ``apsched
calibrate --measure`` does) against the formulas of the cluster, by class of operator, the copies of
buckets included; and the time of a launch on the compute stream. Exit status: 0 done, or no GPU
here; 1 a peak is off by more than 1 %; 2 wrong use.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import networkx as nx
import torch
from torch.fx import GraphModule

from apsched.calibrate.measure import measure_compute
from apsched.calibrate.stopwatch import duration_us
from apsched.capture.captured import Capture, CapturedGraph
from apsched.capture.fake_world import world
from apsched.config import Caps, SolveOptions
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.costs.compute.operation import operator_of
from apsched.errors import ApschedError
from apsched.graph.export.export import export_graph
from apsched.kinds import NodeKind
from apsched.models.build import build
from apsched.models.mesh import MeshSpec
from apsched.models.preset_capture import capture_built
from apsched.pipeline.inductor_baseline import run_inductor
from apsched.problem.build import build_problem
from apsched.quantities import parse_count, parse_number
from apsched.schedule.result import AS_CAPTURED
from apsched.solver import solve
from apsched.torch_compat.sizes import size_hint
from apsched.writeback.write_back import write_back
from benchmarks.common.live_bytes import live_bytes_of, run_counting

NO_GPU = "Skipped: no CUDA device here. Nothing is estimated in its place."
WITHIN = 0.01
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Memory of one graph under one schedule."""

    schedule: str
    graph: str
    predicted_bytes: int
    measured_bytes: int
    """As the device's allocator says; on a CPU, as counted node by node."""
    reserved_bytes: int
    """Bytes that the allocator reserved; 0 on a CPU."""

    @property
    def off(self) -> float:
        """Share by which the prediction is too high."""
        return self.predicted_bytes / self.measured_bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorClass:
    """All nodes of one operator, in the graphs as captured or, for copies of buckets, as
    rewritten.
    """

    name: str
    num_nodes: int
    predicted_us: float
    measured_us: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", default="llama3-8b", help="model (default llama3-8b)")
    parser.add_argument("--mesh", default="fsdp=64", help="mesh of the job (default fsdp=64)")
    parser.add_argument(
        "--seq", metavar="NUMBER", default="2048", help="sequence length (default 2048)"
    )
    parser.add_argument("--cluster", default="h100", help="whose formulas predict (default h100)")
    parser.add_argument(
        "--budget", metavar="WORK", default="4", help="of the solver for each graph (default 4)"
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: the same, counted node by node, at small sizes",
    )
    parser.add_argument("--json", action="store_true", help="the numbers instead of tables")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print(json.dumps({"skipped": NO_GPU}) if args.json else NO_GPU)
        return 0
    try:
        found = measured(
            args.preset,
            MeshSpec.parse(args.mesh),
            parse_count(args.seq, "--seq", least=8),
            cluster=args.cluster,
            budget=parse_number(args.budget, "--budget"),
            device=torch.device(args.device),
        )
    except ApschedError as error:
        print(f"benchmarks.device: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found) if args.json else markdown(found))
    return 1 if any(abs(Peak(**row).off) > WITHIN for row in found["peaks"]) else 0


def measured(
    preset: str, mesh: MeshSpec, seq_len: int, *, cluster: str, budget: float, device: torch.device
) -> dict[str, Any]:
    """Return peaks, operator classes and the price of a launch, as JSON has them."""
    with world(mesh.world_size):
        capture = capture_built(build(preset, mesh=mesh, seq_len=seq_len, device=device.type))
        ranks = {name: ranks for name, ranks in capture.group_ranks.items() if ranks}
        model = ClusterCostModel(load_cluster(cluster), ranks, fused=False)
        modules = _schedules(capture, model, ranks, budget)
        _warm_up(device)
        peaks, classes = [], []
        for name, pair in modules.items():
            dags = [
                export_graph(replace(c, module=m), model, group_ranks=ranks)
                for c, m in zip(capture.graphs, pair, strict=True)
            ]
            peaks += [
                _peak(name, c, m, dag, device)
                for c, m, dag in zip(capture.graphs, pair, dags, strict=True)
            ]
            if name in (AS_CAPTURED, "apsched"):
                classes += _classes(
                    list(zip(pair, dags, strict=True)), device, cluster, copies=name == "apsched"
                )
    return {
        "model": f"{preset}, {mesh}, sequences of {seq_len}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "cluster": cluster,
        "peaks": [asdict(peak) for peak in peaks],
        "classes": [asdict(one) for one in classes],
        "launch_us": {"predicted": model.cluster.launch_us, "measured": _launch_us(device)},
    }


def _schedules(
    capture: Capture, model: ClusterCostModel, ranks: Mapping[str, tuple[int, ...]], budget: float
) -> dict[str, list[GraphModule]]:
    """Return both graphs under every schedule, by name."""
    problems = [
        build_problem(export_graph(captured, model, group_ranks=ranks))
        for captured in capture.graphs
    ]
    answers = [solve(problem, Caps(), SolveOptions(budget=budget)) for problem in problems]
    chosen = {
        one.name: [answer.baselines[k].schedule for answer in answers]
        for k, one in enumerate(answers[0].baselines)
    }
    chosen["apsched"] = [answer.best.schedule for answer in answers if answer.best is not None]
    modules = {
        name: [
            write_back(c.module, p, s)
            for c, p, s in zip(capture.graphs, problems, of_both, strict=True)
        ]
        for name, of_both in chosen.items()
    }
    modules["torch"] = [
        run_inductor(captured, model, group_ranks=ranks).module for captured in capture.graphs
    ]
    return modules


def _peak(
    schedule: str,
    captured: CapturedGraph,
    module: GraphModule,
    dag: nx.DiGraph,
    device: torch.device,
) -> Peak:
    """Run one graph for real and return its peak, inputs included, earlier memory excluded."""
    told = live_bytes_of(dag)
    before = _reset(device)
    boxed = [_real(node.meta["val"], device) for node in module.graph.find_nodes(op="placeholder")]
    outputs, counted = run_counting(module, boxed, dag, captured.kept_inputs)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        most, reserved = (
            torch.cuda.max_memory_allocated(device) - before,
            torch.cuda.max_memory_reserved(device),
        )
    else:
        most, reserved = max(counted), 0
    del outputs
    return Peak(
        schedule=schedule,
        graph=captured.name,
        predicted_bytes=max(told),
        measured_bytes=most,
        reserved_bytes=reserved,
    )


def _reset(device: torch.device) -> int:
    """Forget former peaks and return the bytes that are allocated now."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _real(value: Any, device: torch.device) -> Any:
    """Return a tensor of the shape, strides and dtype of ``value``; tokens are 0, which every
    vocabulary has.
    """
    if not isinstance(value, torch.Tensor):
        return size_hint(value)
    size, stride = tuple(map(size_hint, value.shape)), tuple(map(size_hint, value.stride()))
    return torch.empty_strided(size, stride, dtype=value.dtype, device=device).zero_()


def _warm_up(device: torch.device) -> None:
    """Let the library of matrix products take its workspace, which belongs to no graph, before
    anything is counted.
    """
    if device.type == "cuda":
        for dtype in (torch.bfloat16, torch.float32):
            square = torch.ones(256, 256, dtype=dtype, device=device)
            square @ square
        torch.cuda.synchronize(device)


def _classes(
    graphs: Sequence[tuple[GraphModule, nx.DiGraph]],
    device: torch.device,
    cluster: str,
    *,
    copies: bool,
) -> list[OperatorClass]:
    """Return compute nodes by operator, or with ``copies`` by their role the copies that write-back
    added, the longest first.
    """
    prices = measure_compute(graphs, device, cluster, fused=False).costs.compute
    totals: dict[str, tuple[int, float, float]] = {}
    for _, dag in graphs:
        for rank in range(dag.number_of_nodes()):
            record = dag.nodes[rank]["record"]
            price = prices.get(record.operation)
            if (
                record.kind is NodeKind.COMPUTE
                and price is not None
                and bool(record.role) == copies
            ):
                name = (
                    f"bucket: {record.role}, {operator_of(record.operation)}"
                    if copies
                    else operator_of(record.operation)
                )
                number, predicted_us, measured_us = totals.get(name, (0, 0.0, 0.0))
                totals[name] = (
                    number + 1,
                    predicted_us + record.duration_us,
                    measured_us + price.time_us,
                )
    found = [
        OperatorClass(name=name, num_nodes=n, predicted_us=p, measured_us=m)
        for name, (n, p, m) in totals.items()
    ]
    return sorted(found, key=lambda one: (-one.measured_us, one.name))


def _launch_us(device: torch.device) -> float | None:
    """Return the time of a launch on the compute stream: an event for the group's stream, one back,
    and the waits; ``None`` on a CPU.
    """
    if device.type != "cuda":
        return None
    small, other = torch.zeros(1, device=device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def launched() -> None:
        small.add_(1)
        other.wait_stream(torch.cuda.current_stream(device))
        torch.cuda.current_stream(device).wait_stream(other)

    return duration_us(launched, device) - duration_us(lambda: small.add_(1), device)


def markdown(found: Mapping[str, Any]) -> str:
    """Return the tables."""
    launch = found["launch_us"]
    lines = [
        (
            f"{found['model']}; {found['device']}, torch {found['torch']}; times predicted by the"
            f" formulas of `{found['cluster']}`."
        ),
        "",
        "| schedule | graph | predicted, MiB | measured, MiB | off | reserved, MiB |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for peak in (Peak(**row) for row in found["peaks"]):
        lines.append(
            f"| {peak.schedule} | {peak.graph} | {peak.predicted_bytes / _MIB:.2f} |"
            f" {peak.measured_bytes / _MIB:.2f} | {100 * peak.off:+.2f} % |"
            f" {peak.reserved_bytes / _MIB:.0f} |"
        )
    lines += [
        "",
        "| operator | nodes | predicted, ms | measured, ms | off |",
        "|---|---:|---:|---:|---:|",
    ]
    for one in (OperatorClass(**row) for row in found["classes"]):
        off = f"{100 * (one.predicted_us / one.measured_us - 1):+.0f} %" if one.measured_us else ""
        lines.append(
            f"| {one.name} | {one.num_nodes} | {one.predicted_us / 1e3:.3f} |"
            f" {one.measured_us / 1e3:.3f} | {off} |"
        )
    if launch["measured"] is not None:
        lines += [
            "",
            (
                f"A launch takes {launch['measured']:.1f} us of the compute stream;"
                f" {launch['predicted']:.1f} us were predicted."
            ),
        ]
    return "\n".join(lines)
