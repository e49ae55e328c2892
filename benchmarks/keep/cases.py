"""Which steps are measured, and their figures."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from apsched.config import DEFAULT_COMPUTE_MOVE, Caps, SolveOptions
from apsched.pipeline.cost_choice import CostChoice
from apsched.pipeline.load import loaded
from apsched.pipeline.solve_graph import SolveRequest, under_plan
from apsched.pipeline.sources import SourceRequest
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.units import ticks_to_us
from apsched.whole_step.choices import NONE, Choice, kept_in_node, kept_whole
from apsched.whole_step.pair import SolvedChoice, Step
from apsched.whole_step.search import StepAnswer, solve_step

GIB = 2**30
ROOM = (0.5, 0.1)
"""Room under the lower caps: shares of the bytes of all kept parameters, above the least peak found
with all gathered again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step: a preset on a mesh and a cluster."""

    model: str
    mesh: str
    seq_len: int
    cluster: str
    num_layers: int | None = None
    budget: float = SolveOptions().budget
    room: tuple[float, ...] = ROOM
    on_device: bool = True
    """Whether it is also measured under the memory of the device."""
    without_cap: bool = False
    """Whether it is also measured without a memory cap."""

    def __str__(self) -> str:
        layers = "" if self.num_layers is None else f", {self.num_layers} layers"
        return f"{self.model} {self.mesh}, {self.seq_len} tokens{layers}, {self.cluster}"


GRID = (
    Case(model="llama3-8b", mesh="fsdp=256", seq_len=2048, cluster="h100"),
    Case(model="llama3-8b", mesh="fsdp=256", seq_len=2048, cluster="h100-tcpx"),
    Case(model="llama3-8b", mesh="fsdp=64", seq_len=8192, cluster="h100"),
    Case(model="llama3-8b", mesh="fsdp=8", seq_len=8192, cluster="h100"),
    Case(model="llama3-8b", mesh="fsdp=64", seq_len=2048, cluster="a100-efa"),
    Case(model="deepseek-v3-16b", mesh="fsdp=64,ep=8", seq_len=2048, cluster="h100"),
    Case(model="llama3-70b", mesh="fsdp=256", seq_len=2048, cluster="h100"),
    Case(model="llama3-70b", mesh="fsdp=256", seq_len=2048, cluster="a100-efa", room=(0.1,)),
)
MESHES = {
    "llama3-8b": ("fsdp=8", "fsdp=64", "fsdp=256"),
    "deepseek-v3-16b": ("fsdp=8,ep=8", "fsdp=64,ep=8", "fsdp=256,ep=8"),
    "llama3-70b": ("fsdp=64", "fsdp=256"),  # with AdamW it does not fit eight devices
}
WIDE = tuple(
    Case(model=model, mesh=mesh, seq_len=seq_len, cluster=cluster, room=(0.25,))
    for model, meshes in MESHES.items()
    for mesh in meshes
    for cluster in ("h100", "h100-tcpx", "a100-efa")
    for seq_len in (2048, 8192)
)
"""Every model on every mesh, cluster and length."""
FLOOR = tuple(replace(case, room=(0.0,), on_device=False) for case in WIDE)
"""The same under the least memory of all gathered again."""
NO_CAP = tuple(
    replace(case, room=(), on_device=False, without_cap=True)
    for case in WIDE
    if case.model == "llama3-70b"
)
"""Without a memory cap; the other models fit the device."""
SMOKE = (
    Case(
        model="llama3-debug",
        mesh="fsdp=8",
        seq_len=64,
        cluster="h100",
        num_layers=2,
        budget=0.0,
        room=(),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One choice under one cap."""

    case: str
    cap: str
    choice: str
    num_kept: int
    num_in_node: int
    """Resharded in their node."""
    num_again: int
    """Gathered again, of those that both graphs gather."""
    kept_gib: float
    forward_ms: float | None
    backward_ms: float | None
    step_ms: float | None
    peak_gib: float | None
    gap: float | None
    """Gap of the answer to the bound."""
    cpu_s: float | None
    """Processor time of all that was solved under the cap."""


def measured(case: Case) -> Iterator[Row]:
    """Yield the rows of ``case``: no cap, the device's memory, then caps with less room."""
    source = SourceRequest(
        source=case.model, mesh=case.mesh, seq_len=case.seq_len, num_layers=case.num_layers
    )
    progress = Progress(quiet=True)
    with loaded(source, CostChoice(cluster=case.cluster), "both", progress) as opened:
        request = SolveRequest(
            caps=Caps(max_compute_move=DEFAULT_COMPUTE_MOVE),
            options=SolveOptions(budget=case.budget),
        )
        graphs = under_plan(opened.graphs, request)
        free = Step.of(graphs, request, progress)
        if case.without_cap:
            endless = replace(request, memory_cap=MemoryCap())
            yield from _rows(case, "none", Step.of(graphs, endless, progress))
        if case.on_device:
            yield from _rows(case, "device", free)
        if not case.room:
            return
        again = free.solve(Choice())
        least = max(result.answer.floor_memory_bytes for result in again.results)
        most = sum(p.size_bytes for p in free.parameters)
        for share in case.room:
            cap = least + int(share * most)
            tight = SolveRequest(
                caps=request.caps, options=request.options, memory_cap=MemoryCap(size_bytes=cap)
            )
            step = Step.of(graphs, tight, progress)
            step.made.update(free.made)
            room = f"least + {share:g} of all kept" if share else "least of none"
            yield from _rows(case, f"{room} ({cap / GIB:.2f} GiB)", step)


def _rows(case: Case, cap: str, step: Step) -> Iterator[Row]:
    began = time.process_time()
    answer = solve_step(step)
    took = time.process_time() - began
    excluded = {name: step.solve(choice.kept) for name, choice in answer.excluded.items()}
    count = len(step.parameters)
    for name, choice in {**answer.baselines, **excluded}.items():
        yield _row(case, cap, name, choice, count)
    assert NONE in answer.baselines
    yield _row(case, cap, "apsched", answer.best, count, answer, took)


def _row(
    case: Case,
    cap: str,
    name: str,
    choice: SolvedChoice,
    num_parameters: int,
    answer: StepAnswer | None = None,
    took: float | None = None,
) -> Row:
    forward, backward = (
        None if result.step_time_us is None else round(result.step_time_us / 1000, 3)
        for result in choice.results
    )
    return Row(
        case=str(case),
        cap=cap,
        choice=name,
        num_kept=len(kept_whole(choice.kept)),
        num_in_node=len(kept_in_node(choice.kept)),
        num_again=num_parameters - len(choice.kept),
        kept_gib=round(choice.kept_bytes / GIB, 2),
        forward_ms=forward,
        backward_ms=backward,
        step_ms=round(ticks_to_us(choice.step_ticks) / 1000, 3) if choice.fits else None,
        peak_gib=round(choice.peak_bytes / GIB, 2) if choice.fits else None,
        gap=None if answer is None or not choice.fits else round(answer.gap, 5),
        cpu_s=None if took is None else round(took, 1),
    )
