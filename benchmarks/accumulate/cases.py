"""The steps that are measured, and their figures."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from apsched.config import DEFAULT_COMPUTE_MOVE, Caps, SolveOptions
from apsched.names import IN_NODE, NEXT, SUM, SUM_SHARDS, mark_of
from apsched.pipeline.cost_choice import CostChoice
from apsched.pipeline.load import loaded
from apsched.pipeline.solve_graph import SolveRequest, under_plan
from apsched.pipeline.sources import SourceRequest
from apsched.progress import Progress
from apsched.quantities import MemoryCap
from apsched.units import ticks_to_us
from apsched.whole_step.accumulation.search import (
    AccumulationAnswer,
    solve_accumulation,
    solve_baselines,
)
from apsched.whole_step.accumulation.step import Accumulation, SolvedAccumulation
from apsched.whole_step.keep_request import AUTO, KeepRequest
from apsched.whole_step.pair import Step

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step: a preset on a mesh and a cluster."""

    model: str
    mesh: str
    seq_len: int
    cluster: str
    num_micro_batches: int
    num_layers: int | None = None
    budget: float = 1.0
    cap_gib: int | None = None
    """``None``: the memory of the device."""

    def __str__(self) -> str:
        return (
            f"{self.model} {self.mesh}, {self.seq_len} tokens, {self.cluster},"
            f" {self.num_micro_batches} micro-batches"
        )


GRID = (
    Case(model="llama3-8b", mesh="fsdp=64", seq_len=2048, cluster="a100-efa", num_micro_batches=4),
    Case(
        model="llama3-8b",
        mesh="fsdp=64",
        seq_len=2048,
        cluster="a100-efa",
        num_micro_batches=4,
        cap_gib=40,
    ),
    Case(model="llama3-8b", mesh="fsdp=256", seq_len=2048, cluster="h100", num_micro_batches=4),
    Case(model="llama3-8b", mesh="fsdp=64", seq_len=8192, cluster="h100", num_micro_batches=4),
    Case(
        model="deepseek-v3-16b",
        mesh="fsdp=64,ep=8",
        seq_len=2048,
        cluster="h100",
        num_micro_batches=4,
    ),
    Case(model="llama3-70b", mesh="fsdp=256", seq_len=2048, cluster="h100", num_micro_batches=4),
    Case(
        model="llama3-8b",
        mesh="hsdp=8x8",
        seq_len=2048,
        cluster="a100-efa",
        num_micro_batches=4,
        cap_gib=40,
    ),
)
SMOKE = (
    Case(
        model="llama3-debug",
        mesh="fsdp=8",
        seq_len=64,
        cluster="h100",
        num_micro_batches=3,
        num_layers=2,
        budget=0.0,
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
    num_held: int
    """Gathered until the next micro-batch."""
    num_summed: int
    """Gradients reduced once."""
    num_shards_summed: int
    """Gradients whose shards are all-reduced once."""
    step_ms: float | None
    peak_gib: float | None
    gap: float | None
    """Gap of the answer to the bound."""
    cpu_s: float | None
    """Processor time of all that was solved under the cap."""


def measured(case: Case) -> Iterator[Row]:
    """Yield the rows of ``case``."""
    source = SourceRequest(
        source=case.model, mesh=case.mesh, seq_len=case.seq_len, num_layers=case.num_layers
    )
    cap = None if case.cap_gib is None else MemoryCap(size_bytes=case.cap_gib * GIB)
    request = SolveRequest(
        caps=Caps(max_compute_move=DEFAULT_COMPUTE_MOVE),
        options=SolveOptions(budget=case.budget),
        memory_cap=cap,
    )
    progress = Progress(quiet=True)
    with loaded(source, CostChoice(cluster=case.cluster), "both", progress) as opened:
        step = Step.of(under_plan(opened.graphs, request), request, progress)
        began = time.process_time()
        accumulation = Accumulation.of(step, case.num_micro_batches)
        answer = solve_accumulation(accumulation, KeepRequest(mode=AUTO))
        took = time.process_time() - began
        baselines = solve_baselines(accumulation)
    for name, solved in baselines.items():
        yield _row(case, name, solved)
    yield _row(case, "apsched", answer.best, answer, took)


def _row(
    case: Case,
    name: str,
    solved: SolvedAccumulation,
    answer: AccumulationAnswer | None = None,
    took: float | None = None,
) -> Row:
    marks = [mark_of(entry) for entry in solved.kept]
    return Row(
        case=str(case),
        cap="device" if case.cap_gib is None else f"{case.cap_gib} GiB",
        choice=name,
        num_kept=marks.count(""),
        num_in_node=marks.count(IN_NODE),
        num_held=marks.count(NEXT),
        num_summed=marks.count(SUM),
        num_shards_summed=marks.count(SUM_SHARDS),
        step_ms=round(ticks_to_us(solved.step_ticks) / 1000, 3) if solved.fits else None,
        peak_gib=round(solved.peak_bytes / GIB, 2) if solved.fits else None,
        gap=None if answer is None else round(answer.gap, 5),
        cpu_s=None if took is None else round(took, 1),
    )
