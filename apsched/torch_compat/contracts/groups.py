"""Contracts of process groups, and of torch's own schedulers, which need some."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from apsched.torch_compat import fsdp as fsdp
from apsched.torch_compat import graphs as private
from apsched.torch_compat.contracts.registry import contract, expect, group
from apsched.torch_compat.gloo import avoid_coalesced_gathers

c10d = torch.ops._c10d_functional


@contract("fake_store")
def _fake_store() -> None:
    with group(8, fake=True) as name:
        waited = c10d.wait_tensor(c10d.all_gather_into_tensor(torch.ones(2), 8, name))
        expect(
            waited.shape == (16,), "collectives of a fake group of 8 have the shapes of a real one"
        )


@contract("process_group_names")
def _process_group_names() -> None:
    with group(4, fake=True) as name:
        pair = dist.new_group([0, 1])
        expect(
            private.process_group_names() == {name: (0, 1, 2, 3), pair.group_name: (0, 1)},
            "all groups, with their process ranks",
        )


@contract("job_store", "default_group")
def _job_store() -> None:
    with group():
        store, default = private.job_store(), private.default_group()
        store.set("key", b"value")
        expect(
            store.check(["key"]) and not store.check(["none"]) and store.get("key") == b"value",
            "the store keeps the values that are set",
        )
        expect([store.add("count", n) for n in (0, 2, 0)] == [0, 2, 2], "it counts")
        expect(private.job_store().check(["key"]), "it is the store of the job")
        expect(
            default is private.default_group() and default is dist.group.WORLD,
            "the default group is one object",
        )


@contract("avoid_coalesced_gathers")
def _avoid_coalesced_gathers() -> None:
    stays = avoid_coalesced_gathers.cache_info().currsize
    library = avoid_coalesced_gathers()
    try:
        with group() as name:
            shard = torch.arange(6.0).view(3, 2)
            one = c10d.wait_tensor(c10d.all_gather_into_tensor(shard.T, 1, name))
            expect(one.equal(shard.T), "a gather of a strided shard has its values")
            turned = torch.complex(shard, -shard).conj()
            one = c10d.wait_tensor(c10d.all_gather_into_tensor(turned, 1, name))
            expect(one.equal(turned), "a gather of complex numbers has their values")
            many = c10d.all_gather_into_tensor_coalesced([shard, shard + 1], 1, name)
            expect(
                [c10d.wait_tensor(each).sum().item() for each in many] == [15, 21],
                "a coalesced gather has the values of each shard",
            )
    finally:
        if not stays:
            library._destroy()
            avoid_coalesced_gathers.cache_clear()


@contract("ordered_group")
def _ordered_group() -> None:
    with group(4, fake=True) as name:
        expect(private.ordered_group([0, 1, 2, 3]) == name, "a group that exists is found")
        made = private.ordered_group([0, 2])
        expect(private.process_group_names()[made] == (0, 2), "one that does not is made")


@contract(
    "registered_groups",
    "group_of_name",
    "process_rank_in_group",
    "ranks_of_group",
)
def _registered_groups() -> None:
    with group(4, fake=True) as name:
        with private.registered_groups({"mine": 2}):
            expect(private.group_of_name("mine").size() == 2, "a group can be given a name")
            expect(private.process_rank_in_group("mine") == 0, "and knows this process rank's rank")
        expect(private.process_rank_in_group(name) == 0, "so does the default group")
        expect(private.ranks_of_group(name) == (0, 1, 2, 3), "its process ranks are known")
        expect(private.ranks_of_group("mine") == (), "those of no group are none")
        try:
            private.process_rank_in_group("mine")
        except LookupError:
            return
        raise AssertionError("the name is gone afterwards")


def gathers() -> GraphModule:
    """Return a graph with two gathers, each before the product that needs it; a group of 2 must
    run.
    """
    name = dist.group.WORLD.group_name if dist.group.WORLD is not None else ""

    def run(x: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        for shard in shards:
            x = torch.tanh(x @ c10d.wait_tensor(c10d.all_gather_into_tensor(shard, 2, name)))
        return x

    return make_fx(run, tracing_mode="fake")(
        torch.ones(8, 8), *(torch.ones(4, 8) for _ in range(2))
    )


def _launches(module: GraphModule) -> int:
    return sum("wait_tensor" in str(node.target) for node in module.graph.nodes)


@contract("import_schedulers", "schedule_overlap")
def _schedule_overlap() -> None:
    expect(
        callable(private.import_schedulers().schedule_overlap_bucketing),
        "the greedy scheduler is there",
    )
    with group(2, fake=True):
        module = gathers()
        priced: list[torch.fx.Node] = []

        def estimate_ms(node: torch.fx.Node, size_bytes: int | None) -> float:
            priced.append(node)
            return 0.01

        private.schedule_overlap(module, estimate_ms)
        module.graph.lint()
        expect(
            priced and 1 <= _launches(module) <= 2, "it asks for times, and leaves a sound graph"
        )


@contract("schedule_overlap_by_module")
def _schedule_overlap_by_module() -> None:
    with group(2, fake=True):
        module = gathers()
        private.schedule_overlap_by_module(module, [["layer"]], lambda node: "layer")
        module.graph.lint()
        expect(_launches(module) == 1, "the gathers of one module share a launch")


@contract("fsdp_unit_of")
def _fsdp_unit_of() -> None:
    with group():
        a, b, c = (nn.Linear(2, 2) for _ in range(3))
        fully_shard([a, b], mesh=init_device_mesh("cpu", (1,)))
        fully_shard(c, mesh=init_device_mesh("cpu", (1,)))
        expect(isinstance(a, FSDPModule), "fully_shard makes an FSDPModule")
        units = [fsdp.fsdp_unit_of(module) for module in (a, b, c)]
        expect(units[0] == units[1] != units[2], "modules that were sharded together are one unit")
