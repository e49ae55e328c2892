"""The pass for AutoParallel: on graphs of several groups, in place, under its configuration's
names; importing it changes nothing.
"""

import logging
import re
import subprocess
import sys

import pytest
import torch

from apsched.capture.fake_world import world
from apsched.compiler.settings import Settings
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.errors import InputError
from apsched.fx.collectives import is_collective
from apsched.integrations.autoparallel import (
    aten_autobucketing_config,
    aten_autobucketing_reordering_pass,
    scheduling_pass,
)
from apsched.integrations.estimated_costs import EstimatedCosts
from tests.helpers.graphs.toy_graphs import capture_toy
from tests.helpers.processes import WORKERS, run_sizes

QUICK = Settings(budget=0.0)


@pytest.fixture
def gm():
    with world(2) as running:
        yield capture_toy(next(iter(running.group_ranks)), 2, num_shards=4).module


def config(**values: object) -> object:
    return type("Config", (aten_autobucketing_config,), values)


def scheduled(gm: torch.fx.GraphModule, **values: object) -> torch.fx.GraphModule:
    return aten_autobucketing_reordering_pass(gm.graph, config(**values), settings=QUICK)


def num_launches(gm: torch.fx.GraphModule) -> int:
    return sum(is_collective(node) for node in gm.graph.nodes)


def test_the_graph_is_changed_in_place(gm):
    graph, before = gm.graph, num_launches(gm)
    assert scheduled(gm) is gm
    assert gm.graph is graph
    assert num_launches(gm) < before
    graph.lint()


def test_the_pass_of_modules_leaves_its_input(gm):
    before = gm.code
    run_pass = scheduling_pass(budget=0.0)
    assert num_launches(run_pass(gm, ())) < num_launches(gm)
    assert gm.code == before
    with pytest.raises(InputError, match="did you mean 'memory_cap'"):
        scheduling_pass(memory_cup="1GiB")


def test_limits_are_kept(gm):
    whole = num_launches(gm)
    result = scheduled(
        gm,
        max_in_flight_gb=1.0,
        max_topo_span=7,
        max_compute_pre_fetch=2,
        collective_bucketing=False,
    ).meta["apsched_result"]
    assert num_launches(gm) == whole, "without bucketing each stays alone"
    caps = result.caps
    assert (caps.in_flight_cap_bytes, caps.max_topo_span, caps.bucket_cap_bytes) == (2**30, 7, 0)
    assert caps.max_prefetch >= 2
    assert result.round_trip_exact is True


def test_what_changes_nothing_is_said(gm, caplog):
    """AutoParallel's own defaults: a class with names that have no counterpart here, and one that
    a later version may have.
    """
    with caplog.at_level(logging.WARNING, logger="apsched.integrations.autoparallel"):
        scheduled(
            gm,
            max_coll_distance=100,
            compute_overlap_multipler=1.0,
            save_trace=True,
            bucket_all_all_reduce_groups=False,
            of_a_later_version=7,
            _counter=0,
        )
    assert sorted(message.split(" changes nothing here: ")[0] for message in caplog.messages) == [
        "max_coll_distance=100",
        "of_a_later_version=7",
        "save_trace=True",
    ]


def test_unknown_names_are_refused(gm):
    with pytest.raises(
        InputError, match=r"found 'max_in_fligth_gb'; did you mean max_in_flight_gb\?"
    ):
        scheduled(gm, max_in_fligth_gb=1.0)
    with pytest.raises(InputError, match="expected a graph of a GraphModule"):
        aten_autobucketing_reordering_pass(torch.fx.Graph(), config())


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_in_flight_gb", "2", "a number of GiB >= 0 or None"),
        ("max_in_flight_gb", float("inf"), "a number of GiB >= 0 or None"),
        ("pre_bucketing_fsdp_collectives_bucket_cap_mb", -5, "a number of MiB >= 0 or None"),
        ("max_compute_pre_fetch", 1.5, "a whole number >= 0 or None"),
        ("max_topo_span", True, "a whole number >= 0 or None"),
        ("collective_bucketing", "no", "True or False or None"),
        ("custom_runtime_estimation", 1.0, "a function or None"),
    ],
)
def test_a_wrong_value_is_refused_by_its_own_name(gm, name, value, expected):
    message = f"configs.{name}: expected {expected}, found {value!r}"
    with pytest.raises(InputError, match=re.escape(message)):
        scheduled(gm, **{name: value})


