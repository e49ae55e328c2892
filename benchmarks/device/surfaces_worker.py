"""One of several process ranks that train with apsched and without.

usage: python -m benchmarks.device.surfaces_worker RANK MESH FOLDER DEVICE SURFACES

Process rank 0 writes ``FOLDER/0.json`` after each surface.
"""

import gc
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

import apsched
from apsched.calibrate.profile.predict import predicted
from apsched.calibrate.profile.profile import profile_costs
from apsched.calibrate.profile.trace import load_trace
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.graph.export.export import export_graph
from apsched.models.build import BuiltModel, build
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions
from apsched.models.preset_capture import capture_built
from apsched.models.training import run_step
from apsched.units import allocated_bytes

NUM_STEPS, RATE, SEQ_LEN, NUM_LAYERS = 3, 0.1, 512, 4
CLOSE = 0.05
"""Distance that other kernels, or another order of sums, may make to losses and gradients in
bfloat16.
"""
SOLVE: dict[str, Any] = {"budget": 1.0, "deadline_s": 200.0}
_MIB = 2**20
_OTHER_BYTES = 3 * 2**30
_CONTEXT_BYTES = 2 * 2**30
"""More than context, communicators and cache of one more process."""

Record = list[torch.Tensor]
Losses = Callable[[], torch.Tensor]


