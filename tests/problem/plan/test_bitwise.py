"""Bitwise mode: reductions in the buckets and payload order of eager FSDP2, and what that costs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from apsched import api as solve_problem
from apsched.capture.fake_world import world
from apsched.config import Caps, SolveOptions
from apsched.errors import InputError
from apsched.graph.graph_file import load_graph
from apsched.models.mesh import MeshSpec
from apsched.names import block_of
from apsched.problem.build import build_problem
from apsched.problem.plan.apply import restricted
from apsched.problem.plan.bitwise import BITWISE_RULE, fsdp_units
from apsched.problem.plan.rules import Plan, Rule
from apsched.problem.problem import Problem
from apsched.schedule.schedule import Bucket
from apsched.schedule.verify import verify
from apsched.solver import solve
from apsched.solver.milp.model import solve_milp
from tests.conftest import Run
from tests.helpers.problems.by_hand import ByHand, line
from tests.helpers.processes import WORKERS, run_processes

KIB = 1024


class Block(nn.Module):
    """A block with parameters of its own beside those of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.first = nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.shift = nn.Parameter(torch.ones(8))


class Model(nn.Module):
    """Blocks, and a root that has parameters before, between and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))
        self.embedding = nn.Embedding(8, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.output = nn.Linear(8, 8)


@pytest.mark.parametrize("activations", [False, True], ids=["replicas", "tensor parallel"])
def test_a_warning_names_gradients_that_are_added_over_the_replicas_first(
    activations: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Their sums round in another order than those of FSDP2; under tensor parallelism FSDP2 gets
    gradients that are all-reduced.
    """
    hand = ByHand()
    gradient = hand.compute("gradient", 3, size=2 * KIB)
    if activations:
        path = hand.start("all_reduce", "ar", gradient, KIB, KIB, group="other", on_path=True)
        gradient = hand.compute("more", 3, hand.wait("wait", path), size=2 * KIB)
    start = hand.start("all_reduce", "ar_a.w", gradient, 2 * KIB, 2 * KIB, group="other")
    mean = hand.view("view", hand.wait("wait_a.w", start))
    scatter = hand.start(
        "reduce_scatter", "rs_a.w", mean, 2 * KIB, KIB, module="a.w", output_place=0
    )
    problem = hand.output(hand.wait("gradient_a.w", scatter))
    assert len(fsdp_units(problem)) == 1
    warned = "all-reduces that of a.w over group other before (wait_a.w)" in caplog.text
    assert warned is not activations


def of_fully_shard(model: nn.Module) -> list[list[str]]:
    """Return the parameters of each unit of eager FSDP2, as torch lists them; the process group
    must run.
    """
    names = [name for name, _ in model.named_parameters()]
    places = {
        name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
        for name in names
    }
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    name_of = {(id(module), own): name for name, (module, own) in places.items()}
    units = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            infos = [p._module_info for p in module._get_fsdp_state()._fsdp_param_group.fsdp_params]
            units.append([name_of[id(info.module), info.param_name] for info in infos])
    return units


def gradients(names: list[str], num_micro_batches: int = 1) -> Problem:
    """Return a backward graph with a reduce-scatter for each parameter and micro-batch: computed
    from the last to the first, put out in order; of several the results are added.
    """
    hand = ByHand(prices={"reduce_scatter": line(5, 1)})
    waits: dict[str, list[str]] = {name: [] for name in names}
    for name, k in [(name, k) for k in range(num_micro_batches) for name in reversed(names)]:
        suffix = name if k == 0 else f"{name}_{k}"
        start = hand.start(
            "reduce_scatter",
            f"rs_{suffix}",
            hand.compute(suffix, 3, size=2 * KIB),
            2 * KIB,
            KIB,
            module=name,
        )
        hand.collectives[-1]["output_place"] = names.index(name)
        waits[name].append(hand.wait(f"wait_{suffix}", start))
    if num_micro_batches == 1:
        return hand.output(*(waits[name][0] for name in names))
    return hand.output(*(hand.compute(f"sum_{n}", 1, *waits[n], size=KIB) for n in names))


def modules(problem: Problem, members: tuple[int, ...]) -> list[str]:
    return [problem.collectives[c].module for c in members]


def test_units_and_payload_order_are_those_of_fully_shard() -> None:
    """Blocks and root, children before the module's own parameters, whatever the order in which
    gradients are computed.
    """
    with world(2):
        model = Model()
        problem = gradients([name for name, _ in model.named_parameters()])
        expected = of_fully_shard(model)
    found = [modules(problem, unit) for unit in fsdp_units(problem)]
    assert sorted(found) == sorted(expected)
    assert expected[0] == ["embedding.weight", "output.weight", "output.bias", "gain"]


