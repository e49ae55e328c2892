"""The profile that a calibration on a CPU reads: the second of its process.

In the first, the profiler's events come to lie between tensors in the heap, which grows by 40 MB in
every step; first touching those pages made compute look 1.6 times as slow. Events of later profiles
lie where those of the first did.
"""

from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

_WARM_UP = 2


def second_profile(step: Callable[[], None], num_steps: int, trace: Path) -> None:
    """Run ``step`` through two profiles of ``num_steps`` each, and write the second to
    ``trace``.
    """
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        schedule=schedule(wait=0, warmup=_WARM_UP, active=num_steps, repeat=2),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace)),
    ) as profiler:
        for _ in range(2 * (_WARM_UP + num_steps)):
            step()
            profiler.step()
