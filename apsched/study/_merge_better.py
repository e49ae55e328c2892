"""Two answers to one question are one: the better schedule, the higher bound."""

from dataclasses import replace

from apsched.study.work import ALONG, BETTERED, INFEASIBLE, Outcome
from apsched.units import ticks_to_us


def better_of(known: Outcome, new: Outcome) -> Outcome:
    """Return the better of both; ``known`` itself where ``new`` adds nothing. Bounds hold for both, whoever proved them."""
    best = known if known.value[:4] <= new.value[:4] else new
    if best.status == INFEASIBLE:
        return best
    assert best.step_ticks is not None
    higher = max(known, new, key=lambda outcome: outcome.bound_ticks)
    if higher.bound_ticks > best.bound_ticks:
        bound_ticks = min(higher.bound_ticks, best.step_ticks)
        status = "optimal" if bound_ticks == best.step_ticks else best.status
        gap = (best.step_ticks - bound_ticks) / best.step_ticks if best.step_ticks else 0.0
        report = {**best.report, "bound_us": ticks_to_us(bound_ticks), "gap": gap, "status": status}
        best = replace(best, bound_ticks=bound_ticks, bound_source=higher.bound_source, status=status, report=report)
    solve = next((outcome for outcome in (known, new) if outcome.how != ALONG), None)
    if solve is None or best.how != ALONG:
        return best
    return replace(best, how=BETTERED, solved_floor_bytes=solve.solved_floor_bytes, solved_peak_bytes=solve.solved_peak_bytes)
