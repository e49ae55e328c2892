"""The result of capture: FX graphs with shapes, and facts that a graph alone does not have."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from apsched.graph.records import ParameterShard


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGraph:
    """One FX graph as a compiler would hand it to its backend."""

    name: str
    """``forward``, ``backward``, ``joint`` or ``graph`` (direction unknown)."""
    module: torch.fx.GraphModule
    """Every placeholder and call carries ``meta["val"]`` (fake tensors, or symbolic integers).
    """
    kept_inputs: frozenset[str]
    """Placeholders that the caller keeps alive (parameters, buffers); the others are freed at their
    last use.
    """
    parameter_names: Mapping[str, str]
    """Placeholder name -> fully qualified name of the parameter behind it."""
    hints: Mapping[str, int] = field(default_factory=dict)
    """Symbol -> size, of sizes that depend on data, as the user states them."""
    gradient_inputs: tuple[str, ...] = ()
    """Placeholders of forward whose gradients this graph returns, where its outputs have no
    descriptors of AOTAutograd.
    """
    shards: Mapping[str, ParameterShard] = field(default_factory=dict)
    """Name -> parameter, of all parameters of the step, where a compiler states them; the graph
    may take fewer.
    """
    has_backward: bool = True
    """Whether the step may have a backward graph: a model of which nothing is trained has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """Bytes that forward saves for backward, without its inputs."""

    tagged: int
    """As captured."""
    untagged: int
    """Bytes if the partitioner decides alone, without tags on the gathers of parameters and the
    nodes that follow them.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The graphs of one source, with the process groups they name."""

    source: str
    graphs: tuple[CapturedGraph, ...]
    group_ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Group name -> process ranks of the group that contains process rank 0 (empty where only the
    size is known).
    """
    group_sizes: Mapping[str, int] = field(default_factory=dict)
    """Group name -> number of process ranks, of the groups whose process ranks are not known."""
    saved_bytes: SavedBytes | None = None
    """Where it was asked for."""
    notes: tuple[str, ...] = ()
    """Notes on the origin of the graphs, to be printed with an answer, a sentence each."""
    warnings: tuple[str, ...] = ()
    """Warnings about the graphs, to be printed at once, a sentence each."""