def test_each_micro_batch_that_reduces_its_own_gradients_has_its_own_units() -> None:
    """As under eager FSDP2, where each backward reduces a unit: one launch for both would put its
    gradients at other places of the buffer, and they would round otherwise.
    """
    names = ["layers.0.scale", "layers.0.first.weight", "output.weight"]
    problem = restricted(gradients(names, num_micro_batches=2), Plan(), bitwise=True)
    answer = solve(problem, Caps(), SolveOptions(time_slack=0.0))
    assert answer.best is not None
    starts = [
        [problem.node_names[problem.collectives[c].start] for c in bucket.members]
        for bucket in answer.best.schedule.buckets
    ]
    assert sorted(starts) == [
        ["rs_layers.0.first.weight", "rs_layers.0.scale"],
        ["rs_layers.0.first.weight_1", "rs_layers.0.scale_1"],
    ]


def unit_of(parameter: str) -> str:
    return block_of(parameter.rpartition(".")[0])


@pytest.mark.parametrize(
    ("parameter", "unit"),
    [
        ("layers.3.attention.wq.weight", "layers.3"),
        ("a.b.0.c.1.w", "a.b.0"),
        ("norm.weight", ""),
        ("0.weight", ""),
        ("layers.0", ""),
    ],
)
def test_the_unit_of_a_parameter(parameter: str, unit: str) -> None:
    assert unit_of(parameter) == unit


def test_a_schedule_in_bitwise_mode_has_these_buckets_and_no_other() -> None:
    """Solver and ``verify`` agree; another payload order is refused."""
    names = [
        "embedding.weight",
        *(f"layers.{i}.{w}" for i in range(2) for w in ("scale", "first.weight")),
        "output.weight",
    ]
    problem = restricted(gradients(names), Plan(), bitwise=True)
    answer = solve(problem, Caps(), SolveOptions(time_slack=0.0))
    assert answer.best is not None
    assert answer.status == "optimal"
    assert sorted(modules(problem, b.members) for b in answer.best.schedule.buckets) == [
        ["embedding.weight", "output.weight"],
        ["layers.0.first.weight", "layers.0.scale"],
        ["layers.1.first.weight", "layers.1.scale"],
    ]
    assert verify(problem, answer.best.schedule, Caps()) == ()
    turned = replace(
        answer.best.schedule,
        buckets=tuple(Bucket(b.members[::-1]) for b in answer.best.schedule.buckets),
    )
    assert f"bucket 0: the members stand in another payload order ({BITWISE_RULE})" in verify(
        problem, turned, Caps()
    )


def test_the_milp_agrees() -> None:
    problem = restricted(
        gradients(["layers.0.scale", "layers.0.first.weight", "output.weight"]),
        Plan(),
        bitwise=True,
    )
    found, answer = (
        solve_milp(problem, Caps()),
        solve(problem, Caps(), SolveOptions(time_slack=0.0)),
    )
    assert found.schedule is not None
    assert answer.best is not None
    assert found.step_time_ticks == answer.best.step_time_ticks
    assert [modules(problem, b.members) for b in found.schedule.buckets] == [
        ["layers.0.first.weight", "layers.0.scale"]
    ]


def test_what_it_costs_is_said() -> None:
    """Latency makes buckets pay, so that a free choice is one bucket for all; the price is what the
    units add to it.
    """
    problem = replace(
        gradients([f"layers.{i}.{w}" for i in range(3) for w in "ab"]), copy_price=line(0)
    )
    result = solve_problem.solve(problem, bitwise=True, options=SolveOptions(time_slack=0.0))
    free = solve_problem.solve(problem, options=SolveOptions(time_slack=0.0))
    assert result.bitwise is not None
    assert result.best is not None
    assert free.best is not None
    assert result.bitwise.cost_us == pytest.approx(
        (result.best.step_time_ticks - free.best.step_time_ticks) / 1000
    )
    assert result.bitwise.step_time_us == free.step_time_us
    assert result.bitwise.cost_us > 0
    assert free.bitwise is None


