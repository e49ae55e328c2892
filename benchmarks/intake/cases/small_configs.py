"""Configurations of Transformers at a tiny size, made from the defaults of each architecture."""

from importlib import import_module
from typing import Any

ARCHITECTURES = (
    "albert",
    "bart",
    "beit",
    "bert",
    "biogpt",
    "bloom",
    "clip_text_model",
    "clip_vision_model",
    "codegen",
    "cohere",
    "convbert",
    "convnext",
    "deberta-v2",
    "deepseek_v3",
    "deit",
    "dinov2",
    "distilbert",
    "electra",
    "esm",
    "falcon",
    "fnet",
    "funnel",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "granite",
    "ijepa",
    "llama",
    "m2m_100",
    "mbart",
    "mistral",
    "mixtral",
    "modernbert",
    "mpnet",
    "mpt",
    "nystromformer",
    "olmo",
    "olmo2",
    "opt",
    "pegasus",
    "persimmon",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "rembert",
    "roberta",
    "segformer",
    "siglip_vision_model",
    "stablelm",
    "starcoder2",
    "swin",
    "t5",
    "vit",
    "vit_mae",
    "xglm",
)
"""``model_type`` of the architectures that are surveyed."""

_WIDTHS = [
    "hidden_size",
    "d_model",
    "n_embd",
    "dim",
    "embedding_size",
    "embed_dim",
    "word_embed_proj_dim",
    "projection_dim",
]
_INNER = [
    "intermediate_size",
    "d_ff",
    "n_inner",
    "ffn_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "hidden_dim",
    "moe_intermediate_size",
]
_DEPTHS = [
    "n_layer",
    "n_layers",
    "num_layers",
    "num_hidden_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
]
_HEADS = [
    "n_head",
    "n_heads",
    "num_heads",
    "num_attention_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
]
_OTHERS = {
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "image_size": 32,
    "patch_size": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "d_kv": 16,
    "d_head": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_SIZES = (
    dict.fromkeys(_WIDTHS, 64)
    | dict.fromkeys(_INNER, 96)
    | dict.fromkeys(_DEPTHS, 1)
    | dict.fromkeys(_HEADS, 4)
    | _OTHERS
)
_SPECIAL: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "deepseek_v3": {"num_key_value_heads": 4, "first_k_dense_replace": 0},
    "convnext": {"depths": [1, 1], "hidden_sizes": [32, 64], "num_stages": 2},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "falcon": {"num_kv_heads": 1, "multi_query": True},
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1, "d_head": 16},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global"], 1]]},
    "segformer": {
        "depths": [1, 1, 1, 1],
        "hidden_sizes": [16, 32, 32, 64],
        "num_attention_heads": [1, 2, 2, 4],
    },
    "swin": {
        "depths": [1, 1],
        "num_heads": [2, 2],
        "embed_dim": 32,
        "patch_size": 4,
        "window_size": 4,
    },
}


def small_fields(model_type: str) -> dict[str, Any]:
    """Return the fields of a tiny configuration of ``model_type``, as its file has them; dropout is
    off.
    """
    known: Any = import_module("transformers").CONFIG_MAPPING
    config = known[model_type]()
    fields: dict[str, Any] = {"model_type": model_type}
    stated = config.to_dict()
    for name, value in _SIZES.items():
        old = stated.get(name)
        if (
            name not in config.attribute_map
            and isinstance(old, int)
            and not isinstance(old, bool)
            and old > 0
        ):
            fields[name] = value
    for name, old in stated.items():
        if isinstance(old, float) and ("drop" in name):
            fields[name] = 0.0
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(kinds := getattr(config, name, None), list):
            fields[name] = kinds[:1]
    return fields | _SPECIAL.get(model_type, {})
