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


def written(folder: Path, name: str, **changes: object) -> Path:
    """Write configuration ``name`` with ``changes``, and return its path."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(CONFIGS[name] | changes))
    return path
