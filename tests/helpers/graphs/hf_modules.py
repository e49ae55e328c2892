"""Small Transformers of any architecture, sharded over a fake world as the presets are."""

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from apsched.models.mesh import MeshSpec, build_meshes
from apsched.models.options import ModelOptions
from apsched.models.sharding import shard_parameters

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "image_size": 32,
    "patch_size": 8,
}


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        named = {"pixel_values" if given.is_floating_point() else "input_ids": given}
        return self.model(**named)[0].float().square().mean()


def small_transformer(model_type: str, mesh: MeshSpec) -> tuple[nn.Module, tuple[torch.Tensor]]:
    """Return a model of one layer with a loss, its parameters sharded, and its input; fake
    tensors. A process group of ``mesh`` must run.
    """
    config = transformers.AutoConfig.for_model(model_type)
    for name, value in _SMALL.items():
        if hasattr(config, name) and name not in config.attribute_map:
            setattr(config, name, value)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    meshes = build_meshes(mesh, "cpu")
    with FakeTensorMode():
        shard_parameters(model, meshes, ModelOptions(), device=torch.device("cpu"), values=None)
        for module in model.modules():
            for name, buffer in tuple(module.named_buffers(recurse=False)):
                filled = torch.empty(buffer.shape, dtype=buffer.dtype)
                module.register_buffer(name, filled, persistent=False)
        given = (
            torch.zeros(1, 64, dtype=torch.int64)
            if hasattr(config, "vocab_size")
            else torch.empty(1, 3, config.image_size, config.image_size)
        )
    return _WithLoss(model), (given,)
