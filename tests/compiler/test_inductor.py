"""``apsched.backend(inductor=True)`` and ``apsched.inductor_pass``: the code that Inductor
generates, its caches and its own passes.
"""

import logging
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.distributed.device_mesh import init_device_mesh

import apsched
from apsched.capture.fake_world import world
from apsched.compiler import fingerprint, schedule_graph
from apsched.compiler.backend import ParameterNames
from apsched.compiler.inductor_pass import ParameterPass
from apsched.compiler.inductor_settings import OFF
from apsched.compiler.settings import Settings
from apsched.costs.cluster_model import ClusterCostModel
from apsched.costs.clusters.cluster import load_cluster
from apsched.errors import InputError
from apsched.models.build import build
from apsched.models.mesh import MeshSpec
from apsched.torch_compat.compilers import with_custom_pass
from tests.helpers.graphs.inductor_code import (
    calls_of,
    calls_of_graph,
    freed_in_flight,
    interpreted,
    segments_of,
)
from tests.helpers.graphs.small_models import WIDTH, Broken, layers, shard

WORLD_SIZE = 4
QUICK = {"budget": 0.0, "memory_cap": "none"}


@pytest.fixture(scope="module")
def mesh():
    with world(WORLD_SIZE):
        yield init_device_mesh("cpu", (WORLD_SIZE,))


@pytest.fixture(autouse=True)
def compiled_anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def codes():
    """The code that Inductor generates; none is compiled."""
    with interpreted() as found:
        yield found


@pytest.fixture
def scheduled(monkeypatch) -> list[torch.fx.GraphModule]:
    """The graphs whose order is to be held."""
    graphs = []

    def recorded(gm, **options):
        graphs.append(gm)
        return original(gm, **options)

    original = schedule_graph.hold_order
    monkeypatch.setattr(schedule_graph, "hold_order", recorded)
    return graphs


def step_of(model: torch.nn.Module, backend: object, *inputs: torch.Tensor) -> Callable[[], None]:
    compiled = torch.compile(model, backend=backend)

    def step():
        compiled(*inputs).sum().backward()

    return step


@pytest.mark.parametrize(
    ("preset", "spec"), [("llama3-debug", "fsdp=4"), ("llama3-debug", "fsdp=2,tp=2")]
)
@pytest.mark.slow
def test_the_code_has_the_order_of_the_schedule(mesh, scheduled, codes, preset, spec):
    built = build(preset, mesh=MeshSpec.parse(spec), seq_len=32, num_layers=1, materialize=True)
    backend = apsched.backend(
        inductor=True, reshard_after_forward=True, budget=0.0, memory_cap="none"
    )
    step_of(built.module, backend, *built.inputs)()
    assert [result.problem.name for result in backend.results] == ["forward", "backward"]
    assert len(codes) == len(scheduled) == 2
    for code, gm, result in zip(codes, scheduled, backend.results, strict=True):
        assert segments_of(calls_of(code)) == segments_of(calls_of_graph(gm))
        calls = Counter(calls_of(code))
        assert (
            calls["all_gather"] + calls["reduce_scatter"] + calls["all_reduce"]
            == result.best.num_launches
        )
        assert freed_in_flight(code) == (result.best.num_launches, [])
        assert result.round_trip_exact


@pytest.mark.parametrize("reduce", ["each", "once"])
def test_gradients_of_two_micro_batches_are_reduced_each_or_once(mesh, codes, reduce):
    model = shard(layers(2), mesh)
    backend = apsched.backend(inductor=True, reduce=reduce, **QUICK)
    both = apsched.micro_batches(lambda x: model(x).sum(), 2)
    step_of(both, backend, torch.randn(4, WIDTH))()
    kinds = Counter(
        result.problem.keys[one.key].kind
        for result in backend.results
        for one in result.problem.collectives
    )
    assert kinds["reduce_scatter"] == {"each": 8, "once": 4}[reduce]
    assert backend.results[1].best.num_launches == 1, "sums stand behind all reductions"


def test_an_error_in_putting_sums_first_leaves_the_graph(mesh, codes, monkeypatch, caplog):
    def broken(graph: torch.fx.Graph) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("apsched.compiler.inductor_pass.put_sums_first", broken)
    model = shard(layers(1), mesh)
    backend = apsched.backend(inductor=True, reduce="once", on_error="fallback", **QUICK)
    step_of(model, backend, torch.randn(4, WIDTH))()
    assert "joint stays unchanged" in caplog.text
    assert [result.problem.name for result in backend.results] == ["forward", "backward"]


