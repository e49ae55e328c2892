"""The line from a captured graph to a scheduled one: export, problem, caps, solve, verify, write back, round trip."""

import torch

from apsched.capture.captured import CapturedGraph
from apsched.compiler.settings import Settings
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.measured_model import MeasuredCostModel
from apsched.errors import InfeasibleError
from apsched.infeasible import explain_infeasible
from apsched.options import MemoryCap
from apsched.pipeline import export_graph, resolve_caps, rewrite, solve_graph, under_plan, with_round_trip
from apsched.plan_file import as_plan
from apsched.progress import Progress
from apsched.torch_private import process_group_names

RESULT = "apsched_result"
"""Key in ``meta`` of a scheduled module, and its attribute: the :class:`apsched.Result`."""


def scheduled(captured: CapturedGraph, settings: Settings) -> torch.fx.GraphModule:
    """Return the module of ``captured`` in the fastest order that ``settings`` allow; what was captured stays as it is.

    ``InputError`` where the graph cannot be scheduled, ``InfeasibleError`` where no schedule keeps the caps.
    """
    group_ranks = running_groups()
    model = settings.prices(group_ranks)
    cluster = model.cluster if isinstance(model, ClusterCostModel | MeasuredCostModel) else None
    progress = Progress(quiet=not (settings.progress and process_rank() == 0))
    graph = export_graph(
        captured,
        model,
        cluster=cluster.name if cluster else "",
        group_ranks=group_ranks,
        device_memory_bytes=cluster.device.memory_bytes if cluster else None,
        progress=progress,
    )
    (graph,) = under_plan((graph,), as_plan(settings.plan), bitwise=settings.bitwise)
    stated = settings.stated_memory_cap
    if stated is None and cluster is None:
        stated = MemoryCap()
    result = solve_graph(graph, resolve_caps(graph, settings.caps, stated, progress), settings.solve_options, progress)
    if result.best is None:
        raise InfeasibleError(explain_infeasible(result))
    rewritten = rewrite(graph, result.best, progress)
    result = with_round_trip(result, rewritten)
    rewritten.module.meta[RESULT] = result
    setattr(rewritten.module, RESULT, result)
    return rewritten.module


def running_groups() -> dict[str, tuple[int, ...]]:
    """Return name -> process ranks of the process groups that run in this process."""
    return process_group_names() if _is_distributed() else {}


def process_rank() -> int:
    """Return this process's rank; 0 where no process group runs."""
    return torch.distributed.get_rank() if _is_distributed() else 0


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
