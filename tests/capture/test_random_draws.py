"""Branches on random draws, as those of LayerDrop: decided where all draws agree, else refused."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import apsched
from apsched.capture.fake_world import world
from apsched.errors import InputError
from apsched.graph.graph_file import to_bytes
from apsched.pipeline.sources import SourceRequest, opened
from apsched.torch_compat.random_draws import DecidedDraws, RandomBranchError


class LayerDrop(nn.Module):
    """Layers, each of which is skipped with a probability, as Transformers does it."""

    def __init__(self, drops: Callable[[], Any] | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.drops = drops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.drops is not None and self.training and self.drops():
                continue
            x = layer(x)
        return x.square().mean()


X = torch.ones(4, 8)


def under(probability: float) -> LayerDrop:
    return LayerDrop(lambda: torch.rand([]) < probability)


def graphs(model: nn.Module) -> list[bytes]:
    return [to_bytes(dag) for dag in apsched.capture(model, (X,), "fsdp=2")]


@pytest.mark.parametrize(
    "drops",
    [
        lambda: torch.rand([]) < 0.0,
        lambda: torch.rand(1) <= -1,
        lambda: not torch.rand(()) >= 0,
        lambda: not torch.rand([]) < 1.0,
        lambda: torch.rand([]) > 1,
        lambda: torch.lt(torch.rand([]), 0),
        lambda: (torch.rand([]) < 0.0).item(),
    ],
)
def test_a_branch_that_no_draw_takes_is_not_in_the_graph(drops):
    assert graphs(LayerDrop(drops)) == graphs(LayerDrop(None))


def test_all_surfaces_take_a_layerdrop_of_0_and_refuse_another():
    found = r"random draw, torch\.rand lt 0\.1 \(.*_draws\.py:\d+\); set layerdrop to 0"
    refused = partial(pytest.raises, InputError, match=found)
    settings = {"cluster": "h100"}
    quick = {**settings, "budget": 0, "memory_cap": "none"}
    with world(2):
        assert apsched.ddp_buckets(under(0.0), (X,), **settings) == apsched.ddp_buckets(
            LayerDrop(None), (X,), **settings
        )
        with refused():
            apsched.ddp_buckets(under(0.1), (X,), **settings)
        apsched.tune_fsdp2(fully_shard(under(0.0)), (X,), **quick)
        with refused():
            apsched.tune_fsdp2(fully_shard(under(0.1)), (X,), **quick)
    assert apsched.solve_step(under(0.0), (X,), "fsdp=2", budget=0.1, accumulate=2).step_time_us > 0
    with refused():
        apsched.solve_step(under(0.1), (X,), "fsdp=2", budget=0.1)
    with refused():
        graphs(under(0.1))
    assert len(graphs(under(0.1).eval())) == 2, "without LayerDrop"


@pytest.mark.parametrize(
    "drops",
    [
        lambda: torch.rand([]) > 0.0,
        lambda: torch.rand([]) < 0.5,
        lambda: torch.rand([]).mul_(-1) < 0.0,
        lambda: torch.rand([]) - 1 < 0.0,
        lambda: torch.rand([]) < torch.zeros([]),
        lambda: torch.randn([]) < 0.0,
        lambda: torch.rand(2).sum() < 0.0,
    ],
)
def test_nothing_is_decided_that_depends_on_the_draw(drops):
    with pytest.raises(InputError, match="found a branch on"):
        graphs(LayerDrop(drops))


def test_a_draw_that_was_written_to_is_no_draw_any_more():
    def view() -> torch.Tensor:
        draw = torch.rand([])
        draw.view(1).sub_(1)
        return draw < 0.0

    def comparison() -> torch.Tensor:
        found = torch.rand([]) < 0.0
        found.logical_not_()
        return found

    with DecidedDraws():
        assert view()
        assert comparison()
        assert not torch.rand([]) < 0.0
        with pytest.raises(RandomBranchError):
            bool(torch.rand([]) < 0.5)


@pytest.mark.parametrize(("layerdrop", "number"), [(0.0, None), (0.5, r"0\.5")])
def test_a_configuration_with_layerdrop_is_refused_in_one_line(layerdrop, number, tmp_path):
    pytest.importorskip("transformers", reason="needs the extra hf")
    fields = {"model_type": "bart", "vocab_size": 96, "d_model": 8, "encoder_layerdrop": layerdrop}
    for part in ("encoder", "decoder"):
        fields |= {f"{part}_layers": 2, f"{part}_ffn_dim": 16, f"{part}_attention_heads": 2}
    path = tmp_path / "small.json"
    path.write_text(json.dumps(fields))
    source = opened(SourceRequest(source=f"hf:{path}", mesh="fsdp=2", seq_len=8))
    if number is None:
        with source as found:
            assert len(found.capture.graphs) == 2
        return
    match = rf"hf:small\.json: .* torch\.rand lt {number} \(.*modeling_bart\.py:\d+\)"
    with pytest.raises(InputError, match=match), source:
        pass
