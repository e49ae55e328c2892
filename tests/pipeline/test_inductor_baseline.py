"""torch's own schedulers run as baselines: without a GPU, at our costs, on a copy, and nothing of
them is left behind.
"""

import importlib
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from apsched.api import solve
from apsched.capture.captured import CapturedGraph
from apsched.capture.fake_world import world
from apsched.config import Caps, SolveOptions
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.fx.collectives import describe, group_sizes, is_collective
from apsched.graph.export.export import export_graph
from apsched.models.mesh import MeshSpec
from apsched.models.preset_capture import capture_preset
from apsched.pipeline.inductor_baseline import (
    InductorRun,
    run_inductor,
    run_inductor_manual,
    score_run,
    torch_scores,
)
from apsched.problem.build import build_problem
from apsched.problem.problem import Problem
from apsched.report.summary import graph_json, summary_lines
from apsched.schedule.schedule import as_captured
from apsched.schedule.simulate import simulate
from apsched.torch_compat import graphs as torch_private
from benchmarks.common.live_bytes import live_bytes_of, run_counting
from tests.conftest import Run
from tests.helpers.graphs.instrumented import real_inputs
from tests.helpers.processes import WORKERS, run_processes
from tests.workers.training.inductor_baseline_worker import MESHES

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@dataclass(frozen=True, kw_only=True)
class Made:
    """A captured graph, and what both schedulers made of it."""

    captured: CapturedGraph
    problem: Problem
    costs: ClusterCostModel
    ranks: dict[str, tuple[int, ...]]
    code_before: str
    runs: tuple[InductorRun, ...]

    def export(self, run: InductorRun):
        return export_graph(
            replace(self.captured, module=run.module), self.costs, group_ranks=self.ranks
        )

    def score(self, run: InductorRun, caps: Caps | None = None):
        return score_run(
            run, self.captured, self.problem, self.costs, caps or Caps(), group_ranks=self.ranks
        )


@pytest.fixture(scope="module", params=MESHES)
def both_ways(request: pytest.FixtureRequest) -> Iterator[tuple[Made, ...]]:
    """Forward and backward of a small preset, scheduled where triton cannot be imported."""
    mesh = MeshSpec.parse(request.param)
    with world(mesh.world_size), pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton", None)
        capture = capture_preset("llama3-debug", mesh=mesh, seq_len=64)
        ranks = dict(capture.group_ranks)
        costs = ClusterCostModel(load_cluster("h100"), ranks)
        made = []
        for captured in capture.graphs:
            code = captured.module.code
            problem = build_problem(export_graph(captured, costs, group_ranks=ranks))
            runs = (
                run_inductor(captured, costs, group_ranks=ranks),
                run_inductor_manual(captured, problem),
            )
            made.append(
                Made(
                    captured=captured,
                    problem=problem,
                    costs=costs,
                    ranks=ranks,
                    code_before=code,
                    runs=runs,
                )
            )
        yield tuple(made)


def test_this_machine_has_no_cuda() -> None:
    assert not torch.cuda.is_available(), (
        "these tests say nothing about machines without a GPU when they run on one"
    )


def test_the_captured_graph_stays_as_it_was(both_ways: tuple[Made, ...]) -> None:
    for made in both_ways:
        assert made.captured.module.code == made.code_before
        for run in made.runs:
            assert run.seconds > 0
            run.module.graph.lint()
            assert run.module.code != made.code_before
            inputs = [
                [n.name for n in m.graph.find_nodes(op="placeholder")]
                for m in (made.captured.module, run.module)
            ]
            assert inputs[0] == inputs[1]


def moving_bytes(
    module: torch.fx.GraphModule, ranks: dict[str, tuple[int, ...]]
) -> dict[tuple[str, str], int]:
    """Bytes that each kind moves on each group."""
    sizes, total = group_sizes(module.graph.nodes, ranks), {}
    for node in module.graph.nodes:
        if is_collective(node):
            call = describe(node, sizes)
            total[call.kind, call.group] = total.get((call.kind, call.group), 0) + call.size_bytes
    return total


def test_fewer_launches_move_the_same_bytes(both_ways: tuple[Made, ...]) -> None:
    for made in both_ways:
        for run in made.runs:
            assert moving_bytes(run.module, made.ranks) == moving_bytes(
                made.captured.module, made.ranks
            )
            assert made.score(run).num_launches < len(made.problem.collectives)


