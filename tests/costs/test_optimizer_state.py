"""The state of optimizers of torch, counted before it exists: the bytes that torch then holds."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from apsched.capture.fake_world import world
from apsched.compiler import memory_in_use
from apsched.compiler.fingerprint import fingerprint
from apsched.compiler.memory_in_use import MemoryInUse, measured, with_memory_in_use
from apsched.compiler.settings import Settings
from apsched.costs.clusters.cluster import load_cluster
from apsched.costs.optimizer_state import JobOptimizer, job_optimizer
from apsched.costs.optimizer_step import CountedOptimizer, Shards, state_bytes, step_us
from apsched.errors import InputError
from apsched.pipeline.device_memory import (
    CONTEXT_BYTES,
    BesideGraph,
    MemoryAccount,
    account_json,
    account_of_json,
)
from tests.helpers.graphs.sharded_layers import FlatPrices, captured_layers, loaded_layers

MIB = 2**20
CLASSES: dict[str, tuple[type[optim.Optimizer], dict[str, Any], int]] = {
    "adamw": (optim.AdamW, {}, 2),
    "adamw, amsgrad": (optim.AdamW, {"amsgrad": True}, 3),
    "adamw, fused": (optim.AdamW, {"fused": True}, 2),
    "adam, rate in a tensor": (optim.Adam, {"lr": torch.tensor(1e-3)}, 2),
    "sgd": (optim.SGD, {"lr": 0.1}, 0),
    "sgd, momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, 1),
    "adagrad": (optim.Adagrad, {}, 1),
    "adadelta": (optim.Adadelta, {}, 2),
    "rmsprop": (optim.RMSprop, {}, 1),
    "rmsprop, all": (optim.RMSprop, {"momentum": 0.9, "centered": True}, 3),
    "radam": (optim.RAdam, {}, 2),
}
"""Name -> class, hyperparameters, tensors of state for each parameter."""


def model_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a matrix, a kernel of four dimensions, vectors, and a number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 50), nn.LayerNorm(50), nn.Conv2d(2, 3, 5)).to(dtype)
    model.register_parameter("scale", nn.Parameter(torch.ones(7, dtype=dtype)))
    return model


def step(optimizer: optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def bytes_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CLASSES)
def test_the_state_is_the_one_that_torch_makes(case: str, dtype: torch.dtype) -> None:
    kind, stated, tensors = CLASSES[case]
    model = model_of(dtype)
    optimizer = kind(model.parameters(), **stated)
    before = job_optimizer(optimizer).counted
    assert before.parameter_bytes == bytes_of(model)
    assert before.size_bytes == tensors * bytes_of(model)
    step(optimizer)
    held = [t for state in optimizer.state.values() for t in state.values()]
    assert before.size_bytes == sum(t.nbytes for t in held if torch.is_tensor(t) and t.dim())
    assert job_optimizer(optimizer).counted == before, "state that exists is not counted twice"


def test_counting_changes_nothing() -> None:
    model = model_of()
    optimizer = optim.AdamW(model.named_parameters(), lr=torch.tensor(0.1), weight_decay=0.5)
    weights = [parameter.clone() for parameter in model.parameters()]
    groups = [dict(group) for group in optimizer.param_groups]
    draws = torch.random.get_rng_state()
    job_optimizer(optimizer)
    assert not optimizer.state
    assert all(map(torch.equal, model.parameters(), weights))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert torch.equal(torch.random.get_rng_state(), draws)


def test_only_parameters_that_it_updates_have_state() -> None:
    model = model_of()
    model[0].bias.requires_grad_(False)
    held = [model[0].weight, model[0].bias, model[1].weight]
    counted = job_optimizer(optim.Adam(held)).counted
    assert counted.parameter_bytes == 4 * (30 * 50 + 50)
    assert counted.size_bytes == 2 * counted.parameter_bytes
    both = job_optimizer([optim.Adam(held[:1]), optim.SGD(held[2:], momentum=0.9)]).counted
    assert (both.name, both.size_bytes) == ("Adam, SGD", 4 * (2 * 30 * 50 + 50))
    groups = [{"params": held[:1], "momentum": 0.9}, {"params": held[2:], "momentum": 0.0}]
    assert job_optimizer(optim.SGD(groups, lr=0.1)).counted.size_bytes == 4 * 30 * 50


class Holder(optim.SGD):
    """An optimizer around another one."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        self.inner = [optim.Adam(parameters)]


