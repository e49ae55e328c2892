"""For AutoParallel: a pass for its pipeline, and a drop-in for its
``aten_autobucketing_reordering_pass(graph, configs)``.

    from apsched.integrations.autoparallel import aten_autobucketing_config,
    aten_autobucketing_reordering_pass

AutoParallel itself is not imported, and importing this changes nothing in torch.
"""

import difflib
import logging
from collections.abc import Callable
from dataclasses import replace
from math import ceil, isfinite
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from apsched.compiler.inductor_settings import check_inductor
from apsched.compiler.ranks.agreement import agreement_of
from apsched.compiler.schedule_captured import RESULT, groups_of
from apsched.compiler.schedule_graph import all_or_none, schedule_graph
from apsched.compiler.settings import Settings
from apsched.config import is_number
from apsched.costs.clusters.cluster import load_cluster
from apsched.errors import InputError
from apsched.fx.collectives import is_collective, is_wait_tensor
from apsched.integrations.estimated_costs import EstimatedCosts
from apsched.torch_compat.compilers import inductor_setting, replace_graph

logger = logging.getLogger(__name__)

_GIB, _MIB = 2**30, 2**20
_PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "_grouped_mm",
    "convolution",
    "convolution_backward",
)

_IGNORED = {
    "max_coll_distance": "a limit on work; `budget` of apsched's settings is one",
    "compute_overlap_multipler": (
        "costs decide which compute hides a collective; state them as `cost_model` of apsched's"
        " settings"
    ),
    "max_memory_increase_gb": "the peak is exact; state it as `memory_cap` of apsched's settings",
    "max_memory_increase_ratio": (
        "the peak is exact; state it as `memory_cap` of apsched's settings"
    ),
    "max_off_bucket_gb": (
        "tensors outside of the buckets count in `memory_cap` of apsched's settings, as all others"
    ),
    "save_trace": "no trace is written; the graph module's meta['apsched_result'] has the timeline",
    "collective_estimator": (
        "costs come from custom_runtime_estimation, or from `cluster` of apsched's settings"
    ),
    "compute_estimator": (
        "costs come from custom_runtime_estimation, or from `cluster` of apsched's settings"
    ),
    "enable_fusion_regions": "kernels are fused as Inductor does it",
    "bucket_exposed_first": "buckets, order and memory are solved as one",
    "bucket_only_internode_comms": "which buckets pay follows from costs",
    "bucket_all_all_reduce_groups": "the collectives of every group are scheduled",
    "bucket_mode": "buckets are written in apsched's own form",
    "prioritize_bucketing_during_scheduling": "buckets, order and memory are solved as one",
    "pre_bucketing_fsdp_collectives": "buckets, order and memory are solved as one",
    "log_final_collectives_estimations": (
        "the graph module's meta['apsched_result'] has the timeline"
    ),
}
"""Names that have no counterpart -> the behaviour or the setting in their place."""

_NEAR = 0.85
"""Names that are as similar as this are misspelt; others may be of a newer AutoParallel."""

_USUAL = {
    "compute_overlap_multipler": 1.0,
    "save_trace": False,
    "bucket_all_all_reduce_groups": False,
    "pre_bucketing_fsdp_collectives": True,
    "prioritize_bucketing_during_scheduling": True,
    "log_final_collectives_estimations": False,
}
"""Values without effect."""


def _is_size(value: Any) -> bool:
    return is_number(value) and isfinite(value) and value >= 0


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "max_in_flight_gb": ("a number of GiB >= 0", _is_size),
    "pre_bucketing_fsdp_collectives_bucket_cap_mb": ("a number of MiB >= 0", _is_size),
    "max_compute_pre_fetch": ("a whole number >= 0", _is_count),
    "max_topo_span": ("a whole number >= 0", _is_count),
    "collective_bucketing": ("True or False", lambda value: isinstance(value, bool)),
    "insert_overlap_deps": ("True or False", lambda value: isinstance(value, bool)),
    "custom_runtime_estimation": ("a function", callable),
}
"""Name -> the values that it takes other than ``None``."""


class aten_autobucketing_config:  # noqa: N801
    """The names that AutoParallel's configuration has, without limits of their own: ``None`` is
    none.
    """

    max_in_flight_gb: float | None = None
    """GiB of collectives started and not yet waited for."""
    max_compute_pre_fetch: int | None = None
    """Matrix products between a launch and the need; times the compute nodes that the graph has for
    each of them.
    """
    max_topo_span: int | None = None
    """Positions between the first and the last member of a bucket."""
    collective_bucketing: bool = True
    custom_runtime_estimation: Callable[..., float | None] | None = None
    """``(node, override_size) -> milliseconds``, or ``None`` where the cluster's formulas hold."""
    insert_overlap_deps: bool = False
    """Hold the order by control dependencies: for full Inductor only."""


