"""``apsched.backend`` under torch.compile, on fake process groups: which graphs are scheduled, with
what settings and what knowledge.
"""

import logging
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils._pytree import tree_leaves

import apsched
from apsched.capture.fake_world import world
from apsched.compiler import backend as module_under_test
from apsched.compiler import schedule_captured as scheduled
from apsched.costs.cluster_model import ClusterCostModel
from apsched.fx.collectives import collective_kind, is_wait_tensor
from tests.helpers.graphs.small_models import WIDTH, Broken, layers, shard

WORLD_SIZE = 4
QUICK = {"budget": 0.0, "memory_cap": "none"}


@pytest.fixture(scope="module")
def mesh():
    with world(WORLD_SIZE):
        yield init_device_mesh("cpu", (WORLD_SIZE,))


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def run_graphs(monkeypatch) -> list[torch.fx.GraphModule]:
    """The graphs that are run, as they are run."""
    graphs = []

    def recorded(gm):
        graphs.append(gm)
        return original(gm)

    original = module_under_test.boxed
    monkeypatch.setattr(module_under_test, "boxed", recorded)
    return graphs


def num_collectives(gm: torch.fx.GraphModule) -> int:
    return sum(collective_kind(node) is not None for node in gm.graph.nodes)


class Row(torch.nn.Module):
    """A product whose parts are added over process ranks, and a residual."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh, self.weight = mesh, torch.nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        part = DTensor.from_local(x @ self.weight, self.mesh, [Partial()], run_check=False)
        return (part.redistribute(placements=[Replicate()]).to_local() + x).sum()


def test_backward_computes_no_product_again_for_a_reduction_of_forward(mesh, run_graphs):
    x = torch.randn(3, WIDTH, requires_grad=True)
    torch.compile(Row(mesh), backend=apsched.backend(**QUICK))(x).backward()
    products = [
        sum(node.target is torch.ops.aten.mm.default for node in gm.graph.nodes)
        for gm in run_graphs
    ]
    assert products == [1, 2]


def names_of(result: apsched.Result) -> list[str]:
    return [c.module for c in result.problem.collectives]


PARAMETERS = ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_forward_and_the_backward_compiled_later_have_the_settings(mesh, run_graphs):
    backend = apsched.backend(max_prefetch=3, memory_cap="1GiB", budget=0.0)
    compiled = torch.compile(shard(layers(), mesh), backend=backend, fullgraph=True)
    loss = compiled(torch.ones(4, WIDTH)).sum()
    assert [result.problem.name for result in backend.results] == ["forward"]
    loss.backward()
    forward, backward = backend.results
    assert (forward.problem.name, backward.problem.name) == ("forward", "backward")
    for result, gm in zip(backend.results, run_graphs, strict=True):
        assert result.caps.max_prefetch == 3
        assert result.caps.memory_cap_bytes == 2**30
        assert result.round_trip_exact
        assert num_collectives(gm) == result.best.num_launches < len(result.problem.collectives)
    assert names_of(forward) == PARAMETERS
    assert set(names_of(backward)) == set(PARAMETERS)


def test_what_is_saved_for_backward_is_freed_there_and_parameters_are_kept(mesh):
    backend = apsched.backend(**QUICK)
    compiled = torch.compile(shard(layers(), mesh), backend=backend)
    compiled(torch.ones(4, WIDTH)).sum().backward()
    forward, backward = (result.problem for result in backend.results)
    shards = WIDTH * WIDTH * 4 // WORLD_SIZE, 512
    assert sum(s.kept for s in forward.storages) == 2 * 2 + 1, "four shards and the input"
    kept = [s for s in backward.storages if s.kept]
    assert all(s.size_bytes <= max(shards) for s in kept), "no gathered weight is kept"
    assert sum(not s.kept for s in backward.storages) > len(kept)


@pytest.mark.parametrize(("again", "num_gathers"), [(True, 1), (False, 0), (None, 0)])
def test_resharding_after_forward(mesh, again, num_gathers):
    """The second weight is needed in backward, the first is not: nobody wants the gradient of the
    input.
    """
    backend = apsched.backend(reshard_after_forward=again, **QUICK)
    compiled = torch.compile(shard(layers(), mesh), backend=backend)
    compiled(torch.ones(4, WIDTH)).sum().backward()
    kinds = [
        backend.results[1].problem.keys[c.key].kind for c in backend.results[1].problem.collectives
    ]
    assert kinds.count("all_gather") == num_gathers
    assert kinds.count("reduce_scatter") == 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(mesh, run_graphs, mode):
    backend = apsched.backend(**QUICK)
    compiled = torch.compile(shard(layers(), mesh), backend=backend)
    with mode():
        compiled(torch.ones(4, WIDTH))
    (result,), (gm,) = backend.results, run_graphs
    assert names_of(result) == PARAMETERS
    assert num_collectives(gm) == result.best.num_launches < 4
    assert all(s.kept for s in result.problem.storages[:5])


def test_a_linear_model_is_one_micro_batch(mesh):
    """The gradient of its first weight depends on no activation, and is no chain of its own."""
    linear = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
    model = torch.nn.Sequential(*linear)
    backend = apsched.backend(**QUICK)
    torch.compile(shard(model, mesh), backend=backend)(torch.randn(4, WIDTH)).sum().backward()
    assert [result.problem.chains for result in backend.results] == [(), ()]


def test_graph_breaks(mesh):
    backend = apsched.backend(**QUICK)
    compiled = torch.compile(shard(Broken(), mesh), backend=backend)
    compiled(torch.ones(4, WIDTH)).sum().backward()
    assert [r.problem.name for r in backend.results] == [
        "forward",
        "forward",
        "backward",
        "backward",
    ]
    assert [names_of(r)[0].split(".")[0] for r in backend.results] == [
        "first",
        "second",
        "second",
        "first",
    ]


def test_a_size_marked_dynamic(mesh):
    backend = apsched.backend(**QUICK)
    compiled = torch.compile(shard(layers(), mesh), backend=backend)
    for batch in (4, 6, 10):
        x = torch.ones(batch, WIDTH)
        torch._dynamo.mark_dynamic(x, 0)
        y = compiled(x)
        y.sum().backward()
        assert y.shape == (batch, WIDTH)
    assert [r.problem.name for r in backend.results] == ["forward", "backward"], (
        "compiled once for all sizes"
    )
    assert all(r.best.num_launches < len(r.problem.collectives) for r in backend.results)


def test_without_collectives_the_graph_passes_through(run_graphs, monkeypatch):
    handed_in = []
    original = module_under_test.schedule_graph

    def noted(gm, *args, **kwargs):
        handed_in.append(gm)
        return original(gm, *args, **kwargs)

    monkeypatch.setattr(module_under_test, "schedule_graph", noted)
    backend = apsched.backend(**QUICK)
    x = torch.ones(4, WIDTH, requires_grad=True)
    torch.compile(lambda x: torch.tanh(x).sum(), backend=backend)(x).backward()
    assert len(run_graphs) == 2
    assert all(a is b for a, b in zip(handed_in, run_graphs, strict=True))
    assert backend.results == []


@pytest.mark.parametrize(
    ("inductor", "stated", "remedy"),
    [
        (False, {"mode": "reduce-overhead"}, "leave it out"),
        (True, {"options": {"max_autotune": True}}, "set torch._inductor.config"),
    ],
)
def test_a_mode_without_effect_is_logged_once(mesh, monkeypatch, caplog, inductor, stated, remedy):
    monkeypatch.setattr(module_under_test, "inductor_compiled", lambda gm, *_, **__: gm.forward)
    backend = apsched.backend(inductor=inductor, cluster="h100", **QUICK)
    model = torch.compile(torch.nn.Linear(2, 2), backend=backend, dynamic=False, **stated)
    with caplog.at_level(logging.WARNING):
        model(torch.ones(1, 2))
        model(torch.ones(3, 2))
    (found,) = [text for text in caplog.messages if "which has no effect" in text]
    assert repr(next(iter(stated.values()))) in found
    assert remedy in found


def test_an_error_stops_compilation_or_leaves_the_graph(mesh, run_graphs, caplog):
    x = torch.ones(4, WIDTH)
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed, match=r"InfeasibleError: forward: .*memory"
    ) as raised:
        torch.compile(shard(layers(), mesh), backend=apsched.backend(memory_cap=1))(x)
    assert isinstance(raised.value.inner_exception, apsched.InfeasibleError)
    torch._dynamo.reset()
    run_graphs.clear()
    backend = apsched.backend(memory_cap=1, on_error="fallback")
    with caplog.at_level(logging.WARNING):
        torch.compile(shard(layers(), mesh), backend=backend)(x).sum().backward()
    assert [num_collectives(gm) for gm in run_graphs] == [4, 4]
    assert backend.results == []
    assert [text.split(":")[0] for text in caplog.messages if "stays" in text] == [
        "forward stays unchanged",
        "backward stays unchanged",
    ]


def test_a_plan_names_parameters(mesh):
    plan = apsched.Plan((apsched.Rule(match=r"0\.weight", forbid=True),))
    backend = apsched.backend(plan=plan, **QUICK)
    compiled = torch.compile(shard(layers(), mesh), backend=backend)
    compiled(torch.ones(4, WIDTH)).sum().backward()
    for result in backend.results:
        alone = next(i for i, c in enumerate(result.problem.collectives) if c.module == "0.weight")
        assert all(
            bucket.members == (alone,) or alone not in bucket.members
            for bucket in result.schedule.buckets
        )


class UsedTheOtherWayRound(torch.nn.Module):
    """Registers its parameters in another order than it uses them."""

    def __init__(self):
        super().__init__()
        self.second, self.first = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize("inductor", [False, True])
@pytest.mark.parametrize("again", [None, True, False])
@pytest.mark.parametrize(
    "trained",
    [("0.weight", "0.bias", "2.weight", "2.bias"), ("0.bias",), ("2.weight", "2.bias"), ()],
)
def test_both_graphs_count_all_parameters_and_the_state_of_those_trained(
    mesh, trained, again, inductor
):
    """Also in a backward graph that takes frozen parameters alone, or gathered ones: none of their
    shards; and where none is trained.
    """
    model = shard(layers(), mesh)
    for name, parameter in model.named_parameters():
        name = name.replace("parametrizations.", "").removesuffix(".original")
        parameter.requires_grad_(name in trained)
    backend = apsched.backend(
        cluster="h100", budget=0.0, reshard_after_forward=again, inductor=inductor
    )
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    compiled(torch.ones(4, WIDTH, requires_grad=True)).sum().backward()
    shards = [(4 * p.to_local().numel(), p.requires_grad) for p in model.parameters()]
    state_bytes = 2 * sum(size for size, trained in shards if trained)
    assert backend.results
    for result in backend.results:
        lines = {line.what: line.size_bytes for line in result.account.lines}
        assert lines.get("optimizer state (adamw)", 0) == state_bytes
        beside = result.account.beside
        assert beside.parameter_bytes == sum(size for size, _ in shards)
    forward, *backward = [result.account.beside for result in backend.results]
    assert forward.other_parameter_bytes == 0
    for beside in backward if again is False else ():
        assert beside.other_parameter_bytes == beside.parameter_bytes


def test_bitwise_takes_the_order_of_registration(mesh):
    """Dynamo lists parameters by first use; eager FSDP2 reduces them as they were registered."""
    model = shard(UsedTheOtherWayRound(), mesh)
    with pytest.raises(apsched.InputError, match="bitwise: expected parameter_order, found none"):
        apsched.backend(bitwise=True)
    order = [name for name, _ in model.named_parameters()]
    backend = apsched.backend(bitwise=True, parameter_order=order, **QUICK)
    torch.compile(model, backend=backend)(torch.ones(4, WIDTH)).sum().backward()
    result = backend.results[1]
    (bucket,) = [b for b in result.schedule.buckets if len(b.members) > 1]
    names = [result.problem.collectives[c].module for c in bucket.members]
    assert names == ["second.weight", "second.bias", "first.weight", "first.bias"]


def test_inputs_are_freed_at_their_last_use(mesh, run_graphs):
    """Saved activations come in a list that is emptied, so that backward's memory is what was
    claimed.
    """
    compiled = torch.compile(shard(layers(), mesh), backend=apsched.backend(**QUICK))
    compiled(torch.ones(4, WIDTH)).sum().backward()
    code = run_graphs[1].code
    assert "args_list.clear()" in code
    waits = [node for node in run_graphs[1].graph.nodes if is_wait_tensor(node)]
    assert waits
    assert all(
        f"{node.name} = None" in code
        for node in waits
        if all(user.op != "output" for user in node.users)
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inductor": "yes"}, "inductor: expected True or False"),
        ({"reshard_after_forward": 2}, "reshard_after_forward: expected True, False or None"),
        ({"memory_caps": 1}, "did you mean 'memory_cap'"),
        ({"deadline_s": "x"}, "deadline_s: expected a finite number of seconds above 0, or None"),
        ({"schedule": 5}, "schedule: expected a path, a sequence of paths or None; found 5"),
        ({"schedule": [5]}, r"schedule: expected a path, .* found \[5\]"),
        ({"start": 5}, "start: expected a path, a sequence of paths, True, False or None"),
        ({"cache": 5}, "cache: expected a path, True, False or None; found 5"),
        ({"reserve": 2}, "reserve: expected a share between 0 and 1, such as 0.05; found 2"),
        ({"reserve": "200%"}, "reserve: expected a share between 0 and 1"),
        ({"time_slack": None}, "time_slack: expected a share between 0 and 1, found None"),
        ({"budget": None}, "budget: expected a finite number >= 0, found None"),
        ({"cost_model": object()}, "cost_model: .* the methods compute_us and collective_us"),
        ({"cost_model": ClusterCostModel}, "cost_model: expected an object, found the class Clus"),
        ({"cluster": 3}, "cluster: expected a name, a path or None; found 3"),
        ({"cluster": ""}, "expected the name of a cluster .*, found ''"),
        ({"optimizer": torch.optim.AdamW}, "optimizer: expected adamw, .* found <class 'torch"),
        ({"parameter_order": 5}, "parameter_order: expected names of parameters, found 5"),
        ({"parameter_order": [5]}, r"parameter_order: expected names of parameters, found \[5\]"),
        (
            {"keep": []},
            r"keep: expected auto, none, all, a file or names of parameters; found \[\]",
        ),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_compiled(settings, message):
    with pytest.raises(apsched.InputError, match=message):
        apsched.backend(**settings)


def test_a_search_starts_from_what_the_cache_has_under_other_caps(mesh, tmp_path, monkeypatch):
    starts, original = [], scheduled.solve_requested

    def noted(*arguments, start=None, **more):
        starts.append(start)
        return original(*arguments, start=start, **more)

    monkeypatch.setattr(scheduled, "solve_requested", noted)
    model, found = shard(layers(), mesh), []
    for prefetch, budget in ((8, 1.0), (None, 0.0)):
        torch._dynamo.reset()
        backend = apsched.backend(
            cache=tmp_path, start=True, budget=budget, memory_cap="none", max_prefetch=prefetch
        )
        torch.compile(model, backend=backend)(torch.ones(4, WIDTH))
        found += backend.results
    first, second = found
    assert starts == [None, first.best.schedule]
    assert second.best.step_time_ticks <= first.best.step_time_ticks
    with pytest.raises(
        apsched.InputError, match="start: expected a cache to start from, found none"
    ):
        apsched.backend(cache=False, start=True)


def test_groups_are_those_that_run(mesh):
    backend = apsched.backend(**QUICK)
    torch.compile(shard(layers(), mesh), backend=backend)(torch.ones(4, WIDTH))
    (result,) = backend.results
    assert {key.group_size for key in result.problem.keys} == {dist.get_world_size()}
    assert tree_leaves(result.problem.streams)
