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
from apsched.quantities import MemoryCap, show_bytes

_LEAST = MemoryCap(size_bytes=0, above_floor=True)
_LONG_CAPTURE_SECONDS = 60.0
"""Where a capture takes longer, one option that fits is enough."""
_MUCH_TOO_LARGE = 2.0
"""Where the graph needs so many times the memory that it has, and captures are long, the greatest
change of a family comes first.
"""


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
    *,
    keeps: bool = False,
) -> tuple[Trial, ...]:
    """Return the trials for ``results``, the answers for ``source``: none unless the memory of the
    device is the reason why there is no schedule.

    Each is tried with no parameter kept, which the option says where ``results`` ``keeps`` some.
    Options are tried by family: activation checkpointing, smaller batches, more process ranks. A
    family ends with the first option that fits: at most seven captures. Where the capture of
    ``source`` took a minute or more, that option ends all, and of a graph that is much too large
    the greatest change of a family comes first. An option whose graph cannot be captured is left
    out. Ctrl-C ends the trials, and those that are complete are returned.
    """
    short = [result for result in results if default_is_too_small(result)]
    if not short:
        return ()
    worst = min(short, key=_room)
    needed_bytes = worst.answer.floor_memory_bytes
    has_bytes = needed_bytes + _room(worst)
    progress.note(
        f"no schedule fits: {worst.problem.name} needs {show_bytes(needed_bytes)}, has"
        f" {show_bytes(has_bytes)}; looking for options that fit, Ctrl-C ends that"
    )
    much = needed_bytes >= _MUCH_TOO_LARGE * has_bytes
    one_is_enough = short[0].seconds.get("capture", 0.0) >= _LONG_CAPTURE_SECONDS
    trials: list[Trial] = []
    try:
        for family in _without_kept(source) if keeps else _families(source):
            if one_is_enough and any(trial.fits for trial in trials):
                break
            for option, other in family[::-1] if one_is_enough and much else family:
                trial = _tried(option, other, costs, direction, request, progress)
                if trial is not None:
                    trials.append(trial)
                if trial is not None and trial.fits:
                    break
    except KeyboardInterrupt:
        progress.note("interrupted: no more options are tried")
    return tuple(trials)


def _room(result: Result) -> int:
    """Return the bytes that the device has for the graph beyond its least memory."""
    left_bytes = result.account.left_bytes if result.account else 0
    return left_bytes - result.answer.floor_memory_bytes


def default_is_too_small(result: Result) -> bool:
    """Whether the memory that the device leaves is the only cap that is too small."""
    why = result.answer.infeasibility
    return (
        why is not None
        and why.caps == ("memory_cap_bytes",)
        and result.account is not None
        and result.caps.memory_cap_bytes == result.account.left_bytes
    )


def _without_kept(source: SourceRequest) -> Iterator[list[tuple[str, SourceRequest]]]:
    """Yield the options with no parameter kept: that alone, then with others."""
    yield [("--keep none", source)]
    for family in _families(source):
        yield [(f"--keep none {option}", other) for option, other in family]


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
    option: str,
    source: SourceRequest,
    costs: CostChoice,
    direction: str,
    request: SolveRequest,
    progress: Progress,
) -> Trial | None:
    try:
        with (
            progress.within(f"try {option}"),
            loaded(source, costs, direction, progress) as opened,
        ):
            needs = []
            least = replace(request, memory_cap=_LEAST)
            for graph in under_plan(opened.graphs, request):
                account = account_of(graph, request)
                if account is None:
                    return None
                caps = caps_of_problem(graph.problem, least, progress)
                needs.append((caps.memory_cap_bytes or 0, account.left_bytes, graph.problem.name))
    except ApschedError as error:
        progress.note(f"{option} is left out: {error}")
        return None
    needed_bytes, left_bytes, name = max(needs, key=lambda need: need[0] - need[1])
    trial = Trial(option=option, graph=name, needed_bytes=needed_bytes, left_bytes=left_bytes)
    progress.note(
        f"{option} {'fits' if trial.fits else 'is too large'}: {name} needs"
        f" {show_bytes(needed_bytes)}, has {show_bytes(left_bytes)}"
    )
    return trial
