"""A solved step of several micro-batches in a row, set up on eager FSDP2."""

from os import PathLike
from pathlib import Path

from torch import nn

from apsched.errors import InputError
from apsched.integrations.eager.agreed import DEADLINE_S, same_on_all
from apsched.integrations.eager.micro_batches import (
    Fsdp2MicroBatches,
    SolvedPair,
    micro_batches_of_units,
    pair_of_results,
    solved_pair,
    steps_in_words,
)
from apsched.integrations.fsdp2 import micro_batches_of, read_solved
from apsched.integrations.fsdp2_units import units_of
from apsched.names import mark_of
from apsched.report.answer.step import StepResult
from apsched.torch_compat.compilers import uncompiled
from apsched.whole_step.keep_request import KEPT_FILE, keep_request


def apply_fsdp2_micro_batches(
    model: nn.Module,
    solved: StepResult | str | PathLike[str],
    *,
    deadline_s: float | None = DEADLINE_S,
) -> Fsdp2MicroBatches:
    """Return the settings with which ``model``, on which ``fully_shard`` was called, runs a step of
    several micro-batches in a row as ``solved``::

        step = apply_fsdp2_micro_batches(model, "apsched-out/...")
        for k, batch in enumerate(batches):
            step.begin(k)
            model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    ``solved`` is the result of ``apsched.solve_step(..., accumulate=N)``, solved with the plan of
    ``fsdp2_plan`` and ``caps=apsched.Caps(max_compute_move=0)``, or the directory that its
    ``save_run`` or ``apsched solve --accumulate N`` wrote. Every process rank must pass the same:
    where a process group runs, all call this and compare their settings.

    Parameters
    ----------
    deadline_s
        Seconds that one process rank waits for another; ``None``: without limit.

    Raises
    ------
    InputError
        where FSDP2 cannot follow a schedule or the choice, or where process ranks pass different
        results; nothing is set then, on any process rank.
    AgreementError
        where a process rank does not answer.
    """
    model = uncompiled(model)

    def prepared() -> Fsdp2MicroBatches:
        pairs, kept = _read(solved)
        return micro_batches_of_units(model, units_of(model), pairs, kept)

    return same_on_all(model, prepared, steps_in_words, deadline_s)


def _read(solved: StepResult | str | PathLike[str]) -> tuple[list[SolvedPair], set[str]]:
    """Return the schedules of the micro-batches, and the parameters that are kept."""
    if isinstance(solved, StepResult):
        pairs = [pair_of_results(count, *results) for count, results in solved.micro_batches]
        return pairs, {entry for entry in solved.kept if not mark_of(entry)}
    folder = Path(solved)
    listed = micro_batches_of(folder)
    if not listed:
        raise InputError(
            f"{folder}: expected the directory that `apsched solve --accumulate N -o` or"
            " StepResult.save_run wrote, found no result.json of several micro-batches"
        )
    pairs = [
        solved_pair(count, *(read_solved(folder, name) for name in names))
        for count, names in listed
    ]
    entries = keep_request(folder / KEPT_FILE, KEPT_FILE).entries
    return pairs, {entry for entry in entries if not mark_of(entry)}
