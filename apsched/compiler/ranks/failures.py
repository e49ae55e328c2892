"""Failures of one process rank as the others raise them, and differences between ranks in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from apsched.errors import AgreementError, ApschedError, InfeasibleError, InputError

_ERRORS: dict[str, type[ApschedError]] = {
    e.__name__: e for e in (InputError, InfeasibleError, AgreementError)
}


def raise_failure(message: Mapping[str, Any]) -> None:
    if "failed" in message:
        raise _ERRORS.get(message["failed"], ApschedError)(message["message"])


def in_words(error: BaseException, rank: int) -> ApschedError:
    """Return ``error`` in the form that all receive: of its class if apsched raised it on purpose,
    and with the process rank.
    """
    error = getattr(error, "inner_exception", error)  # torch's compilers wrap what a pass raises
    prefix = f"process rank {rank}: "
    if isinstance(error, ApschedError):
        text = str(error)
        return _ERRORS.get(type(error).__name__, ApschedError)(
            text if text.startswith("process rank") else prefix + text
        )
    if not isinstance(error, Exception):
        return AgreementError(f"{prefix}stopped ({type(error).__name__})")
    bug = "" if type(error).__module__.startswith("torch.") else " (a bug of apsched)"
    return ApschedError(f"{prefix}unexpected {type(error).__name__}: {error}{bug}")


def differences(
    own: Mapping[str, str], theirs: Mapping[str, str], without: Sequence[str] = ()
) -> str:
    """Return which settings differ, but for those in ``without``; empty for none."""
    return "; ".join(
        f"{key} {own.get(key, 'nothing')} here, {theirs.get(key, 'nothing')} there"
        for key in sorted({*own, *theirs})
        if own.get(key) != theirs.get(key) and key not in without
    )


COMPILER = "inductor"
"""The setting that has to be the same also where graphs differ: process ranks compare other things
under Inductor.
"""


def other_settings(stated: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the error for process ranks with the same graph and other settings than the lowest
    one, or with another compiler; empty for none. ``stated`` are graph and settings by process
    rank.
    """
    first = min(stated)
    for rank, words in sorted(stated.items()):
        own, theirs = (dict(one["settings"]) for one in (words, stated[first]))
        if words["graph"] != stated[first]["graph"]:
            own, theirs = ({COMPILER: one.get(COMPILER, "nothing")} for one in (own, theirs))
        if differing := differences(own, theirs):
            return (
                f"process rank {rank} has other settings than process rank {first}: {differing};"
                " give all process ranks the same settings"
            )
    return ""
