"""Runs a graph before and after scheduling on the same values, and compares the bits."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from apsched.torch_compat.sizes import depends_on_data, size_hint
from benchmarks.intake.case import EQUAL

_SEED = 20


def values_for(module: GraphModule, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value for each placeholder: a known one of its name and shape, or one that depends
    on nothing but its place and type. One whose size is not known has none, and the graph does not
    run.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(_SEED + rank)
    values = {}
    for node in module.graph.find_nodes(op="placeholder"):
        value = known.get(node.name)
        if _fits(value, node.meta.get("val")):
            values[node.name] = value
        else:
            with suppress(Exception):
                values[node.name] = _value(node.meta.get("val"), generator)
    return values


def _fits(value: Any, meta: Any) -> bool:
    """Return whether a value has the dtype and the shape of a placeholder; sizes that depend on
    data are any.
    """
    if not isinstance(value, torch.Tensor) or not isinstance(meta, torch.Tensor):
        return value is not None and not isinstance(value, torch.Tensor)
    sizes = zip(value.shape, meta.shape, strict=False)
    return (value.dtype, value.dim()) == (meta.dtype, meta.dim()) and all(
        depends_on_data(expected) or size == size_hint(expected) for size, expected in sizes
    )


def outputs_by_name(module: GraphModule, outputs: Any) -> dict[str, Any]:
    """Return the outputs of a graph by the names of its nodes, as a backward graph takes them."""
    nodes = tree_leaves(module.graph.output_node().args[0])
    found = zip(nodes, tree_leaves(outputs), strict=False)
    return {node.name: value for node, value in found if isinstance(node, torch.fx.Node)}


def run(module: GraphModule, values: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the outputs of the graph, and its inputs as it leaves them. Memory that the graph does
    not write before it reads it is filled.
    """
    torch.manual_seed(_SEED)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    places = [node.name for node in module.graph.find_nodes(op="placeholder")]
    inputs = [_copy(values[name]) for name in places]
    with torch.no_grad():
        outputs = torch.fx.Interpreter(module).run(*inputs)
    return tree_leaves(outputs), inputs


def compared(before: GraphModule, after: GraphModule, values: Mapping[str, Any]) -> str:
    """Return whether both graphs give the same bits, in a word or a sentence."""
    try:
        then = run(before, values)
    except Exception as error:
        return f"not run: {type(error).__name__}: {_first_line(error)}"
    try:
        now = run(after, values)
    except Exception as error:
        return f"rewritten graph fails: {type(error).__name__}: {_first_line(error)}"
    for what, old, new in (
        ("outputs", then[0], now[0]),
        ("inputs", then[1], now[1]),
    ):
        if len(old) != len(new):
            return f"{len(old)} {what} before, {len(new)} after"
        wrong = [k for k, pair in enumerate(zip(old, new, strict=True)) if not _same(*pair)]
        if wrong:
            return f"{len(wrong)} of {len(old)} {what} differ, the first is {wrong[0]}"
    return EQUAL


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return bool(one == other) or one is None
    if not isinstance(other, torch.Tensor):
        return False
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    a, b = one.detach().contiguous(), other.detach().contiguous()
    return bool(torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)))


def _value(meta: Any, generator: torch.Generator) -> Any:
    if isinstance(meta, torch.SymInt | int) and not isinstance(meta, bool):
        return size_hint(meta)
    if not isinstance(meta, torch.Tensor):
        return meta
    shape = [size_hint(size) for size in meta.shape]
    if meta.dtype == torch.uint8 and len(shape) == 1 and shape[0] == torch.get_rng_state().numel():
        return torch.get_rng_state()
    if meta.dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if not (meta.is_floating_point() or meta.is_complex()):
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.int64).to(meta.dtype)
    value = torch.randn(shape, generator=generator) / 8
    strides = [size_hint(stride) for stride in meta.stride()]
    return _laid_out(value.to(meta.dtype), strides)


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _laid_out(value.detach(), value.stride())


def _laid_out(value: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a copy with these strides; along a dimension of stride 0 the first element is that of
    all.
    """
    shape = value.shape
    for dim, stride in enumerate(strides):
        if stride == 0:
            value = value.narrow(dim, 0, min(value.shape[dim], 1))
    return torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value).expand(shape)


def _first_line(error: BaseException) -> str:
    """Return the first sentence of an error's message."""
    return (str(error).strip().splitlines() or [""])[0].split(". ")[0][:200]
