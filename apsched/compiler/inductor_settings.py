"""Inductor's settings that would undo a schedule: turned off by the backend, refused by the
pass.
"""

from typing import Any

from apsched.errors import InputError
from apsched.torch_compat.compilers import inductor_setting

OFF: dict[str, Any] = {
    "_fuse_ddp_communication": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "aten_distributed_optimizations.enable_low_contention_collectives": False,
    "aten_distributed_optimizations.allow_comms_decompositions": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
    "dedup_reduce_scatters": False,
    "reorder_for_compute_comm_overlap": False,
}
"""Setting -> value without effect: each of these buckets, replaces or moves collectives, the first
one before the schedule is made, the others after that.
"""

IN_ORDER: dict[str, Any] = {"reorder_for_peak_memory": False, "allow_buffer_reuse": False}
"""Inductor sorts kernels by its own estimate of memory otherwise, and keeps a dead buffer for a
later kernel where that estimate allows it; the predicted peak is that of the order of the graph,
where a buffer is freed behind its last use. This undoes no schedule: the pass accepts it.
"""


def switched_on() -> dict[str, Any]:
    """Return which of these settings have an effect now, with their values."""
    values = {name: inductor_setting(name) for name in OFF}
    return {
        name: value for name, value in values.items() if value != OFF[name] and value is not None
    }


def check_inductor() -> None:
    """Raise InputError where Inductor would move or bucket collectives after this."""
    found = switched_on()
    if found:
        settings_text = ", ".join(f"{name} = {value!r}" for name, value in found.items())
        raise InputError(
            "torch._inductor.config: expected Inductor's own passes over collectives to be off,"
            f" found {settings_text}; turn them off (apsched.backend(inductor=True) does it by"
            " itself): they would undo the schedule"
        )
