"""A schedule as settings of eager FSDP2: real processes gather in that order, with the same losses;
what cannot be is refused.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard

import apsched
from apsched.artifacts.schedule_file import save_schedule
from apsched.capture.fake_world import world
from apsched.capture.joint import capture_module
from apsched.capture.keep import keep
from apsched.config import SolveOptions
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.errors import InputError
from apsched.fx.node_shards import node_groups
from apsched.graph.export.export import export_graph
from apsched.graph.graph_file import save_graph
from apsched.integrations.fsdp2 import apply_fsdp2, fsdp2_plan, refuse_moved_compute
from apsched.integrations.fsdp2_units import launches_of, units_of
from apsched.integrations.prefetch_order import Hook, Launch, prefetch_lists
from apsched.kinds import CollectiveKind
from apsched.models.layers import FeedForward
from apsched.models.mesh import MeshSpec, build_meshes
from apsched.models.options import ModelOptions
from apsched.models.sharding import shard_parameters
from apsched.names import in_node
from apsched.pipeline.result import Result
from apsched.problem.build import build_problem
from apsched.problem.problem import Problem
from tests.helpers.graphs.unit_layouts import layout
from tests.helpers.processes import WORKERS, run_sizes

CASES = ("free", "near", "kept", "some kept")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[int, list[dict]]:
    return run_sizes(
        WORKERS / "training/fsdp2_worker.py", tmp_path_factory.mktemp("fsdp2"), timeout_s=400
    )


@pytest.fixture(params=[2, 4], ids="{} processes".format)
def reports(jobs, request) -> list[dict]:
    return jobs[request.param]


def happened(events: list[str], what: str) -> list[tuple[str, list[str]]]:
    """Return the units that something happened to, in order, each with the units that had begun to
    compute.
    """
    found, begun = [], []
    for event in events:
        verb, unit = event.split()
        if verb == "compute":
            begun.append(unit)
        elif verb == what:
            found.append((unit, list(begun)))
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.ranks
def test_gathers_run_in_the_order_of_the_schedule(reports, case, direction):
    """Each within the unit in which the schedule has it, or at the boundary before."""
    for report in reports:
        found, expected = (
            happened(report[case]["seen"][direction], "gather"),
            report[case]["gathers"][direction],
        )
        assert [unit for unit, _ in found] == [unit for unit, _ in expected]
        needs = report[case]["needs"][direction]
        for (unit, begun), (_, gap) in zip(found, expected, strict=True):
            in_schedule = {name for name, need in needs.items() if need < gap}
            assert len(in_schedule - set(begun)) <= 1, f"{unit} is launched at the boundary before"
            assert not set(begun) & {name for name, need in needs.items() if need > gap}, (
                f"{unit} is not launched late"
            )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.ranks
def test_reductions_run_in_the_order_of_the_schedule(reports, case):
    for report in reports:
        found = [unit for unit, _ in happened(report[case]["seen"][1], "reduce")]
        assert (
            found
            == [unit for unit, _ in report[case]["reductions"]]
            == [unit for unit, _ in happened(report["untouched"]["seen"][1], "reduce")]
        )
        assert (
            report[case]["in flight at most"]
            == report[case]["settings"]["reduce_scatter_buffers"]
            > (case != "some kept")
        )


@pytest.mark.ranks
def test_torch_alone_gathers_otherwise(reports):
    """The cases above differ from each other, and from an untouched run."""
    seen = {case: tuple(map(tuple, reports[0][case]["seen"])) for case in (*CASES, "untouched")}
    assert len(set(seen.values())) == len(seen)
    assert happened(reports[0]["kept"]["seen"][1], "gather") == [], (
        "parameters are kept from forward"
    )
    again = [unit for unit, _ in happened(reports[0]["some kept"]["seen"][1], "gather")]
    assert again == ["layers.1", "layers.0"]


@pytest.mark.ranks
def test_losses_stay_the_same(reports):
    for report in reports:
        assert len(set(report["untouched"]["losses"])) == 2
        for case in CASES:
            assert report[case]["losses"] == report["untouched"]["losses"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.ranks
def test_gradients_and_weights_are_the_same_bit_for_bit(reports, case):
    """With none, all and some parameters kept, behind the last step; each process rank has shards
    of its own.
    """
    for report in reports:
        for what in ("gradients", "weights"):
            assert report[case][what] == report["untouched"][what]
    for what in ("gradients", "weights"):
        assert len({report[case][what] for report in reports}) == len(reports)


@pytest.mark.ranks
def test_units_resharded_in_their_node_are_gathered_in_the_order_of_the_schedule(jobs):
    """Two nodes of two process ranks: as ``fully_shard(..., reshard_after_forward=2)`` has it."""
    for report in jobs[4]:
        case = report["in node"]
        resharded = {u["name"]: u["reshard_after_forward"] for u in case["settings"]["units"]}
        assert resharded["layers.1"] == resharded["layers.2"] == 2
        assert resharded["layers.0"] is resharded["norm+output"] is True
        found = [unit for unit, _ in happened(case["seen"][1], "gather")]
        assert found == [unit for unit, _ in case["gathers"][1]]
        assert {"layers.0", "layers.1", "layers.2"} <= set(found)
        for what in ("losses", "gradients", "weights"):
            assert case[what] == report["untouched"][what]


def test_prefetch_lists_by_hand():
    """Launched at compute node 3, within b: the hook of b. At 9, where d begins: d gathers itself,
    unless one before it goes first.
    """
    hooks = [Hook(unit=name, need=need) for name, need in (("a", 0), ("b", 2), ("c", 5), ("d", 9))]
    launches = [
        Launch(unit=name, gap=gap) for name, gap in (("a", 0), ("b", 0), ("c", 3), ("d", 9))
    ]
    assert prefetch_lists(hooks, launches) == {"a": ("b",), "b": ("c",), "c": (), "d": ()}
    overtaken = [
        Launch(unit=name, gap=gap) for name, gap in (("a", 0), ("b", 2), ("d", 5), ("c", 5))
    ]
    assert prefetch_lists(hooks, overtaken) == {"a": (), "b": ("d",), "c": (), "d": ()}
    too_early = [Launch(unit=name, gap=0) for name in "bacd"]
    with pytest.raises(InputError, match="gathers b before a"):
        prefetch_lists(hooks, too_early)
    with_root = prefetch_lists([Hook(unit="root", need=-1), *hooks], too_early)
    assert with_root == {"root": ("b",), "a": ("c", "d"), "b": (), "c": (), "d": ()}


class Net(nn.Module):
    """A first layer, which stays with the root, and two blocks."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FeedForward(8, hidden) for _ in range(2))
        self.first = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.float().sum()


