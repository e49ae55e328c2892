"""One way to run a whole step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from apsched.capture.captured import Capture
from apsched.costs.measured_model import MeasuredCostModel
from apsched.models.build import BuiltModel
from apsched.problem.problem import Problem
from benchmarks.execution.calibration import Found, run
from benchmarks.execution.worker import as_run, memory

Step = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""The loss, and the gradients by name."""


@dataclass(frozen=True, kw_only=True)
class StepRun:
    """Scheduled graphs of a step, ready to run."""

    name: str
    inputs: tuple[BuiltModel, ...]
    """The model with the inputs of each run of the graphs. With several inputs one step runs the
    graphs several times, and adds losses and gradients.
    """
    capture: Capture
    """The graphs as captured."""
    modules: tuple[GraphModule, GraphModule]
    """The same with their schedules."""
    num_kept: int = 0
    """Parameters that are kept from forward to backward."""
    beside_bytes: int = 0
    """Bytes that are alive in backward, and are not among the inputs of its graph."""

    def run(self) -> Step:
        """Run a step."""
        loss, gradients = run(self.inputs[0], self.modules)
        for built in self.inputs[1:]:
            more_loss, more = run(built, self.modules)
            loss = loss + more_loss
            for name, gradient in more.items():
                gradients[name].add_(gradient)
        return loss, gradients

    def priced(self, found: Found) -> list[Problem]:
        """Return the graphs as they run, in order."""
        return len(self.inputs) * as_run(self.modules, self.capture, found)

    def memory(self, model: MeasuredCostModel) -> list[dict[str, int]]:
        """Return for each graph the peak of live bytes as counted while it runs for real, and as
        predicted.
        """
        rows = memory(self.inputs[0], self.modules, self.capture, model)
        for key in ("counted_bytes", "predicted_bytes"):
            rows[1][key] += self.beside_bytes
        return rows


def is_close(one: Step, other: Step) -> bool:
    """Return whether gradients that were added in another order are those of the other step."""
    return torch.allclose(one[0], other[0]) and all(
        torch.allclose(gradient, other[1][name], rtol=1e-3, atol=1e-6)
        for name, gradient in one[1].items()
    )


def is_same(one: Step, other: Step) -> bool:
    """Return whether two steps have the same bits."""
    (loss, gradients), (other_loss, others) = one, other
    return (
        torch.equal(loss, other_loss)
        and gradients.keys() == others.keys()
        and all(torch.equal(gradient, others[name]) for name, gradient in gradients.items())
    )


def from_first_rank(found: Callable[[], Any]) -> Any:
    """Return the result of ``found`` on process rank 0; all process ranks call this."""
    box = [found() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]
