"""The memory that a job has in use on its device counts in the default cap."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore
from torch.distributed.fsdp import fully_shard

import apsched
from apsched.capture.fake_world import world
from apsched.compiler import memory_in_use
from apsched.compiler.memory_in_use import (
    MemoryInUse,
    agreed_memory,
    measured,
    other_bytes,
    with_memory_in_use,
)
from apsched.compiler.ranks.agreement import GraphAgreement
from apsched.compiler.ranks.job import Job
from apsched.compiler.schedule_captured import scheduled
from apsched.compiler.settings import Settings
from apsched.costs.clusters.cluster import load_cluster
from apsched.errors import InfeasibleError, InputError
from apsched.pipeline.device_memory import CONTEXT_BYTES, BesideGraph, MemoryAccount
from tests.helpers.graphs.sharded_layers import FlatPrices, captured_layers, loaded_layers
from tests.helpers.graphs.small_models import Residual

MIB = 2**20
DEVICE = load_cluster("h100").device.memory_bytes


def in_use(total_bytes: int | None, outside_bytes: int, allocated_bytes: int) -> MemoryInUse:
    return MemoryInUse(
        total_bytes=total_bytes, outside_bytes=outside_bytes, allocated_bytes=allocated_bytes
    )


@pytest.mark.parametrize(
    ("found", "held_bytes", "expected"),
    [
        (in_use(80 * MIB, 12 * MIB, 30 * MIB), 30 * MIB, 0),
        (in_use(None, 0, 0), 30 * MIB, 0),
        (in_use(79 * MIB, 0, 0), 30 * MIB, 256 * MIB),
        (in_use(80 * MIB, 12 * MIB + 1, 0), 0, 256 * MIB),
        (in_use(80 * MIB, 11 * MIB, 257 * MIB), MIB, 256 * MIB),
        (in_use(70 * MIB, 13 * MIB, 300 * MIB), 50 * MIB, 512 * MIB),
    ],
)
def test_bytes_that_nothing_else_counts(found: MemoryInUse, held_bytes: int, expected: int) -> None:
    """A smaller device, more outside of the allocator than context and communicators, other
    tensors: each counts by itself, and one does not make up for another.
    """
    beside = BesideGraph(
        device_bytes=80 * MIB,
        context_bytes=4 * MIB,
        num_communicators=2,
        communicator_bytes=8 * MIB,
        parameter_bytes=0,
        bf16_parameter_bytes=0,
        other_parameter_bytes=0,
    )
    assert other_bytes(found, beside, held_bytes) == expected
    account = MemoryAccount(
        beside=BesideGraph(**{**_fields(beside), "other_bytes": expected}), optimizer="none"
    )
    lines = {line.what: line.size_bytes for line in account.lines}
    assert lines.get("other memory of the device (measured)", 0) == expected


def _fields(beside: BesideGraph) -> dict[str, float]:
    return {name: getattr(beside, name) for name in BesideGraph.__dataclass_fields__}


def test_a_process_without_a_device_has_nothing_in_use() -> None:
    assert torch.cuda.is_available() or measured() == MemoryInUse()


def test_the_least_of_tensors_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph may be compiled while a step runs. Stands in for a CUDA device, which CI has not."""
    monkeypatch.setattr(memory_in_use, "_LEAST", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (50 * MIB, 80 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 22 * MIB)
    for now, least in ((20 * MIB, 20 * MIB), (22 * MIB, 20 * MIB), (9 * MIB, 9 * MIB)):
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda now=now: now)
        assert measured() == in_use(80 * MIB, 8 * MIB, least)


def account_of(direction: int, **settings: object) -> MemoryAccount | None:
    chosen = Settings.of({"cluster": "h100", "budget": 0.0, **settings})
    agreement = GraphAgreement(Job(HashStore(), 0), {})
    module = scheduled(captured_layers((32, 64, 128)).graphs[direction], chosen, agreement)
    return module.apsched_result.account


@pytest.mark.parametrize("direction", [0, 1])
def test_the_default_cap_is_lower_by_what_is_in_use(
    monkeypatch: pytest.MonkeyPatch, direction: int
) -> None:
    before = account_of(direction)
    own = CONTEXT_BYTES + before.beside.communicator_bytes
    found = in_use(DEVICE, own + 1024 * MIB, 1024 * MIB)
    monkeypatch.setattr(memory_in_use, "measured", lambda _: found)
    after = account_of(direction)
    assert before.left_bytes - after.left_bytes == 2048 * MIB, "less some KiB of parameters"
    assert after.beside.other_bytes == 2048 * MIB
    stated = account_of(direction, memory_cap="1GiB")
    assert stated.beside.other_bytes == 0, "a stated cap is a number of bytes for the graph"


