"""Gives every node of a graph its ``meta["val"]`` by running it on fake tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from apsched.errors import InputError
from apsched.torch_compat.graphs import quiet_fake_tensors

_REASON_LENGTH = 300


class _Propagator(torch.fx.Interpreter):
    """Runs a graph node by node and keeps each result; the first node that fails is the error."""

    def __init__(self, module: torch.fx.GraphModule, where: Callable[[torch.fx.Node], str]) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self._where = where

    def run_node(self, n: torch.fx.Node) -> Any:
        try:
            value = super().run_node(n)
        except InputError:
            raise
        except Exception as error:
            reason = " ".join((str(error) or type(error).__name__).split())[:_REASON_LENGTH]
            raise InputError(
                f"{self._where(n)}: expected shapes that {n._pretty_print_target(n.target)} accepts"
                f" at node {n.name}, found: {reason}; check that the graph and its inputs belong"
                " together and come from this version of torch"
            ) from None
        if n.op != "output":
            n.meta["val"] = value
        return value


def propagate(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    mode: FakeTensorMode,
    where: Callable[[torch.fx.Node], str],
) -> None:
    """Set ``meta["val"]`` on every node of ``module`` but the output; ``where`` says how an error
    names a node's place.

    Raises
    ------
    InputError
        If a node cannot be run on what it is given.
    """
    with quiet_fake_tensors(), mode, torch.no_grad():
        _Propagator(module, where).run(*inputs, enable_io_processing=False)
