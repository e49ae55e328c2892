"""Buckets by module: from the module tree, from the user, or none; and those of TorchTitan, run by
torch itself.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from torch import nn

from apsched.capture.captured import Capture
from apsched.capture.fake_world import world
from apsched.cli.requests import with_buckets
from apsched.config import Caps, SolveOptions
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.errors import InputError
from apsched.fx.graph_copies import copied
from apsched.graph.export.export import export_graph
from apsched.models.build import build
from apsched.models.mesh import MeshSpec
from apsched.models.preset_capture import capture_built, capture_preset
from apsched.pipeline.load import LoadedGraph
from apsched.problem.build import build_problem
from apsched.problem.plan.apply import restricted
from apsched.problem.plan.module_buckets import (
    DEFAULT_BUCKET,
    NO_BUCKETS,
    block_buckets,
    blocks_of,
    user_buckets,
)
from apsched.problem.plan.rules import Plan
from apsched.problem.problem import Problem
from apsched.schedule.verify import verify
from apsched.solver import solve
from apsched.solver.arrays.instance import Instance
from apsched.solver.baselines import baselines, block_labels
from apsched.torch_compat import graphs as torch_private


class Part(nn.Module):
    """A block with experts of its own in a list."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))


class Tree(nn.Module):
    """Blocks in a dictionary, as TorchTitan keeps them, beside a dictionary that holds no blocks,
    and an encoder inside a module.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict({"tokens": nn.Embedding(4, 4), "norm": nn.LayerNorm(4)})
        self.encoder = nn.Module()
        self.encoder.stages = nn.ModuleList([Part(), nn.Linear(4, 4)])
        self.bridge = nn.Linear(4, 4)
        self.layers = nn.ModuleDict({"a": Part(), "b": Part()})
        self.norm = nn.LayerNorm(4)
        self.output = nn.Linear(4, 4, bias=False)


def test_blocks_are_found_without_names_of_classes():
    """The outermost lists and dictionaries, whatever their keys; experts inside of a block are
    none.
    """
    assert blocks_of(Tree()) == ("encoder.stages.0", "encoder.stages.1", "layers.a", "layers.b")
    assert blocks_of(nn.Linear(2, 2)) == ()


def test_buckets_of_blocks_and_of_what_lies_between():
    buckets = block_buckets(Tree()).buckets
    assert list(buckets) == [
        "embeddings",
        "encoder.stages.0",
        "encoder.stages.1",
        "bridge",
        "layers.a",
        "layers.b",
        "norm+output",
    ]
    assert buckets["norm+output"] == ("norm.weight", "norm.bias", "output.weight")
    assert sorted(name for names in buckets.values() for name in names) == sorted(
        name for name, _ in Tree().named_parameters()
    )
    with pytest.raises(
        InputError, match="expected a model with blocks in a ModuleList or ModuleDict, found none"
    ):
        block_buckets(nn.Linear(2, 2))


LAYERS = [f"layers.{i}" for i in range(12)]
NAMES = [
    "tok_embeddings.weight",
    *(f"layers.{i}.{w}.weight" for i in range(12) for w in ("wq", "wk")),
    "norm.weight",
    "output.weight",
]


@pytest.mark.parametrize(
    ("entries", "labels"),
    [
        (
            ["tok_embeddings", "layers.[0-5]", r"layers\.([6-9]|1\d)", "norm+output"],
            ["tok_embeddings", *LAYERS, "norm+output"],
        ),
        (
            [r"layers\.\d+", ["norm", "output", "tok_embeddings"]],
            [*LAYERS, "norm+output+tok_embeddings"],
        ),
        (
            ["layers", "tok_embeddings.weight", "norm", "output"],
            ["layers", "tok_embeddings.weight", "norm", "output"],
        ),
        (
            [[r"layers\.\d+", "norm"], "tok_embeddings+output"],
            [r"layers\.\d++norm", "tok_embeddings+output"],
        ),
    ],
)
def test_the_users_buckets(entries, labels):
    buckets = user_buckets(entries, NAMES).buckets
    assert list(buckets) == labels
    assert sorted(name for names in buckets.values() for name in names) == sorted(NAMES)
    assert all(
        [name for name in NAMES if name in names] == list(names) for names in buckets.values()
    ), "in order of registration"


def test_what_no_entry_covers():
    with pytest.raises(
        InputError,
        match=(
            r"found none for tok_embeddings\.weight, norm\.weight, output\.weight; name their"
            r" modules"
        ),
    ):
        user_buckets([r"layers\.\d+"], NAMES)
    with pytest.raises(
        InputError,
        match=(
            r"found none for tok_embeddings\.weight, layers\.2\.wq\.weight, layers\.2\.wk\.weight"
            r" and 19"
        ),
    ):
        user_buckets(["layers.[0-1]", "norm"], NAMES)
    left = user_buckets([r"layers\.\d+"], NAMES, uncovered="default").buckets[DEFAULT_BUCKET]
    assert left == ("tok_embeddings.weight", "norm.weight", "output.weight")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            [r"layer\.\d+"],
            (
                r"expected modules that 'layer\\\\\.\\\\d\+' matches, found none; the nearest names"
                r" are layers"
            ),
        ),
        (["layers.(0"], r"expected regular expressions on module names, found 'layers.\(0'"),
        (
            ["layers", r"layers\.3"],
            (
                r"expected each parameter in one bucket, found layers\.3\.wq\.weight in 'layers'"
                r" and 'layers\.3'"
            ),
        ),
    ],
)
def test_entries_that_cannot_be(entries, message):
    with pytest.raises(InputError, match=message):
        user_buckets(entries, NAMES)
    with pytest.raises(InputError, match="uncovered: expected error or default, found 'drop'"):
        user_buckets(["layers"], NAMES, uncovered="drop")


Made = tuple[nn.Module, Capture, list[Problem]]


def made(preset: str, mesh: str) -> Made:
    spec = MeshSpec.parse(mesh)
    built = build(preset, mesh=spec, seq_len=64, num_layers=2)
    capture = capture_built(built)
    costs = ClusterCostModel(load_cluster("h100"), capture.group_ranks)
    problems = [
        build_problem(export_graph(graph, costs, group_ranks=capture.group_ranks))
        for graph in capture.graphs
    ]
    return built.module, capture, problems


@pytest.fixture(scope="module")
def llama() -> Iterator[Made]:
    with world(4):
        yield made("llama3-debug", "fsdp=4")


def ours(problem: Problem) -> list[list[str]]:
    """The buckets that the plan asks for, in forward order, members as they stand in the
    payload.
    """
    groups: dict[int, list[str]] = {}
    alone = []
    for c in problem.collectives:
        if c.restriction.group is not None:
            groups.setdefault(c.restriction.group, []).append(
                f"{problem.keys[c.key].kind} {c.module}"
            )
        else:
            alone.append([f"{problem.keys[c.key].kind} {c.module}"])
    return sorted(map(sorted, [*groups.values(), *alone]))


TORCHTITAN = ["tok_embeddings", "layers.0", "layers.1", ["norm", "output"]]
"""What TorchTitan's ``get_default_transformer_block_buckets`` gives for two layers (there the
output is called ``lm_head``).
"""


def torchs(capture: Capture, problem: Problem, index: int) -> list[list[str]]:
    """The buckets that torch's manual scheduler makes of TorchTitan's plan, in the order in which
    they are launched.
    """
    module = copied(capture.graphs[index].module)
    parameter = {problem.node_names[c.start]: c.module for c in problem.collectives}
    kind = {problem.node_names[c.start]: problem.keys[c.key].kind for c in problem.collectives}
    torch_private.schedule_overlap_by_module(
        module, TORCHTITAN, lambda node: parameter.get(node.name, "").rpartition(".")[0]
    )
    launched = []
    for node in module.graph.nodes:
        if "_c10d_functional" in str(node.target) and "wait" not in str(node.target):
            sources = {
                name for name, graph in torch_private.sources_of(node) if graph == id(module.graph)
            } & parameter.keys()
            launched.append([f"{kind[name]} {parameter[name]}" for name in sources or {node.name}])
    return launched


def test_the_buckets_are_torchtitans(llama):
    """Blocks found in the module tree, against names of modules run through torch's own
    scheduler.
    """
    module, capture, problems = llama
    buckets = block_buckets(module)
    assert list(buckets.buckets) == ["tok_embeddings", "layers.0", "layers.1", "norm+output"]
    plan = buckets.plan(problems)
    for index, problem in enumerate(problems):
        launched = torchs(capture, problem, index)
        assert sorted(map(sorted, launched)) == ours(restricted(problem, plan))
        assert max(map(len, launched)) == 9


def test_they_are_launched_in_its_order(llama):
    """The plan's order forward, and the reverse backward: the solver's schedule under the plan, and
    torch's, on every stream.
    """
    module, capture, problems = llama
    buckets = block_buckets(module)
    place = {name: k for k, names in enumerate(buckets.buckets.values()) for name in names}
    for index, problem in enumerate(problems):
        answer = solve(
            restricted(problem, buckets.plan(problems)), Caps(), SolveOptions(budget=0.0)
        )
        assert answer.best is not None
        assert (
            verify(restricted(problem, buckets.plan(problems)), answer.best.schedule, Caps()) == ()
        )
        for launched in (torchs(capture, problem, index), by_launch(problem, answer.best.schedule)):
            for kind in ("all_gather", "reduce_scatter"):
                order = [
                    place[member.split()[1]]
                    for members in launched
                    for member in members[:1]
                    if member.startswith(kind)
                ]
                assert all((a < b) if index == 0 else (a > b) for a, b in pairwise(order)), (
                    kind,
                    order,
                )


def by_launch(problem: Problem, schedule) -> list[list[str]]:
    """Return the members of each launch of a schedule, in its order."""
    found = []
    for step in schedule.steps:
        if step.kind.name == "START":
            members = schedule.buckets[step.index].members
        elif step.kind.name == "NODE" and any(c.start == step.index for c in problem.collectives):
            members = (problem.collective_of_node[step.index],)
        else:
            continue
        found.append(
            [
                f"{problem.keys[problem.collectives[c].key].kind} {problem.collectives[c].module}"
                for c in members
            ]
        )
    return found


def test_experts_have_buckets_of_their_own():
    """One plan for two process groups."""
    with world(4):
        module, _, problems = made("deepseek-v3-debug", "fsdp=4,ep=2")
    plan = block_buckets(module).plan(problems)
    forward, backward = (restricted(problem, plan) for problem in problems)
    for problem in (forward, backward):
        for members in ours(problem):
            experts = {".experts." in member for member in members}
            assert len(experts) == 1, members
    assert max(len(m) for m in ours(forward)) > 9


def test_replicas_are_summed_in_the_buckets_of_their_scatters():
    with world(4):
        module, _, problems = made("llama3-debug", "replicate=2,fsdp=2")
    backward = restricted(problems[1], block_buckets(module).plan(problems))
    members = {
        kind: [{m.split()[1] for m in b} for b in ours(backward) if b[0].startswith(kind)]
        for kind in ("all_reduce", "reduce_scatter")
    }
    assert members["all_reduce"] == members["reduce_scatter"]
    assert len(members["all_reduce"]) == 4


def test_no_buckets_leaves_each_alone(llama):
    _, _, problems = llama
    for problem in problems:
        answer = solve(restricted(problem, NO_BUCKETS), Caps(), SolveOptions(budget=0.0))
        assert answer.best is not None
        assert answer.best.schedule.buckets == ()


def test_the_baseline_has_the_buckets_of_the_plan() -> None:
    """One code for both: in either direction ``transformer_block`` launches what the plan by module
    makes.
    """
    capture = capture_preset("llama3-debug", mesh=MeshSpec(fsdp=4), seq_len=256)
    costs = ClusterCostModel(load_cluster("h100"), capture.group_ranks)
    for graph in capture.graphs:
        problem = build_problem(export_graph(graph, costs, group_ranks=capture.group_ranks))
        labels = block_labels(problem)
        assert list(dict.fromkeys(labels.values())) == [
            "tok_embeddings",
            "layers.0",
            "layers.1",
            "behind layers.1",
        ]
        (baseline,) = [b for b in baselines(Instance.of(problem)) if b.name == "transformer_block"]
        for bucket in baseline.schedule.buckets:
            assert len({labels[problem.collectives[c].module] for c in bucket.members}) == 1
        behind = [
            {problem.collectives[c].module for c in bucket.members}
            for bucket in baseline.schedule.buckets
        ]
        assert {"norm.weight", "output.weight"} in behind


def parameters_of(plan: Plan) -> set[tuple[str, frozenset[str]]]:
    """Return the members of the bucket of each rule, in any order."""
    return {(str(rule.kind), frozenset(rule.match.split("|"))) for rule in plan.rules}


def test_buckets_on_the_command_line(tmp_path: Path) -> None:
    """From the names in the graphs alone: none, those of the plan by module, or a file's."""
    capture = capture_preset("llama3-debug", mesh=MeshSpec(fsdp=4), seq_len=256)
    costs = ClusterCostModel(load_cluster("h100"), capture.group_ranks)
    dags = [export_graph(graph, costs, group_ranks=capture.group_ranks) for graph in capture.graphs]
    graphs = [
        LoadedGraph(dag=dag, problem=build_problem(dag), device_memory_bytes=None) for dag in dags
    ]
    problems = [graph.problem for graph in graphs]
    assert with_buckets(Plan(), None, graphs) == Plan()
    assert with_buckets(Plan(), "none", graphs) == NO_BUCKETS
    with world(4):
        built = block_buckets(build("llama3-debug", mesh=MeshSpec(fsdp=4), seq_len=256).module)
    by_block = with_buckets(Plan(), "block", graphs)
    assert parameters_of(by_block) == parameters_of(built.plan(problems))
    (tmp_path / "buckets.txt").write_text("# mine\ntok_embeddings\n\nlayers.[01]\nnorm+output\n")
    mine = with_buckets(Plan(), str(tmp_path / "buckets.txt"), graphs)
    assert parameters_of(mine) == parameters_of(by_block)
    (tmp_path / "empty.txt").write_text("# nothing\n")
    for path, message in (
        ("empty.txt", "expected module names, one a line"),
        ("missing.txt", "expected none, block or a file"),
    ):
        with pytest.raises(InputError, match=f"--buckets: {message}"):
            with_buckets(Plan(), str(tmp_path / path), graphs)
