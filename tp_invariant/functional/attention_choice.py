"""Attention in which a head's bits do not depend on the other heads; parallelized models use it while the mode is on.

Tensor parallelism gives each rank some of the heads, and most kernels give a head different bits when fewer heads are
in the call, above all in backward. SDPA on a CPU does so too: head sizes of 16 and 64 never differed, but 20, 24 and 80
did, in fp32 on the math path (96 of 672 dv) and in bf16 on both paths (45 and 34). Three implementations are invariant,
and `safe_attention` takes the first that applies. The choice depends on arguments, dtype and device, never on the
number of heads:

    no mask, or is_causal    this library's own (attention.py)
    a mask; CUDA, 16 bit     SDPA's memory-efficient kernel, its backward under use_deterministic_algorithms(True): 0 of
                             96 comparisons of head slices differed on an H200, 33 without that flag
    else                     head by head: both products through the process-wide or bundled gemm_fn, softmax by rows

With a mask, key and value heads that several query heads share are repeated, and the gradients of the copies are added
in head order. `safe_attention` replaces F.scaled_dot_product_attention inside modules (`SafeSdpa`) and the attention
function of a Hugging Face model (hugging_face/models.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.deterministic
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from ..core.dtensors import as_dtensor, is_dtensor
from ..core.elementwise import in_whole_vectors
from ..core.mode import is_tp_invariant_mode_enabled
from ..gemm.gemm_fn import check_dtype, gemm
from ..kernels.dtypes import DTYPES
from .attention import attention
from .attention_checks import check_alike, check_score_options, in_autocasts_dtype


def safe_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale q kᵀ + mask) v for each head; a head's bits do not depend on which other heads are in the call.

    q [B, h, S, D], k [B, kv, T, D], v [B, kv, T, E] -> [B, h, S, E], as F.scaled_dot_product_attention.

    Args:
        attn_mask: broadcasts to [B, h, S, T]: bool (True: the query sees the key), or floating point, added to the
            scores; gets no gradient. Other dtypes are refused, because either meaning is possible.
        is_causal: query i sees keys 0 .. i.
        scale: 1 / sqrt(D) if None; positive.
        softcap: scores become softcap * tanh(scores / softcap) before the mask (Gemma 2).
        enable_gqa: allows h to be a multiple of kv; query heads i * h / kv .. share key head i.
        sinks: as in `attention`; not together with a mask.

    A query that sees no key gives zeros. Under torch.autocast, q, k and v are cast to autocast's dtype.

    Raises:
        ValueError: shapes, devices or options that are not compatible, a mask together with is_causal, a mask that
            needs a gradient, or a torch.nn.attention.sdpa_kernel that allows neither MATH nor EFFICIENT_ATTENTION
            (not checked in compiled code).
        TypeError: a dtype that the kernels do not take, a mask of integers.
    """
    q, k, v = in_autocasts_dtype(q, k, v)
    groups = _check_shapes(q, k, v, enable_gqa)
    if attn_mask is not None:
        _check_mask(attn_mask, q, k, is_causal)
    if not torch.compiler.is_compiling():
        _check_not_forced()
    check_dtype(None, q, "q")
    check_alike(q, k, v)
    scale, softcap = check_score_options(q, scale, softcap)
    if (attn_mask is None and q.dtype in DTYPES) or k.shape[2] == 0:  # without keys a mask has no effect
        return _without_mask(q, k, v, is_causal, scale=scale, softcap=softcap, sinks=sinks)
    if sinks is not None:
        raise ValueError("sinks are given with attn_mask: tpi.attention takes them without")
    if groups > 1:
        k, v = _RepeatHeads.apply(k, groups), _RepeatHeads.apply(v, groups)
    half = q.dtype in (torch.bfloat16, torch.float16)
    if attn_mask is not None and q.is_cuda and half and softcap is None and q.shape[-1] % 8 == v.shape[-1] % 8 == 0:
        return _EfficientAttention.apply(q, k, v, _bias(attn_mask, q, k), scale)
    scores = HeadwiseMatmul.apply(q, k.transpose(-1, -2), torch.float32) * scale
    if softcap is not None:
        scores = in_whole_vectors(torch.tanh, scores / softcap) * softcap
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask.to(scores.dtype)
    weights = _Softmax.apply(scores)
    return HeadwiseMatmul.apply(weights.to(v.dtype), v, v.dtype)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> int:
    """The number of query heads that share a key head."""
    fit = q.dim() == k.dim() == v.dim() == 4 and k.shape[:-1] == v.shape[:-1]
    fit = fit and q.shape[0] == k.shape[0] and q.shape[-1] == k.shape[-1]
    fit = fit and 0 not in (k.shape[1], k.shape[-1], v.shape[-1])
    if not fit or q.shape[1] % k.shape[1] or (q.shape[1] != k.shape[1] and not enable_gqa):
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit: they must be [B, heads, S, D], "
            "k and v with as many heads as q, or with enable_gqa=True a divisor of that; no head size may be 0"
        )
    return q.shape[1] // k.shape[1]


