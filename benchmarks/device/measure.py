"""``python -m benchmarks.device``: the memory and the times of a GPU beside their predictions.
Without a GPU, the command prints that and stops.

A fake process group stands for the job (collectives do nothing), so one device runs one process
rank of 64: the graphs of LLaMA-3 8B, forward and backward, are run for real, as captured and under
every schedule. Memory: the bytes that the caching allocator gives against the predicted peak, node
by node, and the bytes that it reserves. Compute: each distinct operator timed alone (as ``apsched
calibrate --measure`` does) against the formulas of the cluster, by class of operator, the copies of
buckets included; and the time of a launch on the compute stream. Step times: with a network that
takes the predicted time (:mod:`benchmarks.device.network`), launched by Python and as a CUDA graph,
against the prediction from the measured operators. Exit status: 0 done, or no GPU here; 1 a peak is
off by more than 1 %; 2 wrong use.

``python -m benchmarks.device.surfaces`` trains under each surface of a job, on NCCL.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
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
from apsched.costs.measured import MeasuredCosts
from apsched.costs.measured_model import MeasuredCostModel
from apsched.costs.model import CostModel
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
from benchmarks.device.conditions import Conditions, condition_rows, conditions
from benchmarks.device.steps import StepTime, step_rows, step_times

NO_GPU = "Skipped: no CUDA device here. Nothing is estimated in its place."
WITHIN = 0.01
_MIB = 2**20
OWN = "apsched"
Save = Callable[[Mapping[str, Any]], None]


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
    scratch_bytes: Mapping[str, int]
    """Operators of nodes at which more (or less) is allocated than predicted, and by how much at
    most: memory that a kernel takes for itself, and gives back.
    """

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
    parser.add_argument("--layers", metavar="NUMBER", help="number of layers (default: all)")
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
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="the numbers, written again after each one"
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
            num_layers=args.layers and parse_count(args.layers, "--layers", least=1),
            cluster=args.cluster,
            budget=parse_number(args.budget, "--budget"),
            device=torch.device(args.device),
            save=lambda now: args.out and args.out.write_text(json.dumps(now)),
        )
    except ApschedError as error:
        print(f"benchmarks.device: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found) if args.json else markdown(found))
    return 1 if any(abs(Peak(**row).off) > WITHIN for row in found["peaks"]) else 0


def measured(
    preset: str,
    mesh: MeshSpec,
    seq_len: int,
    *,
    num_layers: int | None = None,
    cluster: str,
    budget: float,
    device: torch.device,
    save: Save = lambda _: None,
) -> dict[str, Any]:
    """Return peaks, operator classes, step times and the price of a launch, as JSON has them;
    ``save`` gets the numbers so far after each of them.
    """
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "cluster": cluster,
        "notes": [],
        "peaks": [],
        "classes": [],
        "steps": [],
    }
    with world(mesh.world_size):
        built = build(preset, mesh=mesh, seq_len=seq_len, num_layers=num_layers, device=device.type)
        found["model"] = f"{preset}, {built.num_layers} layers, {mesh}, sequences of {seq_len}"
        capture = capture_built(built)
        ranks = {name: ranks for name, ranks in capture.group_ranks.items() if ranks}
        formulas = ClusterCostModel(load_cluster(cluster), ranks, fused=False)
        _warm_up(device)
        found["launch_us"] = {
            "predicted": formulas.cluster.launch_us,
            "measured": _launch_us(device),
        }
        alone = [
            (c.name, c.module, export_graph(c, formulas, group_ranks=ranks)) for c in capture.graphs
        ]
        timed = measure_compute(
            [(module, dag) for _, module, dag in alone], device, cluster, fused=False
        )
        found["notes"] += [f"{name} cannot run here: {why}" for name, why in timed.failed.items()]
        model = MeasuredCostModel(timed.costs, formulas, ranks)
        modules = _schedules(capture, model, ranks, budget, found["notes"])
        for one in step_times(capture.graphs, modules, model, ranks, device):
            found["steps"].append(asdict(one))
            save(found)
        found["conditions"] = [asdict(one) for one in conditions(alone, device)]
        save(found)
        for name, pair in modules.items():
            dags = [
                export_graph(replace(c, module=m), formulas, group_ranks=ranks)
                for c, m in zip(capture.graphs, pair, strict=True)
            ]
            _add_peaks(found, name, capture, pair, dags, device=device, save=save)
            if name in (AS_CAPTURED, OWN):
                graphs = list(zip(pair, dags, strict=True))
                classes = _classes(graphs, device, timed.costs, copies=name == OWN)
                found["classes"] += [asdict(one) for one in classes]
                save(found)
    return found


def _add_peaks(
    found: dict[str, Any],
    schedule: str,
    capture: Capture,
    modules: Sequence[GraphModule],
    dags: Sequence[nx.DiGraph],
    *,
    device: torch.device,
    save: Save,
) -> None:
    """Add the peak of each graph under ``schedule`` to ``found``."""
    for captured, module, dag in zip(capture.graphs, modules, dags, strict=True):
        found["peaks"].append(asdict(_peak(schedule, captured, module, dag, device)))
        save(found)


def _schedules(
    capture: Capture,
    model: CostModel,
    ranks: Mapping[str, tuple[int, ...]],
    budget: float,
    notes: list[str],
) -> dict[str, list[GraphModule]]:
    """Return both graphs under every schedule, by name, ours first; a note says where torch's
    scheduler fails.
    """
    problems = [
        build_problem(export_graph(captured, model, group_ranks=ranks))
        for captured in capture.graphs
    ]
    answers = [solve(problem, Caps(), SolveOptions(budget=budget)) for problem in problems]
    chosen = {OWN: [answer.best.schedule for answer in answers if answer.best is not None]}
    for k, one in enumerate(answers[0].baselines):
        chosen[one.name] = [answer.baselines[k].schedule for answer in answers]
    modules = {
        name: [
            write_back(c.module, p, s)
            for c, p, s in zip(capture.graphs, problems, of_both, strict=True)
        ]
        for name, of_both in chosen.items()
    }
    try:
        modules["torch"] = [
            run_inductor(captured, model, group_ranks=ranks).module for captured in capture.graphs
        ]
    except Exception as error:
        notes.append(f"torch's scheduler fails on these graphs: {type(error).__name__}: {error}")
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
    boxed = [
        real_tensor(node.meta["val"], device) for node in module.graph.find_nodes(op="placeholder")
    ]
    most = 0
    scratch: dict[str, int] = {}

    def ran(rank: int) -> None:
        nonlocal most
        peak = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.reset_peak_memory_stats(device)
        most = max(most, peak)
        if peak != told[rank]:
            target = dag.nodes[rank]["record"].target
            scratch[target] = max(scratch.get(target, -(2**62)), peak - told[rank])

    on_gpu = device.type == "cuda"
    outputs, counted = run_counting(
        module,
        boxed,
        dag,
        captured.kept_inputs,
        count=not on_gpu,
        ran=ran if on_gpu else None,
    )
    reserved = torch.cuda.max_memory_reserved(device) if on_gpu else 0
    most = most if on_gpu else max(counted)
    del outputs
    return Peak(
        schedule=schedule,
        graph=captured.name,
        predicted_bytes=max(told),
        measured_bytes=most,
        reserved_bytes=reserved,
        scratch_bytes=dict(sorted(scratch.items(), key=lambda item: -abs(item[1]))[:12]),
    )


def _reset(device: torch.device) -> int:
    """Forget former peaks and return the bytes that are allocated now."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def real_tensor(value: Any, device: torch.device) -> Any:
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
    known: MeasuredCosts,
    *,
    copies: bool,
) -> list[OperatorClass]:
    """Return compute nodes by operator, or with ``copies`` by their role the copies that write-back
    added, the longest first.
    """
    prices = measure_compute(graphs, device, known.cluster, known, fused=False).costs.compute
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
    lines += _scratch_rows(found)
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
    lines += step_rows([StepTime(**row) for row in found["steps"]])
    lines += condition_rows([Conditions(**row) for row in found["conditions"]])
    if launch["measured"] is not None:
        lines += [
            "",
            (
                f"A launch takes {launch['measured']:.1f} us of the compute stream;"
                f" {launch['predicted']:.1f} us were predicted."
            ),
        ]
    return "\n".join([*lines, *(f"\nnote: {note}" for note in found["notes"])])


def _scratch_rows(found: Mapping[str, Any]) -> list[str]:
    """Return a table of operators at whose nodes the allocator has other bytes than predicted."""
    most: dict[str, int] = {}
    for row in found["peaks"]:
        for operator, size_bytes in row["scratch_bytes"].items():
            if abs(size_bytes) > abs(most.get(operator, 0)):
                most[operator] = size_bytes
    if not most:
        return []
    return [
        "",
        "| at nodes of | allocated beyond the prediction, MiB at most |",
        "|---|---:|",
        *(
            f"| {operator} | {most[operator] / _MIB:+.2f} |"
            for operator in sorted(most, key=lambda name: -abs(most[name]))
        ),
    ]
