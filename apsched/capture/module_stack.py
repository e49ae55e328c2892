"""Record which module each traced node comes from, as Dynamo would: AOTAutograd alone does not."""

from collections.abc import Iterator
from contextlib import contextmanager

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
                working_on(f"backward of {type(module).__name__}")

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