def test_estimates_of_the_users_own_are_the_prices(gm):
    """Twice as long in milliseconds: the step takes twice as long, but for launches and copies."""
    formulas = ClusterCostModel(load_cluster("h100"))
    times = {1: 0.0, 2: 0.0}
    for factor in times:

        def estimate(
            node: torch.fx.Node, override_size: int | None = None, factor: int = factor
        ) -> float | None:
            return None if node.op != "call_function" else factor * 1.0

        costs = EstimatedCosts(estimate, formulas, gm.graph, {})
        starts = [node for node in gm.graph.nodes if is_collective(node)]
        computes = [n for n in gm.graph.nodes if n.op == "call_function" and n not in starts]
        assert {costs.compute_us(node) for node in computes} == {1000.0 * factor}
        assert costs.compute_us(starts[0]) == formulas.compute_us(starts[0])
        times[factor] = costs.collective_us("all_gather", "0", 2, 10**6)
    assert times[2] == pytest.approx(2 * times[1])
    assert EstimatedCosts(lambda *_: None, formulas, gm.graph, {}).collective_us(
        "all_gather", "0", 2, 10**6
    ) == formulas.collective_us("all_gather", "0", 2, 10**6)
    result = scheduled(gm, custom_runtime_estimation=estimate).meta["apsched_result"]
    assert result.step_time_us > 2000.0


def test_held_order_is_for_inductor(gm):
    assert any(
        "control_deps" in str(node.target)
        for node in scheduled(gm, insert_overlap_deps=True).graph.nodes
    )


def test_schedulers_that_run_after_the_pass_are_named(gm):
    """``autoparallel_backend()`` turns torch's own on unless ``overlap_scheduling=False``."""
    before = num_launches(gm)
    on = {"aten_distributed_optimizations.enable_overlap_scheduling": True}
    with torch._inductor.config.patch(on | {"post_grad_custom_post_pass": lambda graph: None}):
        with pytest.raises(InputError, match="enable_overlap_scheduling = True"):
            scheduled(gm)
        assert num_launches(gm) == before
    with torch._inductor.config.patch(on):  # outside of Inductor nothing runs after the pass
        assert num_launches(scheduled(gm)) < before


def test_importing_it_changes_nothing_in_torch():
    """AutoParallel's own module replaces functions of torch when it is imported."""
    code = """
import sys, types, importlib
for name in (
    "bucketing", "fsdp", "overlap_scheduling", "overlap_preserving_bucketer",
    "overlap_manual_scheduling",
):
    importlib.import_module("torch._inductor.fx_passes." + name)
import apsched.models.build, apsched.pipeline.steps, apsched.api, apsched.solver
def seen():
    return {m: {k: id(v) for k, v in vars(module).items() if not isinstance(v, types.ModuleType)}
            for m, module in list(sys.modules.items())
            if m.split(".")[0] == "torch" and isinstance(module, types.ModuleType)}
before = seen()
import apsched.integrations.autoparallel
after = seen()
changed = [(m, k) for m, names in before.items() for k, v in after[m].items()
           if names.get(k) != v and not k.startswith("__")]
assert not changed, changed
assert "autoparallel" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[int, list[dict]]:
    return run_sizes(
        WORKERS / "graphs/autoparallel_worker.py",
        tmp_path_factory.mktemp("autoparallel"),
        timeout_s=500,
    )


@pytest.mark.parametrize(
    ("size", "mesh", "num_groups"),
    [(2, "fsdp=2", 1), (2, "tp=2", 1), (4, "fsdp=2,tp=2", 2), (4, "replicate=2,fsdp=2", 2)],
)
@pytest.mark.ranks
def test_graphs_compute_the_same_bits(jobs, size, mesh, num_groups):
    for report in jobs[size]:
        found = report[mesh]
        assert found["unequal"] == []
        assert found["same loss"] is True
        assert max(found["groups"]) == num_groups
        before, in_place = found["launches"]
        assert sum(in_place) < sum(before)
        assert found["same module"] == [True, True]
        assert found["left alone"] is True
        assert found["chosen"] == [2**28, 2**28]


@pytest.mark.ranks
def test_two_groups_of_the_same_process_ranks(jobs):
    """Collectives of two groups on two processes, one among the other."""
    found = [report["two groups"] for report in jobs[2]]
    assert found[0] == found[1]
    assert (found[0]["groups"], found[0]["unequal"]) == (2, [])
    before, in_place = found[0]["launches"]
    assert in_place < before


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.ranks
def test_launches_are_the_same_on_every_process_rank(jobs, size):
    """By place in the graph: names of groups differ between process ranks."""
    reports = jobs[size]
    for mesh in {*reports[0]} - {"two groups"}:
        shapes = set()
        for report in reports:
            order = report[mesh]["order"]
            renamed = [
                [list(dict.fromkeys(names)).index(name) for name in names] for names in order
            ]
            shapes.add(str(renamed))
        assert len(shapes) == 1
