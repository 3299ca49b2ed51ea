"""Auxiliary losses of a router, the same bits at every degree: load balancing, and the z-loss.

Both are sums over all tokens of a micro-batch. Under sequence or context parallelism a rank has a part of them: then
the logits, E numbers a token, are gathered first, and every rank computes what one computes. So the loss is the same on
every rank, and so is its gradient, of which a rank takes the part of its tokens; nothing is summed over ranks.

    p[t, e]     softmax of the logits in fp32       C[e]   how often e is among a token's top_k: integers
    S[e]        the sum of p[t, e] over tokens, by the GEMM whose order depends on the number of tokens alone

Load balancing after Shazeer et al., arXiv 1701.06538, and Fedus et al., arXiv 2101.03961, with transformers' scale; the
z-loss after Zoph et al., arXiv 2202.08906.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm.collectives import Group, gather_dim, resolve_group
from ..core.differentiation import once_differentiable
from ..core.graph_breaks import outside_of_graphs
from ..gemm.gemm_fn import GemmFn, column_sums
from ..kernels.dtypes import DTYPES
from ..kernels.select import select
from .linear import flatten_tokens
from .regions import gather_sequence
from .routing import top_k as largest


def _softmax(logits: Tensor, log: bool = False) -> Tensor:
    return select("softmax", logits.device.type).softmax(logits, log=log, out_dtype=torch.float32)


def _row_sums(x: Tensor) -> Tensor:
    return select("softmax", x.device.type).row_sums(x.contiguous(), divisor=1, out_dtype=torch.float32)


class _LoadBalance(torch.autograd.Function):
    """logits [N, E], weights [N] of 0 and 1 or None -> E * the sum over e of (C[e] / n) * (S[e] / n), n tokens.

    dlogits[t, e] = p[t, e] * (g[e] - the sum of p[t, i] g[i] over i), where g[e] = dloss * E * C[e] / n^2
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, weights: Tensor | None, top_k: int, gemm_fn: GemmFn | None) -> Tensor:
        experts = logits.shape[1]
        p = _softmax(logits)
        chosen = largest(logits.detach(), top_k)[1]
        ones = torch.ones_like(chosen) if weights is None else weights.long().unsqueeze(1).expand_as(chosen)
        counts = ones.new_zeros(experts).scatter_add_(0, chosen.flatten(), ones.flatten()).float()
        tokens = float(len(p)) if weights is None else weights.long().sum().float()
        counted = p if weights is None else p * weights.unsqueeze(1)
        factors = counts / tokens * experts
        ctx.save_for_backward(p, weights, factors / tokens)
        ctx.dtype = logits.dtype
        return _row_sums((factors * (column_sums(gemm_fn, counted) / tokens)).unsqueeze(0)).squeeze(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None, None]:
        p, weights, factors = ctx.saved_tensors
        dp = dloss * factors * (1.0 if weights is None else weights.unsqueeze(1))
        dp = dp.expand_as(p)
        dots = _row_sums(dp * p).unsqueeze(1)
        return (p * (dp - dots)).to(ctx.dtype), None, None, None


