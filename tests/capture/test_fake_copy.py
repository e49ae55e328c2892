"""Calls of a user's model while it is captured: inputs by name, results in classes of the
user's own, and code that only runs under a compiler.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import apsched
from apsched.capture.fake_copy import also_as_compiled, called_in_order, fake_copy
from apsched.capture.fake_world import world
from apsched.capture.function import call_function, capture_own
from apsched.capture.micro_batches import MicroBatchChoice
from apsched.errors import InputError
from apsched.graph.graph_file import to_bytes


@dataclass
class Found:
    """The result of a model, as users write it."""

    loss: Any
    parts: tuple[Any, ...] = ()
    name: str = "step"


class Model(nn.Module):
    """A layer, with inputs in order."""

    def __init__(self, result: Callable[[torch.Tensor], Any] = lambda loss: loss) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.result = result

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.result((self.layer(x) - y).square().mean())


class ByName(Model):
    """The same with inputs by name alone."""

    def forward(self, *, x: torch.Tensor, scale: float = 1.0, y: torch.Tensor) -> Any:
        assert scale == 2.0
        return super().forward(x, y)


class Nested(Model):
    """The same with inputs inside of containers, among values that are no tensors."""

    def forward(self, x: torch.Tensor, rest: dict[str, Any]) -> Any:  # type: ignore[override]
        y, name, nothing = rest["target"]
        assert (name, nothing, rest["scale"]) == ("y", None, 2)
        return super().forward(x, y)


X, Y = torch.ones(4, 8), torch.zeros(4, 8)
NESTED = {"target": (Y, "y", None), "scale": 2}


def graphs(model: nn.Module, inputs: Any) -> list[bytes]:
    return [to_bytes(dag) for dag in apsched.capture(model, inputs, "fsdp=2")]


def test_inputs_by_name_are_those_in_order() -> None:
    model = ByName()
    named = graphs(model, {"x": X, "scale": 2.0, "y": Y})
    assert "forward" not in vars(model)
    assert named == graphs(Model(), (X, Y))
    step = apsched.solve_step(ByName(), {"x": X, "scale": 2.0, "y": Y}, "fsdp=2", budget=0)
    assert step.step_time_us == apsched.solve_step(Model(), [X, Y], "fsdp=2", budget=0).step_time_us


def test_values_inside_of_an_input_that_has_tensors_stay_as_they_are() -> None:
    expected = graphs(Model(), (X, Y))
    assert graphs(Nested(), (X, NESTED)) == expected
    assert graphs(Nested(), {"x": X, "rest": NESTED}) == expected


@pytest.mark.parametrize(
    "inputs",
    [(X, NESTED), ((X[:2], NESTED | {"target": (Y[:2], "y", None)}),) * 2],
    ids=["batch", "tuples"],
)
def test_micro_batches_of_nested_inputs_are_captured(inputs: tuple[Any, ...]) -> None:
    def of(module: nn.Module, inputs: tuple[Any, ...]) -> list[bytes]:
        return graphs(apsched.micro_batches(module, 2), inputs)

    plain = ((X[:2], Y[:2]),) * 2 if isinstance(inputs[0], tuple) else (X, Y)
    assert of(Nested(), inputs) == of(Model(), plain)
    in_row = capture_own(
        Nested(),
        (X, NESTED),
        source="test",
        num_ranks=None,
        mesh=None,
        micro_batches=MicroBatchChoice(count=2),
    )
    assert len(in_row.graphs) == 2


def test_units_of_fully_shard_take_inputs_by_name() -> None:
    with world(2):
        mesh = init_device_mesh("cpu", (2,))
        found = [
            apsched.capture(fully_shard(model, mesh=mesh), inputs)
            for model, inputs in (
                (Model(), (X, Y)),
                (ByName(), {"x": X, "scale": 2.0, "y": Y}),
                (Model(Found), (X, Y)),
                (Nested(), (X, NESTED)),
            )
        ]
    assert len({tuple(dag.number_of_nodes() for dag in pair) for pair in found}) == 1


@pytest.mark.parametrize(
    "result", [Found, lambda loss: Found(None, (loss,)), lambda loss: {"found": [Found(loss)]}]
)
def test_results_in_dataclasses_are_found(result: Callable[[torch.Tensor], Any]) -> None:
    assert graphs(Model(result), (X, Y)) == graphs(Model(lambda loss: (loss,)), (X, Y))


def test_a_result_without_tensors_is_refused() -> None:
    class Other:
        """No dataclass."""

        def __init__(self, loss: torch.Tensor) -> None:
            self.loss = loss

    with pytest.raises(InputError, match=r"tensors in the result of forward, .* found Other"):
        graphs(Model(Other), (X, Y))


def test_an_own_forward_of_the_module_comes_back() -> None:
    model = Model()
    own = model.forward = lambda x, y: x + y
    with called_in_order(model, {"y": Y, "x": X}) as given:
        assert [value is other for value, other in zip(given, (Y, X), strict=True)] == [True, True]
        assert model(*given).equal(X)
    assert model.forward is own


def test_a_model_that_only_a_compiler_can_trace_is_traced_as_by_one() -> None:
    class Guarded(Model):
        """Code such as that of experts in Transformers."""

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            if not torch.compiler.is_compiling():
                raise RuntimeError("no kernel for meta tensors")
            return super().forward(x, y)

    assert graphs(Guarded(), (X, Y)) == graphs(Model(), (X, Y))


def test_the_error_is_that_of_the_model_without_a_compiler() -> None:
    def trace() -> None:
        raise RuntimeError("second" if torch.compiler.is_compiling() else "first")

    with pytest.raises(RuntimeError, match="first"):
        also_as_compiled(trace)


def named() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return the step, as a function of the command line does."""
    return ByName(), {"x": X, "scale": 2.0, "y": Y}


def test_a_function_of_the_command_line_may_name_inputs() -> None:
    module, inputs = call_function(f"{__name__}:named")
    assert isinstance(module, ByName)
    assert list(inputs) == ["x", "scale", "y"]


class _Replaced(nn.Module):
    """Its forward is replaced on the instance, as libraries of kernels and trainers do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.listed, self.named = [self.inner], {"inner": self.inner}
        self.listed.append(self.listed)
        own = self.forward

        def around(x: torch.Tensor) -> torch.Tensor:
            return own(x) + self.inner.weight.sum()

        def method(module: "_Replaced", x: torch.Tensor) -> torch.Tensor:
            return module.inner(x)

        replaced: dict[str, Callable[..., torch.Tensor]] = {
            "closure": around,
            "method": MethodType(method, self),
            "partial": partial(method, self),
            "list": lambda x: self.listed[0](x),
            "dict": lambda x: self.named["inner"](x),
        }
        self.forward = replaced[way]  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize("way", ["closure", "method", "partial", "list", "dict"])
def test_a_replaced_forward_reads_the_copy(way: str) -> None:
    mode = FakeTensorMode()
    model = _Replaced(way)
    before = vars(model).copy()
    copy = fake_copy(model, mode)
    with mode:
        found = copy(torch.zeros(2, 4))
    found.sum().backward()
    assert copy.inner.weight.grad is not None
    assert model.inner.weight.grad is None
    assert copy.listed[0] is copy.inner
    assert vars(model) == before


def test_hooks_that_refer_to_a_module_read_its_copy() -> None:
    mode = FakeTensorMode()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_forward_pre_hook(lambda _, given: (given[0] + model[0].weight.sum(),))
    copy = fake_copy(model, mode)
    with mode:
        copy[1](torch.zeros(2, 4)).sum().backward()
    assert copy[0].weight.grad is not None