def test_a_wrong_word_for_reductions_is_refused():
    with pytest.raises(InputError, match="expected 'once' or 'each', found 'twice'"):
        apsched.backend(reduce="twice")


@pytest.mark.slow
def test_backward_gathers_what_is_not_kept(mesh, codes, tmp_path):
    """The parameters that are kept: none, all, those of a file, by name, and as solved."""
    chosen = tmp_path / "kept.txt"
    chosen.write_text("2.weight\n")
    gathered = {}
    for label, keep in {
        "none": "none",
        "all": "all",
        "file": chosen,
        "names": ["2.weight"],
        "auto": "auto",
    }.items():
        torch._dynamo.reset()
        codes.clear()
        backend = apsched.backend(inductor=True, keep=keep, **QUICK)
        step_of(shard(layers(4), mesh), backend, torch.ones(4, WIDTH))()
        forward, backward = backend.results
        assert len(forward.problem.collectives) == 8  # weight and bias of four layers
        gathers = [
            c.module
            for c in backward.problem.collectives
            if backward.problem.keys[c.key].kind == "all_gather"
        ]
        _, code = codes
        assert (calls_of(code).count("all_gather") > 0) == bool(gathers)
        assert backward.round_trip_exact
        gathered[label] = set(gathers)
    assert "2.weight" in gathered["none"]
    assert gathered["all"] == gathered["auto"] == set()
    assert gathered["file"] == gathered["names"] == gathered["none"] - {"2.weight"}


def test_options_reach_backward_though_it_is_compiled_later(mesh, codes):
    backend = apsched.backend(inductor=True, max_prefetch=2, **QUICK)
    loss = torch.compile(shard(layers(), mesh), backend=backend)(torch.ones(4, WIDTH)).sum()
    assert len(backend.results) == 1
    loss.backward()
    forward, backward = backend.results
    assert forward.caps.max_prefetch == backward.caps.max_prefetch == 2
    assert {c.module for c in backward.problem.collectives} == {
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    }


def test_graph_breaks_inference_and_dynamic_sizes(mesh, codes):
    backend = apsched.backend(inductor=True, **QUICK)
    compiled = torch.compile(shard(Broken(1), mesh), backend=backend)
    with torch.no_grad():
        compiled(torch.ones(4, WIDTH))
    assert [result.problem.name for result in backend.results] == ["graph", "graph"]
    backend.results.clear()
    for batch in (4, 6):
        x = torch.ones(batch, WIDTH)
        torch._dynamo.mark_dynamic(x, 0)
        y = compiled(x)
        y.sum().backward()
        assert y.shape == (batch, WIDTH)
    assert Counter(result.problem.name for result in backend.results) == {
        "forward": 2,
        "backward": 2,
    }


def test_without_collectives_the_code_is_inductors_own(codes):
    def function(x):
        return torch.tanh(x @ x).sum()

    x = torch.ones(4, 4)
    backend = apsched.backend(inductor=True)
    torch.compile(function, backend=backend)(x)
    torch._dynamo.reset()
    torch.compile(function)(x)
    ours, theirs = codes
    assert calls_of(ours) == calls_of(theirs) != []
    assert backend.results == []


def test_an_error_stops_compilation_or_leaves_the_graph(mesh, codes, caplog):
    x = torch.ones(4, WIDTH)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"memory"):
        torch.compile(shard(layers(), mesh), backend=apsched.backend(inductor=True, memory_cap=1))(
            x
        )
    torch._dynamo.reset()
    backend = apsched.backend(inductor=True, memory_cap=1, on_error="fallback")
    with caplog.at_level(logging.WARNING):
        step_of(shard(layers(), mesh), backend, x)()
    assert [Counter(calls_of(code))["wait"] for code in codes] == [4, 4]
    assert [text.split(":")[0] for text in caplog.messages if "stays" in text] == [
        "forward stays unchanged",
        "backward stays unchanged",
    ]


