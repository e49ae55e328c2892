"""Options that fit where the memory of the device does not: the source under other options, each
captured again, and its least memory found.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from apsched.errors import ApschedError
from apsched.pipeline.cost_choice import CostChoice
from apsched.pipeline.load import loaded
from apsched.pipeline.result import Result
from apsched.pipeline.solve_graph import SolveRequest, account_of, caps_of_problem, under_plan
from apsched.pipeline.sources import DEFAULT_MESH, SourceKind, SourceRequest, classify
from apsched.progress import Progress
from apsched.quantities import MemoryCap

_LEAST = MemoryCap(size_bytes=0, above_floor=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The least memory of a source under one other option."""

    option: str
    """As on the command line."""
    graph: str
    """The graph that has the least room."""
    needed_bytes: int
    """The least memory cap with a known schedule."""
    left_bytes: int
    """The memory of the device that is left for the graph."""

    @property
    def fits(self) -> bool:
        """Whether every graph has a schedule."""
        return self.needed_bytes <= self.left_bytes


def what_fits(
    source: SourceRequest,
    costs: CostChoice,
    direction: str,
    request: SolveRequest,
    results: Sequence[Result],
    progress: Progress,
) -> tuple[Trial, ...]:
    """Return the trials for ``results``, the answers for ``source``: none unless the memory of the
    device is the reason why there is no schedule.

    Options are tried by family: activation checkpointing, smaller batches, more process ranks. A
    family ends with the first option that fits: at most six captures. An option whose graph cannot
    be captured is left out.
    """
    if not any(default_is_too_small(result) for result in results):
        return ()
    trials = []
    for family in _families(source):
        for option, other in family:
            with progress.stage(f"try {option}"):
                trial = _tried(option, other, costs, direction, request)
            if trial is not None:
                trials.append(trial)
            if trial is not None and trial.fits:
                break
    return tuple(trials)


def default_is_too_small(result: Result) -> bool:
    """Whether the memory that the device leaves is the only cap that is too small."""
    why = result.answer.infeasibility
    return (
        why is not None
        and why.caps == ("memory_cap_bytes",)
        and result.account is not None
        and result.caps.memory_cap_bytes == result.account.left_bytes
    )


def _families(source: SourceRequest) -> Iterator[list[tuple[str, SourceRequest]]]:
    """Yield options of one kind, the least change first."""
    kind = classify(source.source)
    built = kind in (SourceKind.PRESET, SourceKind.TRANSFORMERS)
    if built or kind is SourceKind.FUNCTION:
        weaker = {None: 0, "none": 0, "full": 2}.get(source.activation_checkpoint, 1)
        yield [
            (f"--ac {name}", replace(source, activation_checkpoint=name))
            for name in ("selective", "full")[weaker:]
        ]
    if built:
        batch = source.batch or 1
        sizes = dict.fromkeys(size for size in (batch // 2, 1) if 0 < size < batch)
        yield [(f"--batch {size}", replace(source, batch=size)) for size in sizes]
    mesh = source.mesh or (DEFAULT_MESH if built else None)
    if mesh is not None and kind is not SourceKind.GRAPH_FILE:
        meshes = [text for times in (2, 4) if (text := _more_process_ranks(mesh, times))]
        yield [(f"--mesh {text}", replace(source, mesh=text)) for text in meshes]


def _more_process_ranks(mesh: str, times: int) -> str:
    """Return ``mesh`` with ``times`` as many process ranks over which parameters are sharded; empty
    where they are not sharded.
    """
    from apsched.models.mesh import MeshSpec  # needs torch

    spec = MeshSpec.parse(mesh)
    return str(replace(spec, fsdp=times * spec.fsdp)) if spec.fsdp > 1 else ""


def _tried(
    option: str, source: SourceRequest, costs: CostChoice, direction: str, request: SolveRequest
) -> Trial | None:
    quiet = Progress(quiet=True)
    try:
        with loaded(source, costs, direction, quiet) as opened:
            needs = []
            for graph in under_plan(opened.graphs, request):
                account = account_of(graph, request)
                if account is None:
                    return None
                least = caps_of_problem(graph.problem, replace(request, memory_cap=_LEAST), quiet)
                needs.append((least.memory_cap_bytes or 0, account.left_bytes, graph.problem.name))
    except ApschedError:
        return None
    needed_bytes, left_bytes, name = max(needs, key=lambda need: need[0] - need[1])
    return Trial(option=option, graph=name, needed_bytes=needed_bytes, left_bytes=left_bytes)
