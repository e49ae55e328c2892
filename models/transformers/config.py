"""Models of Transformers, built from a configuration alone: no weights, no network; sharded like
the presets.

Layers, names and mathematics are those of the installed ``transformers`` (extra ``apsched[hf]``);
this module adds the parts that Transformers does not have as operators visible to a tracer: the
loss, causal attention without a mask, and tensor parallelism by collectives.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from apsched.errors import InputError
from apsched.models.build import BuiltModel, initial_values, real_tokens
from apsched.models.collectives import sum_gradient, sum_of_parts
from apsched.models.layers import SUMMED, WHOLE, token_loss
from apsched.models.mesh import Group, MeshSpec, build_meshes, group_of
from apsched.models.options import ModelOptions
from apsched.models.sharding import shard_parameters
from apsched.models.transformers.auto import (
    accepted,
    build_auto,
    replace_forward,
)

_ATTENTION = "apsched_causal"

_DENSE_PLAN: Mapping[str, int | str] = {
    "q_proj": 0,
    "k_proj": 0,
    "v_proj": 0,
    "o_proj": 1,
    "gate_proj": 0,
    "up_proj": 0,
    "down_proj": 1,
    "lm_head": 0,
    "q_norm": SUMMED,
    "k_norm": SUMMED,
    "embed_tokens": WHOLE,
    "input_layernorm": WHOLE,
    "post_attention_layernorm": WHOLE,
    "norm": WHOLE,
}
"""Last part of a module's name -> how ``tp`` splits its parameters: the plan of Transformers'
configurations, and the output by rows.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """The known facts of one ``model_type``."""

    config: str
    model: str
    tensor_parallel: bool
    has_experts: bool = False


FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(config="LlamaConfig", model="LlamaForCausalLM", tensor_parallel=True),
    "qwen3": _Family(config="Qwen3Config", model="Qwen3ForCausalLM", tensor_parallel=True),
    "mixtral": _Family(
        config="MixtralConfig", model="MixtralForCausalLM", tensor_parallel=False, has_experts=True
    ),
}
"""``model_type`` of a configuration file -> its classes in Transformers."""


def build_from_config(
    path: Path,
    *,
    mesh: MeshSpec,
    seq_len: int = 8192,
    batch: int = 1,
    num_layers: int | None = None,
    options: ModelOptions | None = None,
    materialize: bool = False,
    seed: int = 0,
) -> BuiltModel:
    """Return the model of the configuration file ``path`` (or of the directory that holds
    ``config.json``) as this process rank holds it.

    Parameters keep Transformers' names. All else is as in :func:`apsched.models.build.build`: a
    process group of ``mesh.world_size`` must run; with ``materialize`` values are real, on the CPU,
    and the same on every mesh.

    Raises
    ------
    InputError
        for a file that is no configuration, a model that is not known here, and a model that does
        not fit the mesh or the sequence.
    """
    path = path / "config.json" if path.is_dir() else path
    fields = read_config(path)
    options = options or ModelOptions()
    for what, value in (("seq_len", seq_len), ("batch", batch)):
        if value < 1:
            raise InputError(f"{what} must be at least 1; found {value}")
    if not _is_known(fields, mesh):
        return build_auto(
            path,
            fields,
            mesh=mesh,
            seq_len=seq_len,
            batch=batch,
            num_layers=num_layers,
            options=options,
            materialize=materialize,
            seed=seed,
        )
    family = FAMILIES[fields["model_type"]]
    if num_layers is not None:
        fields["num_hidden_layers"] = num_layers
    config = accepted(path, lambda: getattr(_transformers(), family.config).from_dict(fields))
    _check(path, config, family, mesh, seq_len, batch)
    module = _on_meta(path, config, family)
    meshes = build_meshes(mesh, "cpu")
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    num_tokens = batch * seq_len * mesh.data_parallel_size
    _make_trainable(module, group_of(meshes.dense, "tp"), options, num_tokens)
    with nullcontext() if materialize else FakeTensorMode():
        shard_parameters(
            module,
            meshes,
            options,
            device=torch.device("cpu"),
            values=initial_values(seed) if materialize else None,
        )
        _fill_buffers(module, config)
        shape = (batch, seq_len + 1)
        inputs = _inputs(config.vocab_size, shape, mesh, seed if materialize else None)
    return BuiltModel(
        name=f"hf:{path.name}",
        module=module,
        inputs=inputs,
        mesh=mesh,
        options=options,
        num_layers=config.num_hidden_layers,
        num_parameters=num_parameters,
    )


def _on_meta(path: Path, config: Any, family: _Family) -> Any:
    """Return the model of ``config`` without values; its attention is captured as one node."""
    transformers = _transformers()
    transformers.AttentionInterface.register(_ATTENTION, _causal_attention)
    config._attn_implementation = _ATTENTION
    if family.has_experts:
        config._experts_implementation = "grouped_mm"  # sizes that do not depend on the routing
    with torch.device("meta"):
        module: Any = accepted(path, lambda: getattr(transformers, family.model)(config))
    if config.tie_word_embeddings:
        module.lm_head.register_parameter("weight", None)
    return module