@pytest.fixture
def model():
    with world(2):
        model = Net()
        for layer in model.layers:
            fully_shard(layer)
        yield fully_shard(model)


def problems_of(kept: tuple[str, ...] = ()) -> tuple[list[Problem], list[object]]:
    """Capture the model as graphs over the two process ranks that run, with parameters kept."""
    module, options = Net(), ModelOptions(param_dtype=torch.float32)
    module, meshes = module.to("meta"), build_meshes(MeshSpec(fsdp=2), "cpu")
    with FakeTensorMode():
        shard_parameters(module, meshes, options, device=torch.device("cpu"), values=None)
        inputs = (torch.empty(4, 8),)
    capture = capture_module(module, inputs, source="net")
    costs = ClusterCostModel(load_cluster("h100"), capture.group_ranks)
    graphs = [
        export_graph(graph, costs, group_ranks=capture.group_ranks)
        for graph in keep(*capture.graphs, kept)
    ]
    return [build_problem(graph) for graph in graphs], graphs


def solved(problem: Problem, **chosen: object) -> Result:
    return apsched.solve(problem, max_compute_move=0, options=SolveOptions(budget=0.0), **chosen)


def test_buckets_across_units_are_refused_with_the_nearest(model):
    problems, _ = problems_of()
    with pytest.raises(
        InputError,
        match=r"FSDP2 cannot gather .* as one: .*nearest is one bucket for each unit.*fsdp2_plan",
    ):
        apply_fsdp2(model, [solved(problem) for problem in problems])


def test_a_part_of_a_unit_is_refused(model):
    problems, _ = problems_of()
    alone = apsched.Plan((apsched.Rule(match=".*", forbid=True),))
    with pytest.raises(InputError, match=r"the unit layers.0 has layers.0.w\d.weight"):
        apply_fsdp2(model, [solved(problem, plan=alone) for problem in problems])


