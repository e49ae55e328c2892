"""Samples and operations of a training step, from which tokens per second and MFU follow."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from apsched.costs.clusters.cluster import Device
from apsched.names import direction_named
from apsched.pipeline.sources import (
    DEFAULT_MESH,
    DEFAULT_SEQ_LEN,
    OpenedSource,
    SourceKind,
    SourceRequest,
    classify,
)

if TYPE_CHECKING:
    from apsched.capture.captured import CapturedGraph

TOKENS, IMAGES = "tokens", "images"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRate:
    """A training step of all process ranks."""

    num_samples: int
    """Tokens or images that all process ranks together train on in a step."""
    unit: str = TOKENS
    """The sort of the samples: tokens, or images where the input is no sequence of tokens."""
    num_ranks: int
    model_us: float
    """Time of the operations of the model at the peak of the device, on one process rank:
    3 times those of forward, as MFU is defined (PaLM, arXiv 2204.02311, appendix B), so that
    operations that activation checkpointing repeats do not count.
    """


def step_rate(
    request: SourceRequest,
    source: OpenedSource,
    graphs: "Sequence[CapturedGraph]",
    device: Device,
) -> StepRate | None:
    """Return samples and operations of the step of a preset or a configuration of Transformers;
    ``None`` for other sources, whose samples are not known, and where forward and backward are not
    captured as one graph each.
    """
    from apsched.costs.compute.at_peak import at_peak_us
    from apsched.models.mesh import MeshSpec

    if classify(request.source) not in (SourceKind.PRESET, SourceKind.TRANSFORMERS):
        return None
    directed = [graph for graph in graphs if direction_named(graph.name)]
    by_direction = {direction_named(graph.name): graph for graph in directed}
    if len(directed) != 2 or set(by_direction) != {"forward", "backward"}:
        return None
    mesh = MeshSpec.parse(DEFAULT_MESH if request.mesh is None else request.mesh)
    num_inputs = (request.batch or 1) * (request.num_micro_batches or 1) * mesh.data_parallel_size
    each = 1 if source.takes_images else request.seq_len or DEFAULT_SEQ_LEN
    return StepRate(
        num_samples=each * num_inputs,
        unit=IMAGES if source.takes_images else TOKENS,
        num_ranks=mesh.world_size,
        model_us=3 * at_peak_us(by_direction["forward"].module.graph, device),
    )