def _check_mask(mask: Tensor, q: Tensor, k: Tensor, is_causal: bool) -> None:
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
        kind = str(mask.dtype) if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise TypeError(
            f"attn_mask is {kind}: it must be a tensor of torch.bool, True where a query sees a key (mask.bool()), or "
            "of a floating point dtype, added to the scores"
        )
    if is_causal:
        raise ValueError("attn_mask and is_causal=True exclude each other: put both into one mask")
    if mask.requires_grad:
        raise ValueError("attn_mask requires a gradient, which is not supported: pass attn_mask.detach()")
    scores = (*q.shape[:3], k.shape[2])
    fit = mask.dim() <= 4 and all(a in (1, b) for a, b in zip(mask.shape[::-1], scores[::-1], strict=False))
    if not fit or mask.device != q.device:
        raise ValueError(
            f"attn_mask is {tuple(mask.shape)} on {mask.device}: it must broadcast to [B, heads, queries, keys], here "
            f"{scores}, on {q.device}"
        )


def _without_mask(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, **options: Any) -> Tensor:
    """As SDPA, whose first query is at the position of the first key; `attention` aligns the last query and key."""
    if not is_causal or q.shape[2] == k.shape[2]:
        return attention(q, k, v, causal=is_causal, **options)
    both = min(q.shape[2], k.shape[2])
    out = attention(q[:, :, :both], k[:, :, :both], v[:, :, :both], causal=True, **options)
    if both == q.shape[2]:
        return out
    return torch.cat([out, attention(q[:, :, both:], k, v, **options)], dim=2)  # these queries see all keys


def _check_not_forced() -> None:
    """Raises under an sdpa_kernel(..) that allows no invariant implementation."""
    if not (torch.backends.cuda.mem_efficient_sdp_enabled() or torch.backends.cuda.math_sdp_enabled()):
        raise ValueError(
            "torch.nn.attention.sdpa_kernel(..) allows neither SDPBackend.EFFICIENT_ATTENTION nor SDPBackend.MATH: "
            "allow one of them while the TP-invariant mode is on; flash and cuDNN give a head other bits when fewer "
            "are in the call"
        )


class _RepeatHeads(torch.autograd.Function):
    """x [B, kv, T, D] -> [B, kv * groups, T, D], each head `groups` times in a row; dx adds them in that order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int) -> Tensor:
        ctx.groups = groups
        return repeat(x, "b kv t d -> b (kv groups) t d", groups=groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        first, *others = rearrange(grad, "b (kv groups) t d -> groups b kv t d", groups=ctx.groups).unbind(0)
        total = first.float()
        for other in others:
            total = total + other.float()
        return total.to(grad.dtype), None


# --- the memory-efficient kernel ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """torch.use_deterministic_algorithms(True) without warn_only, under which the kernel keeps its fast order."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # True would fill every new tensor
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill


def _bias(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The mask as the kernel takes it: added to scores, in q's dtype, [B, h, S, T], rows aligned to 16 elements."""
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, float("-inf"))
    aligned = F.pad(mask.to(q.dtype), (0, -mask.shape[-1] % 16))[..., : mask.shape[-1]]
    return aligned.expand(*q.shape[:3], k.shape[2])


class _EfficientAttention(torch.autograd.Function):
    """SDPA's memory-efficient kernel, called by its own name so that backward, too, can run under the flag."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        with _deterministic():
            out, *state = torch.ops.aten._scaled_dot_product_efficient_attention(
                q, k, v, bias, True, 0.0, False, scale=scale
            )
        ctx.save_for_backward(q, k, v, bias, out, *state)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out, lse, seed, offset = ctx.saved_tensors
        with _deterministic():
            dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
                grad.contiguous(), q, k, v, bias, out, lse, seed, offset, 0.0, [True, True, True, False], False,
                scale=ctx.scale,
            )  # fmt: skip
        return dq, dk, dv, None, None


# --- head by head ---------------------------------------------------------------------------------------------------


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


class _Softmax(torch.autograd.Function):
    """w = exp(s - max) / sum along the last dim, s fp32; ds = w (dw - sum of w dw). Zeros where every s is -inf.

    torch's own backward on a CPU gave other bits on one thread than on two, in 1 to 8% of the elements.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        largest = scores.amax(dim=-1, keepdim=True)
        shifted = scores - largest.masked_fill(largest == float("-inf"), 0.0)
        powers = in_whole_vectors(torch.exp, shifted)
        total = _row_sums(powers)
        weights = powers / total.masked_fill(total == 0, 1.0)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        return weights * (grad - _row_sums(weights * grad))


