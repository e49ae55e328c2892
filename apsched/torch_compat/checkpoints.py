"""Activation checkpointing that a model does itself, as recompute tags on the traced nodes."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count, takewhile
from typing import Any
from unittest.mock import patch

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from apsched.errors import InputError
from apsched.torch_compat.version import check_torch_version

check_torch_version()

_TAGS = ("recompute", "ac_graph_id")
_GENERATORS = (
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
)
"""The function that ``checkpoint`` calls: the first where there is one (from torch 2.15 on), with
``context_fn`` as a keyword, else the second, with ``context_fn`` as its third argument.
"""


def checkpoints_as_tags() -> AbstractContextManager[Any]:
    """Have non-reentrant ``torch.utils.checkpoint`` tag the nodes of its region for the
    partitioner, as Dynamo does, in place of running the region again in backward.

    Traced as it is, a region stands in the joint graph twice: the partitioner merges equal nodes,
    and then saves all activations. Here each node of a region gets ``meta["recompute"]`` (that of
    its selective policy, if there is one) and ``meta["ac_graph_id"]``, the number of the region; a
    region within a region belongs to the outer one. Checkpoints that Dynamo has wrapped stay as
    they are (torch/utils/checkpoint.py, :data:`_GENERATORS`;
    torch/_higher_order_ops/wrap.py, TagActivationCheckpoint).

    Raises
    ------
    InputError
        while a region is traced, where its ``context_fn`` returns no dispatch modes, as torch does
        under torch.compile.
    """
    checkpoints: Any = importlib.import_module("torch.utils.checkpoint")
    name = next(name for name in _GENERATORS if hasattr(checkpoints, name))
    original = getattr(checkpoints, name)
    numbers = count()
    inside = False

    def generator(fn: Any, *given: Any, **options: Any) -> Any:
        nonlocal inside
        context_fn = options["context_fn"] if name == _GENERATORS[0] else given[1]
        proxies = get_proxy_mode()
        if proxies is None or _is_wrapped_by_dynamo(fn) or not torch.is_grad_enabled():
            yield from original(fn, *given, **options)
            return
        if inside:
            yield
            return
        nodes = proxies.tracer.graph.nodes
        last = next(iter(reversed(nodes)), None)
        inside = True
        try:
            with _tagged_by_policy(context_fn):
                yield
        finally:
            inside = False
        number = next(numbers)
        for node in takewhile(lambda node: node is not last, reversed(nodes)):
            if node.op == "call_function":
                node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
                node.meta["ac_graph_id"] = number

    return patch.object(checkpoints, name, generator)


def _is_wrapped_by_dynamo(function: Any) -> bool:
    return isinstance(getattr(function, "__self__", None), torch.fx.Interpreter)


@contextmanager
def _tagged_by_policy(context_fn: Callable[[], tuple[Any, Any]]) -> Iterator[None]:
    """Run a region under the forward context of ``context_fn``, in which a selective policy tags
    the nodes; nodes that are traced behind the region get no tags of it.
    """
    contexts = context_fn()
    if context_fn is not torch.utils.checkpoint.noop_context_fn and not all(
        isinstance(context, TorchDispatchMode) for context in contexts
    ):
        found = ", ".join(type(context).__name__ for context in contexts)
        raise InputError(
            "torch.utils.checkpoint: expected a context_fn that returns two dispatch modes (those"
            f" of create_selective_checkpoint_contexts), found {found}: their changes cannot be"
            " captured; leave context_fn out"
        )
    meta = torch.fx.traceback.current_meta
    before = {key: meta[key] for key in _TAGS if key in meta}
    try:
        with contexts[0]:
            yield
    finally:
        for key in _TAGS:
            meta.pop(key, None)
        meta.update(before)