def test_its_memory_is_what_an_interpreter_counts(both_ways: tuple[Made, ...]) -> None:
    for made in both_ways:
        for run in made.runs:
            dag = made.export(run)
            _, counted = run_counting(
                run.module, real_inputs(run.module), dag, made.captured.kept_inputs
            )
            assert counted == live_bytes_of(dag)
            assert made.score(run).peak_memory_bytes == max(counted)


def us_of_bytes(size_bytes: int) -> float:
    device = load_cluster("h100").device
    return size_bytes / device.memory_bytes_per_us + device.kernel_us


def tensor_bytes(node: torch.fx.Node) -> int:
    return node.meta["val"].numel() * node.meta["val"].element_size()


def test_its_copies_are_priced_by_the_bytes_they_move(both_ways: tuple[Made, ...]) -> None:
    """Flat buckets of ATen operators: gradients and shards are concatenated, the shards copied
    again, and what was gathered cloned.
    """
    seen = set()
    for made in both_ways:
        known = {node.name for node in made.captured.module.graph.nodes}
        for run in made.runs:
            dag = made.export(run)
            for rank, node in enumerate(run.module.graph.nodes):
                if node.name in known or node.op != "call_function":
                    continue
                duration_us = dag.nodes[rank]["record"].duration_us
                match node.target:
                    case aten.cat.default:
                        expected = us_of_bytes(2 * tensor_bytes(node))
                    case (
                        aten.copy_.default
                    ):  # writes its first argument, reads its second, which may be wider
                        expected = us_of_bytes(
                            tensor_bytes(node.args[0]) + tensor_bytes(node.args[1])
                        )
                    case aten.clone.default:
                        expected = us_of_bytes(2 * tensor_bytes(node))
                    case torch.ops.bucketing._pre_bucket_all_gather.default:
                        own = tensor_bytes(node) // node.args[1]
                        expected = us_of_bytes(sum(map(tensor_bytes, node.args[0])) + own)
                    case torch.ops.bucketing._pre_bucket_reduce_scatter.default:
                        expected = us_of_bytes(2 * tensor_bytes(node))
                    case (
                        aten.empty.memory_format
                        | aten.slice.Tensor
                        | aten.view.default
                        | aten.split_with_sizes.default
                    ):
                        expected = 0.0
                    case aten._unsafe_view.default | c10d.wait_tensor.default:
                        expected = 0.0
                    case _:
                        continue
                seen.add(str(node.target))
                assert duration_us == pytest.approx(expected, abs=1e-9), (node.name, node.target)
    assert {
        "aten.cat.default",
        "aten.copy_.default",
        "aten.clone.default",
        "bucketing._pre_bucket_all_gather.default",
    } <= seen


def test_the_figures_are_those_of_its_graph(both_ways: tuple[Made, ...]) -> None:
    for made in both_ways:
        for run in made.runs:
            problem = build_problem(made.export(run))
            timeline = simulate(problem, as_captured(problem.num_nodes))
            score = made.score(run)
            assert (score.name, score.fits) == (run.name, True)
            assert score.step_time_ticks == timeline.step_time_ticks
            assert (
                score.exposed_ticks
                == timeline.exposed_ticks
                < simulate(made.problem, as_captured(made.problem.num_nodes)).exposed_ticks
            )


def test_caps_that_it_breaks_are_named(both_ways: tuple[Made, ...]) -> None:
    made = both_ways[1]
    for run in made.runs:
        peak = made.score(run).peak_memory_bytes
        assert made.score(run, Caps(memory_cap_bytes=peak)).fits
        assert "live bytes" in " ".join(made.score(run, Caps(memory_cap_bytes=peak - 1)).violations)
        assert "more than the bucket cap of 1000" in " ".join(
            made.score(run, Caps(bucket_cap_bytes=1000)).violations
        )
        assert "more than the topo-span cap of 3" in " ".join(
            made.score(run, Caps(max_topo_span=3)).violations
        )
        whole = Caps(bucket_cap_bytes=2**40, max_topo_span=made.problem.num_nodes)
        assert made.score(run, whole).fits


def test_manual_buckets_are_transformer_blocks(both_ways: tuple[Made, ...]) -> None:
    """Embedding, two layers, norm and output behind them: a bucket each where there are several
    parameters.
    """
    forward = both_ways[0]
    problem = build_problem(forward.export(forward.runs[1]))
    gathers = [
        c for c in problem.collectives if not c.on_path and problem.keys[c.key].kind == "all_gather"
    ]
    members = [
        sum(1 for _ in torch_private.sources_of(list(forward.runs[1].module.graph.nodes)[c.start]))
        for c in gathers
    ]
    assert [count for count in members if count > 1] == [9, 9, 2]


