"""One way to run a whole step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from apsched.capture.captured import Capture
from apsched.models.build import BuiltModel
from benchmarks.execution.calibration import run

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