def step_in_job(accumulate: int, **options: object) -> apsched.StepResult:
    with world(8):
        model = Residual()
        for layer in model.layers:
            fully_shard(layer)
        tokens = torch.zeros(1, 2, dtype=torch.long)
        return apsched.solve_step(
            fully_shard(model), (tokens,), accumulate=accumulate, budget=0, **options
        )


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_in_a_job_leaves_out_what_is_in_use(
    monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    """The graphs of later micro-batches have it in their caps and accounts, too."""
    monkeypatch.setattr(memory_in_use, "running_job", lambda: Job(HashStore(), 0))
    monkeypatch.setattr(memory_in_use, "process_group_names", dict)
    monkeypatch.setattr(memory_in_use, "measured", lambda _: in_use(None, 0, 1024 * MIB))
    names = {"forward", "backward"}
    names |= {"forward-2", "backward-2", "backward-3"} if accumulate > 1 else set()
    before, after, stated = (
        {result.problem.name: result for result in step.results}
        for step in (
            step_in_job(accumulate, keep="all"),
            step_in_job(accumulate, keep="all", in_job=True),
            step_in_job(accumulate, keep="all", in_job=True, memory_cap="8GiB"),
        )
    )
    assert before.keys() == after.keys() == stated.keys() == names
    for name, result in after.items():
        less = before[name].caps.memory_cap_bytes - result.caps.memory_cap_bytes
        assert less == result.account.beside.other_bytes == 1024 * MIB
        assert before[name].account.left_bytes - result.account.left_bytes == less
        assert stated[name].account.beside.other_bytes == 0
    monkeypatch.setattr(memory_in_use, "measured", lambda _: in_use(None, DEVICE, 0))
    assert step_in_job(accumulate, keep="all", in_job=True).step_time_us is None


def test_a_step_with_a_mesh_is_of_no_running_job() -> None:
    with pytest.raises(InputError, match="in_job: expected a model of the running job, found mesh"):
        apsched.solve_step(Residual(), (), "fsdp=8", in_job=True)


def test_outside_of_a_job_nothing_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph may be for another machine than that of this process."""
    monkeypatch.setattr(memory_in_use, "measured", lambda _: in_use(DEVICE, DEVICE, 0))
    assert agreed_memory(Settings.of({"cluster": "h100"}), None) == MemoryInUse()


def test_a_graph_for_cpus_has_no_memory_of_a_gpu() -> None:
    graph, _ = loaded_layers(captured_layers((32, 64, 128)), FlatPrices())
    found = in_use(DEVICE, DEVICE, 0)
    for context_bytes, other in ((0, 0), (CONTEXT_BYTES, DEVICE - CONTEXT_BYTES)):
        beside = BesideGraph(
            device_bytes=DEVICE,
            context_bytes=context_bytes,
            num_communicators=0,
            communicator_bytes=0,
            parameter_bytes=0,
            bf16_parameter_bytes=0,
            other_parameter_bytes=0,
        )
        known = with_memory_in_use(replace(graph, beside=beside), found, "adamw")
        assert 0 <= known.beside.other_bytes - other < 256 * MIB


def test_too_much_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = in_use(DEVICE, DEVICE, 0)
    monkeypatch.setattr(memory_in_use, "measured", lambda _: found)
    with pytest.raises(InfeasibleError, match=r"other memory of the device \(measured\)"):
        account_of(0)


@pytest.mark.parametrize(
    ("variable", "text", "reserve", "rank", "warned"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "", 0.05, 0, True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", 0.05, 0, True),
        (
            "PYTORCH_CUDA_ALLOC_CONF",
            "max_split_size_mb:64, expandable_segments: True",
            0.05,
            0,
            False,
        ),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", 0.05, 0, False),
        ("PYTORCH_CUDA_ALLOC_CONF", "", 0.12, 0, False),
        ("PYTORCH_CUDA_ALLOC_CONF", "", 0.05, 1, False),
    ],
)
def test_a_small_reserve_needs_expandable_segments(
    monkeypatch, caplog, variable, text, reserve, rank, warned
):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, text)
    monkeypatch.setattr(memory_in_use, "_warned", [])
    found = in_use(80 * MIB, 0, 0)
    monkeypatch.setattr(memory_in_use, "_largest", lambda *_: found)
    job = SimpleNamespace(job=SimpleNamespace(rank=rank))
    for _ in range(2):
        assert agreed_memory(Settings.of({"reserve": reserve}), job) == found
    assert caplog.text.count("expandable_segments:True") == warned


def test_a_job_without_a_gpu_is_not_warned(monkeypatch, caplog):
    monkeypatch.setattr(memory_in_use, "_warned", [])
    monkeypatch.setattr(memory_in_use, "_largest", lambda *_: MemoryInUse())
    agreed_memory(Settings.of({}), SimpleNamespace(job=SimpleNamespace(rank=0)))
    assert caplog.text == ""
