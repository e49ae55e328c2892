"""One combination of options: everything but the memory cap, which a frontier runs along."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from apsched import __version__
from apsched.atomic_files import digest
from apsched.config import ScenarioOptions
from apsched.pipeline.cost_choice import CostChoice
from apsched.pipeline.solve_graph import SolveRequest
from apsched.pipeline.sources import (
    DEFAULT_MESH,
    DEFAULT_SEQ_LEN,
    SourceKind,
    SourceRequest,
    classify,
)
from apsched.study.speeds import Speeds
from apsched.whole_step.choices import NONE
from apsched.whole_step.keep_request import KeepRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The question, with the memory cap left open."""

    request: SourceRequest
    costs: CostChoice
    direction: str
    search: SolveRequest
    """The memory cap left open, and without the price of bitwise mode."""
    speeds: Speeds = field(default_factory=Speeds)
    keep: KeepRequest = field(default_factory=KeepRequest)
    """Parameters kept from forward to backward."""
    num_micro_batches: int = 1
    """Micro-batches in a row."""

    @property
    def alone(self) -> bool:
        """Whether nothing follows from the answers under other memory caps: a schedule that is
        best over scenarios, or has second groups, is not ordered by its step time alone.
        """
        return self.search.scenarios is not None or self.search.second_group

    def described(self) -> dict[str, Any]:
        """Return the options in words that are the same on every machine, by the names that
        ``--vary`` takes.
        """
        request, search = self.request, self.search
        kind = classify(request.source)
        preset = kind in (SourceKind.PRESET, SourceKind.TRANSFORMERS)
        return {
            "source": Path(request.source).name
            if kind in (SourceKind.REPRO, SourceKind.GRAPH_FILE)
            else _named(request.source),
            "mesh": request.mesh or (DEFAULT_MESH if preset else None),
            "seq": request.seq_len or (DEFAULT_SEQ_LEN if preset else None),
            "batch": request.batch or (1 if preset else None),
            "layers": request.num_layers,
            "ac": request.activation_checkpoint or ("none" if preset else None),
            **({"micro_batches": request.num_micro_batches} if request.num_micro_batches else {}),
            **({"reduce": request.reduce} if request.reduce else {}),
            "cluster": Path(self.costs.cluster).name if self.costs.cluster else None,
            "costs": Path(self.costs.costs).name if self.costs.costs else None,
            "collectives": [Path(name).name for name in self.costs.collectives],
            "unfused": not self.costs.fused,
            **self.speeds.described(),
            **{
                name.removesuffix("_bytes"): value
                for name, value in asdict(search.caps).items()
                if name != "memory_cap_bytes"
            },
            "plan": [str(rule) for rule in search.plan.rules],
            "bitwise": search.bitwise,
            "contention": str(self.costs.contention),
            **asdict(search.options),
            "optimizer": search.optimizer,
            "reserve": search.reserve,
            **({"second_group": True} if search.second_group else {}),
            **(_scenarios(search.scenarios) if search.scenarios is not None else {}),
            **self._choice(),
        }

    def _choice(self) -> dict[str, Any]:
        """Return the options of the choice of kept parameters, where there is one."""
        if self.keep.mode == NONE:
            return {}
        keep = list(self.keep.entries) or self.keep.mode
        several = {"accumulate": self.num_micro_batches} if self.num_micro_batches > 1 else {}
        return {"keep": keep, **several}


def _scenarios(options: ScenarioOptions) -> dict[str, Any]:
    return {"scenarios": options.count, "noise": options.noise, "robust": options.measure}


def _named(source: str) -> str:
    """Return a source without the directories of a file that it names."""
    scheme, colon, path = source.partition(":")
    return f"{scheme}:{Path(path).name}" if colon and "/" in path else source


def point_id(graph_id: str, described: Mapping[str, Any], memory_cap: str) -> str:
    """Return the name of a point: the same question to the same version about the same graph has
    the same name.
    """
    searched = {name: value for name, value in described.items() if name not in _IN_THE_GRAPH}
    return digest({"graph": graph_id, "memory_cap": memory_cap, "version": __version__, **searched})


_IN_THE_GRAPH = (
    "source",
    "mesh",
    "seq",
    "batch",
    "layers",
    "ac",
    "cluster",
    "costs",
    "collectives",
    "unfused",
    "network",
    "compute",
)
"""Options that make another graph, or none."""
