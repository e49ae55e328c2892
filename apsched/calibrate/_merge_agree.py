"""All process ranks of a job must solve the same problem, or they run different orders and hang: so they agree on its costs first."""

import torch.distributed as dist

from apsched.costs.measured import MeasuredCosts, merged
from apsched.errors import InputError


def agreed(costs: MeasuredCosts) -> MeasuredCosts:
    """Return the median of what all process ranks found; every one must call this, and gets the same. Alone: ``costs``."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return costs
    parts: list[MeasuredCosts | None] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, costs)
    return merged([part for part in parts if part is not None])


def all_measured(failure: Exception | None) -> None:
    """Raise on every process rank where one of them could not measure: who went on alone would wait for it for ever."""
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, None if failure is None else f"{type(failure).__name__}: {failure}")
    failed = [(rank, reason) for rank, reason in enumerate(reasons) if reason is not None]
    if failed:
        rank, reason = failed[0]
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise InputError(f"process rank {rank}{more} could not measure its operators: {reason}; measure where that is mended") from failure