def test_a_unit_that_is_kept_in_part_is_refused(model):
    problems, _ = problems_of(("layers.1.w1.weight",))
    results = [solved(problem, plan=fsdp2_plan(model, problem)) for problem in problems]
    with pytest.raises(
        InputError, match=r"of layers.1 the schedule gathers .* and keeps others.*tune_fsdp2"
    ):
        apply_fsdp2(model, results)


def in_nodes(entries: tuple[str, ...]) -> list[Problem]:
    """Capture the model on four process ranks, two on a node, with parameters resharded there."""
    module, options = Net(), ModelOptions(param_dtype=torch.float32)
    module, meshes = module.to("meta"), build_meshes(MeshSpec(fsdp=4), "cpu")
    with FakeTensorMode():
        shard_parameters(module, meshes, options, device=torch.device("cpu"), values=None)
        capture = capture_module(module, (torch.empty(4, 8),), source="net")
    nodes = node_groups(capture.group_ranks, 2)
    costs = ClusterCostModel(load_cluster("h100"), capture.group_ranks)
    return [
        build_problem(export_graph(graph, costs, group_ranks=capture.group_ranks))
        for graph in keep(*capture.graphs, entries, nodes)
    ]


def test_a_number_of_process_ranks_that_fully_shard_does_not_have_is_refused():
    every = tuple(in_node(f"layers.1.w{k}.weight") for k in (1, 2, 3))
    with world(4):
        problems = in_nodes(every)
        unset, fitting = (Net() for _ in range(2))
        for model, number in ((unset, None), (fitting, 2)):
            fully_shard(model.layers[0])
            fully_shard(model.layers[1], reshard_after_forward=number)
            fully_shard(model)
        results = [solved(problem, plan=fsdp2_plan(unset, problem)) for problem in problems]
        with pytest.raises(
            InputError, match=r"call fully_shard\(.*reshard_after_forward=2\) on it"
        ):
            apply_fsdp2(unset, results)
        settings = apply_fsdp2(fitting, results)
        # backward does not read the parameter of the root, which torch keeps
        assert [unit.reshard_after_forward for unit in settings.units] == [False, True, 2]
        part = [solved(p, plan=fsdp2_plan(unset, p)) for p in in_nodes(every[:1])]
        with pytest.raises(InputError, match=r"the unit layers.1 has layers.1.w1.weight, too"):
            apply_fsdp2(fitting, part)


def test_a_schedule_of_another_size_or_mesh_is_refused(model):
    problems, _ = problems_of()
    results = [solved(problem, plan=fsdp2_plan(model, problem)) for problem in problems]
    apply_fsdp2(model, results)
    wider = Net(hidden=32)
    for layer in wider.layers:
        fully_shard(layer)
    fully_shard(wider)
    with pytest.raises(
        InputError, match="gathers 128 elements of it, and this model has 256; solve"
    ):
        apply_fsdp2(wider, results)
    keys = tuple(replace(key, group_size=4) for key in results[0].problem.keys)
    other = replace(results[0], problem=replace(results[0].problem, keys=keys))
    with pytest.raises(
        InputError, match="on 4 process ranks, and this job on 2; solve the step for"
    ):
        apply_fsdp2(model, [other, results[1]])


def test_schedules_of_something_else_are_refused(model):
    problems, _ = problems_of()
    forward, backward = (solved(problem, plan=fsdp2_plan(model, problem)) for problem in problems)
    with pytest.raises(InputError, match="expected a model on which fully_shard was called"):
        apply_fsdp2(Net(), [forward, backward])
    parts = Net()
    fully_shard(next(iter(parts.children()))[0])
    with pytest.raises(
        InputError, match=r"1 modules? in the model alone .*call it on the model, too"
    ):
        apply_fsdp2(parts, [forward, backward])
    with pytest.raises(
        InputError, match="expected results of a forward and a backward graph, found backward"
    ):
        apply_fsdp2(model, backward)
    other = replace(
        forward,
        problem=replace(
            forward.problem,
            collectives=tuple(
                replace(c, module=f"model.{c.module}") for c in forward.problem.collectives
            ),
        ),
    )
    with pytest.raises(
        InputError,
        match=r"expected model\.first\.weight among the parameters .*nearest name is first\.weight",
    ):
        apply_fsdp2(model, [other])


