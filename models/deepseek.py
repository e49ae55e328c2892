"""DeepSeek-V3: multi-head latent attention, routed and shared experts (shapes: see
:mod:`apsched.models.layers`).

Further shapes: K experts per token, R = T x K routed tokens, E experts, L experts of one ``ep``
process rank, C tokens of one expert.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from apsched.models.collectives import exchange_tokens
from apsched.models.layers import (
    FeedForward,
    RMSNorm,
    RotaryTable,
    Table,
    TokenEmbedding,
    token_loss,
)
from apsched.models.mesh import ALONE, Group
from apsched.models.presets import DeepseekConfig


def _linear(in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False)


class LatentAttention(nn.Module):
    """Multi-head latent attention ("DeepSeek-V2", 2024, section 2.1), as trained: keys and values
    are expanded.
    """

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.config = config
        heads = config.num_heads
        if config.q_lora_rank:
            self.wq_a = _linear(config.dim, config.q_lora_rank)
            self.q_norm = RMSNorm(config.q_lora_rank, eps=config.norm_eps)
        self.wq_b = _linear(config.q_lora_rank or config.dim, heads * config.qk_head_dim)
        self.wkv_a = _linear(config.dim, config.kv_lora_rank + config.qk_rope_head_dim)
        self.kv_norm = RMSNorm(config.kv_lora_rank, eps=config.norm_eps)
        self.wkv_b = _linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim)
        )
        self.wo = _linear(heads * config.v_head_dim, config.dim)

    def forward(self, x_TD: torch.Tensor, seq_len: int, rope: RotaryTable) -> torch.Tensor:
        """Return the output projection of causal attention."""
        config = self.config
        q_BSNH = self._heads(
            self.wq_b(self.q_norm(self.wq_a(x_TD)) if config.q_lora_rank else x_TD), seq_len
        )
        q_plain, q_turned = torch.split(
            q_BSNH, [config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1
        )
        latent, k_turned = torch.split(
            self.wkv_a(x_TD), [config.kv_lora_rank, config.qk_rope_head_dim], dim=-1
        )
        kv_BSNH = self._heads(self.wkv_b(self.kv_norm(latent)), seq_len)
        k_plain, v_BSNH = torch.split(kv_BSNH, [config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        k_turned = rope.rotate(k_turned.view(-1, seq_len, 1, config.qk_rope_head_dim)).expand(
            -1, -1, config.num_heads, -1
        )
        q_BSNH = torch.cat((q_plain, rope.rotate(q_turned)), dim=-1)
        k_BSNH = torch.cat((k_plain, k_turned), dim=-1)
        # Flash attention wants heads of one size.
        v_BSNH = F.pad(v_BSNH, (0, config.qk_head_dim - config.v_head_dim))
        q_BNSH, k_BNSH, v_BNSH = (t.permute(0, 2, 1, 3) for t in (q_BSNH, k_BSNH, v_BSNH))
        y_BNSH = F.scaled_dot_product_attention(q_BNSH, k_BNSH, v_BNSH, is_causal=True)
        y_BSNH = y_BNSH.permute(0, 2, 1, 3)[..., : config.v_head_dim]
        y: torch.Tensor = self.wo(y_BSNH.reshape(x_TD.shape[0], -1))
        return y

    def _heads(self, x_TD: torch.Tensor, seq_len: int) -> torch.Tensor:
        return x_TD.view(-1, seq_len, self.config.num_heads, x_TD.shape[1] // self.config.num_heads)


class BalancedRouting(Table):
    """Assignment of tokens to experts with equal loads: round robin, so that shapes are known
    before the run.

    TorchTitan has the same for debugging (``debug_force_load_balance``). Routed tokens are sorted
    by expert.
    """

    token_R: torch.Tensor
    place_R: torch.Tensor
    expert_TK: torch.Tensor

    def __init__(self, num_tokens: int, num_experts: int, num_experts_per_token: int) -> None:
        super().__init__()
        self.shape = (num_tokens, num_experts, num_experts_per_token)
        routed = num_tokens * num_experts_per_token
        self.declare("token_R", (routed,), torch.int64)
        self.declare("place_R", (routed,), torch.int64)
        self.declare("expert_TK", (num_tokens, num_experts_per_token), torch.int64)

    def fill(self, device: torch.device) -> None:
        """Set the token of each routed token, the place of each in the sorted order, and the
        experts of each token.
        """
        num_tokens, num_experts, per_token = self.shape
        flat_R = torch.arange(num_tokens * per_token, device=device)
        self.token_R = flat_R.view(-1, num_experts).t().reshape(-1) // per_token
        self.place_R = flat_R.view(num_experts, -1).t().reshape(-1)
        self.expert_TK = (flat_R % num_experts).view(num_tokens, per_token)


class RoutedExperts(nn.Module):
    """SwiGLU networks of all experts, side by side; with ``ep`` each process rank has some and
    tokens travel.
    """

    expert_parallel: ClassVar[tuple[str, ...]] = ("w1", "w2", "w3")

    def __init__(self, config: DeepseekConfig, ep: Group) -> None:
        super().__init__()
        self.ep = ep
        experts, dim, hidden = config.num_experts, config.dim, config.expert_hidden_dim
        self.w1 = nn.Parameter(torch.empty(experts, dim, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, dim))
        self.w3 = nn.Parameter(torch.empty(experts, dim, hidden))

    def forward(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Return the expert's answer to each routed token; tokens are sorted by expert, as many for
        each.
        """
        w1, w2, w3 = self.w1, self.w2, self.w3
        x_RD = exchange_tokens(x_RD, self.ep)
        x_PLCD = x_RD.view(
            self.ep.size, w1.shape[0], -1, x_RD.shape[1]
        )  # P: the process rank that sent them
        x_LCD = x_PLCD.permute(1, 0, 2, 3).flatten(1, 2)
        y_LCD = torch.bmm(F.silu(torch.bmm(x_LCD, w1)) * torch.bmm(x_LCD, w3), w2)
        y_PLCD = y_LCD.view(y_LCD.shape[0], self.ep.size, -1, y_LCD.shape[2]).permute(1, 0, 2, 3)
        return exchange_tokens(y_PLCD.flatten(0, 2), self.ep)


