"""Contracts of eager data parallelism: ``fully_shard`` and DistributedDataParallel."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from apsched.torch_compat import ddp as ddp
from apsched.torch_compat import fsdp as fsdp
from apsched.torch_compat.contracts.registry import contract, expect, group


@contract("runs_in_fsdp")
def _runs_in_fsdp() -> None:
    seen = []

    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(fsdp.runs_in_fsdp())
            return super().forward(x)

    with group(2, fake=True):
        model: Any = fully_shard(Looks(4, 4))
        seen.append(fsdp.runs_in_fsdp())
        model(torch.ones(1, 4)).sum().backward()
        seen.append(fsdp.runs_in_fsdp())
    expect(seen == [False, True, False], "a step is running from its forward to its backward's end")


@contract("class_before_fsdp", "fsdp_policies", "GatheredParameter", "CastModule")
def _fsdp_policies() -> None:
    with group(2, fake=True):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model[0], mp_policy=policy, reshard_after_forward=False)
        fully_shard(model[1])
        fully_shard(model)
        expect(fsdp.class_before_fsdp(model[0]) is nn.Linear, "a module's class is known")
        expect(fsdp.class_before_fsdp(nn.Linear(1, 1)) is nn.Linear, "also where it is its own")
        parameters, casts = fsdp.fsdp_policies(model)
        first, second = parameters[id(model[0]), "weight"], parameters[id(model[1]), "weight"]
        expect((first.shape, first.dim) == (torch.Size([3, 4]), 0), "whole shape and dimension")
        expect(
            (first.param_dtype, first.reduce_dtype) == (torch.bfloat16, torch.float32)
            and (second.param_dtype, second.reduce_dtype) == (torch.float32, torch.float32),
            "dtypes are those of the policy",
        )
        expect(
            (first.kept, second.kept) == (True, False), "the parameters that stay until backward"
        )
        expect(first.node_group is None, "no parameter is resharded to fewer process ranks")
        expect(first.shard_group.size() == 2 and first.replicate_group is None, "the groups")
        expect(casts[id(model[0])].inputs == torch.bfloat16, "inputs are cast")
        expect(not first.as_bytes, "parameters of one dtype are gathered in it")
        adapted = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4))
        found = fsdp.fsdp_policies(fully_shard(adapted))[0].values()
        expect(all(one.as_bytes for one in found), "those of two dtypes as bytes")
        hooks = [*model[0]._forward_pre_hooks.values(), *model[0]._forward_hooks.values()]
        expect(
            len(hooks) == 2 and all(h.__module__.startswith(fsdp.HOOKS_OF_FSDP) for h in hooks),
            "its hooks are identified by their module",
        )


@contract("as_dtensor", "local_part")
def _as_dtensor() -> None:
    with group(4, fake=True):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Linear(4, 6)
        model.weight = nn.Parameter(
            distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)])
        )
        fully_shard(model, mesh=mesh["dp"])
        parameters = fsdp.fsdp_policies(model)[0]
        of, plain = parameters[id(model), "weight"], parameters[id(model), "bias"]
        expect(of.shape == torch.Size([3, 4]), "the shape is that on one tensor-parallel rank")
        expect(plain.placed is None, "a plain tensor has no placements")
        whole: Any = fsdp.as_dtensor(torch.ones(3, 4, requires_grad=True), of.placed)
        expect(whole.shape == torch.Size([6, 4]), "a part stands for the whole")
        expect(whole.placements == (Shard(0),), "placed as before it was sharded")
        expect(fsdp.local_part(whole).shape == torch.Size([3, 4]), "the part of this rank")


@contract("resharded_to")
def _resharded_to() -> None:
    with group(4, fake=True):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        for module, after in zip(model, (2, False, True, 4), strict=True):
            fully_shard(module, reshard_after_forward=after)
        found = [fsdp.resharded_to(module) for module in model]
        expect(found == [2, False, True, True], "the number of process ranks, kept, or all")
        of = fsdp.fsdp_policies(model)[0][id(model[0]), "weight"]
        expect(of.node_group.size() == 2 and not of.kept, "the group that shares a parameter")


@contract("offloaded_parameter")
def _offloaded_parameter() -> None:
    with group(2, fake=True):
        model: Any = nn.Sequential(nn.Linear(4, 4))
        fully_shard(model[0], offload_policy=CPUOffloadPolicy(pin_memory=False))
        fully_shard(model)
        expect(fsdp.offloaded_parameter(model) is None, "the host computes")
        model[0]._get_fsdp_state()._device = torch.device("meta")
        expect(fsdp.offloaded_parameter(model) == "0.weight", "another device computes")


@contract("group_names_of_units")
def _group_names_of_units() -> None:
    with group(4, fake=True):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        both, one = nn.Linear(4, 4), nn.Linear(4, 4)
        fully_shard(both, mesh=mesh)
        fully_shard(one, mesh=mesh["shard"])
        names = {axis: mesh[axis].get_group().group_name for axis in ("replicate", "shard")}
        expect(set(fsdp.group_names_of_units(both)) == {*names.values()}, "those of HSDP")
        expect(fsdp.group_names_of_units(one) == (names["shard"],), "the group of the shards")
        placed = nn.Linear(4, 4, bias=False)
        weight = distribute_tensor(placed.weight.detach(), mesh["replicate"], [Shard(0)])
        placed.weight = nn.Parameter(weight)
        fully_shard(placed, mesh=mesh["shard"])
        found = fsdp.group_names_of_units(placed)
        expect(found == (names["shard"], names["replicate"]), "that of tensor parallelism, too")


@contract("runs_in_ddp")
def _runs_in_ddp() -> None:
    seen = []

    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(ddp.runs_in_ddp())
            return super().forward(x)

    with group(2, fake=True):
        seen.append(ddp.runs_in_ddp())
        DistributedDataParallel(Looks(4, 4))(torch.ones(1, 4))
        seen.append(ddp.runs_in_ddp())
    expect(seen == [False, True, False], "it is running while its forward is")


@contract("reduces_in_graphs")
def _reduces_in_graphs() -> None:
    modes: dict[str, Any] = {"python_reducer": True, "ddp_optimizer": False}
    seen = {}
    inductor: Any = torch._inductor.config  # DDP turns its own buckets on there
    for mode in modes:
        with (
            inductor.patch(_fuse_ddp_communication=False, _fuse_ddp_bucket_size=25),
            torch._dynamo.config.patch(optimize_ddp=mode),
            group(2, fake=True),
        ):
            model: Any = DistributedDataParallel(nn.Linear(2, 2))
            seen[mode] = model._use_python_reducer
            expect(ddp.reduces_in_graphs() == modes[mode], "as the setting says")
    expect(seen == modes, "DDP has a reducer in Python where the setting says so")


@contract("ignored_names")
def _ignored_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    expect(ddp.ignored_names(model) == frozenset(), "none where none is named")
    private: Any = DistributedDataParallel
    private._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    expect(ddp.ignored_names(model) == {"0.weight"}, "they are those that the module was given")


@contract("takes_limits_of_buckets")
def _limits_of_buckets() -> None:
    limits: Any = {"bucket_cap_mb_list": [1.0]}
    with group(2, fake=True):
        try:
            accepted = isinstance(DistributedDataParallel(nn.Linear(2, 2), **limits), nn.Module)
        except TypeError:
            accepted = False
    expect(ddp.takes_limits_of_buckets() == accepted, "DDP takes a list where it says so")


@contract("first_bucket_bytes", "reducer_buckets")
def _reducer_buckets() -> None:
    sizes = [torch.empty(n, device="meta") for n in (1, 2, 3, 4, 5)]
    expect(ddp.first_bucket_bytes() == 1 << 20, "the first bucket has 1 MiB")
    expect(
        ddp.reducer_buckets(sizes, [4, 20]) == [[0], [1, 2], [3, 4]],
        "a bucket is closed by the gradient with which it reaches its limit; the last limit holds"
        " on",
    )
