"""Small configurations of Transformers, as files."""

import json
from pathlib import Path

_SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}

CONFIGS = {
    "llama": {**_SMALL, "model_type": "llama", "tie_word_embeddings": False},
    "qwen3": {**_SMALL, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "mixtral": {
        **_SMALL,
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


_NO_DROPOUT = dict.fromkeys(
    (
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "attn_pdrop",
        "embd_pdrop",
        "resid_pdrop",
        "dropout_rate",
    ),
    0.0,
)
AUTO = {
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 256,
        "n_embd": 64,
        "n_layer": 1,
        "n_head": 4,
        "n_positions": 64,
    },
    "bert": {**_SMALL, "model_type": "bert", "num_hidden_layers": 1},
    "gpt_neox": {**_SMALL, "model_type": "gpt_neox", "num_hidden_layers": 1},
    "qwen3": {**CONFIGS["qwen3"], "num_hidden_layers": 1},
    "mixtral": {**CONFIGS["mixtral"], "num_hidden_layers": 1},
    "t5": {
        "model_type": "t5",
        "vocab_size": 256,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 1,
        "num_decoder_layers": 1,
        "num_heads": 4,
    },
    "vit": {**_SMALL, "model_type": "vit", "num_hidden_layers": 1, "image_size": 32},
}
"""Architectures without a form of their own here, or on such a mesh; a layer each."""
for _fields in AUTO.values():
    _fields.update(_NO_DROPOUT)


def written(folder: Path, name: str, **changes: object) -> Path:
    """Write configuration ``name`` with ``changes``, and return its path."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(CONFIGS[name] | changes))
    return path
