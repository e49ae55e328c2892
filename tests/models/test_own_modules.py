"""A module of the user's is sharded over ``--mesh`` under its own names, or says why it is not."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from apsched.capture.captured import Capture
from apsched.capture.fake_world import world
from apsched.capture.function import capture_function
from apsched.costs.clusters.cluster import load_cluster
from apsched.errors import InputError
from apsched.fx.collectives import collective_kind, group_name, is_collective
from apsched.graph.export.export import export_graph
from apsched.kinds import CollectiveKind
from apsched.models.mesh import ALONE, MeshSpec
from apsched.models.options import ModelOptions
from apsched.models.own_modules import Read, gather_once, gather_when_read
from apsched.models.sharding import ParameterSharding
from apsched.pipeline.device_memory import beside_graphs
from apsched.problem.build import build_problem
from tests.helpers.graphs.instrumented import UnitCosts

JOB = """
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 12), nn.Linear(12, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x):
        return x + self.outer(self.inner(x).relu()) * self.scale * self.frozen


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.memory = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.memory(x)[0]).square().mean()


def build():
    return Model(), (torch.zeros(2, 4, dtype=torch.int64),)


def normed():
    return torch.nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), (torch.randn(3, 8),)


class Distributed(nn.Module):
    def __init__(self):
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        whole = torch.randn(8, 8)
        self.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))

    def forward(self, x):
        return (x @ self.weight.redistribute(placements=[Replicate()]).to_local()).sum()


def dtensors():
    return Distributed(), (torch.randn(3, 8),)


class Summing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(functional.all_reduce(x, "sum", dist.group.WORLD)).sum()


def by_hand():
    return Summing(), (torch.randn(3, 8),)


def units():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model[0], mesh=mesh, mp_policy=half, reshard_after_forward=False)
    fully_shard(model[2], mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    return model, (torch.randn(3, 8),)


def units_in_nodes():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh, reshard_after_forward=True)
    fully_shard(model[2], mesh=mesh, reshard_after_forward=2)
    fully_shard(model, mesh=mesh)
    return model, (torch.randn(3, 8),)


def two_numbers():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh, reshard_after_forward=2)
    fully_shard(model[1], mesh=mesh, reshard_after_forward=4)
    fully_shard(model, mesh=mesh)
    return model, (torch.randn(3, 8),)


def read_twice():
    model = nn.MultiheadAttention(8, 2, batch_first=True, bias=False)
    return Attention(model), (torch.randn(2, 3, 8),)


