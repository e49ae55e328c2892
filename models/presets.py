"""Published sizes of the models, and small ones for tests.

LLaMA-3: "The Llama 3 Herd of Models" (2024), table 3; 1B: the model card of Llama 3.2. DeepSeek-V3:
its technical report (2024), section 4.2, without multi-token prediction; 16B: DeepSeek-V2-Lite
("DeepSeek-V2", 2024, appendix B).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes of a LLaMA-3."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int
    """Of the feed-forward network."""
    tied: bool = False
    """The embedding is the weight of the output, too."""
    rope_base: float = 500_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.dim // self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig:
    """Sizes of a DeepSeek-V3 (multi-head latent attention, routed and shared experts)."""

    vocab_size: int
    dim: int
    num_layers: int
    num_dense_layers: int
    """The first layers, whose feed-forward network has no experts."""
    num_heads: int
    q_lora_rank: int
    """Rank of the latent query; 0 for a full projection."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    hidden_dim: int
    """Of dense feed-forward networks."""
    expert_hidden_dim: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    softmax_scores: bool = False
    """Router scores are softmax over experts (V2) rather than sigmoid, normalised over the chosen
    (V3).
    """
    route_scale: float = 1.0
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6

    @property
    def qk_head_dim(self) -> int:
        """Size of a head of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


_LLAMA3_VOCAB = 128_256

PRESETS: Mapping[str, LlamaConfig | DeepseekConfig] = MappingProxyType(
    {
        "llama3-debug": LlamaConfig(
            vocab_size=256, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=192
        ),
        # a step of about a second on one core, with as much to gather as a link of 200 Mb/s carries
        # meanwhile
        "llama3-small": LlamaConfig(
            vocab_size=1024, dim=256, num_layers=4, num_heads=8, num_kv_heads=4, hidden_dim=768
        ),
        "llama3-1b": LlamaConfig(
            vocab_size=_LLAMA3_VOCAB,
            dim=2048,
            num_layers=16,
            num_heads=32,
            num_kv_heads=8,
            hidden_dim=8192,
            tied=True,
        ),
        "llama3-8b": LlamaConfig(
            vocab_size=_LLAMA3_VOCAB,
            dim=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            hidden_dim=14_336,
        ),
        "llama3-70b": LlamaConfig(
            vocab_size=_LLAMA3_VOCAB,
            dim=8192,
            num_layers=80,
            num_heads=64,
            num_kv_heads=8,
            hidden_dim=28_672,
        ),
        "llama3-405b": LlamaConfig(
            vocab_size=_LLAMA3_VOCAB,
            dim=16_384,
            num_layers=126,
            num_heads=128,
            num_kv_heads=8,
            hidden_dim=53_248,
        ),
        "deepseek-v3-debug": DeepseekConfig(
            vocab_size=256,
            dim=64,
            num_layers=3,
            num_dense_layers=1,
            num_heads=4,
            q_lora_rank=32,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            hidden_dim=128,
            expert_hidden_dim=32,
            num_experts=8,
            num_experts_per_token=2,
            num_shared_experts=1,
        ),
        "deepseek-v3-16b": DeepseekConfig(
            vocab_size=102_400,
            dim=2048,
            num_layers=27,
            num_dense_layers=1,
            num_heads=16,
            q_lora_rank=0,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            hidden_dim=10_944,
            expert_hidden_dim=1408,
            num_experts=64,
            num_experts_per_token=6,
            num_shared_experts=2,
            softmax_scores=True,
        ),
        "deepseek-v3-671b": DeepseekConfig(
            vocab_size=129_280,
            dim=7168,
            num_layers=61,
            num_dense_layers=3,
            num_heads=128,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            hidden_dim=18_432,
            expert_hidden_dim=2048,
            num_experts=256,
            num_experts_per_token=8,
            num_shared_experts=1,
            route_scale=2.5,
        ),
    }
)
