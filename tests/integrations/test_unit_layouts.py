"""``tune_fsdp2`` on other layouts of units: tied parameters, units in units, kept embeddings."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import apsched
from apsched.capture.fake_world import world
from apsched.capture.fsdp2 import capture_fsdp2
from apsched.integrations.fsdp2 import apply_fsdp2, fsdp2_plan
from apsched.integrations.fsdp2_units import units_of
from tests.helpers.graphs.fine_tuned import FINE_TUNED, adapted, trained_head
from tests.helpers.graphs.unit_layouts import LAYOUTS, blocks, layout, recomputed, shared
from tests.helpers.processes import WORKERS, Job, run_jobs
from tests.workers.training.tune_layouts_worker import SHARED

TOKENS = torch.zeros(4, 8, dtype=torch.long)


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> list[dict]:
    asked = Job(folder=tmp_path_factory.mktemp("layouts") / "two", world_size=2)
    (found,) = run_jobs(WORKERS / "training/tune_layouts_worker.py", [asked], timeout_s=600)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS | FINE_TUNED)
def test_a_tuned_model_computes_what_it_did(job, name):
    for report in job:
        case = report[name]
        assert case["tuned"] == case["as it was"]
        assert len({*case["tuned"]}) == 4, "each step changes the loss"
        predicted, untuned = case["times"]
        assert 0 < predicted <= untuned


@pytest.mark.ranks
@pytest.mark.parametrize("name", SHARED)
def test_micro_batches_that_share_all_are_those_of_the_same_switches_set_by_hand(job, name):
    for report in job:
        case = report[name]["shared"]
        assert case["tuned"] == case["by hand"]
        assert case["tuned"][:3] == case["as it was"][:3]
        assert len({*case["tuned"]}) == 7, "each micro-batch and each step changes the loss"


@pytest.mark.ranks
def test_a_causal_model_of_transformers_is_tuned_with_its_usual_inputs(job):
    """By name, with a mask; the model returns a cache, and branches on the values of the mask."""
    pytest.importorskip("transformers", reason="needs the extra hf")
    test_a_tuned_model_computes_what_it_did(job, "transformers")
    for report in job:
        assert report["transformers"]["units"] == ["(root)", "model.layers.0", "model.layers.1"]
        order = report["transformers"]["ddp"]
        assert order[0] == "model.norm.weight"
        assert order[-1] == "model.embed_tokens.weight", "tied: the last gradient is its first use"


@pytest.mark.ranks
def test_a_unit_that_does_not_run_stays_as_it_is(job):
    for report in job:
        units = report["a unit that does not run"]["units"]
        assert units == ["(root)", "blocks.0", "blocks.2"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_embeddings_are_gathered_in_backward_where_a_checkpoint_runs_them_again(accumulate):
    """Recomputation reads them before it comes to the places, which backward needs."""
    settings = {"budget": 0.0, "memory_cap": "none", "accumulate": accumulate, "keep": "none"}
    with world(2):
        again = apsched.tune_fsdp2(recomputed(), TOKENS, **settings)
        once = layout(lambda model: [model.embedding, *model.blocks])()
        alone = apsched.tune_fsdp2(once, TOKENS, **settings)
    gathered = [
        {one.name: one.unshard_in_backward for one in found.settings.units}
        for found in (again, alone)
    ]
    assert [of_units["embedding"] for of_units in gathered] == [True, False]


@pytest.mark.parametrize("order", [(0, 1, 0, 2), (0, 0, 1, 2)])
def test_a_unit_that_runs_twice_is_refused_by_name(order):
    """Its parameters can be those of the unit around it: see the layouts."""
    with world(2):
        model = layout(order=order)()
        with pytest.raises(
            apsched.InputError, match=r"blocks\.0: expected each unit to run once.*do not call"
        ):
            apsched.tune_fsdp2(model, TOKENS)


@pytest.mark.parametrize("name", ["checkpointed", "plain", "frozen"])
def test_only_an_embedding_that_is_not_checkpointed_is_not_gathered_in_backward(name):
    """Code that runs again in backward reads the weights of a unit, also where the backward graph
    does not.
    """
    with world(2):
        model = nn.Sequential(nn.Embedding(65, 32), nn.Linear(32, 32), nn.Linear(32, 8))
        model[0].requires_grad_(name != "frozen")
        if name == "checkpointed":
            model[0] = checkpoint_wrapper(model[0])
        for unit in model:
            fully_shard(unit)
        found = apsched.tune_fsdp2(fully_shard(model), TOKENS, budget=0.0, memory_cap="none")
        assert apply_fsdp2(model, found.results) == found.settings
    units = {unit.name: unit for unit in found.settings.units}
    assert [u.unshard_in_backward for u in units.values()] == [True, name == "checkpointed"] + (
        [True] * 2
    )
    prefetched = {name for unit in units.values() for name in unit.backward_prefetch}
    assert ("0" in prefetched) == (name == "checkpointed")
    assert "1" in prefetched, "as FSDP2 does, also where the graph does not gather it (frozen)"


def test_a_graph_of_a_unit_of_several_dtypes_is_refused_with_the_call_that_takes_it():
    with world(2):
        model = adapted()
        results = [
            apsched.solve(
                graph, plan=fsdp2_plan(model, graph), max_compute_move=0, memory_cap="none"
            )
            for graph in apsched.capture(model, (TOKENS,))
        ]
        with pytest.raises(apsched.InputError, match=r"\(bfloat16, float32\).* call tune_"):
            apply_fsdp2(model, results)


@pytest.mark.parametrize("keep", [None, "auto"])
def test_a_unit_of_several_dtypes_is_gathered_at_once(keep):
    """FSDP2 gathers bytes; the trained ones have one dtype, in which they are reduced."""
    with world(2):
        found = apsched.tune_fsdp2(adapted(), TOKENS, keep=keep, budget=0.0, memory_cap="none")
    forward, backward = (result.problem for result in found.results)
    dtypes = {}
    for c in forward.collectives:
        dtypes.setdefault(forward.keys[c.key].dtype, set()).add(c.module.rpartition(".")[0])
    assert dtypes.keys() == {"uint8", "bfloat16"}
    assert dtypes["bfloat16"] == {"embedding", "head"}
    sizes = {c.module: c.size_bytes for c in forward.collectives}
    assert sizes["blocks.0.up.base.weight"] == 32 * 48 * 2
    assert sizes["blocks.0.up.inner.weight"] == 32 * 4 * 4
    assert found.results[0].best.num_launches == 4, "three blocks and the root"
    reduced = {(k.kind, k.dtype) for k in backward.keys if k.kind == "reduce_scatter"}
    assert reduced == {("reduce_scatter", "float32")}


@pytest.mark.parametrize("keep", [None, "auto"])
def test_frozen_parameters_have_no_optimizer_state_beside_forward_either(keep):
    """Forward alone does not say which parameters are trained, and backward does not take all."""
    with world(2):
        model = adapted()
        shards = [(p.to_local().nbytes, p.requires_grad) for p in model.parameters()]
        accounts = [
            result.account
            for result in apsched.tune_fsdp2(model, TOKENS, keep=keep, budget=0.0).results
        ]
    for account in accounts:
        state = next(x.size_bytes for x in account.lines if x.what.startswith("optimizer state"))
        assert state == 2 * sum(size for size, trained in shards if trained)
        assert account.beside.parameter_bytes == sum(size for size, _ in shards)


@pytest.mark.parametrize("kept", [True, False])
def test_a_unit_that_backward_does_not_read_stays_as_fully_shard_keeps_it(kept):
    """FSDP2 gathers it again in backward if it was not kept, read or not."""
    with world(2):
        model = trained_head(kept=kept)
        found = apsched.tune_fsdp2(model, TOKENS, budget=0.0, memory_cap="none")
        assert apply_fsdp2(model, found.results) == found.settings
    reshards = {unit.name: unit.reshard_after_forward for unit in found.settings.units}
    assert reshards["head"] == (not kept)
    assert reshards["blocks.0"], "nothing in front of the head has a backward"


def with_compiled_blocks(model: nn.Module) -> list[nn.Module]:
    for k, block in enumerate(model.blocks):
        model.blocks[k] = torch.compile(block, backend="eager")
    return list(model.blocks)


def test_blocks_that_are_compiled_are_captured_as_they_are():
    graphs = []
    for units in (blocks, with_compiled_blocks):
        with world(2):
            graphs.append(capture_fsdp2(layout(units)(), (TOKENS,)).graphs)
    first, second = ([graph.module.code for graph in pair] for pair in graphs)
    assert first == second


def test_a_compiled_model_is_tuned_as_the_model_in_it():
    """As the warning under torch.compile advises."""
    found = []
    for wrap in (torch.compile, lambda model: model):
        with world(2):
            given = wrap(layout()())
            found.append(apsched.tune_fsdp2(given, TOKENS, budget=0.0, memory_cap="none").settings)
    assert found[0] == found[1]


@torch.compile(backend="aot_eager")
def gated(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * torch.sigmoid(x)


class Gated(nn.Module):
    """Calls a function of torch.compile in forward, as TorchTitan does for flex_attention."""

    def __init__(self, *, compiled: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.gate = gated if compiled else gated._torchdynamo_orig_callable

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.gate(layer(x))
        return x


def test_functions_that_are_compiled_are_captured_as_they_are():
    x = torch.zeros(4, 32)

    def codes(*, compiled: bool) -> list[str]:
        with world(2):
            model = fully_shard(Gated(compiled=compiled))
            graphs = capture_fsdp2(model, (x,)).graphs
            assert apsched.ddp_buckets(Gated(compiled=compiled), x).buckets
        assert len(apsched.capture(Gated(compiled=compiled), (x,), "fsdp=2")) == 2
        return [graph.module.code for graph in graphs]

    assert codes(compiled=True) == codes(compiled=False)


class Branching(nn.Module):
    """Branches on the values of its input, in the job and under a compiler."""

    def __init__(self, *, asks_compiler: bool) -> None:
        super().__init__()
        self.inner, self.asks_compiler = nn.Linear(4, 4), asks_compiler

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y = self.inner(x) * scale
        if self.asks_compiler and torch.compiler.is_compiling():
            return y
        return y if x.sum() > 0 else -y


def test_a_branch_on_values_is_captured_as_by_a_compiler_or_refused_with_its_place():
    inputs = {"x": torch.ones(2, 4), "scale": 2.0}
    with world(2):
        apsched.ddp_buckets(Branching(asks_compiler=True), inputs)
        assert len(capture_fsdp2(fully_shard(Branching(asks_compiler=True)), inputs).graphs) == 2
        refused = partial(
            pytest.raises,
            apsched.InputError,
            match=r"branch on the value .*test_unit_layouts.py:\d",
        )
        with refused():
            apsched.ddp_buckets(Branching(asks_compiler=False), inputs)
        with refused():
            apsched.tune_fsdp2(fully_shard(Branching(asks_compiler=False)), inputs)
    assert not torch.compiler.is_compiling()


def test_an_embedding_read_outside_of_its_unit_cannot_be_resharded():
    with (
        world(2),
        pytest.raises(
            apsched.InputError,
            match=r"embedding\.weight: .* read outside, too: leave keep out",
        ),
    ):
        apsched.tune_fsdp2(shared(), TOKENS, keep="none", budget=0.0, memory_cap="none")


@pytest.mark.parametrize(
    "name", ["tied in the root", "tied in a unit", "an embedding read by the root"]
)
def test_a_tied_parameter_is_gathered_and_reduced_once(name):
    """As FSDP2 does, which has one shard of it; its name is the first one."""
    with world(2):
        model = LAYOUTS[name]()
        graphs = capture_fsdp2(model, (TOKENS,)).graphs
        known = {parameter for unit in units_of(model) for parameter in unit.parameters}
    for graph, kind in zip(
        graphs, ("all_gather_into_tensor", "reduce_scatter_tensor"), strict=True
    ):
        served = [
            node.meta["custom"]["apsched_parameter"]
            for node in graph.module.graph.nodes
            if kind in str(node.target)
        ]
        assert sorted(served) == sorted(known)


class HeadOutside(nn.Module):
    """A model whose loss calls its head, as TorchTitan's ChunkedLossWrapper does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 64, bias=False)
        self.skips_head = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x) if self.skips_head else self.head(self.norm(x))


