"""One step of a job on a GPU, taken apart: kernels belong to the operator that launched them,
NCCL's to the message they name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from apsched.calibrate.profile.match import Matched
from apsched.calibrate.profile.messages import Message, is_nccl, message_of
from apsched.calibrate.profile.trace import Trace, Work, ancestors


@dataclass(slots=True)
class DeviceTimes:
    """Times of one step on the device."""

    compute_us: dict[int, float]
    """Of each pair of the match: its kernels, not those of NCCL."""
    messages: list[tuple[Message, float]] = field(default_factory=list)
    """Transfers with their times."""
    transfer_us: dict[int, float] = field(default_factory=dict)
    """Of each pair that is a start node, the kernels of NCCL that it launched."""
    other_us: dict[str, float] = field(default_factory=dict)
    """Kernels that no node launched, by name."""
    span_us: float = 0.0
    """From the begin of the first kernel to the end of the last."""
    idle_us: float = 0.0
    """Of it, the time in which none of these kernels runs."""


def device_times(
    trace: Trace, matched: Matched, step: tuple[float, float], op_of_id: Mapping[int, int]
) -> DeviceTimes:
    """Return the times of one step: of kernels that its operators launched, whenever they ran, and
    of those during it that none did.
    """
    pair_of_op = {pair.op: k for k, pair in enumerate(matched.pairs)}
    times = DeviceTimes(compute_us=dict.fromkeys(range(len(matched.pairs)), 0.0))
    within = trace.ops_within(*step)
    kernels: list[Work] = []
    for kernel in trace.kernels:
        index = op_of_id.get(kernel.external_id, -1)
        if index not in within and (index >= 0 or not step[0] <= kernel.begin_us < step[1]):
            continue
        kernels.append(kernel)
        pair = next(
            (pair_of_op[above] for above in ancestors(trace.ops, index) if above in pair_of_op),
            None,
        )
        if is_nccl(kernel):
            message = message_of(kernel, trace.ops[index] if index >= 0 else None)
            if message is not None:
                times.messages.append((message, kernel.duration_us))
            if pair is not None:
                times.transfer_us[pair] = times.transfer_us.get(pair, 0.0) + kernel.duration_us
            elif message is None:
                times.other_us[kernel.name] = (
                    times.other_us.get(kernel.name, 0.0) + kernel.duration_us
                )
        elif pair is not None:
            times.compute_us[pair] += kernel.duration_us
        else:
            times.other_us[kernel.name] = times.other_us.get(kernel.name, 0.0) + kernel.duration_us
    if kernels:
        times.span_us = max(work.end_us for work in kernels) - min(
            work.begin_us for work in kernels
        )
        times.idle_us = times.span_us - _busy_us(kernels)
    return times


def _busy_us(kernels: list[Work]) -> float:
    """Return the time in which at least one of ``kernels`` runs."""
    busy_us, until = 0.0, -math.inf
    for work in sorted(kernels, key=lambda work: work.begin_us):
        busy_us += max(work.end_us - max(work.begin_us, until), 0.0)
        until = max(until, work.end_us)
    return busy_us


def op_of_external_id(trace: Trace) -> dict[int, int]:
    """Return for each ``External id`` the operator that has it."""
    return {op.external_id: index for index, op in enumerate(trace.ops) if op.external_id >= 0}
