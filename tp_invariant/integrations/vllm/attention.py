"""vLLM's attention backend for CPUs with `tpi.attention`: reads keys and values through the block table, by position.

A query's bits do not depend on its batch, the size of a block, or how its prompt was divided into chunks, because
attention's sums are cut at absolute positions (functional/attention.py). Of a layer with a window, keys that no query
sees any more are not read, as vLLM may have given their blocks away.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ...functional.attention import attention
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
        tokens = attn_metadata.num_actual_tokens
        q = query[:tokens].view(tokens, self.num_heads, self.head_size)
        y = paged_attention(
            q, kv_cache, attn_metadata.block_table, attn_metadata.seq_lens, attn_metadata.query_start_loc,
            scale=self.scale, window=self.sliding_window if self.sliding_window and self.sliding_window > 0 else None,
            softcap=self.logits_soft_cap or None, sinks=self.sinks,
        )  # fmt: skip
        output[:tokens].copy_(y.reshape(output[:tokens].shape))
        return output


def paged_attention(
    q: Tensor, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_starts: Tensor, *, scale: float,
    window: int | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Causal attention of packed queries [T, h, D] over paged keys and values [blocks, kv, size, 2 D] -> [T, h, D].

    block_table [sequences, most], seq_lens [sequences] (keys of each, the queries' own included), query_starts
    [sequences + 1]; integers. The last query of a sequence is at its last key.
    """
    sequences, size = seq_lens.shape[0], kv_cache.shape[2]
    cu_q = query_starts[: sequences + 1].int()
    lengths, first = seq_lens.long(), torch.zeros(sequences, dtype=torch.long)
    if window is not None:
        first = (lengths - cu_q.diff() - window + 1).clamp(min=0)
    cu_k = torch.nn.functional.pad((lengths - first).cumsum(0), (1, 0))
    sequence = torch.repeat_interleave(torch.arange(sequences), lengths - first)
    position = torch.arange(int(cu_k[-1])) - cu_k[sequence] + first[sequence]
    kv = kv_cache[block_table.long()[sequence, position // size], :, position % size]  # [keys, kv, 2 D]
    k, v = (x.transpose(0, 1).unsqueeze(0) for x in kv.chunk(2, -1))
    y = attention(
        q.transpose(0, 1).unsqueeze(0), k, v, causal=True, scale=scale, window=window, softcap=softcap, sinks=sinks,
        cu_seqlens_q=cu_q, cu_seqlens_k=cu_k.int(), first_key=0 if window is None else first.int(),
    )  # fmt: skip
    return y[0].transpose(0, 1)


class Backend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[Attention]:
        return Attention


def register() -> None:
    """In place of vLLM's backend for CPUs."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{Backend.__name__}")
