"""Attention over keys and values in pages, as serving engines hold them: forward alone, with the bits of `attention`.

    q [1, h, Sq, D]   k, v [pages, kv, P, D]   key j of sequence n is row j % P of page page_table[n, j // P]

The pages are read where they are. A block of keys is added in the order that it has in one tensor, so a row of out
depends on neither the size of a page nor its place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.attention.spec import AttentionSpec, PackedLengths
from ..kernels.dtypes import DTYPES
from . import attention_kernels
from .attention_checks import check_score_options, check_sinks, number


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of packed sequences whose keys and values are in pages: [1, h, Sq, D], in q's dtype.

    q [1, h, Sq, D], k, v [pages, kv, P, D]: bfloat16, float16 or float32, of one dtype and device, with any strides of
    pages, heads and rows that are multiples of 16 bytes; P is a multiple of 16. Rows of pages that a sequence has must
    be finite, also those that the window has passed.

    Args:
        page_table: int32 [sequences, most pages]. Entries past a sequence's last page are not read; the others must be
            pages of k and v, which is not checked.
        cu_seqlens_q, max_seqlen_q: as in `attention`; the sequences cover all queries.
        cu_seqlens_k: int32 [sequences + 1]: the sums of the sequences' numbers of keys, the new ones too.
        max_seqlen_k: at least the longest sequence's number of keys.
        scale, window, softcap, sinks: as in `attention`.

    Raises:
        ValueError: shapes, strides or devices that do not fit; a tensor that requires a gradient, under autograd.
        TypeError: a dtype that is not supported.
        NotImplementedError: a head of more than 256.
    """
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
    if q.dim() != 4 or q.shape[0] != 1 or k.dim() != 4 or k.shape != v.shape or k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{shapes} must be [1, heads, tokens, D], and twice [pages, key heads, rows of a page, D]")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] or k.shape[2] == 0 or k.shape[2] % 16:
        raise ValueError(f"{shapes}: q's heads must be a multiple of k's, and a page's rows one of 16")
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}: they must have one dtype of {DTYPES}")
    if q.shape[-1] > 256:
        raise NotImplementedError(f"{shapes}: heads in pages have a size of at most 256")
    tensors = dict(page_table=page_table, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    for name, x in tensors.items():
        if (
            x.dtype != torch.int32
            or x.device != q.device
            or (x.dim(), x.shape[0])
            != ((2, cu_seqlens_q.shape[0] - 1) if x is page_table else (1, cu_seqlens_q.shape[0]))
        ):
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}: it must be int32 on {q.device}, "
                "[sequences, pages] or [sequences + 1]"
            )
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks)):
        raise ValueError("a tensor requires a gradient, which attention over pages does not have: use torch.no_grad()")
    if sinks is not None:
        check_sinks(sinks, q)
        sinks = sinks.float().contiguous()
    q, scale, softcap = check_score_options(q, scale, softcap)
    window = number(window, int, "window") or 0
    if window < 0:
        raise ValueError(f"window={window} must be at least 1, or None")
    spec = AttentionSpec(True, scale, min(window, 2**30), softcap or 0.0)
    lengths = PackedLengths(
        cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), max_seqlen_q, max_seqlen_k, page_table.contiguous()
    )
    out: Tensor = attention_kernels.kernel_for(q).forward(q, k, v, spec, lengths, sinks)[0]
    return out
