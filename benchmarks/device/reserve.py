"""``python -m benchmarks.device.reserve``: the memory that fragmentation takes on a GPU.

PyTorch's caching allocator holds blocks that no tensor fills. A step that needs P bytes of tensors
at its peak therefore needs a device with L > P bytes free, and ``--reserve`` is the share
1 - P / L of it. This benchmark finds L: training steps of one process rank of many (a fake process
group stands for the others) run under lower and lower limits of the allocator, each from an empty
cache, until they run out of memory. Both of its modes are measured. Exit status: 0 done, or no GPU
here; 2 wrong use.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from apsched.capture.captured import Capture
from apsched.capture.fake_world import world
from apsched.config import Caps, SolveOptions
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.errors import ApschedError, InputError
from apsched.graph.export.export import export_graph
from apsched.models.build import build
from apsched.models.mesh import MeshSpec
from apsched.models.preset_capture import capture_built
from apsched.problem.build import build_problem
from apsched.quantities import parse_count, parse_number
from apsched.schedule.result import AS_CAPTURED
from apsched.solver import solve
from apsched.writeback.write_back import write_back
from benchmarks.common.live_bytes import run_counting
from benchmarks.device.measure import NO_GPU, real_tensor

EXPANDABLE = "expandable_segments"
_PARTS = "PRESET:MESH:SEQ:LAYERS"
_NUM_STEPS = 3
_WITHIN = 0.002
"""Distance of the limits between which the least one lies, as a share."""
_MIB = 2**20

Step = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Memory of one training step, optimizer state included."""

    step: str
    allocator: str
    peak_bytes: int
    """Of the tensors."""
    reserved_bytes: int
    """Taken by the allocator from a device that has more than enough."""
    least_bytes: int
    """The least limit of the allocator under which the step runs."""

    @property
    def share(self) -> float:
        """Share of the memory that no tensor can have."""
        return 1 - self.peak_bytes / self.least_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device.reserve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--case",
        metavar=_PARTS,
        action="append",
        help="several times (default llama3-8b:fsdp=64:2048:32 and llama3-8b:fsdp=8,tp=8:8192:8)",
    )
    parser.add_argument("--budget", metavar="WORK", default="1", help="of the solver (default 1)")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="the numbers, written again after each one"
    )
    parser.add_argument("--json", action="store_true", help="the numbers instead of a table")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(json.dumps({"skipped": NO_GPU}) if args.json else NO_GPU)
        return 0
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": [],
    }
    try:
        budget = parse_number(args.budget, "--budget")
        for case in args.case or ["llama3-8b:fsdp=64:2048:32", "llama3-8b:fsdp=8,tp=8:8192:8"]:
            for row in _rows_of(case, budget, torch.device("cuda", 0)):
                found["rows"].append(asdict(row))
                print(row, f"{100 * row.share:.2f} %", file=sys.stderr, flush=True)
                if args.out:
                    args.out.write_text(json.dumps(found))
    except ApschedError as error:
        print(f"benchmarks.device.reserve: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found) if args.json else markdown(found))
    return 0


def _rows_of(case: str, budget: float, device: torch.device) -> Sequence[Reserve]:
    parts = case.split(":")
    if len(parts) != len(_PARTS.split(":")):
        raise InputError(f"--case: expected {_PARTS}, found {case!r}")
    preset, mesh_text, seq, layers = parts
    mesh, seq_len = MeshSpec.parse(mesh_text), parse_count(seq, "--case", least=8)
    rows = []
    with world(mesh.world_size):
        built = build(
            preset,
            mesh=mesh,
            seq_len=seq_len,
            num_layers=parse_count(layers, "--case", least=1),
            device=device.type,
        )
        name = f"{preset}, {built.num_layers} layers, {mesh}, sequences of {seq_len}"
        capture = capture_built(built)
        for schedule, pair in schedules(capture, budget).items():
            step = GraphStep(capture, pair, device)
            rows += _both_modes(f"{name}: {schedule}", step, device)
            del step
            _forget()
    return rows


def schedules(capture: Capture, budget: float) -> dict[str, list[GraphModule]]:
    """Return both graphs as captured, under the fastest schedule, and under one near the least
    memory.
    """
    ranks = {name: ranks for name, ranks in capture.group_ranks.items() if ranks}
    formulas = ClusterCostModel(load_cluster("h100"), ranks, fused=False)
    options = SolveOptions(budget=budget)
    found: dict[str, list[GraphModule]] = {"fastest": [], "least memory": []}
    for captured in capture.graphs:
        problem = build_problem(export_graph(captured, formulas, group_ranks=ranks))
        fastest = solve(problem, Caps(), options)
        least = solve(problem, Caps(memory_cap_bytes=fastest.floor_memory_bytes), options)
        for name, result in zip(found, (fastest, least), strict=True):
            if result.best is None:
                raise AssertionError(f"{captured.name}: no schedule fits its own least memory")
            found[name].append(write_back(captured.module, problem, result.best.schedule))
    return {AS_CAPTURED: [captured.module for captured in capture.graphs], **found}


class GraphStep:
    """A training step of captured or rewritten graphs, with AdamW."""

    def __init__(
        self, capture: Capture, modules: Sequence[GraphModule], device: torch.device
    ) -> None:
        ranks = {name: ranks for name, ranks in capture.group_ranks.items() if ranks}
        formulas = ClusterCostModel(load_cluster("h100"), ranks, fused=False)
        self._graphs = [replace(c, module=m) for c, m in zip(capture.graphs, modules, strict=True)]
        self._dags = [export_graph(c, formulas, group_ranks=ranks) for c in self._graphs]
        forward = self._graphs[0]
        placeholders = forward.module.graph.find_nodes(op="placeholder")
        self._inputs = [real_tensor(node.meta["val"], device) for node in placeholders]
        self.parameters = [
            value
            for node, value in zip(placeholders, self._inputs, strict=True)
            if node.name in forward.parameter_names
        ]
        self.optimizer = torch.optim.AdamW(self.parameters)

    def __call__(self) -> None:
        loss, *saved = self._run(0, list(self._inputs))
        boxed = [
            *(value for value in saved if not isinstance(value, torch.Tensor)),
            *(value for value in saved if isinstance(value, torch.Tensor)),
            torch.ones_like(loss),
        ]
        del saved, loss
        gradients = self._run(1, boxed)
        for parameter, gradient in zip(self.parameters, gradients, strict=False):
            parameter.grad = gradient
        del gradients
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _run(self, k: int, boxed: list[Any]) -> Any:
        graph = self._graphs[k]
        return run_counting(graph.module, boxed, self._dags[k], graph.kept_inputs, count=False)[0]


def _both_modes(name: str, step: Step, device: torch.device) -> list[Reserve]:
    rows = []
    for allocator, settings in (("default", "False"), (EXPANDABLE, "True")):
        torch.cuda.memory._set_allocator_settings(f"{EXPANDABLE}:{settings}")
        rows.append(measured(name, allocator, step, device))
    torch.cuda.memory._set_allocator_settings(f"{EXPANDABLE}:False")
    return rows


def measured(name: str, allocator: str, step: Step, device: torch.device) -> Reserve:
    """Return the memory of ``step`` under one mode of the allocator."""
    peak_bytes, reserved_bytes = unlimited(step, device)
    too_few, enough = peak_bytes, reserved_bytes
    if runs_within(step, peak_bytes, device):
        enough = peak_bytes
    while enough - too_few > _WITHIN * peak_bytes:
        between = (too_few + enough) // 2
        if runs_within(step, between, device):
            enough = between
        else:
            too_few = between
    return Reserve(
        step=name,
        allocator=allocator,
        peak_bytes=peak_bytes,
        reserved_bytes=reserved_bytes,
        least_bytes=enough,
    )


def unlimited(step: Step, device: torch.device) -> tuple[int, int]:
    """Return the peak of the tensors, and the bytes that the allocator reserves, without a
    limit.
    """
    step()  # the state of the optimizer, workspaces
    _forget()
    torch.cuda.reset_peak_memory_stats(device)
    _steps(step)
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def runs_within(step: Step, limit_bytes: int, device: torch.device) -> bool:
    """Return whether ``step`` runs with ``limit_bytes`` for the allocator."""
    _forget()
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, device)
    try:
        _steps(step)
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    return True


def markdown(found: Mapping[str, Any]) -> str:
    """Return the table."""
    lines = [
        f"{found['device']}, torch {found['torch']}.",
        "",
        (
            "| step | allocator | peak of tensors, MiB | reserved without a limit, MiB |"
            " least limit, MiB | reserve |"
        ),
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in (Reserve(**one) for one in found["rows"]):
        lines.append(
            f"| {row.step} | {row.allocator} | {row.peak_bytes / _MIB:.0f} |"
            f" {row.reserved_bytes / _MIB:.0f} | {row.least_bytes / _MIB:.0f} |"
            f" {100 * row.share:.1f} % |"
        )
    return "\n".join(lines)


def _steps(step: Step) -> None:
    for _ in range(_NUM_STEPS):
        step()
    torch.cuda.synchronize()


def _forget() -> None:
    """Give all blocks that hold no tensor back to the device."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