@pytest.mark.parametrize("skips_head", [False, True])
def test_a_parameter_that_the_step_does_not_read_is_said_to_be_gathered(skips_head):
    """FSDP2 gathers it with its unit; the figures are without it."""
    with world(2):
        model = HeadOutside()
        model.skips_head = skips_head
        for layer in model.layers:
            fully_shard(layer)
        fully_shard([model.norm, model.head])
        found = apsched.tune_fsdp2(
            fully_shard(model), torch.zeros(4, 32), budget=0.0, memory_cap="none"
        )
    assert found.unread == (("head.weight",) if skips_head else ())
    text = "; predicted without the gather of head.weight, which the captured step does not read"
    assert (text in str(found)) == skips_head


def test_a_parameter_that_fully_shard_ignores_is_not_said_to_be_gathered():
    with world(2):
        model = HeadOutside()
        ignored = {model.norm.weight}
        fully_shard(model, ignored_params=ignored)
        found = apsched.tune_fsdp2(model, torch.zeros(4, 32), budget=0.0, memory_cap="none")
    assert found.unread == ()


def test_units_that_an_evaluation_left_gathered_are_captured_by_their_shards():
    """Their parameters are gathered tensors in bfloat16 then, and shards have float32."""

    def codes(*, evaluated: bool) -> list[str]:
        with world(2):
            model, x = HeadOutside(), torch.zeros(4, 32)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for layer in model.layers:
                fully_shard(layer, mp_policy=policy, reshard_after_forward=False)
            fully_shard(model, mp_policy=policy)
            if evaluated:
                with torch.no_grad():
                    model(x)
                assert model.layers[0].weight.dtype == torch.bfloat16
            return [graph.module.code for graph in capture_fsdp2(model, (x,)).graphs]

    assert codes(evaluated=True) == codes(evaluated=False)