@dataclass(frozen=True)
class Scaled:
    """Costs with collectives made cheaper or dearer."""

    costs: ClusterCostModel
    factor: float

    def compute_us(self, node: torch.fx.Node) -> float:
        return self.costs.compute_us(node)

    def collective_us(self, kind: str, group_name: str, group_size: int, size_bytes: int) -> float:
        return self.factor * self.costs.collective_us(kind, group_name, group_size, size_bytes)


@pytest.mark.parametrize(
    "both_ways", ["fsdp=2,tp=2"], indirect=True
)  # elsewhere one bucket of each kind is all there is
def test_the_schedule_follows_our_costs(both_ways: tuple[Made, ...]) -> None:
    """The same costs give the same graph; dearer collectives are started elsewhere."""
    made = both_ways[1]
    again, cheap, dear = (
        run_inductor(made.captured, Scaled(made.costs, f), group_ranks=made.ranks)
        for f in (1.0, 0.0, 300.0)
    )
    assert again.module.code == made.runs[0].module.code
    assert cheap.module.code != dear.module.code


def replaced_by_the_baseline() -> list[object]:
    """Changed settings while torch's schedulers run."""
    owners = {
        "torch.utils._runtime_estimation": ("get_compute_time", "get_transfer_time"),
        "torch._inductor.comm_analysis": ("detect_interconnect",),
        "torch._inductor.fx_passes.node_runtime_estimation": ("_log_collective_benchmarks",),
    }
    found: list[object] = [
        getattr(importlib.import_module(module), name)
        for module, names in owners.items()
        for name in names
    ]
    return [
        *found,
        logging.getLogger("torch._inductor.fx_passes.fsdp").disabled,
        torch.is_grad_enabled(),
    ]


def nodes_in_cache() -> int:
    return torch_private.import_schedulers().get_group_name.cache_info().currsize


@pytest.mark.parametrize("both_ways", ["fsdp=2,tp=2"], indirect=True)
def test_nothing_is_left_patched(both_ways: tuple[Made, ...]) -> None:
    made, before, during = both_ways[0], replaced_by_the_baseline(), []
    assert nodes_in_cache() == 0

    class Spying(Scaled):
        def collective_us(self, *args) -> float:
            during.append(replaced_by_the_baseline())
            return super().collective_us(*args)

    class Failing(Spying):
        def collective_us(
            self, kind: str, group_name: str, group_size: int, size_bytes: int
        ) -> float:
            if size_bytes == 0:  # torch asks for the latency
                raise ArithmeticError("no such price")
            return super().collective_us(kind, group_name, group_size, size_bytes)

    run_inductor(made.captured, Spying(made.costs, 1.0), group_ranks=made.ranks)
    run_inductor_manual(made.captured, made.problem)
    assert any(seen != before for seen in during), (
        "the collectives of a bucket are priced while torch's scheduler runs"
    )
    assert replaced_by_the_baseline() == before
    assert nodes_in_cache() == 0
    for captured in (m.captured for m in both_ways):
        try:
            run_inductor(captured, Failing(made.costs, 1.0), group_ranks=made.ranks)
        except ArithmeticError:
            break
    else:
        pytest.fail("torch never asked for a latency")
    assert replaced_by_the_baseline() == before
    assert nodes_in_cache() == 0