def _inputs(
    vocab_size: int, shape: tuple[int, int], mesh: MeshSpec, seed: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and those that follow them; without ``seed`` they have no values."""
    tokens = (
        torch.empty(shape, dtype=torch.int64)
        if seed is None
        else real_tokens(vocab_size, shape, mesh, seed)
    )
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()


def _is_known(fields: Mapping[str, Any], mesh: MeshSpec) -> bool:
    """Return whether the model has a form of its own here on ``mesh``."""
    family = FAMILIES.get(fields["model_type"])
    if family is None:
        return False
    whole = (
        fields.get("tie_word_embeddings") or fields.get("attention_bias") or fields.get("mlp_bias")
    )
    return mesh.ep == 1 and (mesh.tp == 1 or (family.tensor_parallel and not whole))


def _number(fields: dict[str, Any]) -> Any:
    """Return the number that ``fields`` stand for, as Transformers writes ``Infinity``; else
    ``fields``.
    """
    return float(fields["__float__"]) if fields.keys() == {"__float__"} else fields


def read_config(path: Path) -> dict[str, Any]:
    """Return the fields of a configuration file that names its ``model_type``; needs neither torch
    nor Transformers.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"), object_hook=_number)
    except OSError as error:
        raise InputError(
            f"hf:{path}: expected a configuration file of Transformers, found"
            f" {error.strerror or error}; name its path"
        ) from None
    except ValueError as error:
        raise InputError(
            f"hf:{path}: expected JSON, found {error}; take the config.json of a model"
        ) from None
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if not isinstance(kind, str):
        raise InputError(
            f'hf:{path}: expected a configuration with a "model_type" of Transformers; found'
            f" {kind!r}: capture other models as package.module:function"
        )
    return dict(fields)


def _transformers() -> Any:
    try:
        return import_module("transformers")
    except ImportError as error:
        raise InputError(
            f"hf: needs Transformers ({error}); run pip install 'apsched[hf]'"
        ) from None


def _check(
    path: Path, config: Any, family: _Family, mesh: MeshSpec, seq_len: int, batch: int
) -> None:
    for what, value in (
        ("seq_len", seq_len),
        ("batch", batch),
        ("num_hidden_layers", config.num_hidden_layers),
    ):
        if value < 1:
            raise InputError(f"{what} must be at least 1; found {value}")
    if mesh.tp > 1 and not family.tensor_parallel:
        raise InputError(
            f"hf:{path}: {config.model_type} has no tensor-parallel form here; found tp={mesh.tp}:"
            " use fsdp"
        )
    if mesh.tp > 1 and config.tie_word_embeddings:
        raise InputError(
            f"hf:{path}: tp splits the output by rows, and here it is the embedding"
            f" (tie_word_embeddings); drop tp={mesh.tp}"
        )
    if mesh.tp > 1 and (
        getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)
    ):
        raise InputError(
            f"hf:{path}: biases have no tensor-parallel form here (attention_bias, mlp_bias); drop"
            f" tp={mesh.tp}"
        )
    if config.num_key_value_heads % mesh.tp:
        raise InputError(
            f"hf:{path}: tp must divide the {config.num_key_value_heads} key-value heads; found"
            f" tp={mesh.tp}"
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and seq_len > window:
        raise InputError(
            f"hf:{path}: attention to a sliding window of {window} tokens is not captured; take"
            f" --seq {window} or less"
        )


def _causal_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: None,
    *,
    scaling: float,
    dropout: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Return causal attention without a mask: Transformers makes one only for kinds of attention
    that it knows.
    """
    y_BNSH = F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=True
    )
    return y_BNSH.transpose(1, 2).contiguous(), None


def _make_trainable(model: nn.Module, tp: Group, options: ModelOptions, global_tokens: int) -> None:
    """Give the model a forward that returns the loss, and with ``tp`` its layers collectives around
    their matrix products.
    """

    def loss(self: Any, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
        if self.lm_head.weight is None:
            embedding = self.model.embed_tokens
            weight_VD = embedding.weight  # read once, gathered once
            x_BSD = F.embedding(tokens_BS, weight_VD, embedding.padding_idx)
            logits_TV = F.linear(
                self.model(inputs_embeds=x_BSD, use_cache=False).last_hidden_state.flatten(0, 1),
                weight_VD,
            )
        else:
            x_TD = self.model(input_ids=tokens_BS, use_cache=False).last_hidden_state.flatten(0, 1)
            logits_TV = self.lm_head(sum_gradient(x_TD, tp, x_TD.dtype))
        return token_loss(logits_TV, targets_BS.flatten(), tp) / global_tokens

    replace_forward(model, loss)
    if tp.size == 1:
        return
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last in _DENSE_PLAN:
            module.tensor_parallel = dict.fromkeys(
                dict(module.named_parameters(recurse=False)), _DENSE_PLAN[last]
            )
        elif last in ("self_attn", "mlp"):
            replace_forward(module, _summed(type(module).forward, tp))


def _summed(inner: Callable[..., Any], tp: Group) -> Callable[..., Any]:
    """Return a layer's forward between two all-reduces over ``tp``: of its output, and of the
    gradient of its input.
    """

    def forward(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = inner(self, sum_gradient(hidden_states, tp, hidden_states.dtype), *args, **kwargs)
        if isinstance(result, tuple):
            return sum_of_parts(result[0], tp), *result[1:]
        return sum_of_parts(result, tp)

    return forward


def _fill_buffers(model: nn.Module, config: Any) -> None:
    """Compute the tables of the rotary embedding, which the model has on ``meta``."""
    for name, module in model.named_modules():
        if not any(True for _ in module.buffers(recurse=False)):
            continue
        if not type(module).__name__.endswith("RotaryEmbedding"):
            raise InputError(
                f"hf: buffers of {name} ({type(module).__name__}) are not known; report the version"
                " of transformers"
            )
        for key, buffer in type(module)(config=config).named_buffers(recurse=False):
            module.register_buffer(key, buffer, persistent=False)