class Job:
    """The model of the surfaces that compile it, and its inputs."""

    def __init__(self, device: torch.device, mesh: MeshSpec) -> None:
        self.device = device
        self.built: BuiltModel = build(
            "llama3-small",
            mesh=mesh,
            seq_len=SEQ_LEN,
            num_layers=NUM_LAYERS,
            options=ModelOptions(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            device=device.type,
            materialize=True,
        )
        tokens = torch.randint(
            0, 1000, (4, 1, SEQ_LEN), generator=torch.Generator().manual_seed(dist.get_rank())
        ).to(device)
        self.batches = [(tokens[0], tokens[1]), (tokens[2], tokens[3])]

    def held(self) -> list[torch.Tensor]:
        """Return the tensors that the caller of a step holds: shards and inputs."""
        return [*map(_local, self.built.module.parameters()), *self.batches[0]]

    def train(self, losses: Losses) -> tuple[Record, int]:
        """Return losses, gradients and weights of some steps, after which the weights are as
        before, and the peak of the allocator during the last step, tensors of the caller included.
        """
        module = self.built.module
        parameters = list(module.parameters())
        start = [_local(parameter).clone() for parameter in parameters]
        record, peak = [], 0
        for _ in range(NUM_STEPS):
            before = self._reset()
            record.append(losses())
            if self.device.type == "cuda":
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated() - before + self.held_bytes()
            for parameter in parameters:
                shard, gradient = _local(parameter), _local(_gradient(parameter))
                record.append(gradient.clone())
                shard.sub_(gradient, alpha=RATE)
                record.append(shard.clone())
                parameter.grad = None
        for parameter, value in zip(parameters, start, strict=True):
            _local(parameter).copy_(value)
        return record, peak

    def _reset(self) -> int:
        if self.device.type != "cuda":
            return 0
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def held_bytes(self) -> int:
        """Return the bytes that the allocator gives for the tensors of the caller."""
        return sum(allocated_bytes(tensor.nbytes) for tensor in self.held())

    def predicted_bytes(self, results: Sequence[apsched.Result]) -> int:
        """Return the peak of a step: of each graph, with the tensors of the caller that it does not
        take."""
        held_bytes = self.held_bytes()
        return max(
            result.best.peak_memory_bytes + held_bytes - result.problem.kept_bytes
            for result in results
            if result.best
        )

    def compiled(self, backend: Any) -> tuple[Record, int]:
        """Return the record of training under torch.compile."""
        torch._dynamo.reset()
        module = torch.compile(self.built.module, backend=backend)

        def losses() -> torch.Tensor:
            return _stepped(module, *self.batches[0])

        return self.train(losses)

    def in_a_row(self) -> Record:
        """Return the record of two micro-batches in a row."""
        torch._dynamo.reset()
        module = torch.compile(self.built.module, backend="aot_eager")

        def losses() -> torch.Tensor:
            first, second = (_stepped(module, *batch) for batch in self.batches)
            return first + second

        return self.train(losses)[0]

    def as_one_step(self, backend: Any) -> tuple[Record, int]:
        """Return the record of both micro-batches as one step."""
        torch._dynamo.reset()
        module = torch.compile(apsched.micro_batches(self.built.module, 2), backend=backend)

        def losses() -> torch.Tensor:
            return _stepped(module, *self.batches)

        return self.train(losses)


class Block(nn.Module):
    """The feed-forward part of a transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + y


class Blocks(nn.Module):
    """A model for FSDP2 and DDP."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(4))
        self.output = nn.Linear(width, 101)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return cast("torch.Tensor", self.output(x).float().logsumexp(-1).mean())


def compare(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return how far apart two records are."""
    pairs = list(zip(expected, found, strict=True))
    distances = [
        ((a.float() - b.float()).norm() / a.float().norm().clamp_min(1e-30)).item()
        for a, b in pairs
        if a.numel()
    ]
    return {
        "num_unequal": sum(not torch.equal(a, b) for a, b in pairs),
        "largest_distance": float(f"{max(distances):.2g}"),
    }


def _of_backend(job: Job, backend: Any, peak: int) -> dict[str, Any]:
    results = backend.results
    return {
        "launches": " ".join(
            f"{len(r.problem.collectives)}->{r.best.num_launches}" for r in results if r.best
        ),
        "predicted_mib": round(job.predicted_bytes(results) / _MIB, 2),
        "measured_mib": round(peak / _MIB, 2) if peak else "",
    }


class Surfaces:
    """Each public method is a surface; it returns how far apart both ways to train are."""

    def __init__(self, device: torch.device, mesh: MeshSpec, folder: Path) -> None:
        self._job = Job(device, mesh)
        self._device, self._folder = device, folder
        self._plain: dict[str, Record] = {}

    def _expected(self, plain: str) -> Record:
        if plain not in self._plain:
            self._plain[plain] = (
                self._job.in_a_row() if plain == "in a row" else self._job.compiled(plain)[0]
            )
        return self._plain[plain]

    def _compiled(self, plain: str, **settings: Any) -> dict[str, Any]:
        expected = self._expected(plain)
        backend = apsched.backend(**{**SOLVE, **settings})
        found, peak = self._job.compiled(backend)
        return compare(expected, found) | _of_backend(self._job, backend, peak)

    def _merged(self, **settings: Any) -> dict[str, Any]:
        expected = self._expected("in a row")
        backend = apsched.backend(**{**SOLVE, **settings})
        found, peak = self._job.as_one_step(backend)
        return compare(expected, found) | _of_backend(self._job, backend, peak)

    def other_memory(self) -> dict[str, Any]:
        """A model outside of the graph, on each process rank: the account of the device has it,
        and those of the other process ranks on the device, as other memory. This surface is the
        first, since the least memory that a job ever held counts.
        """
        other = torch.empty(_OTHER_BYTES, dtype=torch.uint8, device=self._device)
        backend = apsched.backend(**SOLVE)
        row = compare(self._expected("aot_eager"), self._job.compiled(backend)[0])
        account = backend.results[0].account
        if account is None:
            raise AssertionError("the result has no account of the device")
        lines = {line.what: line.size_bytes for line in account.lines}
        found = account.beside.other_bytes
        on_device = dist.get_world_size() / max(torch.cuda.device_count(), 1)
        held_bytes = other.nbytes * on_device if self._device.type == "cuda" else 0
        if not held_bytes <= found <= held_bytes + on_device * _CONTEXT_BYTES:
            row["largest_distance"] = 1.0
        account_mib = {what: round(size / _MIB) for what, size in lines.items()}
        return row | {
            "note": f"{account_mib}, held beside: {held_bytes / _MIB:.0f}",
        }

    def repeated(self) -> dict[str, Any]:
        """Torch's own backend twice: how far bits repeat here without apsched."""
        return compare(self._expected("aot_eager"), self._job.compiled("aot_eager")[0])

    def node_by_node(self) -> dict[str, Any]:
        """``apsched.backend`` against ``aot_eager``."""
        return self._compiled("aot_eager")

    def node_by_node_gathered_again(self) -> dict[str, Any]:
        """The same with parameters gathered again in backward."""
        return self._compiled("aot_eager", reshard_after_forward=True)

    def kept_by_choice(self) -> dict[str, Any]:
        """The same with a choice for each parameter."""
        return self._compiled("aot_eager", keep="auto")

    def least_memory(self) -> dict[str, Any]:
        """The same with the least memory."""
        return self._compiled("aot_eager", reshard_after_forward=True, memory_cap="floor")

    def two_micro_batches_reduced_each(self) -> dict[str, Any]:
        """Two micro-batches as one step against two in a row."""
        return self._merged(reduce="each")

    def close_two_micro_batches_reduced_once(self) -> dict[str, Any]:
        """The same with gradients added first."""
        return self._merged(reduce="once")

    def close_inductor(self) -> dict[str, Any]:
        """Full Inductor against Inductor."""
        return self._compiled("inductor", inductor=True)

    def close_inductor_gathered_again(self) -> dict[str, Any]:
        """The same with parameters gathered again in backward."""
        return self._compiled("inductor", inductor=True, reshard_after_forward=True)

    def close_inductor_kept_by_choice(self) -> dict[str, Any]:
        """The same with a choice for each parameter."""
        return self._compiled("inductor", inductor=True, keep="auto")

    def fsdp2(self) -> dict[str, Any]:
        """Eager FSDP2, tuned and not."""
        records, tuned = [], None
        for is_tuned in (False, True):
            model = self._blocks()
            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)
            if is_tuned:
                tuned = apsched.tune_fsdp2(model, self._tokens(), **SOLVE)
            records.append(self._eagerly(model, model))
        return compare(*records) | {"launches": str(tuned).splitlines()[0][:120]}

    def ddp(self) -> dict[str, Any]:
        """DDP with buckets of apsched, against DDP."""
        records, found = [], None
        for is_tuned in (False, True):
            model = self._blocks()
            found = apsched.ddp_buckets(model, self._tokens()) if is_tuned else None
            arguments = found.arguments if found else {}
            records.append(self._eagerly(model, DistributedDataParallel(model, **arguments)))
        return compare(*records) | {"launches": f"bucket_cap_mb {arguments.get('bucket_cap_mb')}"}

    def measured_costs(self) -> dict[str, Any]:
        """Costs measured in the job on its process groups, and a schedule by them."""
        expected = self._expected("aot_eager")
        graph = capture_built(self._job.built).graphs[0].module
        costs = apsched.measure_costs(graph, fused=False)
        again = apsched.backend(cost_model=costs, **SOLVE)
        found, peak = self._job.compiled(again)
        transfers = {
            f"{t.kind} {t.num_ranks}": f"{t.bytes_per_us / 1e3:.2f} GB/s"
            for t in costs.costs.transfers
            if t.bytes_per_us is not None
        }
        return (
            compare(expected, found)
            | _of_backend(self._job, again, peak)
            | {"note": f"{len(costs.costs.compute)} operations, {transfers}"}
        )

    def profiled_costs(self) -> dict[str, Any]:
        """Costs from a profile of the graphs as captured: all nodes are found in it."""
        built, cluster = self._job.built, load_cluster("h100")
        capture = capture_built(built)
        forward, backward = (captured.module for captured in capture.graphs)
        ranks = {name: ranks for name, ranks in capture.group_ranks.items() if ranks}
        formulas = ClusterCostModel(cluster, ranks, fused=False)
        dags = [export_graph(c, formulas, group_ranks=ranks) for c in capture.graphs]
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        traces = [self._folder / f"trace.{rank}.json" for rank in range(dist.get_world_size())]
        with profile(
            activities=activities,
            record_shapes=True,
            schedule=schedule(wait=1, warmup=1, active=4),
            on_trace_ready=lambda p: p.export_chrome_trace(str(traces[dist.get_rank()])),
        ) as profiler:
            for _ in range(6):
                with torch.no_grad():
                    run_step(built, forward, backward)
                if self._device.type == "cuda":
                    torch.cuda.synchronize()
                profiler.step()
        dist.barrier()
        found = profile_costs(dags, [load_trace(trace) for trace in traces], cluster, "h100")
        expected = predicted(dags, found.costs, cluster)
        return {
            "num_unequal": found.num_nodes - found.num_matched,
            "largest_distance": 0.0 if found.num_matched == found.num_nodes else 1.0,
            "note": (
                f"{found.num_matched} of {found.num_nodes} nodes on {found.costs.device}; step"
                f" {found.step_us:.0f} us, predicted {expected.step_us:.0f}; missing"
                f" {found.missing[:5]}, unmatched {found.unmatched[:5]}"
            ),
        }

    def _blocks(self) -> Blocks:
        torch.manual_seed(0)
        return Blocks().to(self._device)

    def _tokens(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(dist.get_rank())
        return torch.randint(0, 101, (4, 64), generator=generator).to(self._device)

    def _eagerly(self, model: nn.Module, wrapped: nn.Module) -> Record:
        record = []
        for _ in range(NUM_STEPS):
            record.append(_stepped(wrapped, self._tokens()))
            for parameter in model.parameters():
                _local(parameter).sub_(_local(_gradient(parameter)), alpha=RATE)
                record.append(_local(parameter).clone())
                parameter.grad = None
        return record


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the shard of this process rank, without its history."""
    plain: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return cast("torch.Tensor", plain.detach())


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        raise AssertionError("a parameter has no gradient")
    return parameter.grad


def _stepped(module: Callable[..., Any], *inputs: Any) -> torch.Tensor:
    """Run forward and backward; return the loss."""
    loss = module(*inputs)
    loss.backward()
    return cast("torch.Tensor", loss.detach().clone())


def main(rank: int, mesh: MeshSpec, folder: Path, device_type: str, pattern: str) -> int:
    """Run the surfaces whose names match ``pattern``."""
    num_ranks = mesh.world_size
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"inductor{rank}")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(1)
    # dq of attention is a sum of atomic additions otherwise, whose bits differ from run to run
    torch.use_deterministic_algorithms(True, warn_only=True)
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=240),
    )
    surfaces, found = Surfaces(device, mesh, folder), []
    name = torch.cuda.get_device_name(device) if device_type == "cuda" else "cpu"
    chosen = [
        n for n, m in vars(Surfaces).items() if not n.startswith("_") and re.search(pattern, n)
    ]
    for surface in chosen:
        begin = time.monotonic()
        try:
            row = getattr(surfaces, surface)()
            limit = CLOSE if surface.startswith("close_") else 0.0
            row["passed"] = row["largest_distance"] <= limit
        except Exception as error:
            traceback.print_exc()
            row = {"passed": False, "note": f"{type(error).__name__}: {str(error)[:400]}"}
        row |= {"name": surface, "seconds": round(time.monotonic() - begin, 1)}
        print(row, flush=True)
        found.append(row)
        if rank == 0:
            (folder / "0.json").write_text(
                json.dumps({"surfaces": found, "device_name": name, "torch": torch.__version__})
            )
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), MeshSpec.parse(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:6]))
