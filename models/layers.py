"""Layers shared by the models: plain modules of whole size, which say how tensor parallelism splits
their parameters.

Shapes: T tokens (batch x sequence, flattened), B batch, S sequence, N heads, H head size, D model
width, V vocabulary.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from apsched.models.collectives import largest_of_parts, scatter_tokens, sum_of_parts
from apsched.models.mesh import Group

SUMMED = "summed"
"""A parameter that is whole on every ``tp`` process rank and whose gradient is summed over them
(sequence-parallel norms).
"""


WHOLE = "whole"
"""A parameter that is whole on every ``tp`` process rank, all of which see the same activations:
their gradients are the same, too.
"""


class ColumnLinear(nn.Linear):
    """Linear layer whose outputs are split over ``tp``."""

    tensor_parallel: ClassVar[dict[str, int | str]] = {"weight": 0}

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)


class RowLinear(nn.Linear):
    """Linear layer whose inputs are split over ``tp``; the outputs are parts of a sum."""

    tensor_parallel: ClassVar[dict[str, int | str]] = {"weight": 1}

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm over the model width, on this process rank's tokens."""

    tensor_parallel: ClassVar[dict[str, int | str]] = {"weight": SUMMED}


class TokenEmbedding(nn.Embedding):
    """Embedding whose vocabulary is split over ``tp``; the result is this process rank's tokens."""

    tensor_parallel: ClassVar[dict[str, int | str]] = {"weight": 0}

    def embed(self, tokens_T: torch.Tensor, weight_VD: torch.Tensor, tp: Group) -> torch.Tensor:
        """Return the rows of ``weight_VD`` that ``tokens_T`` name."""
        if tp.size == 1:
            return F.embedding(tokens_T, weight_VD)
        index_T = tokens_T - tp.rank * weight_VD.shape[0]
        elsewhere_T = (index_T < 0) | (index_T >= weight_VD.shape[0])
        rows_TD = F.embedding(index_T.masked_fill(elsewhere_T, 0), weight_VD)
        return scatter_tokens(rows_TD.masked_fill(elsewhere_T.unsqueeze(1), 0), tp)


class FeedForward(nn.Module):
    """SwiGLU feed-forward network."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = ColumnLinear(dim, hidden_dim)
        self.w2 = RowLinear(hidden_dim, dim)
        self.w3 = ColumnLinear(dim, hidden_dim)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return ``w2(silu(w1 x) * w3 x)``, a part of a sum over ``tp``."""
        result: torch.Tensor = self.w2(F.silu(self.w1(x_TD)) * self.w3(x_TD))
        return result


class Table(nn.Module):
    """Constants of a model, as buffers that are no part of the state dict."""

    def declare(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Add a buffer without values."""
        self.register_buffer(name, torch.empty(shape, dtype=dtype), persistent=False)

    def fill(self, device: torch.device) -> None:
        """Set every buffer, on ``device``."""
        raise NotImplementedError


class RotaryTable(Table):
    """Cosines and sines of rotary position embedding."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, seq_len: int, head_dim: int, base: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.base = (seq_len, head_dim), base
        for name in ("cos", "sin"):
            self.declare(name, self.shape, dtype)

    def fill(self, device: torch.device) -> None:
        """Set both buffers, on ``device``."""
        seq_len, head_dim = self.shape
        frequency_H = self.base ** (
            -torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        )
        angle_SH = torch.outer(
            torch.arange(seq_len, dtype=torch.float32, device=device), frequency_H
        ).repeat(1, 2)
        self.cos, self.sin = angle_SH.cos().to(self.cos.dtype), angle_SH.sin().to(self.sin.dtype)

    def rotate(self, x_BSNH: torch.Tensor) -> torch.Tensor:
        """Return ``x`` with its halves rotated by the position (the form of GPT-NeoX)."""
        first, second = x_BSNH.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x_BSNH * self.cos.unsqueeze(1) + turned * self.sin.unsqueeze(1)


def token_loss(logits_TV: torch.Tensor, targets_T: torch.Tensor, tp: Group) -> torch.Tensor:
    """Return the summed cross-entropy; with ``tp`` the vocabulary is split and only a few numbers
    per token travel.
    """
    logits_TV = logits_TV.float()
    if tp.size == 1:
        return F.cross_entropy(logits_TV, targets_T, reduction="sum")
    shifted_TV = logits_TV - largest_of_parts(logits_TV.amax(dim=1, keepdim=True), tp)
    log_sum_T = sum_of_parts(shifted_TV.exp().sum(dim=1), tp).log()
    index_T = targets_T - tp.rank * logits_TV.shape[1]
    elsewhere_T = (index_T < 0) | (index_T >= logits_TV.shape[1])
    own_T = shifted_TV.gather(1, index_T.masked_fill(elsewhere_T, 0).unsqueeze(1)).squeeze(1)
    target_T = sum_of_parts(own_T.masked_fill(elsewhere_T, 0), tp)
    return (log_sum_T - target_T).sum()
