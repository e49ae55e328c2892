"""All process ranks of a job must solve the same problem, or they run different orders and hang: so they agree on its costs first."""

import torch.distributed as dist

from apsched.costs.measured import MeasuredCosts, merged


def agreed(costs: MeasuredCosts) -> MeasuredCosts:
    """Return the median of what all process ranks found; every one must call this, and gets the same. Alone: ``costs``."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return costs
    parts: list[MeasuredCosts | None] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, costs)
    return merged([part for part in parts if part is not None])
