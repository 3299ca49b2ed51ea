"""Attention by the arguments of F.scaled_dot_product_attention; parallelized models use it while the mode is on.

Tensor parallelism gives each rank some of the heads, and most kernels give a head different bits when fewer heads are
in the call, above all in backward. SDPA on a CPU does so too: head sizes of 16 and 64 never differed, but 20, 24 and 80
did, in fp32 on the math path (96 of 672 dv) and in bf16 on both paths (45 and 34). So this library's own runs, with and
without a mask (attention.py). `safe_attention` replaces F.scaled_dot_product_attention inside modules (`SafeSdpa`) and
the attention function of a Hugging Face model (hugging_face/models.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..comm.collectives import Group
from ..core.dtensors import as_dtensor, is_dtensor
from ..core.elementwise import POSITION_DEPENDENT_FUNCTIONS, AroundForward, AroundLayers, call_in_whole_vectors
from ..core.mode import is_tp_invariant_mode_enabled
from ..core.torch_private import forward_pre_hooks_of, function_modes
from .attention import attention
from .attention_checks import check_mask, check_tensors, in_autocasts_dtype
from .context_parallel import of_own_heads, with_all_tokens


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
    cp_group: Group | None = None,
) -> Tensor:
    """softmax(scale q kᵀ + mask) v for each head; a head's bits do not depend on which other heads are in the call.

    q [B, h, S, D], k [B, kv, T, D], v [B, kv, T, E] -> [B, h, S, E], as F.scaled_dot_product_attention.

    Args:
        attn_mask: broadcasts to [B, h, S, T]: bool (True: the query sees the key), or floating point, added to the
            scores; `attention` says when it may require a gradient. Other dtypes are refused, because either meaning
            is possible.
        is_causal: query i sees keys 0 .. i.
        scale: 1 / sqrt(D) if None.
        softcap: scores become softcap * tanh(scores / softcap) before the mask (Gemma 2).
        enable_gqa: allows h to be a multiple of kv; query heads i * h / kv .. share key head i.
        sinks, cp_group: as in `attention`; S and T are then this rank's part, and attn_mask is whole.

    A query that sees no key gives zeros. Under torch.autocast, q, k and v are cast to autocast's dtype.

    Raises:
        ValueError: shapes, devices or options that are not compatible, or a mask together with is_causal.
        TypeError: a dtype that the kernels do not take, a mask of integers.
    """
    q, k, v = in_autocasts_dtype(q, k, v)
    check_tensors(q, k, v)
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise ValueError(
            f"q has {q.shape[1]} heads and k {k.shape[1]}: they must have as many, or with enable_gqa=True k a divisor "
            "of that"
        )
    if attn_mask is not None:
        parts = 1 if cp_group is None else cp_group.size
        check_mask(attn_mask, (*q.shape[:2], q.shape[2] * parts, k.shape[2] * parts), q.device, "attn_mask")
        if is_causal:
            raise ValueError("attn_mask and is_causal=True exclude each other: put both into one mask")
    options: dict[str, Any] = dict(scale=scale, softcap=softcap, sinks=sinks, cp_group=cp_group)
    if attn_mask is not None:
        return attention(q, k, v, mask=attn_mask, **options)
    return _without_mask(q, k, v, is_causal, **options)


def _without_mask(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, **options: Any) -> Tensor:
    """As SDPA, whose first query is at the position of the first key; `attention` aligns the last query and key."""
    if not is_causal or q.shape[2] == k.shape[2] or options["cp_group"] is not None:
        return attention(q, k, v, causal=is_causal, **options)
    both = min(q.shape[2], k.shape[2])
    out = attention(q[:, :, :both], k[:, :, :both], v[:, :, :both], causal=True, **options)
    if both == q.shape[2]:
        return out
    return torch.cat([out, attention(q[:, :, both:], k, v, **options)], dim=2)  # these queries see all keys


# --- in place of F.scaled_dot_product_attention ---------------------------------------------------------------------


_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_, torch.feature_dropout,
}  # fmt: skip
_REROUTED = {F.scaled_dot_product_attention, *_DROPOUTS, *POSITION_DEPENDENT_FUNCTIONS}

# (a node of the autograd graph, None where there is no graph; the name of what draws a mask for its value): raises a
# ValueError where that value is this rank's part of the activations
CheckMask = Callable[[Any, str], None]


class _Reroute(AroundLayers):
    """Reads the mode at each call, because an interrupt in a forward skips the hook that would remove this object."""

    def __init__(self, check_mask: CheckMask | None = None, cp_group: Group | None = None) -> None:
        super().__init__()
        self.check_mask, self.cp_group = check_mask, cp_group

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _REROUTED:  # nearly always, for every function of torch that a module calls
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            if is_tp_invariant_mode_enabled():
                return _safe_sdpa(*args, check_dropout=self.check_mask, cp_group=self.cp_group, **kwargs)
            return (
                func(*args, **kwargs) if self.cp_group is None else stock_sdpa(*args, cp_group=self.cp_group, **kwargs)
            )
        if not is_tp_invariant_mode_enabled():
            return func(*args, **kwargs)
        if func not in _DROPOUTS:
            return call_in_whole_vectors(func, args, kwargs)
        return func(*args, **kwargs) if torch.compiler.is_compiling() else self._dropout(func, args, kwargs)

    def _dropout(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        before = (args[0] if args else kwargs["input"]).grad_fn
        result = func(*args, **kwargs)
        if self.check_mask is not None and before is not None and result.grad_fn is not before:  # p > 0, in training
            self.check_mask(before, func.__name__)
        return result


def _safe_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    check_dropout: CheckMask | None = None,
    cp_group: Group | None = None,
) -> Tensor:
    layout = _layout_of(query, key, value)
    q, k, v = (x.to_local() if is_dtensor(x) else x for x in (query, key, value))
    mask = _whole_mask(attn_mask)
    options: dict[str, Any] = dict(attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    if dropout_p:
        if (
            check_dropout is None
            or cp_group is not None
            or (layout is not None and not all(p.is_replicate() for p in layout[1]))
        ):
            refuse_dropout(dropout_p, "dropout_p")
        else:
            check_dropout(q.grad_fn, f"dropout_p={dropout_p} of scaled_dot_product_attention")
        with torchs_attention():
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, **options)
    else:
        out = safe_attention(q, k, v, cp_group=cp_group, **options)
    return out if layout is None else as_dtensor(out, layout, "the output of scaled_dot_product_attention")


def stock_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    cp_group: Group,
) -> Tensor:
    """With the mode off, torch's own, of all tokens of this rank's heads; attn_mask is whole."""
    heads, scale = query.shape[1], query.shape[-1] ** -0.5 if scale is None else scale
    mask = attn_mask if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]
    mask = of_own_heads(mask, 1, heads, cp_group)
    options: dict[str, Any] = dict(attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # not F's function, in whose place a module around this call may run this one again
        return torch.ops.aten.scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa, **options)

    return with_all_tokens(attend, query, key, value, cp_group)


def torchs_attention() -> Any:
    """Inside, torch's attention is one whose bits and dropout mask are the same at each call from the same seed.

    For dropout, which this library's attention does not have. Every rank must have all heads.
    """
    return sdpa_kernel(SDPBackend.MATH)


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


def refuse_dropout(p: float, name: str) -> None:
    raise ValueError(
        f"{name}={p} is not supported with the TP-invariant mode on where a rank may have a part of the heads, because "
        "a dropout mask would depend on the degree: set it to 0"
    )


class SafeSdpa(AroundForward):
    """Hooks that replace F.scaled_dot_product_attention inside a module's forward by _safe_sdpa, while the mode is on.

    On a CPU they also have sigmoid, silu, exp and the like, called as functions, compute an element by one formula
    wherever it lies (core/elementwise.py), which torch does not: how many of a head's elements fill full vectors
    depends on how many heads the rank has. Not in loops that inductor makes.

    The hooks do not act in a function that torch.utils.checkpoint recomputes in backward, outside any module's forward:
    pass a module to torch.utils.checkpoint, as transformers does with its layers.

    check_mask: is called where the module's code draws a dropout mask; None: attention with dropout is refused.
    cp_group: of a module that gets this rank's part of the tokens. Its attention is then `attention(.., cp_group=..)`,
        and with the mode off torch's between the same exchanges. A mask must be whole; dropout is refused.
    """

    def __init__(self, module: nn.Module, check_mask: CheckMask | None = None, cp_group: Group | None = None) -> None:
        self._arguments = check_mask, None if cp_group is None or cp_group.size == 1 else cp_group
        hooks = forward_pre_hooks_of(module).values()
        if not any(isinstance(getattr(hook, "__self__", None), SafeSdpa) for hook in hooks):
            super().__init__(module, "attention")

    def _mode(self) -> _Reroute | None:
        """None also where a module around this one has entered its own."""
        wanted = is_tp_invariant_mode_enabled() or self._arguments[1] is not None
        if not wanted or any(type(mode) is _Reroute for mode in function_modes()):
            return None
        return _Reroute(*self._arguments)


def callers(model: nn.Module, names: Iterable[str]) -> dict[int, nn.Module]:
    """{id: module} of the modules whose forward calls the named ones, which therefore may compute attention."""
    by_id = {}
    for name in names:
        while name := name.rpartition(".")[0]:
            parent = model.get_submodule(name)
            if not isinstance(parent, (nn.ModuleList, nn.ModuleDict)):  # these have no forward of their own
                by_id[id(parent)] = parent
                break
    return by_id
