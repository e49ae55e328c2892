"""Settings of eager FSDP2 that all process ranks of the units' groups have: compared before any
module is changed.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import nn

from apsched.compiler.ranks.agreement import GraphAgreement
from apsched.compiler.ranks.job import running_job
from apsched.compiler.ranks.launches import Launch
from apsched.compiler.schedule_captured import running_groups
from apsched.compiler.settings import checked_deadline
from apsched.errors import AgreementError, InputError
from apsched.torch_compat.fsdp import group_names_of_units

DEADLINE_S = 600.0
"""Process ranks may come at different times, since each may solve on its own before: as long as
collectives of NCCL wait by default.
"""
T = TypeVar("T")


def units_agreement(model: nn.Module, deadline_s: float | None) -> GraphAgreement | None:
    """Return the messages of the process ranks of the units' groups about ``model``; ``None``
    without other process ranks.
    """
    job = running_job(deadline_s)
    if job is None:
        return None
    ranks = running_groups()
    used = [name for name in group_names_of_units(model) if name in ranks]
    opened = GraphAgreement(job, {name: ranks[name] for name in used})
    return opened if opened.groups else None


def as_launches(
    texts: Sequence[str], agreement: GraphAgreement | None
) -> dict[str, tuple[Launch, ...]]:
    """Return ``texts`` as launches in each group, so that process ranks compare them."""
    launches = tuple(Launch(what=text, members=(), names=()) for text in texts)
    return {group.name: launches for group in agreement.groups} if agreement else {}


def same_on_all(
    model: nn.Module,
    prepare: Callable[[], T],
    in_words: Callable[[T], Sequence[str]],
    deadline_s: float | None,
) -> T:
    """Return the result of ``prepare``, where it succeeds on all process ranks that share units of
    ``model``, and ``in_words`` of it are the same; all of them call it at once.

    Raises
    ------
    InputError
        on all of them, where one differs or fails; the message names it.
    AgreementError
        where one of them does not answer for ``deadline_s``.
    """
    agreement = units_agreement(model, checked_deadline(deadline_s))
    if agreement is None:
        return prepare()
    with agreement:
        with agreement.job.working():
            found = prepare()
        try:
            agreement.check(as_launches(in_words(found), agreement))
        except AgreementError as error:
            if error.is_silent:
                raise
            raise InputError(
                f"{error}. FSDP2 is not changed on any process rank: pass the same results on all;"
                " solve on one, call save_run, and pass its directory"
            ) from error
    return found