class MixtureOfExperts(nn.Module):
    """Router, routed experts and shared experts ("DeepSeek-V3", 2024, section 2.1.2)."""

    def __init__(self, config: DeepseekConfig, ep: Group) -> None:
        super().__init__()
        self.config = config
        self.router = _linear(config.dim, config.num_experts)
        self.experts = RoutedExperts(config, ep)
        self.shared_experts = FeedForward(
            config.dim, config.num_shared_experts * config.expert_hidden_dim
        )

    def forward(self, x_TD: torch.Tensor, routing: BalancedRouting) -> torch.Tensor:
        """Return the weighted answers of the chosen experts plus that of the shared ones."""
        weight_TK = self._weights(self.router(x_TD).float(), routing.expert_TK)
        y_RD = self.experts(x_TD[routing.token_R])
        y_TKD = y_RD[routing.place_R].view(x_TD.shape[0], -1, x_TD.shape[1])
        result: torch.Tensor = (y_TKD * weight_TK.to(x_TD.dtype).unsqueeze(-1)).sum(
            1
        ) + self.shared_experts(x_TD)
        return result

    def _weights(self, logits_TE: torch.Tensor, expert_TK: torch.Tensor) -> torch.Tensor:
        if self.config.softmax_scores:
            return logits_TE.softmax(dim=-1).gather(1, expert_TK) * self.config.route_scale
        weight_TK = logits_TE.sigmoid().gather(1, expert_TK)
        return weight_TK / weight_TK.sum(dim=-1, keepdim=True) * self.config.route_scale


class TransformerBlock(nn.Module):
    """Attention and a dense or routed feed-forward network, each behind a norm and beside a
    residual.
    """

    def __init__(self, config: DeepseekConfig, layer: int, ep: Group) -> None:
        super().__init__()
        self.attention = LatentAttention(config)
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        if layer < config.num_dense_layers:
            self.feed_forward = FeedForward(config.dim, config.hidden_dim)
        else:
            self.moe = MixtureOfExperts(config, ep)

    def forward(
        self, x_TD: torch.Tensor, seq_len: int, rope: RotaryTable, routing: BalancedRouting
    ) -> torch.Tensor:
        """Return the tokens after the layer."""
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), seq_len, rope)
        normed_TD = self.ffn_norm(x_TD)
        result: torch.Tensor = x_TD + (
            self.moe(normed_TD, routing) if hasattr(self, "moe") else self.feed_forward(normed_TD)
        )
        return result


class Deepseek(nn.Module):
    """The model with its loss: tokens in, loss out."""

    def __init__(
        self,
        config: DeepseekConfig,
        *,
        num_tokens: int,
        seq_len: int,
        dtype: torch.dtype,
        ep: Group,
        global_tokens: int,
    ) -> None:
        super().__init__()
        self.seq_len, self.global_tokens = seq_len, global_tokens
        self.tok_embeddings = TokenEmbedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(
            TransformerBlock(config, layer, ep) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.output = _linear(config.dim, config.vocab_size)
        self.rope = RotaryTable(seq_len, config.qk_rope_head_dim, config.rope_base, dtype)
        self.routing = BalancedRouting(num_tokens, config.num_experts, config.num_experts_per_token)

    def forward(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
        """Return this process rank's share of the mean loss over all tokens of the step."""
        x_TD = self.tok_embeddings.embed(tokens_BS.reshape(-1), self.tok_embeddings.weight, ALONE)
        for layer in self.layers:
            x_TD = layer(x_TD, self.seq_len, self.rope, self.routing)
        return (
            token_loss(self.output(self.norm(x_TD)), targets_BS.reshape(-1), ALONE)
            / self.global_tokens
        )
