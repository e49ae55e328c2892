"""``apsched.optimize``: a graph module in, the same computation in a proven order out."""

from os import PathLike

import torch

from apsched.capture.graph_module import capture_graph_module
from apsched.compiler.scheduled import scheduled
from apsched.compiler.settings import Settings, memory_cap_of
from apsched.config import DEFAULT_COMPUTE_MOVE
from apsched.contention import Contention
from apsched.costs.model import CostModel
from apsched.plan import Plan


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
    contention: str | Contention | None = None,
    second_group: bool = False,
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
        As in :class:`apsched.Caps`; ``None`` is no limit. Compute moves only where it has something to hide.
    plan
        Rules for collectives by name of their parameter: an :class:`apsched.Plan`, or the path of a plan file. They need names, which
        graphs of AOTAutograd have on their outputs and placeholders.
    bitwise
        Reduce gradients in the buckets and payload order of eager FSDP2, so that sums are the same bit for bit. What that costs is
        ``apsched_result.bitwise``. Parameters must have names, too.
    contention
        Who slows whom, as for ``--contention`` (``"links,compute=1.2"``), or in full; by default nobody.
    second_group
        Also try gathers on a second process group of the same process ranks, so that they do not queue behind reductions, and keep the
        faster. The group is made once in the life of the process, by all of its process ranks.

    Raises
    ------
    InputError
        Where ``gm`` cannot be scheduled; the message names the node.
    InfeasibleError
        Where no schedule keeps the caps; the message says the least that would do.
    """
    memory_cap_of(memory_cap_bytes, "memory_cap_bytes")
    settings = Settings(
        cost_model=cost_model,
        memory_cap=memory_cap_bytes,
        bucket_cap=bucket_cap_bytes,
        max_topo_span=max_topo_span,
        max_prefetch=max_prefetch,
        in_flight_cap=in_flight_cap_bytes,
        max_compute_move=max_compute_move,
        plan=plan,
        bitwise=bitwise,
        contention=contention,
        second_group=second_group,
        seed=seed,
    )
    return scheduled(capture_graph_module(gm), settings)