class LessInLarge(optim.Optimizer):
    """As quantized optimizers do, it has less state in large parameters."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                dtype = torch.int8 if one.numel() >= 4096 else torch.float32
                self.state[one] = {"moment": torch.zeros_like(one, dtype=dtype)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (optim.LBFGS, r"steps on a small tensor by itself, found LBFGS .*pass a name \(adamw"),
        (optim.Adafactor, r"bytes per element, found Adafactor with .*'none' with a memory_cap"),
        (LessInLarge, "bytes per element, found LessInLarge with 32, 8192, 32768 bytes"),
        (Holder, r"updates parameters itself, found Holder.*pass these \(its attribute 'inner'\)"),
        (lambda _: 3, r"adamw, .* as text, or a torch\.optim\.Optimizer, or a list"),
        (lambda _: [], "found \\[\\]"),
        (lambda _: ["adamw"], "found \\['adamw'\\]"),
    ],
)
def test_what_cannot_be_counted_is_refused(make: Any, message: str) -> None:
    model = model_of()
    with pytest.raises(InputError, match=message):
        Settings.of({"optimizer": make(list(model.parameters()))})


def test_state_that_exists_is_counted_whatever_it_is() -> None:
    model = model_of()
    optimizer = optim.Adafactor(model.parameters())
    step(optimizer)
    held = [t for state in optimizer.state.values() for t in state.values()]
    expected = sum(t.nbytes for t in held if torch.is_tensor(t) and t.dim())
    assert 0 < expected < bytes_of(model)
    assert job_optimizer(optimizer).counted.size_bytes == expected


@pytest.mark.parametrize("rank", [0, 3])
def test_all_process_ranks_count_the_largest_shard(rank: int) -> None:
    """Of 10 rows, four process ranks have 3, 3, 3 and 1."""
    with world(4, rank):
        mesh = init_device_mesh("cpu", (4,))
        weight = nn.Parameter(distribute_tensor(torch.ones(10, 8), mesh, [Shard(0)]))
        optimizer = optim.AdamW([weight])
        before = job_optimizer(optimizer).counted
        assert (before.parameter_bytes, before.size_bytes) == (3 * 8 * 4, 2 * 3 * 8 * 4)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert job_optimizer(optimizer).counted == before
        alive = 2 * 4 * weight.to_local().numel()
        assert job_optimizer(optimizer).alive_bytes(torch.device("cpu")) == alive


def test_settings_hold_a_value() -> None:
    """The same on all process ranks: in caches and in the agreement of a job."""
    ways = [Settings.of({"optimizer": optim.AdamW(model_of().parameters())}) for _ in range(2)]
    assert ways[0] == ways[1] == replace(ways[0])
    assert ways[0].solve_request == ways[1].solve_request
    assert fingerprint(ways[0]) == fingerprint(ways[1])
    other = Settings.of({"optimizer": optim.SGD(model_of().parameters())})
    assert fingerprint(ways[0]) != fingerprint(other)
    assert ways[0].solve_request.optimizer == CountedOptimizer(
        name="AdamW", parameter_bytes=bytes_of(model_of()), size_bytes=2 * bytes_of(model_of())
    )


def test_the_account_names_it_and_is_read_again() -> None:
    counted = CountedOptimizer(name="Adam", parameter_bytes=100, size_bytes=200)
    beside = BesideGraph(
        device_bytes=80 * MIB,
        context_bytes=0,
        num_communicators=0,
        communicator_bytes=0,
        parameter_bytes=10**6,
        bf16_parameter_bytes=10**6,
        other_parameter_bytes=0,
        memory_bytes_per_us=2.0,
    )
    account = MemoryAccount(beside=beside, optimizer=counted, reserve=0)
    assert {line.what: line.size_bytes for line in account.lines} == {"optimizer state (Adam)": 200}
    assert account.optimizer_us == step_us(counted, beside.shards, 2.0) == (3 * 100 + 2 * 200) / 2
    assert account_of_json(account_json(account)) == account
    assert account_json(account)["optimizer"]["name"] == "Adam"
    assert account_json(replace(account, optimizer="sgd"))["optimizer"] == "sgd"
    assert state_bytes(counted, Shards(size_bytes=0, bf16_bytes=0)) == 200


def test_memory_in_use_has_the_state_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured before the state exists, and with it: the same other memory. Stands in for a CUDA
    device, which CI has not.
    """
    model = model_of()
    optimizer = optim.AdamW(model.parameters())
    stated = job_optimizer(optimizer)
    graph, _ = loaded_layers(captured_layers((32, 64, 128)), FlatPrices())
    device_bytes = load_cluster("h100").device.memory_bytes
    beside = BesideGraph(
        device_bytes=device_bytes,
        context_bytes=CONTEXT_BYTES,
        num_communicators=0,
        communicator_bytes=0,
        parameter_bytes=0,
        bf16_parameter_bytes=0,
        other_parameter_bytes=0,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (device_bytes, device_bytes))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    state_bytes_alive = 700 * MIB
    large = replace(stated.counted, size_bytes=state_bytes_alive)
    for alive in (0, state_bytes_alive):
        monkeypatch.setattr(memory_in_use, "_LEAST", {})
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda alive=alive: alive + 600 * MIB)
        monkeypatch.setattr(JobOptimizer, "alive_bytes", lambda _, device, alive=alive: alive)
        found = measured(stated)
        assert found == MemoryInUse(total_bytes=device_bytes, allocated_bytes=600 * MIB)
        known = with_memory_in_use(replace(graph, beside=beside), found, large)
        assert known.beside.other_bytes == 768 * MIB, "600 MiB less some KiB of parameters"
    named = with_memory_in_use(replace(graph, beside=beside), measured(), "adamw")
    assert named.beside.other_bytes == 768 * MIB, "the least that was measured"
