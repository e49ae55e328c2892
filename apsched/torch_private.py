"""Every private function of torch that apsched uses: one small function per use, each with the torch file it comes from."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def fake_store() -> Any:
    """Return the store of a fake process group, and register the ``fake`` backend (torch/testing/_internal/distributed/fake_pg.py)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def strided_shard(dim: int, split_factor: int) -> Any:
    """Return the placement of a dim split over an inner mesh axis first (torch/distributed/tensor/placement_types.py, _StridedShard)."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def process_group_names() -> dict[str, tuple[int, ...]]:
    """Return group name -> process ranks, of the groups this process rank is in (torch/distributed/distributed_c10d.py, _world)."""
    from torch.distributed.distributed_c10d import _world, get_process_group_ranks

    return {name: tuple(get_process_group_ranks(group)) for group, name in _world.pg_names.items()}


_OP_LIBRARIES = {
    "_c10d_functional": "torch.distributed._functional_collectives",
    "_c10d_functional_autograd": "torch.distributed._functional_collectives",
    "_dtensor": "torch.distributed.tensor",
    "bucketing": "torch._inductor.fx_passes.bucketing",
    "fsdp": "torch.distributed.fsdp._fully_shard._fsdp_collectives",
    "higher_order": "torch._higher_order_ops",
    "prims": "torch._inductor.inductor_prims",
    "rngprims": "torch._prims.rng_prims",
    "symm_mem": "torch.distributed._symmetric_memory",
}


def import_op_library(namespace: str) -> bool:
    """Import the part of torch that defines the operators of ``namespace``; return whether there is one."""
    module = _OP_LIBRARIES.get(namespace)
    if module is None:
        return False
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def symbolic_size(shape_env: ShapeEnv, name: str, hint: int) -> torch.SymInt:
    """Return a new symbolic integer with the value ``hint`` (torch/fx/experimental/symbolic_shapes.py, ShapeEnv.create_symbol)."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    symbol = shape_env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, positive=None, do_not_specialize_zero_one=True)
    return shape_env.create_symintnode(symbol, hint=hint, source=source)  # type: ignore[return-value]


def size_hint(size: Any) -> int:
    """Return the value of a (symbolic) integer without a guard; ValueError where it depends on data (torch/fx/experimental/sym_node.py)."""
    if isinstance(size, torch.SymInt):
        hint = size.node.hint if size.node.has_hint() else None
        if hint is None:
            raise ValueError(f"the size {size} depends on data")
        return int(hint)
    return int(size)


@contextmanager
def registered_groups(sizes: Mapping[str, int]) -> Iterator[None]:
    """Run the body with a process group of each name, of the first process ranks (torch/csrc/distributed/c10d/GroupRegistry.cpp)."""
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    known = process_group_names()
    added = [name for name in sizes if name not in known]
    try:
        for name in added:
            c10d._register_process_group(name, dist.new_group(list(range(sizes[name]))))  # type: ignore[arg-type]
        yield
    finally:
        for name in added:
            c10d._unregister_process_group(name)  # type: ignore[arg-type]
