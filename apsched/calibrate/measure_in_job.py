"""Costs of a graph in the job that runs it: ``apsched.optimize(gm,
cost_model=apsched.measure_costs(gm))``.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from apsched.calibrate.ranks import job
from apsched.capture.graph_module import capture_graph
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import DEFAULT_CLUSTER, load_cluster
from apsched.costs.measured import MeasuredCosts
from apsched.costs.measured_model import MeasuredCostModel
from apsched.graph.export.export import export_graph
from apsched.torch_compat.graphs import process_group_names


def measure_costs(
    gm: torch.fx.GraphModule,
    *,
    cluster: str = DEFAULT_CLUSTER,
    known: MeasuredCosts | None = None,
    fused: bool = True,
) -> MeasuredCostModel:
    """Return a cost model with the times of the nodes and collectives of ``gm`` on this device and
    on the process groups that run here.

    Each distinct operation runs a few times with made-up values, each collective at several sizes.
    Where a process group runs, every process rank must call this, with its own graph; all get the
    same costs, the median, so that all solve the same problem. The formulas of ``cluster`` price
    operations that cannot run here, and groups that exist in name only. ``known`` costs of the same
    device are not measured again; hand in the same on every process rank. With ``fused``, operators
    that Inductor fuses keep the formulas' price: operators run one by one here; ``fused=False`` is
    for jobs that run them so (eager, ``aot_eager``).
    """
    with ThreadPoolExecutor(1, initializer=_on_device, initargs=(_device(),)) as thread:
        return thread.submit(_measured, gm, cluster, known, fused=fused).result()


def _device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _on_device(device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)


def _measured(
    gm: torch.fx.GraphModule, cluster: str, known: MeasuredCosts | None, *, fused: bool
) -> MeasuredCostModel:
    """As :func:`measure_costs`; to be called in a thread of its own, since a compiler that traces
    has fake tensors in its thread, and collectives on these do not end.
    """
    with job() as measuring_job:
        group_ranks = process_group_names() if dist.is_available() and dist.is_initialized() else {}
        formulas = ClusterCostModel(load_cluster(cluster), group_ranks, fused=fused)
        dag = export_graph(
            capture_graph(gm),
            formulas,
            group_ranks=group_ranks,
            cluster_name=formulas.cluster.name,
        )
        costs = measuring_job.measure(
            [(gm, dag)], cluster, formulas.cluster, known, fused=fused
        ).costs
    return MeasuredCostModel(costs, formulas, group_ranks)
