"""vLLM's attention backend for CPUs with `tpi.attention`: reads keys and values through the block table, by position.

A query's bits do not depend on its batch, the size of a block, or how its prompt was divided into chunks, because
attention's sums are cut at absolute positions (functional/paged_attention.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ...functional.paged_attention import paged_attention
from .layers import Invariant


class Attention(Invariant, CPUAttentionBackendImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        unsupported = {
            "ALiBi": self.alibi_slopes is not None,
            f"attn_type={self.attn_type!r}": self.attn_type != "decoder",
            f"kv_cache_dtype={self.kv_cache_dtype!r}": self.is_fp8_kv_cache,
        }
        if named := [name for name, is_so in unsupported.items() if is_so]:
            raise NotImplementedError(f"attention with {', '.join(named)} is not supported by tp_invariant in vLLM")

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        size, count = kv_cache.shape[2], slot_mapping.shape[0]
        used = slot_mapping >= 0
        slots = slot_mapping[used]
        kv_cache[slots // size, :, slots % size] = torch.cat([key[:count][used], value[:count][used]], -1)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """query [T, h, D], kv_cache [blocks, kv, size, 2 D] -> output [T, h D], of num_actual_tokens."""
        if attn_metadata is None:  # vLLM tries the model without any
            return output
        if not attn_metadata.causal or attn_metadata.dynamic_causal is not None:
            raise NotImplementedError("attention that is not causal is not supported by tp_invariant in vLLM")
        tokens, lengths = attn_metadata.num_actual_tokens, attn_metadata.seq_lens.int()
        starts = attn_metadata.query_start_loc[: lengths.shape[0] + 1].int()
        k, v = kv_cache.chunk(2, -1)
        y = paged_attention(
            query[:tokens].view(tokens, self.num_heads, self.head_size).transpose(0, 1).unsqueeze(0), k, v,
            page_table=attn_metadata.block_table[: lengths.shape[0]].int(), cu_seqlens_q=starts,
            cu_seqlens_k=F.pad(lengths.cumsum(0), (1, 0)).int(), max_seqlen_q=attn_metadata.max_query_len,
            max_seqlen_k=attn_metadata.max_seq_len, scale=self.scale,
            window=self.sliding_window if self.sliding_window and self.sliding_window > 0 else None,
            softcap=self.logits_soft_cap or None, sinks=self.sinks,
        )  # fmt: skip
        output[:tokens].copy_(y[0].transpose(0, 1).reshape(output[:tokens].shape))
        return output


class Backend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[Attention]:
        return Attention


def register() -> None:
    """In place of vLLM's backend for CPUs."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{Backend.__name__}")
