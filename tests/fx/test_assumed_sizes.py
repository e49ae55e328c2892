"""Which numbers stand for sizes that depend on data, and whose word each is."""

from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from apsched.fx.assumed_sizes import assume_sizes, rests_on_assumed
from apsched.fx.operands import touched_bytes
from apsched.fx.passes.partition_replay import is_whole_view
from apsched.torch_compat import sizes
from apsched.torch_compat.sizes import FALLBACK_SIZE, same_sizes, size_hint
from tests.helpers.graphs.experts import env_of, knowledge_of

c10d = torch.ops._c10d_functional
NUM_RANKS = 4


def traced(function: Callable[..., object], *inputs: torch.Tensor) -> torch.fx.GraphModule:
    """Return a graph whose inputs have the sizes given."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    return make_fx(function)(*(mode.from_tensor(x, static_shapes=True) for x in inputs))


def assumed(module: torch.fx.GraphModule, **stated: int) -> dict[str, tuple[int, str]]:
    return {s.symbol: (s.value, str(s.source)) for s in assume_sizes(module.graph, stated)}


def kept(x: torch.Tensor) -> torch.Tensor:
    return x.nonzero() + 1


def exchanged(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the rows that other process ranks send; ``counts`` has the rows for each."""
    ones = [1] * NUM_RANKS
    theirs = c10d.wait_tensor(c10d.all_to_all_single(counts, ones, ones, "0"))
    sent, received = counts.tolist(), theirs.tolist()
    return c10d.wait_tensor(c10d.all_to_all_single(x, received, sent, "0")) * 2


def result_of(module: torch.fx.GraphModule) -> torch.Tensor:
    value: torch.Tensor = list(module.graph.nodes)[-2].meta["val"]
    return value


def test_known_sizes_need_no_assumption() -> None:
    assert assumed(traced(lambda x: x * 2, torch.ones(3))) == {}


def test_nothing_is_known_of_a_mask_but_its_bounds() -> None:
    assert assumed(traced(kept, torch.ones(16))) == {"u0": (16, "fallback")}
    free = make_fx(kept, tracing_mode="symbolic")(torch.ones(16))
    assert assumed(free) == {"u0": (FALLBACK_SIZE, "fallback")}


def test_routing_is_taken_as_balanced() -> None:
    """Rows that cannot be shared evenly go to the first process ranks."""
    module = traced(exchanged, torch.ones(10, 8), torch.ones(NUM_RANKS, dtype=torch.int64))
    sent = dict(zip(("u4", "u5", "u6", "u7"), (3, 3, 2, 2), strict=True))
    assert assumed(module) == {name: (size, "balanced") for name, size in sent.items()}
    result = result_of(module)
    assert rests_on_assumed(result)
    assert [size_hint(size) for size in result.shape] == [10, 8]


def test_a_stated_split_leaves_the_rest_to_the_others() -> None:
    module = traced(exchanged, torch.ones(10, 8), torch.ones(NUM_RANKS, dtype=torch.int64))
    found = assumed(module, u4=7)
    assert found["u4"] == (7, "stated")
    assert {found[name] for name in ("u5", "u6", "u7")} == {(1, "balanced")}


def test_a_sum_that_the_graph_asserts_is_shared() -> None:
    def function(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        first, second = counts.tolist()
        torch._check(first >= 0)
        torch._check(second >= 0)
        torch._check(2 * first + 2 * second == 12)
        return x.new_zeros(first) * x.new_zeros(second, 1)

    module = traced(function, torch.ones(2), torch.ones(2, dtype=torch.int64))
    assert assumed(module) == {"u0": (3, "balanced"), "u1": (3, "balanced")}


def test_torchs_own_hint_goes_before_a_guess_and_the_users_before_both() -> None:
    module = traced(kept, torch.ones(16))
    env = env_of(module)
    (symbol,) = (s for s in env.var_to_range if str(s) == "u0")
    env.var_to_hint_override[symbol] = 5  # what torch._dynamo.mark_unbacked(hint_override=5) does
    assert assumed(module) == {"u0": (5, "torch")}
    assert size_hint(result_of(module).shape[0]) == 5
    assert assumed(module, u0=9) == {"u0": (9, "stated")}
    assert size_hint(result_of(module).numel()) == 9


def test_one_trace_has_one_assumption() -> None:
    """Backward, which has no all-to-all that says so, has the sizes of forward."""
    module = traced(exchanged, torch.ones(8, 8), torch.ones(NUM_RANKS, dtype=torch.int64))
    before = assumed(module)
    graph = torch.fx.Graph()
    graph.placeholder("saved").meta["val"] = result_of(module)
    graph.output(())
    assert {s.symbol: (s.value, str(s.source)) for s in assume_sizes(graph, {})} == before


def test_an_expression_without_a_value_has_the_fallback() -> None:
    env = ShapeEnv()
    size = env.create_unbacked_symint()
    torch._check(size >= 0)
    module = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    with FakeTensorMode(shape_env=env):
        module.graph.placeholder("x").meta["val"] = torch.empty(size)
    assert assumed(module, u0=0) == {"u0": (0, "stated")}
    assert size_hint(100 // size) == FALLBACK_SIZE
    assert size_hint(size - 3) == 0, "no size is negative"


@pytest.mark.parametrize("function", [kept, exchanged])
def test_the_users_graph_gets_no_guard(function: Callable[..., object]) -> None:
    inputs = [torch.ones(8, 8), torch.ones(NUM_RANKS, dtype=torch.int64)]
    module = traced(function, *inputs[: 1 if function is kept else 2])
    env = env_of(module)
    before = knowledge_of(env)
    assumed(module)
    result = result_of(module)
    sizes = (*result.shape, result.numel(), result.untyped_storage().nbytes())
    assert all(size_hint(size) >= 0 for size in sizes)
    assert not same_sizes(result.shape, [3, 8])
    assert same_sizes(result.shape, result.shape)
    assert knowledge_of(env) == before


def test_views_are_compared_without_a_guard() -> None:
    module = traced(lambda x: (x.nonzero().t(), x.nonzero()[:, :1]), torch.ones(4, 4))
    found = {n.name: is_whole_view(n) for n in module.graph.nodes if n.op == "call_function"}
    assert found["t"] is True
    assert not any(whole for name, whole in found.items() if name.startswith("slice"))


def test_an_expanded_size_counts_once() -> None:
    module = traced(lambda x: x.nonzero().expand(-1, 5), torch.ones(16))
    assert assumed(module) == {"u0": (16, "fallback")}
    assert touched_bytes(result_of(module)) == 16 * 8


def test_sizes_that_were_seen_are_solved_for_their_symbols():
    env = ShapeEnv()
    a, b, c, d = (env.create_unbacked_symint() for _ in range(4))
    seen = [(b + c, 11), (2 * a, 6), (b, 4), (c + d, 30)]
    assert sizes.solved(seen) == {"u0": 3, "u1": 4, "u2": 7, "u3": 23}
    assert sizes.solved([(a + b, 7)]) == {"u0": 4, "u1": 3}, "an even share of the sum"
    assert sizes.solved([]) == {}


def test_what_is_stated_goes_before_a_profile_and_that_before_torch():
    env = ShapeEnv()
    first, second = (env.create_unbacked_symint() for _ in range(2))
    found = sizes.assume([first, second], (), {"u0": 5}, {"u0": 6, "u1": 7})
    assert [(s.value, str(s.source)) for s in found] == [(5, "stated"), (7, "profile")]
    found = sizes.assume([first, second], (), {"u0": 5}, {"u1": 8})
    assert [s.value for s in found] == [5, 8], "another profile, in the same trace"