class _ZLoss(torch.autograd.Function):
    """logits [N, E], weights [N] of 0 and 1 or None -> the mean over tokens of log(sum of exp(logits))^2.

    dlogits[t, e] = dloss * 2 / n * z[t] * p[t, e], where z is the logarithm
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, weights: Tensor | None, gemm_fn: GemmFn | None) -> Tensor:
        # of the largest logit the log-softmax is next to 0, so little is lost
        z = logits.float().amax(1) - _softmax(logits, log=True).amax(1)
        tokens = float(len(z)) if weights is None else weights.long().sum().float()
        z = z if weights is None else z * weights
        ctx.save_for_backward(_softmax(logits), z, tokens if isinstance(tokens, Tensor) else None)
        ctx.dtype = logits.dtype
        return column_sums(gemm_fn, (z * z).unsqueeze(1)).squeeze(0) / tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None]:
        p, z, tokens = ctx.saved_tensors
        tokens = float(len(z)) if tokens is None else tokens
        return (p * (dloss * 2 / tokens * z).unsqueeze(1)).to(ctx.dtype), None, None


def _whole(
    router_logits: Tensor | Sequence[Tensor],
    mask: Tensor | None,
    tp_group: dist.ProcessGroup | DeviceMesh | Group | None,
    sequence_parallel: bool,
    sequence_dim: int,
    cp_group: dist.ProcessGroup | DeviceMesh | Group | None,
) -> tuple[Tensor, Tensor | None]:
    """The logits of all tokens, layer after layer, [N, E], and the mask of them, [N] in fp32."""
    layers = [router_logits] if isinstance(router_logits, Tensor) else list(router_logits)
    group, context = resolve_group(tp_group), resolve_group(cp_group)
    if not layers:
        raise ValueError("router_logits is empty: give the logits of at least one layer")
    for number, logits in enumerate(layers):
        if logits.dim() < 2 or logits.shape != layers[0].shape or not logits.is_floating_point():
            raise ValueError(
                f"router_logits[{number}] is {logits.dtype} of shape {tuple(logits.shape)}, and the first "
                f"{tuple(layers[0].shape)}: all must be floating point, of one shape [.., E], with a token dim"
            )
        if logits.dtype not in DTYPES:
            allowed = ", ".join(map(str, DTYPES))
            raise TypeError(f"router_logits[{number}] is {logits.dtype} on rank {group.rank}; allowed: {allowed}")
    lead = layers[0].shape[:-1]
    if mask is not None and mask.shape != lead:
        raise ValueError(f"mask has shape {tuple(mask.shape)}: it must be {tuple(lead)}, that of the logits' tokens")
    groups = [g for g in (group if sequence_parallel else None, context) if g is not None and g.size > 1]
    if (sequence_parallel or groups) and not 0 <= sequence_dim < len(lead):
        raise ValueError(f"sequence_dim={sequence_dim} is not a token dim of logits with shape {(*lead, '..')}")
    for over in groups:  # a rank of cp_group has consecutive tokens, of which those of tp_group have parts
        layers = [gather_sequence(logits, over, sequence_dim) for logits in layers]
        mask = None if mask is None else gather_dim(mask.to(torch.uint8), sequence_dim, over)
    if layers[0].numel() == 0:
        raise ValueError("router_logits has no tokens: a mean over them is not defined")
    flat = [flatten_tokens(logits) for logits in layers]
    weights = None if mask is None else (mask != 0).flatten().float().repeat(len(flat))
    return torch.cat(flat), weights


@outside_of_graphs("a compiler may compute sums and exponentials in another order")
def load_balancing_loss(
    router_logits: Tensor | Sequence[Tensor],
    top_k: int,
    *,
    mask: Tensor | None = None,
    tp_group: dist.ProcessGroup | DeviceMesh | Group | None = None,
    sequence_parallel: bool = False,
    sequence_dim: int = 0,
    cp_group: dist.ProcessGroup | DeviceMesh | Group | None = None,
    gemm_fn: GemmFn | None = None,
) -> Tensor:
    """E * the sum over experts of (choices per token) * (mean probability): top_k if all experts are used alike.

    The value of transformers' load_balancing_loss_func: layers count as if their tokens were one batch. An expert that
    is chosen as often as another has the same weight, whatever the order of the ranks; equal logits go to the lower
    index, as in Routing. The gradient goes through the probabilities alone.

    It is a mean over one micro-batch's tokens, which is what makes it independent of the data-parallel degree: add it
    to the loss of each micro-batch.

    Args:
        router_logits: [.., E], in bfloat16, float16 or float32, or one such tensor for each layer.
        top_k: how many experts each token gets.
        mask: [..], of any dtype; tokens where it is 0 do not count.
        tp_group: of the layers. Needed with sequence_parallel alone.
        sequence_parallel, sequence_dim: whether, and along which dim, logits and mask are this rank's part of the
            tokens; otherwise they are all tokens, the same on every rank.
        cp_group: context parallelism: logits and mask are this rank's part of each sequence, along sequence_dim.
        gemm_fn: for the sum over tokens, as for Linear.

    Returns:
        A 0-dim fp32 tensor, the same on every rank; NaN if the mask leaves no token.

    Raises:
        TypeError: logits in another dtype.
        ValueError: shapes that do not fit together, no tokens, or a top_k that is not from 1 to E.
        RuntimeError: ranks whose shapes or dtypes differ, under sequence parallelism.
    """
    logits, weights = _whole(router_logits, mask, tp_group, sequence_parallel, sequence_dim, cp_group)
    if not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"top_k={top_k} must be from 1 to {logits.shape[1]}, the number of experts")
    return _LoadBalance.apply(logits, weights, top_k, gemm_fn)


@outside_of_graphs("a compiler may compute sums and exponentials in another order")
def router_z_loss(
    router_logits: Tensor | Sequence[Tensor],
    *,
    mask: Tensor | None = None,
    tp_group: dist.ProcessGroup | DeviceMesh | Group | None = None,
    sequence_parallel: bool = False,
    sequence_dim: int = 0,
    cp_group: dist.ProcessGroup | DeviceMesh | Group | None = None,
    gemm_fn: GemmFn | None = None,
) -> Tensor:
    """The mean over tokens of log(sum over experts of exp(logit))^2, which keeps logits small.

    Arguments, result and errors are load_balancing_loss's.
    """
    logits, weights = _whole(router_logits, mask, tp_group, sequence_parallel, sequence_dim, cp_group)
    return _ZLoss.apply(logits, weights, gemm_fn)
