"""Record which module each traced node comes from, and name the parameters of shared modules once,
as Dynamo would: AOTAutograd alone does not.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx.traceback import preserve_node_meta

from apsched.progress import working_on
from apsched.torch_compat.graphs import set_traced_module_stack


@contextmanager
def recorded_modules(root: nn.Module) -> Iterator[None]:
    """While the body traces ``root``, every node gets ``meta["nn_module_stack"]``: outermost module
    first, each with name and class.
    """
    stack: list[tuple[str, tuple[str, type]]] = []
    hooks: list[torch.utils.hooks.RemovableHandle] = []

    def publish() -> None:
        set_traced_module_stack(dict(stack) if stack else None)

    def watch(name: str, module: nn.Module) -> None:
        entry = (name, (name, type(module)))

        def enter(*_: object) -> None:
            working_on(f"forward of {name or type(module).__name__}")
            stack.append(entry)
            publish()

        def leave(*_: object) -> None:
            stack.pop()
            publish()
            if not stack:
                working_on(f"backward of {type(module).__name__}", is_long=True)

        hooks.append(module.register_forward_pre_hook(enter, prepend=True))
        hooks.append(module.register_forward_hook(leave, always_call=True))

    with preserve_node_meta():
        try:
            for name, module in root.named_modules():
                watch(name, module)
            yield
        finally:
            for hook in hooks:
                hook.remove()


@contextmanager
def shared_modules_named_once(root: nn.Module) -> Iterator[None]:
    """While the body runs, the parameters and buffers of a module that ``root`` has under several
    names are listed under the first one alone, as an optimizer knows them. AOTAutograd takes each
    name for an input of its own (torch/_functorch/aot_autograd.py, ``remove_duplicate=False``).
    """
    prefixes = {name and f"{name}." for name, _ in root.named_modules()}
    given = {"named_parameters": root.named_parameters, "named_buffers": root.named_buffers}

    def once(of: Callable[..., Iterator[tuple[str, Any]]], *arguments: Any, **options: Any) -> Any:
        named = of(*arguments, **options)
        return ((name, one) for name, one in named if name[: name.rfind(".") + 1] in prefixes)

    try:
        for name, of in given.items():
            object.__setattr__(root, name, partial(once, of))
        yield
    finally:
        for name in given:
            object.__delattr__(root, name)
