"""Cut a kernel where no schedule that leaves kernels whole is known to fit.

Whole kernels are cheaper, so a kernel is cut only for a memory cap below the least peak that is
known with all of them whole. Storages of the kernel then live shorter: a second piece that
allocates storages alive at the peak may come later; a first piece that is the last to need storages
alive there may come earlier. The search tries the cuts of most such bytes, among equal ones those
nearest to the peak, judges each by the least peak of all orders that it finds with it, and makes
the best; then it looks for the next one, as long as that lowers the peak. It stops at the first cut
that fits the cap.
"""

from dataclasses import dataclass, replace

import numpy as np

from apsched.config import SolveOptions
from apsched.kinds import KernelCut
from apsched.schedule.kernel_cuts import pieces, with_cut
from apsched.schedule.memory import lifetimes, live_bytes
from apsched.schedule.schedule import StepKind
from apsched.solver.arrays.instance import Instance
from apsched.solver.program.to_schedule import expand
from apsched.solver.reorder.lower_peak import lower_peak
from apsched.solver.reorder.min_memory import LeastMemory, is_small, least_memory_with
from apsched.solver.reorder.reorder import ComputeMover
from apsched.solver.search.just_in_time import just_in_time

_TRIED = 6
"""Cuts that are tried at a peak."""
_MOST_CUTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """An instance, perhaps with some of its kernels cut, and the facts found about it."""

    instance: Instance
    mover: ComputeMover | None
    floor: LeastMemory

    @property
    def nothing_fits(self) -> bool:
        """Whether the memory cap is below the bound on the least peak."""
        cap_bytes = self.instance.caps.memory_cap_bytes
        return cap_bytes is not None and cap_bytes < self.floor.bound_bytes


def cut_to_fit(whole: Fitting, options: SolveOptions) -> Fitting:
    """Return ``whole`` with kernels cut until its least known peak is within the cap on memory, or
    nothing lowers it.
    """
    cap, best = whole.instance.caps.memory_cap_bytes, whole
    if cap is None or whole.mover is None or whole.nothing_fits:
        return whole
    for _ in range(_MOST_CUTS):
        if best.floor.peak_bytes <= cap:
            break
        found = best
        for cut in _cuts_at_peak(best)[:_TRIED]:
            found = min(found, _with_cut(best, cut, options, cap), key=lambda f: f.floor.peak_bytes)
            if found.floor.peak_bytes <= cap:
                return found
        if found is best:
            break
        best = found
    return best


def _with_cut(whole: Fitting, cut: KernelCut, options: SolveOptions, cap_bytes: int) -> Fitting:
    instance = Instance.of(with_cut(whole.instance.problem, cut), whole.instance.caps)
    mover = ComputeMover(instance)
    if is_small(instance.problem, mover.orders):
        floor = least_memory_with(instance, mover, options)
    else:  # the bound, and what is known as captured, are those of whole kernels
        lowered = lower_peak(mover, instance.without_memory_cap().caps, cap_bytes)
        least = min((whole.floor.peak_bytes, *(lower.peak_bytes for lower in lowered)))
        floor = replace(whole.floor, peak_bytes=least, lowered=lowered)
    return Fitting(instance=instance, mover=mover, floor=floor)


def _cuts_at_peak(fitting: Fitting) -> list[KernelCut]:
    """Return the cuts, those first that may free the most bytes at the peak of the least known."""
    assert fitting.mover is not None
    blocks = fitting.floor.lowered[-1].blocks if fitting.floor.lowered else fitting.mover.captured
    moved = fitting.mover.moved(blocks)
    problem = moved.problem
    least = just_in_time(moved.without_memory_cap())
    if least is None:
        return []
    schedule = expand(moved, least.program)
    peak = int(np.argmax(live_bytes(problem, schedule)))
    at = {step.index: k for k, step in enumerate(schedule.steps) if step.kind is StepKind.NODE}
    alive = [
        problem.storages[life.storage]
        for life in lifetimes(problem, schedule)
        if life.first <= peak <= life.last and life.storage >= 0
    ]
    born: dict[int, int] = {}
    freed: dict[int, int] = {}
    for storage in alive:
        if storage.birth in at:
            born[storage.birth] = born.get(storage.birth, 0) + storage.size_bytes
        last = max((node for node in storage.uses if node in at), key=at.__getitem__, default=-1)
        freed[last] = freed.get(last, 0) + storage.size_bytes
    worth: list[tuple[int, int, int, KernelCut]] = []
    for cut in problem.cuts:
        first, second = pieces(problem, cut)
        gained = (
            sum(born.get(node, 0) for node in second)
            if at[first[0]] < peak
            else sum(freed.get(node, 0) for node in first)
        )
        worth.append((-gained, abs(at[cut.node] - peak), cut.node, cut))
    return [cut for *_, cut in sorted(worth, key=lambda entry: entry[:-1])]
