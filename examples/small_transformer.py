"""A small decoder-only transformer, built from tensor-parallel layers as a user would.

Shapes: B batch, S sequence, H hidden, F ffn, h heads, d = H / h; P tensor-parallel ranks. Activations are [B, S, H]
between blocks, whole on every rank, or with sequence parallelism [B, S/P, H], this rank's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

import tp_invariant as tpi
from tp_invariant.gemm.gemm_fn import gemm
from tp_invariant.regions import scatter_sequence

VOCABULARY = 256


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the whole model; every degree must divide heads and ffn (and sequence, under sequence_parallel)."""

    layers: int = 2
    hidden: int = 256
    heads: int = 8
    ffn: int = 512
    sequence: int = 64
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


class Transformer(nn.Module):
    """tokens [B, S] int64 -> logits [B, S, VOCABULARY], whole on every rank."""

    def __init__(self, config: ModelConfig, tp_group: Any) -> None:
        super().__init__()
        self.tp_group, self.sequence_parallel = tp_group, config.sequence_parallel
        place: dict[str, Any] = dict(device=config.device, dtype=config.dtype)
        self.embedding = nn.Embedding(VOCABULARY, config.hidden, **place)
        self.position = nn.Embedding(config.sequence, config.hidden, **place)
        self.blocks = nn.ModuleList(Block(config, tp_group) for _ in range(config.layers))
        self.head = tpi.LayerNormLinear(
            config.hidden, VOCABULARY, gather_output=True, **_column(config, tp_group), bias=False
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        if self.sequence_parallel:
            x = scatter_sequence(x, self.tp_group, sequence_dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    """x + attention, then x + gated MLP; x [B, S, H], or [B, S/P, H] under sequence parallelism."""

    def __init__(self, config: ModelConfig, tp_group: Any) -> None:
        super().__init__()
        column, row = _column(config, tp_group), _row(config, tp_group)
        self.head_dim = config.hidden // config.heads
        # fused q, k and v, and fused gate and up: each rank holds its own heads of all three, and its own columns of
        # both, which is what partition_stride says
        self.qkv = tpi.LayerNormLinear(config.hidden, 3 * config.hidden, bias=True, partition_stride=3, **column)
        self.out = tpi.Linear(config.hidden, config.hidden, bias=False, **row)
        self.fc1 = tpi.LayerNormLinear(config.hidden, 2 * config.ffn, bias=False, partition_stride=2, **column)
        self.fc2 = tpi.Linear(config.ffn, config.hidden, bias=False, **row)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)  # [B, S, 3H/P], all tokens
        q, k, v = rearrange(qkv, "b s (three h d) -> three b h s d", three=3, d=self.head_dim)
        attended = rearrange(causal_attention(q, k, v), "b h s d -> b s (h d)")
        x = x + self.out(attended)
        return x + self.fc2(tpi.gated_activation(self.fc1(x), activation="silu"))  # gate and up are [B, S, F/P] each


def _column(config: ModelConfig, tp_group: Any) -> dict[str, Any]:
    return dict(parallel_mode="column", normalization="RMSNorm", **_common(config, tp_group))


def _row(config: ModelConfig, tp_group: Any) -> dict[str, Any]:
    return dict(parallel_mode="row", **_common(config, tp_group))


def _common(config: ModelConfig, tp_group: Any) -> dict[str, Any]:
    return dict(
        tp_group=tp_group,
        sequence_parallel=config.sequence_parallel,
        sequence_dim=1,
        device=config.device,
        dtype=config.dtype,
    )


# --- attention ------------------------------------------------------------------------------------------------------


class HeadwiseMatmul(torch.autograd.Function):
    """c = a b for each batch and head, one GEMM each.

    a [B, h, M, K]   b [B, h, K, N]   c [B, h, M, N] in out_dtype      da = dc bᵀ      db = aᵀ dc
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(a, b)
        return _headwise(a, b, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dc: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        dc = dc.to(a.dtype)
        return _headwise(dc, b.transpose(-1, -2), a.dtype), _headwise(a.transpose(-1, -2), dc, b.dtype), None


def _headwise(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    c = a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=out_dtype)
    for one_a, one_b, one_c in zip(a.flatten(0, 1), b.flatten(0, 1), c.flatten(0, 1), strict=True):
        one_c.copy_(gemm(None, one_a, one_b, out_dtype=out_dtype))
    return c


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / sqrt(d)) v without looking ahead, over this rank's heads: q, k, v, result [B, h/P, S, d].

    A head's bits must not depend on how many other heads the rank holds. torch's fused attention promises no such
    thing, so with the mode on both products go head by head through the library's GEMM.
    """
    if not tpi.is_tp_invariant_mode_enabled():
        # the fused backends add atomically in backward on a GPU: they would differ from themselves, at one degree
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = HeadwiseMatmul.apply(q, k.transpose(-1, -2), torch.float32) * q.shape[-1] ** -0.5  # [B, h/P, S, S]
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(ahead, float("-inf")).softmax(dim=-1)  # fp32; rows of S at every degree
    return HeadwiseMatmul.apply(weights.to(v.dtype), v, v.dtype)