def test_inductors_own_passes_over_collectives_are_off(mesh, codes, caplog):
    backend = apsched.backend(inductor=True, **QUICK)
    on = {"bucket_all_gathers_fx": "all", "reorder_for_compute_comm_overlap": True}
    with config.patch(on), caplog.at_level(logging.WARNING):
        step_of(shard(layers(), mesh), backend, torch.ones(4, WIDTH))()
    for code, result in zip(codes, backend.results, strict=True):
        assert Counter(calls_of(code))["wait"] == result.best.num_launches
    assert [name in caplog.text for name in on] == [True, True]


@pytest.mark.parametrize(("rank", "times"), [(0, 1), (1, 0)])
def test_one_process_rank_names_what_is_off(monkeypatch, caplog, rank, times):
    monkeypatch.setattr("apsched.compiler.backend.process_rank", lambda: rank)
    backend = apsched.backend(inductor=True, **QUICK)
    with config.patch(bucket_all_gathers_fx="all"), caplog.at_level(logging.WARNING):
        patches = backend._patches(ParameterNames())
    assert patches["bucket_all_gathers_fx"] == OFF["bucket_all_gathers_fx"]
    assert caplog.text.count("bucket_all_gathers_fx is off") == times


def test_inductor_sorts_and_keeps_nothing_by_its_own_estimate_of_memory(mesh, codes, monkeypatch):
    original, orders = GraphLowering.codegen, []

    def recorded(graph):
        orders.append((config.reorder_for_peak_memory, config.allow_buffer_reuse))
        return original(graph)

    monkeypatch.setattr(GraphLowering, "codegen", recorded)
    backend = apsched.backend(inductor=True, **QUICK)
    step_of(shard(layers(), mesh), backend, torch.ones(4, WIDTH))()
    assert orders == [(False, False), (False, False)]


@pytest.mark.parametrize("name", OFF)
def test_every_setting_that_is_turned_off_exists(name):
    assert apsched.compiler.inductor_settings.inductor_setting(name) == OFF[name], (
        "torch's default has no effect"
    )


def test_the_pass_refuses_a_setting_that_would_undo_it(mesh, codes):
    found = {
        "post_grad_custom_post_pass": apsched.inductor_pass(**QUICK),
        "bucket_all_gathers_fx": "all",
    }
    with (
        config.patch(found),
        pytest.raises(
            Exception,
            match=r"expected Inductor's own passes .* found bucket_all_gathers_fx = 'all'",
        ),
    ):
        step_of(shard(layers(), mesh), "inductor", torch.ones(4, WIDTH))()


def test_the_pass_alone_schedules_forward_and_backward(mesh, scheduled, codes):
    own = apsched.inductor_pass(**QUICK)
    with config.patch(post_grad_custom_post_pass=own):
        step_of(shard(layers(), mesh), "inductor", torch.ones(4, WIDTH))()
    assert [result.problem.name for result in own.results] == ["forward", "backward"]
    for code, gm in zip(codes, scheduled, strict=True):
        assert segments_of(calls_of(code)) == segments_of(calls_of_graph(gm))


def test_the_pass_before_may_leave_nodes_in_any_order(mesh, codes):
    def disordered(graph):
        first = next(node for node in graph.nodes if node.op == "call_function")
        next(iter(first.users)).append(first)

    own = apsched.inductor_pass(**QUICK)
    with config.patch(post_grad_custom_post_pass=with_custom_pass(disordered, own)):
        step_of(shard(layers(), mesh), "inductor", torch.ones(4, WIDTH))()
    assert [result.problem.name for result in own.results] == ["forward", "backward"]


def test_the_pass_alone_refuses_bitwise_mode_for_want_of_names(mesh, codes):
    model = shard(layers(), mesh)
    order = [name for name, _ in model.named_parameters()]
    own = apsched.inductor_pass(bitwise=True, parameter_order=order, **QUICK)
    with (
        config.patch(post_grad_custom_post_pass=own),
        pytest.raises(Exception, match=r"expected parameter_order .*inductor=True"),
    ):
        step_of(model, "inductor", torch.ones(4, WIDTH))()


