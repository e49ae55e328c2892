"""Private functions of torch about the effects of a call: its overload, and the operators that it
dispatches.
"""

import builtins
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch


def resolved_packet(packet: Any, args: Any, kwargs: Any) -> Any:
    """Return the overload that ``packet`` runs on these values, or None where none fits.

    torch/csrc/jit/python/init.cpp, _jit_resolve_packet; torch/_ops.py,
    OpOverloadPacket._qualified_op_name.
    """
    name: str = packet._qualified_op_name
    try:
        overload = torch._C._jit_resolve_packet(name, *args, **kwargs)
    except RuntimeError:
        return None
    return getattr(packet, overload)


@lru_cache(maxsize=1)
def _overridable() -> frozenset[Any]:
    listed = torch.overrides.get_overridable_functions().values()
    functions = {f for functions in listed for f in functions if builtins.callable(f)}
    stateful = ("__set__", "__setstate__", "backward", "register_hook")
    return frozenset(f for f in functions if getattr(f, "__name__", "") not in stateful)


def is_torch_function(target: Any) -> bool:
    """Return whether ``target`` is torch's own, and has only the effects of the operators that it
    dispatches.

    torch/overrides.py, get_overridable_functions; torch/_C/_VariableFunctions.pyi, which also has
    the functions that make tensors from no tensor (``torch.rand``).
    """
    try:
        function = getattr(torch._C._VariableFunctions, getattr(target, "__name__", ""), None)
        return (function is not None and function == target) or target in _overridable()
    except TypeError:  # cannot be hashed
        return False


def watched(mode: Any, call: Callable[[], Any], see: Callable[..., None]) -> Any:
    """Return ``call()`` on fake tensors of ``mode``; ``see(operator, args, kwargs)`` is called
    first.

    ``see`` is called for each operator that is dispatched, and may raise to stop the call. No
    gradients are recorded, and no symbol that is made meanwhile stays behind
    (torch/utils/_python_dispatch.py, TorchDispatchMode).
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        supports_higher_order_operators = True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            see(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    shape_env = mode.shape_env
    symbols = nullcontext() if shape_env is None else shape_env.ignore_fresh_unbacked_symbols()
    with torch.no_grad(), symbols, mode, Watch():  # type: ignore[no-untyped-call]
        return call()