def test_the_directory_of_apsched_solve_will_do(model, tmp_path):
    problems, graphs = problems_of()
    results = [solved(problem, plan=fsdp2_plan(model, problem)) for problem in problems]
    for graph, result in zip(graphs, results, strict=True):
        save_graph(graph, tmp_path / f"{result.problem.name}.graph")
        save_schedule(tmp_path / f"{result.problem.name}.schedule.json", result)
    expected = apply_fsdp2(model, results)
    assert apply_fsdp2(model, tmp_path) == expected
    assert [unit.name for unit in expected.units] == ["(root)", "layers.0", "layers.1"]
    forward_only = apply_fsdp2(model, results[0])
    assert {unit.backward_prefetch for unit in forward_only.units} == {None}
    with pytest.raises(InputError, match="found no schedule"):
        apply_fsdp2(model, tmp_path / "elsewhere")


@pytest.mark.usefixtures("model")
def test_contract_of_the_private_attributes():
    """Modules that one call wraps share a unit."""
    from apsched.torch_compat.fsdp import fsdp_unit_of

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(2, 2) for _ in range(3))

    two = Two()
    fully_shard([two.a, two.b])
    fully_shard(two.c)
    assert fsdp_unit_of(two.a) == fsdp_unit_of(two.b) != fsdp_unit_of(two.c)


def test_moved_compute_is_refused_with_advice_for_each_surface(model, monkeypatch):
    (problem, _), _ = problems_of()
    schedule = apsched.solve(problem, budget=0.0).schedule
    monkeypatch.setattr("apsched.integrations.fsdp2.moved_compute", lambda *_: True)
    advice = r"caps=apsched.Caps\(max_compute_move=0\), on the command line --max-compute-move 0"
    with pytest.raises(InputError, match=advice):
        refuse_moved_compute(problem, schedule)


def test_a_choice_under_the_plan_of_the_units_keeps_whole_units(model):
    """Under caps from the least memory to where everything is kept, every answer can be set up."""
    problems, _ = problems_of()
    plan = fsdp2_plan(model, problems[1])
    kept = []
    for room in ("", "+512", "+1KiB", "+4KiB"):
        step = apsched.solve_step(
            model,
            (torch.empty(4, 8),),
            plan=plan,
            caps=apsched.Caps(max_compute_move=0),
            memory_cap=f"floor{room}",
            budget=0.0,
        )
        settings = apply_fsdp2(model, step.results)
        kept.append({one.name for one in settings.units if not one.reshard_after_forward})
    root = "(root)"  # backward does not read its parameter, and torch keeps it
    assert kept[0] == {root, "layers.1"}
    assert kept[-1] == {root, "layers.0", "layers.1"}


@pytest.mark.parametrize("bitwise", [False, True])
def test_a_root_reduced_first_by_the_schedule_is_reduced_last(bitwise):
    """With a frozen embedding the root's gradients are the first; under the plan of the units and
    the buckets of bitwise mode, which are the same here.
    """
    with world(2):
        model = layout(frozen=True)()
        graphs = apsched.capture(model, (torch.zeros(4, 8, dtype=torch.long),))
        results = [
            apsched.solve(
                graph,
                plan=fsdp2_plan(model, graph),
                max_compute_move=0,
                bitwise=bitwise,
                budget=0.0,
            )
            for graph in graphs
        ]
        settings = apply_fsdp2(model, results)
        assert settings.units[0].name == "(root)"
        by_parameter = {name: unit for unit in units_of(model) for name in unit.parameters}
        backward = results[1]
        kind = CollectiveKind.REDUCE_SCATTER
        reduced = launches_of(backward.problem, backward.schedule, kind, by_parameter)
        assert reduced[0].unit == "(root)", "the schedule itself has it first"


def test_an_order_of_reductions_that_breaks_the_cap_is_refused_with_advice():
    """Where neither the peak of the schedule nor the cap has room for the order of FSDP2."""
    with world(2):
        model = layout(frozen=True)()
        graphs = apsched.capture(model, (torch.zeros(1, 1, dtype=torch.long),))
        plans = [fsdp2_plan(model, graph) for graph in graphs]
        results = [
            apsched.solve(graph, plan=plan, max_compute_move=0, budget=0.0, memory_cap="floor")
            for graph, plan in zip(graphs, plans, strict=True)
        ]
        with pytest.raises(InputError, match=r"in the order of FSDP2 it needs more memory .* tune"):
            apply_fsdp2(model, results)
