"""LLaMA-3: grouped-query attention, RMSNorm, RoPE and SwiGLU (shapes: see
:mod:`apsched.models.layers`).
"""

import torch
import torch.nn.functional as F
from torch import nn

from apsched.models.collectives import gather_tokens, scatter_tokens
from apsched.models.layers import (
    ColumnLinear,
    FeedForward,
    RMSNorm,
    RotaryTable,
    RowLinear,
    TokenEmbedding,
    token_loss,
)
from apsched.models.mesh import Group
from apsched.models.presets import LlamaConfig


class Attention(nn.Module):
    """Causal grouped-query attention of the heads of this ``tp`` process rank."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = ColumnLinear(config.dim, config.num_heads * config.head_dim)
        self.wk = ColumnLinear(config.dim, config.num_kv_heads * config.head_dim)
        self.wv = ColumnLinear(config.dim, config.num_kv_heads * config.head_dim)
        self.wo = RowLinear(config.num_heads * config.head_dim, config.dim)

    def forward(self, x_TD: torch.Tensor, seq_len: int, rope: RotaryTable) -> torch.Tensor:
        """Return the output projection, a part of a sum over ``tp``."""
        q_BSNH, k_BSNH, v_BSNH = (
            self._heads(w(x_TD), seq_len) for w in (self.wq, self.wk, self.wv)
        )
        q_BNSH, k_BNSH, v_BNSH = (
            t.permute(0, 2, 1, 3) for t in (rope.rotate(q_BSNH), rope.rotate(k_BSNH), v_BSNH)
        )
        y_BNSH = F.scaled_dot_product_attention(
            q_BNSH, k_BNSH, v_BNSH, is_causal=True, enable_gqa=True
        )
        y: torch.Tensor = self.wo(y_BNSH.permute(0, 2, 1, 3).reshape(x_TD.shape[0], -1))
        return y

    def _heads(self, x_TD: torch.Tensor, seq_len: int) -> torch.Tensor:
        return x_TD.view(-1, seq_len, x_TD.shape[1] // self.head_dim, self.head_dim)


class TransformerBlock(nn.Module):
    """Attention and feed-forward network, each behind a norm and beside a residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config.dim, config.hidden_dim)
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)

    def forward(
        self, x_TD: torch.Tensor, seq_len: int, rope: RotaryTable, tp: Group
    ) -> torch.Tensor:
        """Return this process rank's tokens after the layer."""
        x_TD = x_TD + scatter_tokens(
            self.attention(gather_tokens(self.attention_norm(x_TD), tp), seq_len, rope), tp
        )
        return x_TD + scatter_tokens(self.feed_forward(gather_tokens(self.ffn_norm(x_TD), tp)), tp)


class Llama(nn.Module):
    """The model with its loss: tokens in, loss out."""

    def __init__(
        self,
        config: LlamaConfig,
        *,
        seq_len: int,
        dtype: torch.dtype,
        tp: Group,
        global_tokens: int,
    ) -> None:
        super().__init__()
        self.tp, self.seq_len, self.global_tokens = tp, seq_len, global_tokens
        self.tok_embeddings = TokenEmbedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.output = None if config.tied else ColumnLinear(config.dim, config.vocab_size)
        self.rope = RotaryTable(seq_len, config.head_dim, config.rope_base, dtype)

    def forward(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
        """Return this process rank's share of the mean loss over all tokens of the step."""
        embedding_VD = self.tok_embeddings.weight
        x_TD = self.tok_embeddings.embed(tokens_BS.reshape(-1), embedding_VD, self.tp)
        for layer in self.layers:
            x_TD = layer(x_TD, self.seq_len, self.rope, self.tp)
        x_TD = gather_tokens(self.norm(x_TD), self.tp)
        logits_TV = F.linear(x_TD, embedding_VD) if self.output is None else self.output(x_TD)
        return token_loss(logits_TV, targets_BS.reshape(-1), self.tp) / self.global_tokens