@pytest.mark.slow
def test_a_warm_cache_is_used_for_the_same_and_never_for_another_plan(mesh):
    """Inductor's caches on disk are those that a second process would find."""
    model, x = shard(layers(1), mesh), torch.ones(4, WIDTH)

    def compiled_with(**settings):
        torch._dynamo.reset()
        counters.clear()
        backend = apsched.backend(inductor=True, **QUICK, **settings)
        _, codes = run_and_get_code(step_of(model, backend, x))
        hits = (
            counters["aot_autograd"]["autograd_cache_hit"]
            + counters["inductor"]["fxgraph_cache_hit"]
        )
        return (
            [r.best.num_launches for r in backend.results],
            hits,
            [calls_of(code) for code in codes],
        )

    alone = apsched.Plan((apsched.Rule(match=".*", forbid=True),))
    with fresh_cache():
        first, hits, code = compiled_with()
        assert hits == 0
        again, hits, same_code = compiled_with()
        assert (again, hits > 0) == ([], True), "nothing was solved"
        assert same_code == code
        planned, hits, other_code = compiled_with(plan=alone)
        assert hits == 0
    assert planned == [2, 2] != first
    assert other_code != code


class TestKey:
    """The inputs of the key of Inductor's caches."""

    def key(self, **settings) -> str | None:
        return apsched.inductor_pass(**settings).uuid()

    def test_equal_settings_have_one_key(self):
        assert self.key(memory_cap="1GiB") == self.key(memory_cap=2**30, cluster="h100") != None  # noqa: E711

    @pytest.mark.parametrize(
        "settings",
        [
            {"memory_cap": "1GiB"},
            {"bucket_cap": 1},
            {"max_prefetch": 1},
            {"second_group": True},
            {"cluster": "h200"},
            {"plan": apsched.Plan((apsched.Rule(match="x", forbid=True),))},
            {"bitwise": True, "parameter_order": ["a", "b"]},
            {"parameter_order": ["b", "a"]},
            {"budget": 1.0},
            {"seed": 1},
            {"start": True, "cache": "/nowhere"},
            {"on_error": "fallback"},
        ],
    )
    def test_what_changes_the_result_changes_the_key(self, settings):
        assert self.key(**settings) != self.key()

    def test_process_ranks_share_no_code(self, monkeypatch):
        """A bucket of all-gathers has the rank's place in its buffer baked in."""
        keys = set()
        for rank in range(3):
            monkeypatch.setattr(fingerprint, "process_rank", lambda rank=rank: rank)
            keys.add(self.key())
        assert len(keys) == 3

    def test_versions(self, monkeypatch):
        key = self.key()
        monkeypatch.setattr(fingerprint, "_versions", lambda: ("another torch",))
        assert self.key() != key

    def test_what_a_cost_model_was_asked_does_not_matter(self):
        model = ClusterCostModel(load_cluster("h100"))
        key = self.key(cost_model=model)
        model.collective_us("all_gather", "0", 8, 2**20)
        assert self.key(cost_model=model) == key
        assert self.key(cost_model=ClusterCostModel(load_cluster("h100"), fused=False)) != key

    def test_a_model_of_the_users_own_needs_a_name(self):
        class Flat:
            def compute_us(self, node):
                return 1.0

            def collective_us(self, kind, group_name, group_size, size_bytes):
                return 1.0

        assert self.key(cost_model=Flat()) is None, "Inductor's caches are bypassed"
        Flat.uuid = lambda self: "flat 1"
        assert self.key(cost_model=Flat()) is not None


def test_a_fingerprint_names_all_settings():
    """A new setting changes the fingerprint, or is known not to matter."""
    known = {
        "cluster",
        "cost_model",
        "memory_cap",
        "bucket_cap",
        "max_topo_span",
        "max_prefetch",
        "in_flight_cap",
        "max_compute_move",
    }
    known |= {
        "group_ranks",
        "hints",
        "plan",
        "bitwise",
        "budget",
        "seed",
        "on_error",
        "schedule",
        "start",
        "parameter_order",
        "contention",
        "second_group",
        "scenarios",
        "noise",
        "robust",
        "time_slack",
        "optimizer",
        "reserve",
        "num_workers",
    }
    assert set(Settings.__dataclass_fields__) - known == {
        "progress",
        "deadline_s",
        "cache",
        "cache_limit",
    }


def test_the_cache_tells_when_gradients_are_reduced():
    passes = [ParameterPass({}, None, Settings(), reduce) for reduce in ("each", "once")]
    assert len({one.uuid() for one in passes}) == 2
