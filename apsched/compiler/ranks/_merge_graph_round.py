"""An FX graph in a running job: the round of talk about it, and the check of what it will launch."""

import logging
from collections.abc import Mapping

import torch

from apsched.agreement.job import running_job
from apsched.agreement.launches import groups_of, launches_of
from apsched.agreement.round import Round
from apsched.torch_private import process_group_names

logger = logging.getLogger(__name__)


def round_of(module: torch.fx.GraphModule, deadline_s: float | None) -> Round | None:
    """Return the round of talk about ``module``; ``None`` where there is nobody to talk to, or ``deadline_s`` is ``None``.

    All process ranks that communicate in ``module`` must call this for it, and for other graphs with the same groups in the same order.
    """
    job = running_job(deadline_s) if deadline_s is not None else None
    if job is None:
        return None
    known = process_group_names()
    groups = groups_of(module)
    for name in groups:
        if name not in known:
            logger.warning("process group %r is not one of this job; the order of its launches is not compared between process ranks", name)
    opened = Round(job, {name: known[name] for name in groups if name in known})
    return opened if opened.parties else None


def check_launches(
    round_: Round, module: torch.fx.GraphModule, captured: torch.fx.GraphModule, names: Mapping[str, str] | None = None
) -> None:
    """Return where ``module``, made from ``captured``, may run: all process ranks will launch the same; ``AgreementError`` where not.

    ``names`` maps a start node of ``captured`` to what it is for.
    """
    with round_.job.working():
        launches = launches_of(module, captured, names)
    round_.check(launches)