def aten_autobucketing_reordering_pass(
    gm: Graph, configs: Any, *, settings: Settings | None = None
) -> GraphModule:
    """Schedule the graph ``gm`` in place under ``configs``; returns its module, compiled.

    ``configs`` is AutoParallel's class or any object with such attributes; its limits are caps
    here. A log line names the replacement of each attribute without a counterpart, and names that
    are not known here. ``settings`` has the rest: cluster, memory cap, plan, budget, handling of
    errors.

    Raises
    ------
    InputError
        for a name in ``configs`` that is nearly one of those known, for a value of the wrong type,
        and in Inductor where torch's own overlap scheduling is on, which runs after this pass.
    """
    module = gm.owning_module
    if module is None:
        raise InputError(
            "expected a graph of a GraphModule, found one of none; wrap it:"
            " torch.fx.GraphModule(root, graph)"
        )
    base = settings or Settings()

    def chosen_settings() -> tuple[dict[str, Any], Settings] | None:
        stated = _stated(configs)
        if not any(is_collective(node) for node in gm.nodes):
            return None
        if inductor_setting("post_grad_custom_post_pass") is not None:
            check_inductor()
        return stated, _settings(stated, base, gm)

    found = all_or_none(
        lambda: agreement_of(module, base.deadline_s),
        None,
        base,
        "graph",
        lambda _: (chosen_settings(), {}),
    )
    if found is not None:
        stated, chosen = found
        fast = schedule_graph(module, chosen, held=bool(stated.get("insert_overlap_deps")))
        if fast is not module:
            replace_graph(gm, fast)
            module.meta[RESULT] = fast.meta[RESULT]
    module.recompile()
    return module


def scheduling_pass(**settings: Any) -> Callable[..., GraphModule]:
    """Return the pass ``(gm, example_inputs=None) -> gm`` for AutoParallel's pipeline of forward,
    backward or joint graphs.

    ``settings`` are those of :class:`apsched.compiler.settings.Settings`. The input graph module
    stays unchanged.
    """
    chosen = Settings.of(settings)

    def apsched_scheduling_pass(gm: GraphModule, example_inputs: Any = None) -> GraphModule:
        return schedule_graph(gm, chosen)

    return apsched_scheduling_pass


def _stated(configs: Any) -> dict[str, Any]:
    """Return the public names of a configuration, of a class or an object, with their values."""
    names = [name for name in dir(configs) if not name.startswith("_")]
    known = (*_VALUES, *_IGNORED)
    for name in names:
        if name in known:
            continue
        if near := difflib.get_close_matches(name, known, n=1, cutoff=_NEAR):
            raise InputError(
                f"configs: expected names of aten_autobucketing_config, found {name!r}; did you"
                f" mean {near[0]}?"
            )
        logger.warning(
            "%s=%r changes nothing here: apsched does not know this name",
            name,
            getattr(configs, name),
        )
    stated = {name: getattr(configs, name) for name in names}
    for name, (expected, fits) in _VALUES.items():
        value = stated.get(name)
        if value is not None and not fits(value):
            raise InputError(f"configs.{name}: expected {expected} or None, found {value!r}")
    return stated


def _settings(stated: dict[str, Any], settings: Settings, graph: Graph) -> Settings:
    """Return ``settings`` with the limits that the configuration states."""
    for name, instead in _IGNORED.items():
        value = stated.get(name)
        if value is not None and value != _USUAL.get(name):
            logger.warning("%s=%r changes nothing here: %s", name, value, instead)
    changes: dict[str, Any] = {}
    if (gib := stated.get("max_in_flight_gb")) is not None:
        changes["in_flight_cap"] = int(gib * _GIB)
    if (mib := stated.get("pre_bucketing_fsdp_collectives_bucket_cap_mb")) is not None:
        changes["bucket_cap"] = int(mib * _MIB)
    if stated.get("collective_bucketing") is False:
        changes["bucket_cap"] = 0
    if (span := stated.get("max_topo_span")) is not None:
        changes["max_topo_span"] = span
    if (products := stated.get("max_compute_pre_fetch")) is not None:
        changes["max_prefetch"] = products * _computes_per_product(graph)
        logger.info(
            "max_compute_pre_fetch=%d products are taken as max_prefetch=%d compute nodes",
            products,
            changes["max_prefetch"],
        )
    if (estimation := stated.get("custom_runtime_estimation")) is not None:
        groups = groups_of(graph, settings)
        formulas = settings.prices(groups)
        changes |= {
            "cost_model": EstimatedCosts(estimation, formulas, graph, groups),
            "cluster": None,
        }
        if settings.memory_cap is None and settings.cost_model is None:
            changes["memory_cap"] = load_cluster(settings.known_cluster).device.memory_bytes
    return replace(settings, **changes)


def _computes_per_product(graph: Graph) -> int:
    """Return the number of compute nodes that the graph has for each matrix product, rounded up:
    torch counts products only.
    """
    operators = [
        node.target
        for node in graph.nodes
        if node.op == "call_function" and not is_collective(node) and not is_wait_tensor(node)
    ]
    computes = [
        target
        for target in operators
        if isinstance(target, torch._ops.OpOverload) and not target.is_view
    ]
    products = sum(
        target.overloadpacket.__name__ in _PRODUCTS or "_scaled_dot_product" in str(target)
        for target in computes
    )
    return ceil(len(computes) / products) if products else 1
