"""A copy of a user's module that takes no memory: fake tensors in place of parameters, buffers and
other tensors, so that a job can be captured in the job itself.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

Make = Callable[[nn.Module, str, nn.Parameter], torch.Tensor]
"""Module, name and parameter -> the fake tensor that stands for it."""

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_OF_HOOKS = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


def fake_copy(
    module: nn.Module,
    mode: FakeTensorMode,
    *,
    make: Make | None = None,
    class_of: Callable[[nn.Module], type[nn.Module]] = type,
    without_hooks_of: str = "",
    copies: dict[nn.Module, nn.Module] | None = None,
) -> nn.Module:
    """Return ``module`` and all modules in it with fake tensors of ``mode``; names and sharing
    stay.

    ``make`` makes parameters in another way, ``class_of`` gives the class that a module had
    before a later change, ``without_hooks_of`` names the package whose hooks are left out, and
    ``copies`` fills with the copy of each module.
    """
    copies = {} if copies is None else copies
    parameters: dict[int, nn.Parameter] = {}

    def fake(value: Any) -> Any:
        return mode.from_tensor(value, static_shapes=True) if _is_real(value) else value

    def parameter(owner: nn.Module, name: str, value: nn.Parameter | None) -> nn.Parameter | None:
        if value is not None and id(value) not in parameters:
            made = fake(value.detach()) if make is None else make(owner, name, value)
            parameters[id(value)] = nn.Parameter(made, requires_grad=value.requires_grad)
        return None if value is None else parameters[id(value)]

    def kept(hook: Any) -> bool:
        return not (without_hooks_of and str(hook.__module__).startswith(without_hooks_of))

    def copy(one: nn.Module) -> nn.Module:
        if one in copies:
            return copies[one]
        of = class_of(one)
        new = copies[one] = of.__new__(of)
        state = {key: fake(value) for key, value in vars(one).items()}
        state["_parameters"] = {k: parameter(one, k, v) for k, v in one._parameters.items()}
        state["_buffers"] = {k: fake(v) for k, v in one._buffers.items()}
        state["_modules"] = {k: v and copy(v) for k, v in one._modules.items()}
        left = set()
        for hooks in (name for name in _HOOKS if name in state):
            state[hooks] = type(state[hooks])(
                (k, hook) for k, hook in state[hooks].items() if kept(hook)
            )
            left |= set(state[hooks])
        for hooks in (name for name in _OF_HOOKS if name in state):
            state[hooks] = type(state[hooks])(
                (k, value) for k, value in state[hooks].items() if k in left
            )
        state["_compiled_call_impl"] = None
        vars(new).update(state)
        return new

    return copy(module)


def fake_inputs(inputs: tuple[Any, ...], mode: FakeTensorMode) -> tuple[Any, ...]:
    """Return ``inputs`` with fake tensors of ``mode``, in tuples, lists and dicts, too."""
    return tuple(
        torch.utils._pytree.tree_map(
            lambda value: mode.from_tensor(value, static_shapes=True) if _is_real(value) else value,
            inputs,
        )
    )


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
