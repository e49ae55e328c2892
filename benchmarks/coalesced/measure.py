"""``python -m benchmarks.coalesced``: a bucket as one flat buffer, as one coalesced launch, and its
members one by one, on gloo.

Process ranks of one thread gather and reduce-scatter buckets of several sizes, the three forms by
turns. The time of a coalesced launch above the flat transfer of the same bytes, divided by the
number of members, is the ``coalesced_member_us`` that a cluster file may state. On gloo a coalesced
launch is a loop over its members; NCCL makes one group launch of it.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from apsched.errors import ApschedError
from apsched.kinds import CollectiveKind
from apsched.quantities import parse_count

_c10d: Any = torch.ops._c10d_functional
_MEMBERS = (2, 4, 8, 16)
_MEMBER_BYTES = (16 * 2**10, 256 * 2**10, 2**20)
_REPEATS = 21


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.coalesced",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--processes", metavar="NUMBER", default="2", help="process ranks (default 2)"
    )
    parser.add_argument(
        "--repeats",
        metavar="NUMBER",
        default=str(_REPEATS),
        help=f"of each form (default {_REPEATS})",
    )
    args = parser.parse_args(arguments)
    try:
        num_ranks, repeats = (
            parse_count(args.processes, "--processes", least=2),
            parse_count(args.repeats, "--repeats", least=1),
        )
    except ApschedError as error:
        print(f"benchmarks.coalesced: error: {error}", file=sys.stderr)
        return 2
    with TemporaryDirectory() as folder:
        spawn(_process_rank, args=(num_ranks, folder, repeats), nprocs=num_ranks)  # type: ignore[no-untyped-call]
        print((Path(folder) / "table.md").read_text(), end="")
    return 0


def _process_rank(rank: int, num_ranks: int, folder: str, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=120),
    )
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    lines = [
        (
            f"{num_ranks} gloo processes on one machine, medians of {repeats}, the forms by turns,"
            f" torch {torch.__version__}"
        ),
        "",
        (
            "| kind | members | bytes of each | flat with copies, us | flat transfer, us |"
            " coalesced, us | one by one, us | coalesced/flat | per member above the transfer, us |"
        ),
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, forms in (
        (CollectiveKind.ALL_GATHER, _gathers),
        (CollectiveKind.REDUCE_SCATTER, _reductions),
    ):
        for size_bytes in _MEMBER_BYTES:
            for members in _MEMBERS:
                times = _by_turns(forms(members, size_bytes // 4, num_ranks, group), repeats)
                flat, transfer, coalesced, _ = times
                figures = (
                    *(f"{value:.0f}" for value in times),
                    f"{coalesced / flat:.2f}",
                    f"{(coalesced - transfer) / members:.0f}",
                )
                lines.append(f"| {kind} | {members} | {size_bytes} | {' | '.join(figures)} |")
    if rank == 0:
        (Path(folder) / "table.md").write_text("\n".join(lines) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _by_turns(forms: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Return the median microseconds of each form, of the slowest process rank."""
    times: list[list[float]] = [[] for _ in forms]
    for number in range(-2, repeats):
        for form, taken in zip(forms, times, strict=True):
            dist.barrier()
            begin = time.perf_counter_ns()
            form()
            if number >= 0:
                taken.append((time.perf_counter_ns() - begin) / 1e3)
    medians = torch.tensor([median(taken) for taken in times])
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return [float(value) for value in medians]


def _gathers(members: int, numel: int, num_ranks: int, group: str) -> list[Callable[[], object]]:
    shards = [torch.randn(numel // num_ranks) for _ in range(members)]
    buffer = torch.cat(shards)

    def flat() -> object:
        whole = _c10d.wait_tensor(
            _c10d.all_gather_into_tensor(torch.cat(shards), num_ranks, group)
        ).view(num_ranks, -1)
        return [
            part.clone(memory_format=torch.contiguous_format)
            for part in whole.split([s.numel() for s in shards], dim=1)
        ]

    def coalesced() -> object:
        return [
            _c10d.wait_tensor(out)
            for out in _c10d.all_gather_into_tensor_coalesced(shards, num_ranks, group)
        ]

    def alone() -> object:
        started = [_c10d.all_gather_into_tensor(shard, num_ranks, group) for shard in shards]
        return [_c10d.wait_tensor(out) for out in started]

    return [
        flat,
        lambda: _c10d.wait_tensor(_c10d.all_gather_into_tensor(buffer, num_ranks, group)),
        coalesced,
        alone,
    ]


def _reductions(members: int, numel: int, num_ranks: int, group: str) -> list[Callable[[], object]]:
    gradients = [torch.randn(numel) for _ in range(members)]
    buffer = torch.cat(gradients)

    def flat() -> object:
        sent = torch.cat([g.view(num_ranks, -1) for g in gradients], dim=1)
        return _c10d.wait_tensor(
            _c10d.reduce_scatter_tensor(sent.view(-1), "sum", num_ranks, group)
        )

    def coalesced() -> object:
        return [
            _c10d.wait_tensor(out)
            for out in _c10d.reduce_scatter_tensor_coalesced(gradients, "sum", num_ranks, group)
        ]

    def alone() -> object:
        started = [_c10d.reduce_scatter_tensor(g, "sum", num_ranks, group) for g in gradients]
        return [_c10d.wait_tensor(out) for out in started]

    return [
        flat,
        lambda: _c10d.wait_tensor(_c10d.reduce_scatter_tensor(buffer, "sum", num_ranks, group)),
        coalesced,
        alone,
    ]