def _row_sums(x: Tensor) -> Tensor:
    """[.., T] -> [.., 1]: adds the first half and the second, elementwise, until one element is left.

    The order depends on T alone.
    """
    while (width := x.shape[-1]) > 1:
        half = width // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([folded, x[..., -1:]], dim=-1) if width % 2 else folded
    return x


def _headwise(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    c = a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=out_dtype)
    for one_a, one_b, one_c in zip(a.flatten(0, 1), b.flatten(0, 1), c.flatten(0, 1), strict=True):
        one_c.copy_(gemm(None, one_a, one_b, out_dtype=out_dtype))
    return c


# --- in place of F.scaled_dot_product_attention ---------------------------------------------------------------------


class _Reroute(TorchFunctionMode):
    """Reads the mode at each call, because an interrupt in a forward skips the hook that would remove this object."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention or not is_tp_invariant_mode_enabled():
            return func(*args, **(kwargs or {}))
        return _safe_sdpa(*args, **(kwargs or {}))


def _safe_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    check_no_dropout(dropout_p, "dropout_p")
    layout = _layout_of(query, key, value)
    q, k, v = (x.to_local() if is_dtensor(x) else x for x in (query, key, value))
    mask = _whole_mask(attn_mask)
    out = safe_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    return out if layout is None else as_dtensor(out, layout, "the output of scaled_dot_product_attention")


def _layout_of(query: Tensor, key: Tensor, value: Tensor) -> Any:
    """The mesh and the placements of q, k and v; None for plain tensors."""
    layouts = {x.device_mesh: x.placements for x in (query, key, value) if is_dtensor(x)}
    if not layouts:
        return None
    (layout, *others) = layouts.items()
    alike = not others and all(is_dtensor(x) and x.placements == layout[1] for x in (query, key, value))
    if not alike or any(p.is_partial() or getattr(p, "dim", 0) > 1 for p in layout[1]):
        placed = ", ".join(str(x.placements if is_dtensor(x) else "a plain tensor") for x in (query, key, value))
        raise ValueError(
            f"q, k and v of scaled_dot_product_attention are placed as {placed}: all three must be plain tensors, or "
            "DTensors on one mesh, placed alike: by heads (Shard(1)), by batch (Shard(0)) or Replicate"
        )
    return layout


def _whole_mask(mask: Tensor | None) -> Tensor | None:
    if is_dtensor(mask) and not all(p.is_replicate() for p in mask.placements):
        raise ValueError(f"attn_mask is a DTensor placed as {mask.placements}: it must be Replicate or a plain tensor")
    return mask.to_local() if is_dtensor(mask) else mask


def check_no_dropout(p: float, name: str) -> None:
    if p:
        raise ValueError(
            f"{name}={p} is not supported with the TP-invariant mode on, because a dropout mask would depend on the "
            "degree: set it to 0"
        )


class SafeSdpa:
    """Hooks that replace F.scaled_dot_product_attention inside a module's forward by _safe_sdpa, while the mode is on.

    The hooks do not act in a function that torch.utils.checkpoint recomputes in backward, outside any module's forward:
    pass a module to torch.utils.checkpoint, as transformers does with its layers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._entered: list[_Reroute] = []
        if any(isinstance(getattr(hook, "__self__", None), SafeSdpa) for hook in module._forward_pre_hooks.values()):
            return
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if is_tp_invariant_mode_enabled():
            self._entered.append(_Reroute())
            self._entered[-1].__enter__()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._entered:  # after an error in another hook this may run without _enter
            self._entered.pop().__exit__(None, None, None)


def callers(model: nn.Module, names: Iterable[str]) -> dict[int, nn.Module]:
    """{id: module} of the modules whose forward calls the named ones, which therefore may compute attention."""
    found = {}
    for name in names:
        while name := name.rpartition(".")[0]:
            parent = model.get_submodule(name)
            if not isinstance(parent, (nn.ModuleList, nn.ModuleDict)):  # these have no forward of their own
                found[id(parent)] = parent
                break
    return found
