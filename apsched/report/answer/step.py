"""The answer for a whole step as Python has it."""

import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from apsched.artifacts.output_dir import write_run
from apsched.artifacts.schedule_file import dump_schedule
from apsched.artifacts.solved_run import MODEL, RESULT_FILE
from apsched.atomic_files import write_atomic
from apsched.errors import InputError
from apsched.graph.graph_file import to_bytes
from apsched.pipeline.result import Result
from apsched.report.answer.accumulation import accumulation_json, accumulation_lines
from apsched.report.answer.joint_graph import joint_json, joint_lines
from apsched.report.answer.whole_step import keep_json, kept_lines
from apsched.report.summary import report_json
from apsched.units import ticks_to_us
from apsched.whole_step.accumulation.search import AccumulationAnswer
from apsched.whole_step.accumulation.step import SolvedAccumulation
from apsched.whole_step.joint_graph.step import JointAnswer
from apsched.whole_step.keep_request import KEPT_FILE, kept_file
from apsched.whole_step.search import StepAnswer
from apsched.whole_step.solve import Answer


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepResult:
    """A step whose graphs were solved together: forward and backward, or those of several
    micro-batches in a row.
    """

    answer: StepAnswer | AccumulationAnswer
    model: str
    """Class of the model."""
    kept_tensors: dict[str, tuple[str, ...]]
    """Graph -> nodes whose values are kept gathered for the next graph, for ``plot_memory``."""

    @property
    def kept(self) -> tuple[str, ...]:
        """Sorted names of the parameters that are kept from forward to backward; with ``@node``
        behind it a parameter that is resharded in its node, with ``@next`` one that stays gathered
        until the next micro-batch, with ``@sum`` one whose gradients are reduced once, with
        ``@sum-shards`` one of HSDP whose gradients are reduced over the replicas once.
        """
        return tuple(sorted(self.answer.best.kept))

    @property
    def results(self) -> tuple[Result, ...]:
        """The answers for forward and backward with these parameters kept; of several micro-batches
        those of the first, of one in the middle, and of the last.
        """
        return self.answer.best.results

    @property
    def micro_batches(self) -> tuple[tuple[int, tuple[Result, Result]], ...]:
        """Number of micro-batches, and their answers for forward and backward, in order."""
        best = self.answer.best
        if isinstance(best, SolvedAccumulation):
            return tuple((pair.count, pair.results) for pair in best.pairs)
        return ((1, best.results),)

    @property
    def step_time_us(self) -> float | None:
        """All graphs, one after the other; ``None`` where no choice fits."""
        best = self.answer.best
        return ticks_to_us(best.step_ticks) if best.fits else None

    @property
    def bound_us(self) -> float:
        """No choice that fits is faster."""
        return ticks_to_us(self.answer.bound.ticks)

    @property
    def gap(self) -> float:
        """(step time - bound) / step time."""
        return self.answer.gap

    @property
    def peak_memory_bytes(self) -> int | None:
        """The highest peak of all graphs; ``None`` where no choice fits."""
        return self.answer.best.peak_bytes if self.answer.best.fits else None

    def as_dict(self) -> dict[str, Any]:
        """Return the entry ``keep`` of ``apsched solve --json``: the figures of each choice solved,
        and the frontier of memory and step time among them; of several micro-batches the entry
        ``accumulate``.
        """
        (figures,) = step_entries(self.answer).values()
        return figures | {"tensors": self.kept_tensors}

    def save(self, path: str | PathLike[str]) -> None:
        """Write the names kept to a file that ``--keep`` and ``keep=`` take."""
        write_atomic(Path(path), kept_file(self.answer.best.kept))

    def save_run(self, directory: str | PathLike[str]) -> None:
        """Write graphs, schedules and figures as ``apsched solve -o`` does, without rewritten
        modules. ``apply_fsdp2``, ``apply_fsdp2_micro_batches`` and commands such as ``apsched
        report`` read the directory.

        Raises
        ------
        InputError
            where no choice fits the caps, or ``directory`` cannot be written.
        """
        best = self.answer.best
        if not best.fits:
            raise InputError("save_run: expected a step that fits, found that no choice fits")
        report = report_json(f"{MODEL}{self.model}", best.results[0].cluster, best.results, {})
        report |= dict.fromkeys(step_entries(self.answer), self.as_dict())
        files = {f"{graph.problem.name}.graph": to_bytes(graph.dag) for graph in best.graphs}
        for result in best.results:
            files[f"{result.problem.name}.schedule.json"] = dump_schedule(result)
        files[KEPT_FILE] = kept_file(best.kept)
        files[RESULT_FILE] = (json.dumps(report, indent=1) + "\n").encode()
        write_run(Path(directory), files, advice="choose another one")

    def __repr__(self) -> str:
        """The step, the kept parameters, and memory against step time."""
        lines = step_lines(self.answer)
        return "\n".join(("apsched.StepResult", *(f"  {line}" for line in lines)))


def step_entries(answer: Answer) -> dict[str, dict[str, Any]]:
    """Return the entries of the step in ``--json``: the figures of the answer first, and for one
    graph of forward and backward those of both apart.
    """
    if isinstance(answer, AccumulationAnswer):
        return {"accumulate": accumulation_json(answer)}
    if isinstance(answer, JointAnswer):
        return joint_json(answer)
    return {"keep": keep_json(answer)}


def step_lines(answer: Answer) -> tuple[str, ...]:
    """Return the step as text: time and bound, and the choice."""
    if isinstance(answer, AccumulationAnswer):
        return accumulation_lines(answer, None)
    if isinstance(answer, JointAnswer):
        return joint_lines(answer)
    return kept_lines(answer)
