"""Small graphs of the very operators that a function calls, costs in round numbers, and real
inputs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from apsched.capture.captured import CapturedGraph


class UnitCosts:
    """A cost model in which everything takes a round number of microseconds."""

    def compute_us(self, node):
        return 1.0

    def collective_us(self, kind, group_name, group_size, size_bytes):
        return 10.0 + size_bytes / 1024


def capture_of(
    module: torch.fx.GraphModule,
    kept: Sequence[str] = (),
    *,
    name: str = "graph",
    parameters: Mapping[str, str] | None = None,
):
    """Return ``module`` as capture hands it over."""
    return CapturedGraph(
        name=name,
        module=module,
        kept_inputs=frozenset(kept),
        parameter_names=dict(parameters or {}),
    )


def traced(function, inputs: Sequence[object]) -> torch.fx.GraphModule:
    """Return the graph of the very operators that ``function`` calls (nothing decomposed), with
    fake values.
    """
    module = torch.fx.symbolic_trace(function)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    FakeTensorProp(module, mode).propagate(*inputs)
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.meta.setdefault("val", None)  # FakeTensorProp notes tensors and numbers alone
    return module


def call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``target`` as one node of the graph that ``symbolic_trace`` makes; at once where nothing
    is traced.
    """
    proxies = [
        a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.fx.Proxy)
    ]
    return (
        proxies[0].tracer.create_proxy("call_function", target, args, kwargs)
        if proxies
        else target(*args, **kwargs)
    )


def real_inputs(module: torch.fx.GraphModule) -> list[object]:
    """Return real tensors like the fake ones of the placeholders: zeros for integers, and who
    shares a storage still does.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    inputs: list[object] = []
    for node in module.graph.find_nodes(op="placeholder"):
        fake = node.meta["val"]
        if not isinstance(fake, torch.Tensor):
            inputs.append(int(fake))
            continue
        key = fake.untyped_storage()._cdata
        if key not in storages:
            storages[key] = torch.zeros(
                fake.untyped_storage().nbytes(), dtype=torch.uint8
            ).untyped_storage()
        inputs.append(
            torch.empty(0, dtype=fake.dtype).set_(
                storages[key], fake.storage_offset(), fake.shape, fake.stride()
            )
        )
    return inputs