def test_a_plan_may_say_more_but_not_otherwise() -> None:
    problem = gradients([f"layers.{i}.{w}" for i in range(2) for w in "ab"])
    with pytest.raises(
        InputError,
        match=r"rule 1 .*forbid.* and bitwise: .*rs_layers\.1\.a .* cannot be alone and in a group",
    ):
        restricted(problem, Plan((Rule(match=r"layers\.1\.a", forbid=True),)), bitwise=True)
    last = len(problem.compute_order)
    both = restricted(
        problem, Plan((Rule(match=r"layers\.1\..*", start=problem.num_nodes - 1),)), bitwise=True
    )
    asked = [c.restriction for c in both.collectives if c.module.startswith("layers.1")]
    assert [(r.closed, r.start_slots, r.rules) for r in asked] == [(True, (last, last), (0, 1))] * 2


def test_graphs_that_do_not_say_the_order_are_refused() -> None:
    problem = gradients(["layers.0.a", "layers.0.b"])
    unknown = replace(
        problem, collectives=tuple(replace(c, output_place=-1) for c in problem.collectives)
    )
    with pytest.raises(
        InputError, match=r"the order in which parameters were registered.*capture it again"
    ):
        restricted(unknown, Plan(), bitwise=True)
    nameless = replace(
        problem, collectives=tuple(replace(c, module="") for c in problem.collectives)
    )
    with pytest.raises(InputError, match=r"needs the name of each gradient's parameter"):
        restricted(nameless, Plan(), bitwise=True)


def test_from_a_preset_to_the_files(run: Run, tmp_path: Path) -> None:
    """The written schedule has each unit's gradients in order of registration; the price is in the
    report and on the screen.
    """
    preset = (
        "llama3-debug",
        "--mesh",
        "fsdp=4",
        "--seq",
        "64",
        "--layers",
        "2",
        "--budget",
        "0",
        "-o",
        "out",
    )
    ran = run("solve", *preset, "--bitwise", "--json")
    assert ran.code == 0, ran.stderr
    forward, backward = json.loads(ran.stdout)["graphs"]
    assert "bitwise" not in forward
    assert backward["round_trip_exact"] is True
    assert backward["bitwise"]["cost_us"] >= 0
    assert backward["bitwise"]["step_time_us"] + backward["bitwise"]["cost_us"] == pytest.approx(
        backward["fastest_us"]
    )
    assert backward["plan"]["rules"] == [BITWISE_RULE]
    with world(4):
        names = _registered()
    expected = {unit: [n for n in names if unit_of(n) == unit] for unit in map(unit_of, names)}
    written = json.loads((tmp_path / "out" / "backward.schedule.json").read_text())
    found = [
        [m["module"] for m in b["members"]]
        for b in written["buckets"]
        if b["kind"] == "reduce_scatter"
    ]
    assert sorted(found) == sorted(expected.values())
    problem = build_problem(load_graph(tmp_path / "out" / "backward.graph"))
    assert sorted(modules(problem, unit) for unit in fsdp_units(problem)) == sorted(found), (
        "graph files keep the order"
    )
    ran = run("solve", *preset, "--bitwise", "--direction", "backward")
    assert "bitwise costs " in ran.stdout


def _registered() -> list[str]:
    """Return the parameters of the preset in order of registration."""
    from apsched.models.build import build

    built = build(
        "llama3-debug", mesh=MeshSpec(fsdp=4), seq_len=64, batch=1, num_layers=2, options=None
    )
    return [name for name, _ in built.module.named_parameters()]


@pytest.mark.ranks
def test_gradients_are_bit_for_bit_those_of_fsdp2_s_reductions(tmp_path: Path) -> None:
    """Four real processes: each unit's gradients, chunked, concatenated and reduced at once as
    ``foreach_reduce`` does it.
    """
    for report in run_processes(WORKERS / "training/bitwise_worker.py", tmp_path, 4, timeout_s=400):
        assert report["units"] == 3
        assert report["gradients"] == 2 * 9 + 3
        assert report["unequal"] == 0


def test_a_group_of_the_plan_with_the_members_of_a_bucket_is_that_bucket() -> None:
    """In the payload order of the unit; another group of its members is none."""
    problem = gradients([f"layers.{i}.{w}" for i in range(2) for w in "ab"])
    units = Rule(match=r"layers\.(\d)\..*", group=True, by=r"\1", closed=True)
    both = restricted(problem, Plan((units,)), bitwise=True)
    alone = restricted(problem, Plan(), bitwise=True)
    asked, wanted = (
        [replace(c.restriction, rules=()) for c in one.collectives] for one in (both, alone)
    )
    assert asked == wanted
    across = Rule(match=r"layers\..*\.a", group=True, closed=True)
    with pytest.raises(InputError, match="would be in two groups"):
        restricted(problem, Plan((across,)), bitwise=True)