@pytest.mark.parametrize("both_ways", ["fsdp=4"], indirect=True)
def test_a_failure_of_torch_is_a_note(
    both_ways: tuple[Made, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = both_ways[0]

    def refuse(*args: object) -> None:
        raise AssertionError("nyi")

    monkeypatch.setattr(torch_private, "schedule_overlap", refuse)
    found = torch_scores(made.captured, made.problem, made.costs, Caps(), group_ranks=made.ranks)
    assert [score.name for score in found.scores] == ["inductor_manual"]
    assert found.notes == (
        "forward: no inductor, torch's scheduler fails on this graph (AssertionError: nyi)",
    )


class Unpriced(Scaled):
    """Costs without a latency, which torch's pass asks for."""

    def collective_us(self, kind: str, group_name: str, group_size: int, size_bytes: int) -> float:
        if size_bytes == 0:
            raise ArithmeticError("no such price")
        return super().collective_us(kind, group_name, group_size, size_bytes)


@pytest.mark.parametrize("both_ways", ["fsdp=4"], indirect=True)
def test_a_failure_of_a_price_is_not_called_torchs(both_ways: tuple[Made, ...]) -> None:
    made = both_ways[0]
    costs = Unpriced(made.costs, 1.0)
    found = torch_scores(made.captured, made.problem, costs, Caps(), group_ranks=made.ranks)
    assert found.scores == ()
    assert found.notes == tuple(
        f"forward: no {name}, apsched cannot price this graph (ArithmeticError: no such price)"
        for name in ("inductor", "inductor_manual")
    )


@pytest.mark.parametrize("both_ways", ["fsdp=4"], indirect=True)
def test_without_module_names_there_is_no_manual_plan(both_ways: tuple[Made, ...]) -> None:
    made = both_ways[0]
    nameless = replace(
        made.problem, collectives=tuple(replace(c, module="") for c in made.problem.collectives)
    )
    found = torch_scores(made.captured, nameless, made.costs, Caps(), group_ranks=made.ranks)
    assert [score.name for score in found.scores] == ["inductor"]
    assert found.notes == (
        "forward: no inductor_manual, which needs the module names of FSDP collectives",
    )


@pytest.mark.parametrize("both_ways", ["fsdp=4"], indirect=True)
def test_a_baseline_that_is_faster_is_named(both_ways: tuple[Made, ...]) -> None:
    made = both_ways[0]
    result = solve(made.problem, options=SolveOptions(budget=0.0))
    best = result.best
    faster = replace(
        made.score(made.runs[0]), step_time_ticks=best.step_time_ticks - 2000, violations=()
    )
    slower = replace(faster, name="inductor_manual", step_time_ticks=best.step_time_ticks)
    result = replace(result, others=(faster, slower))
    assert result.beaten_by == (faster,)
    assert "  NOT the fastest: inductor fits and is 2.00 µs faster" in summary_lines(result)
    assert set(graph_json(result)["baselines"]) >= {"inductor", "inductor_manual"}
    assert (
        replace(result, others=(replace(faster, violations=("too much memory",)),)).beaten_by == ()
    )


@pytest.mark.slow
def test_compare_runs_them_by_default_and_solve_on_request(
    run: Run, debug_graphs: dict[str, Path]
) -> None:
    preset = (
        "llama3-debug",
        "--mesh",
        "fsdp=4",
        "--seq",
        "64",
        "--layers",
        "2",
        "--direction",
        "forward",
        "--budget",
        "0",
        "--json",
    )
    for arguments, expected in (
        (("compare", *preset), True),
        (("compare", *preset, "--no-inductor"), False),
        (("solve", *preset), False),
        (("solve", *preset, "--inductor"), True),
    ):
        ran = run(*arguments)
        assert ran.code == 0, ran.stderr
        (graph,) = json.loads(ran.stdout)["graphs"]
        assert ({"inductor", "inductor_manual"} <= set(graph["baselines"])) is expected
    ran = run("compare", debug_graphs["forward"], "--budget", "0")
    assert "note: forward: no inductor, which needs the FX graph" in ran.stdout
    without = run("compare", debug_graphs["forward"], "--budget", "0", "--no-inductor")
    assert "no inductor" not in without.stdout


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return run_processes(
        WORKERS / "training/inductor_baseline_worker.py",
        tmp_path_factory.mktemp("inductor"),
        4,
        timeout_s=400,
    )


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["inductor", "inductor_manual"])
@pytest.mark.ranks
def test_its_graphs_compute_the_same_bits(reports: list[dict], mesh: str, name: str) -> None:
    """Loss and every gradient, on four real processes: what is compared is the same training
    step.
    """
    for report in reports:
        found = report[mesh][name]
        assert found["finite"]
        assert found["num_results"] == 22
        assert found["unequal"] == []


def test_sources_are_found_through_several_rewrites() -> None:
    """``meta["from_node"]``: nearest first, each with the graph that it was in."""
    graph = torch.fx.Graph()
    first, second, third = (graph.placeholder(name) for name in ("a", "b", "c"))
    second.meta["from_node"] = [torch_private.node_source(first, "once")]
    third.meta["from_node"] = [torch_private.node_source(second, "twice")]
    assert list(torch_private.sources_of(third)) == [("b", id(graph)), ("a", id(graph))]
    assert list(torch_private.sources_of(first)) == []
