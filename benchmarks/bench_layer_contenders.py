"""What bench_layer.py compares: parts of a Qwen3-8B layer, built by each contender from the same full weights.

stock        bench_layer_stock.py, torch's rms_norm, the fastest SDPA
gather_all   this library's layers with owner_map="replicate", nothing ahead: every rank gathers whole operands and
             computes the whole product; by NCCL
tp_invariant this library as it comes, by the --transport that is asked for
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from bench_layer_stock import StockColumn, StockRow
from einops import rearrange
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tp_invariant as tpi
from tp_invariant.comm import peer_memory
from tp_invariant.comm.collectives import Group
from tp_invariant.core.layout import shard
from tp_invariant.functional.attention_choice import safe_attention
from tp_invariant.gemm.tokens import shared_tokens
from tp_invariant.gemm.weights import weight_cache

CONTENDERS = ("stock", "gather_all", "tp_invariant")
PARTS = ("projections", "mlp", "layer")
EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    """Of the layer; `heads` query heads over `kv` key heads."""

    hidden: int
    ffn: int
    heads: int
    kv: int
    head_dim: int

    def weights(self, place: dict) -> dict[str, Tensor]:
        """The full layer's; QKV by groups of the query heads that share a key head, as Megatron-LM orders them."""
        generator = torch.Generator(place["device"]).manual_seed(1)
        qkv = (self.heads + 2 * self.kv) * self.head_dim
        shapes = {
            "norm1": (self.hidden,), "qkv": (qkv, self.hidden), "q_norm": (self.head_dim,), "k_norm": (self.head_dim,),
            "o": (self.hidden, self.heads * self.head_dim), "norm2": (self.hidden,),
            "fc1": (2 * self.ffn, self.hidden), "fc2": (self.hidden, self.ffn),
        }  # fmt: skip
        return {
            name: torch.randn(shape, generator=generator, **place) * (shape[-1] ** -0.5 if len(shape) > 1 else 1.0)
            for name, shape in shapes.items()
        }


QWEN3_8B = Sizes(4096, 12288, 32, 8, 128)
SMALL = Sizes(64, 128, 8, 4, 16)
SHARDED = {"qkv": (0, 1), "fc1": (0, 2), "o": (1, 1), "fc2": (1, 1)}  # dim and partition_stride
USED = {"projections": ("qkv", "o"), "mlp": ("fc1", "fc2"), "layer": None}


def fast_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    fastest_first = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(fastest_first, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def invariant_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return safe_attention(q, k, v, is_causal=True, enable_gqa=True)


def part_of_rank(name: str, full: Tensor, group: Group) -> Tensor:
    """This rank's shard of a weight or of its gradient."""
    if name not in SHARDED or group.size == 1:
        return full
    dim, stride = SHARDED[name]
    return shard(full, dim=dim, rank=group.rank, world=group.size, stride=stride)


class Part(nn.Module):
    """One of PARTS. x [S/P under SP, B, hidden] -> the same shape; `local` are this rank's weights by name."""

    def __init__(
        self, part: str, contender: str, sizes: Sizes, group: Group, sp: bool, weights: dict[str, Tensor],
        attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> None:  # fmt: skip
        super().__init__()
        self.part, self.contender, self.sizes, self.group = part, contender, sizes, group
        self.sp, self.attention = sp and group.size > 1, attention
        names = USED[part] or tuple(weights)
        self.local = nn.ParameterDict({name: part_of_rank(name, weights[name], group) for name in names})
        if contender != "stock":
            self.layers = nn.ModuleDict({name: self._layer(name) for name in names})

    def _layer(self, name: str) -> nn.Module:
        weight, options = self.local[name], dict(tp_group=self.group, sequence_parallel=self.sp, device="meta")
        if name not in SHARDED:
            if name in ("q_norm", "k_norm"):
                heads = self.sizes.heads if name == "q_norm" else self.sizes.kv
                options |= dict(heads=heads, heads_dim=2, sequence_parallel=False)
            layer: nn.Module = tpi.ParallelNorm(weight.shape[0], EPS, **options)
        else:
            dim, stride = SHARDED[name]
            n, k = (size * (self.group.size if d == dim else 1) for d, size in enumerate(weight.shape))
            layer = tpi.Linear(
                k, n, bias=False, parallel_mode="column" if dim == 0 else "row", partition_stride=stride,
                owner_map="replicate" if self.contender == "gather_all" else "auto", **options,
            )  # fmt: skip
        layer.weight = weight
        return layer

    def _linear(self, name: str, x: Tensor) -> Tensor:
        if self.contender != "stock":
            return self.layers[name](x)
        if self.group.size == 1:
            return F.linear(x, self.local[name])
        function = StockColumn if SHARDED[name][0] == 0 else StockRow
        return function.apply(x, self.local[name], self.group, self.sp)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        if self.contender != "stock":
            return self.layers[name](x)
        return F.rms_norm(x, x.shape[-1:], self.local[name], EPS)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [S, B, heads/P, D], k and v [S, B, kv/P, D]."""
        groups = self.sizes.heads // self.sizes.kv
        parts = rearrange(qkv, "s b (kv per d) -> s b kv per d", per=groups + 2, d=self.sizes.head_dim)
        return rearrange(parts[..., :groups, :], "s b kv g d -> s b (kv g) d"), parts[..., -2, :], parts[..., -1, :]

    def _attend(self, qkv: Tensor) -> Tensor:
        q, k, v = self._heads(qkv)
        q, k = self._norm("q_norm", q), self._norm("k_norm", k)
        out = self.attention(*(rearrange(t, "s b h d -> b h s d") for t in (q, k, v)))
        return rearrange(out, "b h s d -> s b (h d)")

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up = self._linear("fc1", x).chunk(2, dim=-1)
        return self._linear("fc2", F.silu(gate) * up)

    def forward(self, x: Tensor) -> Tensor:
        if self.part == "mlp":
            return self._mlp(x)
        if self.part == "projections":  # q stands for what attention would make of it
            return self._linear("o", rearrange(self._heads(self._linear("qkv", x))[0], "s b h d -> s b (h d)"))
        x = x + self._linear("o", self._attend(self._linear("qkv", self._norm("norm1", x))))
        return x + self._mlp(self._norm("norm2", x))


class Stack(nn.Module):
    """Several of the same part in a row, as in a model: what is gathered ahead for one hides behind the one before."""

    def __init__(self, parts: list[Part]) -> None:
        super().__init__()
        self.parts, self.sp = parts, parts[0].sp
        self.local = {f"{i}.{name}": weight for i, part in enumerate(parts) for name, weight in part.local.items()}

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


@contextlib.contextmanager
def as_contender(contender: str, keep: int = 0) -> Iterator[None]:
    """The library's settings for one; `keep` gathered weights stay, as for decoding."""
    before = weight_cache.keep, weight_cache.ahead, weight_cache.ahead_in_graphs, shared_tokens.enabled
    transport = peer_memory.transport()
    weight_cache.keep = keep if contender == "tp_invariant" else 0
    weight_cache.ahead = weight_cache.ahead_in_graphs = shared_tokens.enabled = contender == "tp_invariant"
    try:
        with tpi.set_tp_invariant_mode(contender != "stock"):
            if contender != "tp_invariant":
                os.environ[peer_memory.TRANSPORT_VARIABLE] = "nccl"
            yield
    finally:
        os.environ[peer_memory.TRANSPORT_VARIABLE] = transport
        weight_cache.keep, weight_cache.ahead, weight_cache.ahead_in_graphs, shared_tokens.enabled = before
