"""``apsched.optimize``: a graph module in, the same computation in a proven order out."""

from os import PathLike

import torch

from apsched.capture.graph_module import capture_graph_module
from apsched.config import DEFAULT_COMPUTE_MOVE, Caps, SolveOptions
from apsched.costs.cluster import DEFAULT_CLUSTER, load_cluster
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.measured_model import MeasuredCostModel
from apsched.costs.model import CostModel
from apsched.errors import InfeasibleError, InputError
from apsched.options import MemoryCap, parse_memory_cap
from apsched.pipeline import explain_infeasible, export_graph, resolve_caps, rewrite, solve_graph, under_plan, with_round_trip
from apsched.plan import Plan
from apsched.plan_file import as_plan
from apsched.progress import Progress
from apsched.torch_private import process_group_names

RESULT = "apsched_result"


def optimize(
    gm: torch.fx.GraphModule,
    *,
    cost_model: CostModel | None = None,
    memory_cap_bytes: int | str | None = None,
    bucket_cap_bytes: int | None = None,
    max_topo_span: int | None = None,
    max_prefetch: int | None = None,
    in_flight_cap_bytes: int | None = None,
    max_compute_move: int | None = DEFAULT_COMPUTE_MOVE,
    plan: Plan | str | PathLike[str] | None = None,
    bitwise: bool = False,
    seed: int = 0,
) -> torch.fx.GraphModule:
    """Return ``gm`` in the fastest order and with the best buckets that the caps allow; ``gm`` itself stays as it is.

    The :class:`apsched.Result` (schedule, bound, gap, figures) is at hand as ``fast.apsched_result`` and ``fast.meta["apsched_result"]`` of
    the module returned, which was exported and simulated again to check it. Every node needs ``meta["val"]``, as the graphs that compilers
    hand to their backends have it. Who runs the result node by node has its order; full Inductor would change it, and keeps it where
    :func:`apsched.hold_order` has been over it.

    Parameters
    ----------
    cost_model
        Prices of nodes and collectives; by default those of the cluster ``h100``, with the process groups that run here.
    memory_cap_bytes
        Live bytes at any node. Text is read as by ``--memory-cap``: ``"none"``, ``"floor"``, ``"60GiB"``. ``None`` is the memory of the
        cost model's device, and no cap where the model is one of the user's own.
    bucket_cap_bytes, max_topo_span, max_prefetch, in_flight_cap_bytes, max_compute_move
        As in :class:`apsched.Caps`; ``None`` is no limit. Compute moves only where a collective is on the path.
    plan
        Rules for collectives by name of their parameter: an :class:`apsched.Plan`, or the path of a plan file. They need names, which
        graphs of AOTAutograd have on their outputs and placeholders.
    bitwise
        Reduce gradients in the buckets and payload order of eager FSDP2, so that sums are the same bit for bit. What that costs is
        ``apsched_result.bitwise``. Parameters must have names, too.

    Raises
    ------
    InputError
        Where ``gm`` cannot be scheduled; the message names the node.
    InfeasibleError
        Where no schedule keeps the caps; the message says the least that would do.
    """
    group_ranks = _group_ranks()
    model = cost_model if cost_model is not None else ClusterCostModel(load_cluster(DEFAULT_CLUSTER), group_ranks)
    cluster = model.cluster if isinstance(model, ClusterCostModel | MeasuredCostModel) else None
    progress = Progress(quiet=True)
    graph = export_graph(
        capture_graph_module(gm),
        model,
        cluster=cluster.name if cluster else "",
        group_ranks=group_ranks,
        device_memory_bytes=cluster.device.memory_bytes if cluster else None,
        progress=progress,
    )
    (graph,) = under_plan((graph,), as_plan(plan), bitwise=bitwise)
    caps = Caps(
        bucket_cap_bytes=bucket_cap_bytes,
        max_topo_span=max_topo_span,
        max_prefetch=max_prefetch,
        in_flight_cap_bytes=in_flight_cap_bytes,
        max_compute_move=max_compute_move,
    )
    memory_cap = _memory_cap(memory_cap_bytes, has_device=cluster is not None)
    result = solve_graph(graph, resolve_caps(graph, caps, memory_cap, progress), SolveOptions(seed=seed), progress)
    if result.best is None:
        raise InfeasibleError(explain_infeasible(result))
    rewritten = rewrite(graph, result.best, progress)
    result = with_round_trip(result, rewritten)
    rewritten.module.meta[RESULT] = result
    setattr(rewritten.module, RESULT, result)
    return rewritten.module


def _memory_cap(stated: int | str | None, *, has_device: bool) -> MemoryCap | None:
    """Return the cap as stated; ``None`` stands for the device's memory."""
    match stated:
        case None:
            return None if has_device else MemoryCap()
        case str():
            return parse_memory_cap(stated, "memory_cap_bytes")
        case int() if not isinstance(stated, bool) and stated >= 0:
            return MemoryCap(size_bytes=stated)
    raise InputError(f"memory_cap_bytes: expected a whole number >= 0, a text such as '60GiB', or None; found {stated!r}")


def _group_ranks() -> dict[str, tuple[int, ...]]:
    """Return the process groups that run in this process."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return {}
    return process_group_names()