class Attention(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b, self.c = self.a, nn.Linear(8, 8, bias=False)
        self.norm = self.again = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.c(self.again(self.b(self.norm(self.a(x)))))


def shared():
    return Shared(), (torch.randn(4, 8),)


def nothing():
    return nn.ReLU(), (torch.randn(3, 8, requires_grad=True),)


def complex_numbers():
    return nn.Linear(8, 8, dtype=torch.complex64), (torch.randn(3, 8, dtype=torch.complex64),)
"""

SOURCE = "apsched_own_job:"
KINDS = CollectiveKind


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "apsched_own_job.py").write_text(JOB)
    yield
    sys.modules.pop("apsched_own_job", None)


def captured(function: str, mesh: str) -> Capture:
    return capture_function(SOURCE + function, mesh=MeshSpec.parse(mesh))


def served(capture: Capture, name: str, kind: CollectiveKind) -> list[str]:
    """Return the parameters that the collectives of one kind serve."""
    graph = next(graph for graph in capture.graphs if graph.name == name)
    nodes = [node for node in graph.module.graph.nodes if is_collective(node)]
    return [
        node.meta["custom"]["apsched_parameter"]
        for node in nodes
        if collective_kind(node) == kind and "apsched_parameter" in node.meta.get("custom", {})
    ]


def test_a_part_of_a_parameter_shares_no_storage_with_it() -> None:
    """With torch 2.14 a captured graph has the storage of the whole, too."""
    with world(4):
        sharding = ParameterSharding(
            mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",)),
            inner=ALONE,
            inner_dim=0,
            fsdp_dim=0,
            inner_shape=(8, 8),
            options=ModelOptions(),
        )
        part = sharding.own_part(torch.empty(8, 8))
    assert part.shape == (2, 8)
    assert part.untyped_storage().nbytes() == part.numel() * part.itemsize


@pytest.mark.parametrize("mesh", ["fsdp=2", "fsdp=4", "replicate=2,fsdp=2"])
def test_a_shard_has_a_storage_of_its_own_size(mesh: str) -> None:
    """Not that of the whole parameter, of which memory and optimizer would count all."""
    for graph in captured("build", mesh).graphs:
        values = [node.meta["val"] for node in graph.module.graph.find_nodes(op="placeholder")]
        for value in values:
            if isinstance(value, torch.Tensor):
                assert value.untyped_storage().nbytes() == value.numel() * value.itemsize


@pytest.mark.parametrize(
    ("mesh", "frozen_bytes"),
    [("fsdp=2", 2 * 4 * 4), ("fsdp=4", 2 * 2 * 4), ("replicate=2", 2 * 8 * 4)],
)
def test_a_frozen_parameter_has_no_optimizer_state(mesh: str, frozen_bytes: int) -> None:
    """Also beside tied ones, of which one is named."""
    capture = captured("build", mesh)
    dags = [
        export_graph(graph, UnitCosts(), group_ranks=capture.group_ranks)
        for graph in capture.graphs
    ]
    for beside in beside_graphs(dags, load_cluster("h100")):
        assert beside.frozen_bytes == frozen_bytes
        assert beside.parameter_bytes > frozen_bytes


SPLIT = {
    *(
        f"layers.{k}.{part}.{what}"
        for k in (0, 1)
        for part in ("inner", "outer")
        for what in ("weight", "bias")
    ),
    *(f"memory.{what}_{side}_l0" for what in ("weight", "bias") for side in ("ih", "hh")),
    "table.weight",
}


def test_every_parameter_is_gathered_and_reduced_under_its_own_name():
    capture = captured("build", "fsdp=4")
    assert capture.warnings == ()
    gathered = served(capture, "forward", KINDS.ALL_GATHER)
    frozen = {"layers.0.frozen", "layers.1.frozen"}
    assert {*gathered} == SPLIT | frozen
    assert {*served(capture, "backward", KINDS.REDUCE_SCATTER)} == SPLIT, "none of a frozen one"
    scales = {"layers.0.scale", "layers.1.scale"}
    assert {*served(capture, "backward", KINDS.ALL_REDUCE)} == scales, "a number is not split"
    assert [len(ranks) for ranks in capture.group_ranks.values()] == [4]


def test_a_module_with_two_names_counts_under_the_first_as_an_optimizer_has_it() -> None:
    capture = captured("shared", "fsdp=4")
    names = {"a.weight", "c.weight", "norm.weight", "norm.bias"}
    for graph in capture.graphs:
        assert set(graph.parameter_names.values()) <= names
        assert "running_mean" not in str(graph.parameter_names)
    assert {*served(capture, "forward", KINDS.ALL_GATHER)} == names
    dags = [export_graph(g, UnitCosts(), group_ranks=capture.group_ranks) for g in capture.graphs]
    beside, _ = beside_graphs(dags, load_cluster("h100"))
    assert beside.parameter_bytes == 4 * (2 * 8 * 8 + 2 * 8) // 4
    assert beside.frozen_bytes == 0


def test_a_parameter_that_is_read_twice_is_gathered_once_and_may_share_a_bucket() -> None:
    """torch 2.14 leaves a wait for each read."""
    capture = captured("read_twice", "fsdp=4")
    gathered = served(capture, "forward", KINDS.ALL_GATHER)
    assert sorted(gathered) == ["attention.in_proj_weight", "attention.out_proj.weight"]
    for graph in capture.graphs:
        dag = export_graph(graph, UnitCosts(), group_ranks=capture.group_ranks)
        assert all(one.bucketable for one in build_problem(dag).collectives)


def test_copies_of_the_module_reduce_alone():
    capture = captured("build", "replicate=4")
    assert served(capture, "forward", KINDS.ALL_GATHER) == []
    reduced = {*served(capture, "backward", KINDS.ALL_REDUCE)}
    assert reduced == SPLIT | {"layers.0.scale", "layers.1.scale"}


def test_a_parametrization_does_not_show_in_names():
    capture = captured("normed", "fsdp=2")
    assert "weight" in served(capture, "forward", KINDS.ALL_GATHER)


@pytest.mark.parametrize(
    ("function", "found"), [("dtensors", "DTensor parameters"), ("by_hand", "collectives")]
)
def test_a_module_that_is_distributed_already_stays_so_and_mesh_says_it(function, found):
    capture = captured(function, "fsdp=4,tp=2")
    (warning,) = capture.warnings
    assert f"{SOURCE}{function}: the module has {found} of its own" in warning
    assert "--mesh fsdp=4,tp=2 only the number of process ranks (8) counts" in warning
    assert [len(ranks) for ranks in capture.group_ranks.values()] == [8]


def test_units_of_fully_shard_gather_and_reduce_as_they_say():
    capture = captured("units", "fsdp=4")
    assert "units of fully_shard of its own" in capture.warnings[0]
    names = {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert {*served(capture, "forward", KINDS.ALL_GATHER)} == names
    again = {*served(capture, "backward", KINDS.ALL_GATHER)}
    assert again == {"2.weight"}, "the first unit is kept; no gradient needs a bias"
    assert {*served(capture, "backward", KINDS.REDUCE_SCATTER)} == names
    types = {
        node.meta["custom"]["apsched_parameter"]: node.meta["val"].dtype
        for node in capture.graphs[0].module.graph.nodes
        if is_collective(node)
    }
    assert (types["0.weight"], types["2.weight"]) == (torch.bfloat16, torch.float32)


def test_units_that_are_resharded_to_fewer_process_ranks_are_gathered_there() -> None:
    capture = captured("units_in_nodes", "fsdp=4")
    graph = capture.graphs[1].module.graph
    gathers = {
        node.meta["custom"]["apsched_parameter"]: len(capture.group_ranks[group_name(node)])
        for node in graph.nodes
        if collective_kind(node) == KINDS.ALL_GATHER
    }
    assert gathers == {"2.weight": 2}, "no gradient needs the first weight, the root is kept"
    with pytest.raises(InputError, match="reshard_after_forward with one number of process ranks"):
        captured("two_numbers", "fsdp=8")


def test_no_collective_on_several_process_ranks_is_a_warning(run):
    (warning,) = captured("nothing", "fsdp=4").warnings
    assert "no collective on 4 process ranks" in warning
    assert captured("nothing", "fsdp=1").warnings == ()
    ran = run("capture", f"{SOURCE}nothing", "--mesh", "fsdp=4", "-o", "step.graph")
    assert ran.code == 0
    assert f"warning: {warning}" in ran.stderr


def test_complex_parameters_are_named_as_the_reason_for_no_collective() -> None:
    (warning,) = captured("complex_numbers", "fsdp=4").warnings
    assert "nothing to schedule; parameters of complex numbers are not sharded" in warning


def test_axes_that_say_nothing_about_any_module_are_refused():
    with pytest.raises(InputError, match=r"found tp=2 in --mesh fsdp=2,tp=2; have the function"):
        captured("build", "fsdp=2,tp=2")


def test_a_tied_parameter_is_read_once_in_a_pass_and_apart_without_gradients() -> None:
    """Reentrant checkpointing reads without gradients in a pass that has some."""
    seen: list[bool] = []

    def read(shard: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        return shard * 1

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.other.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x = self.other(self.one(x))
            return self.other(self.one(x))

    model = Tied()
    entered = Read(owner=model.one, name="weight", read=read, places=[model.one, model.other])
    for module in entered.places:
        gather_when_read(module, {"weight": entered})
    gather_once(model, [entered])
    for passes in (1, 2):
        assert model(torch.ones(1, 2)).requires_grad
        assert seen == [False, True] * passes
