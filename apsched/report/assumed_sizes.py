"""The assumed sizes of an answer as text."""

from apsched.kinds import SizeSource
from apsched.pipeline.assumptions import Assumptions

_WORDS = {
    SizeSource.TORCH: "torch's hint",
    SizeSource.STATED: "as stated",
    SizeSource.PROFILE: "profile",
    SizeSource.BALANCED: "balanced",
    SizeSource.FALLBACK: "fallback",
}
_SHOWN = 4


def assumed_text(assumptions: Assumptions) -> str:
    """Return the assumed sizes, like ones together, and the shares that rest on them."""
    alike: dict[tuple[int, SizeSource], list[str]] = {}
    for size in assumptions.sizes:
        alike.setdefault((size.value, size.source), []).append(size.symbol)
    parts = [
        f"{_names(symbols)} = {value:,} ({_WORDS[source]})"
        for (value, source), symbols in alike.items()
    ]
    shown = "; ".join([*parts[:_SHOWN], *(["..."] if len(parts) > _SHOWN else [])])
    return f"{shown}; {share_text(assumptions)}"


def share_text(assumptions: Assumptions) -> str:
    """Return the shares of time and peak that rest on assumed sizes."""
    time = f"{100 * assumptions.time_share:.1f} % of the time"
    if assumptions.peak_share is None:
        return f"{time} rests on it"
    return f"{time} and {100 * assumptions.peak_share:.1f} % of the peak rest on it"


def _names(symbols: list[str]) -> str:
    if len(symbols) <= _SHOWN:
        return ", ".join(symbols)
    return f"{symbols[0]} to {symbols[-1]} ({len(symbols)} sizes)"
