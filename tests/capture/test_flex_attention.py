"""``flex_attention`` is traced on CPU with its gradients, the share of its mask counts, and context
parallelism gathers its keys and values.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental._context_parallel._attention import _ContextParallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from apsched.capture.captured import Capture
from apsched.capture.fake_world import world
from apsched.capture.function import capture_own
from apsched.errors import InputError
from apsched.models.mesh import MeshSpec

NUM_RANKS, LENGTH, DIM = 4, 512, 64


def causal() -> BlockMask:
    return create_block_mask(lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, device="cpu")


class Core(nn.Module):
    def __init__(self, mask: BlockMask | None = None) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q, k, v, mask=None):
        return flex_attention(q, k, v, block_mask=mask or self.mask)


class Attention(nn.Module):
    def __init__(self, core: Core) -> None:
        super().__init__()
        self.qkv, self.core = nn.Linear(DIM, 3 * DIM, bias=False), core

    def forward(self, x, mask=None):
        heads = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.core(*heads, mask).transpose(1, 2).flatten(2)


def captured(module: nn.Module, *inputs: object) -> Capture:
    mesh = MeshSpec.parse(f"fsdp={NUM_RANKS}")
    return capture_own(module, inputs, source="test", num_ranks=NUM_RANKS, mesh=mesh)


def whole() -> torch.Tensor:
    return torch.zeros(1, LENGTH, DIM)


def calls(capture: Capture, name: str) -> list[torch.fx.Node]:
    return [n for g in capture.graphs for n in g.module.graph.nodes if name in str(n.target)]


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[object, ...]]]] = {
    "mask of the module": lambda: (Attention(Core(causal())), (whole(),)),
    "mask as an input": lambda: (Attention(Core()), (whole(), causal())),
    "units of fully_shard": lambda: (fully_shard(Attention(Core(causal()))), (whole(),)),
}


@pytest.mark.parametrize("case", CASES)
def test_both_directions_are_traced_without_a_warning(case, recwarn):
    torch._dynamo.reset()
    with world(NUM_RANKS):
        module, inputs = CASES[case]()
        capture = captured(module, *inputs)
    forward, backward = calls(capture, "flex_attention")
    assert (str(forward.target), str(backward.target)) == (
        "flex_attention",
        "flex_attention_backward",
    )
    assert len(calls(capture, "all_gather_into_tensor")) == 1  # inputs need no gradient
    assert not [one for one in recwarn if "flex_attention" in str(one.message)]


def test_the_blocks_of_a_mask_of_the_module_are_known():
    """Of 4 x 4 blocks a causal mask keeps ten."""
    from apsched.costs.compute.flops import count_flops
    from apsched.fx.operands import bound_arguments, result_of

    flops = []
    for mask in (causal(), None):
        with world(NUM_RANKS):
            capture = captured(Attention(Core(mask)), whole())
        calls_of_mask = calls(capture, "flex_attention")
        flops.append([count_flops(n, bound_arguments(n), result_of(n)) for n in calls_of_mask])
    assert flops[0] == [dense * 10 // 16 for dense in flops[1]]


@pytest.mark.parametrize("unit", [False, True])
def test_a_mask_may_depend_on_inputs(unit):
    """As that of documents, made in forward: its numbers are inputs of both operators."""

    class Documents(Attention):
        def forward(self, x, document):
            def same(b, h, q, k):
                return (document[q] == document[k]) & (q >= k)

            mask = create_block_mask(same, None, None, LENGTH, LENGTH, device="cpu")
            return super().forward(x, mask)

    with world(NUM_RANKS):
        module = Documents(Core())
        document = torch.arange(LENGTH) // 100
        capture = captured(fully_shard(module) if unit else module, whole(), document)
    for call in calls(capture, "flex_attention"):
        (numbers,) = call.args[-1]
        assert numbers.meta["val"].shape == document.shape


def test_context_parallelism_gathers_keys_and_values():
    with world(NUM_RANKS):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        module = Attention(Core())
        style = _ContextParallel(2, _ContextParallel.AttentionType.FLEX)
        parallelize_module(module.core, mesh["cp"], style)
        capture = captured(fully_shard(module), torch.zeros(1, LENGTH // 2, DIM))
        ranks = dist.get_process_group_ranks(mesh["cp"].get_group())
        (gather, backward) = calls(capture, "flex_cp_allgather")
        assert capture.group_ranks[gather.args[-1]] == tuple(ranks) == (0, 1)
    assert gather.meta["val"][0].shape == (1, 4, LENGTH, 16)
    assert backward.meta["val"][0].shape == (1, 4, LENGTH // 2, 16)


def test_a_module_with_context_parallelism_is_distributed_already():
    with world(NUM_RANKS):
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        module = Attention(Core())
        style = _ContextParallel(2, _ContextParallel.AttentionType.FLEX)
        parallelize_module(module.core, mesh, style)
        capture = captured(module, torch.zeros(1, LENGTH // NUM_RANKS, DIM))
    assert any("has collectives of its own" in warning for warning in capture.warnings)
    assert not calls(capture, "all_gather_into_tensor")
    assert len(calls(capture, "flex_cp_allgather")) == 2


def test_a_collective_behind_attention_is_seen():
    class Reduced(Attention):
        def forward(self, x, mask=None):
            return all_reduce(super().forward(x), "sum", dist.group.WORLD)

    with world(NUM_RANKS):
        capture = captured(Reduced(Core()), whole())
    assert any("has collectives of its own" in warning for warning in capture.warnings)


def test_a_parameter_that_is_not_registered_is_refused():
    class Hidden(Attention):
        def __init__(self) -> None:
            super().__init__(Core())
            self.hidden = [nn.Parameter(torch.ones(DIM))]

        def forward(self, x, mask=None):
            return super().forward(x) * self.hidden[0]

    with world(NUM_RANKS), pytest.raises(InputError, match="Parameter containing"):
        captured(Hidden(), whole())


def test_torch_refuses_the_backward_on_cpu_as_before():
    with world(NUM_RANKS):
        captured(Attention(Core()), whole())
    x = torch.zeros(1, 4, 16, 16, requires_grad=True)
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        flex_attention(x, x, x)
