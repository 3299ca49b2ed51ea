"""The keys that a query of a Hugging Face model sees, as arguments of attention.py instead of a boolean matrix.

transformers builds a model's masks once per forward, by a function that is registered together with the attention
function. It describes a mask by a function of two positions, composed of its own parts, and by the padding tokens.
`VisibleKeys` is derived from both: causal, sliding window, packed sequences, padding, a cache's empty end. So padded
tokens are left out instead of masked, and a sequence has the bits that it has alone and unpadded. A mask that is not
fully recognised remains the matrix that sdpa gets, which attention takes too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import resolve_name

from ..functional.attention import attention, from_whole_chunks


@dataclass(frozen=True)
class Packing:
    """The rows of a [B * S] batch that are not padding, one sequence after another; None: all rows.

    A sequence whose cache has dropped keys has others in their place, as many as move its first key to the place in a
    chunk of keys that it has in the whole sequence; no query sees them.

    cu_q, cu_k, longest_q and longest_k are attention's cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k.
    """

    q_rows: Tensor | None
    k_rows: Tensor | None
    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int

    def to(self, device: torch.device) -> Packing:
        """The same on `device`: layers may be on several devices, and the masks are built once, on the first."""
        if self.cu_q.device == device:
            return self
        tensors: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)


@dataclass(frozen=True, eq=False)
class VisibleKeys:
    """The first `keys` keys are valid, and the last query is at the last of them; see attention for the other fields.

    first: the position of the first key, of a cache that has dropped those before it.
    places: how many keys the mask is for, with the empty end of a static cache; None: not known.
    matrix: which keys of such a cache each query sees, [B, 1, queries, keys], where that is none of the above.
    as_matrix: makes the mask that transformers' own attention takes, for dropout; None in a CUDA graph.

    This is not a tensor: a model that computes with its mask gets an error that says so.
    """

    causal: bool
    window: int | None
    keys: int
    packing: Packing | None
    first: int = 0
    places: int | None = None
    matrix: Tensor | None = None
    as_matrix: Callable[[], Tensor | None] | None = field(default=None, metadata={"in_graphs": False})

    # generate makes the masks of a static cache itself, and asks of them what it asks of a matrix: this, and contiguous
    ndim = 4

    def contiguous(self) -> VisibleKeys:
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_no_tensor(f".{name}"))

    @classmethod
    def __torch_function__(cls, function: Callable, *others: Any) -> Any:
        raise NotImplementedError(_no_tensor(resolve_name(function) or str(function)))


def _no_tensor(what: str) -> str:
    return (
        f"the model computes with its attention mask ({what}): it adds to it, or has an attention of its own, and "
        "tpi.attention is told which keys a query sees without a matrix. For such a model choose "
        'attn_implementation="eager" and neither parallelize nor "tp_invariant"; its bits may depend on the degree'
    )


def _refused(name: str) -> Callable:
    def refuse(*operands: Any) -> Any:
        raise NotImplementedError(_no_tensor(name))

    return refuse


for _name in ["add", "sub", "mul", "truediv", "and", "or", "xor"]:
    for _one in (f"__{_name}__", f"__r{_name}__"):
        setattr(VisibleKeys, _one, _refused(_one))
for _name in ["getitem", "invert", "neg", "eq", "ne", "lt", "le", "gt", "ge"]:
    setattr(VisibleKeys, f"__{_name}__", _refused(f"__{_name}__"))


# --- from transformers' description ---------------------------------------------------------------------------------


def _made_by(maker: Callable | None, function: Any) -> dict[str, Any] | None:
    """The variables in the closure of `function`, if `maker` defines it; else None."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if maker is None or module != maker.__module__ or not name.startswith(f"{maker.__qualname__}.<locals>."):
        return None
    return dict(inspect.getclosurevars(function).nonlocals)


def _terms(function: Any) -> Iterator[tuple[str, Any]]:
    """The conditions whose conjunction is a mask function; "unknown" for a condition that is not recognised."""
    from transformers import masking_utils as theirs

    if function is theirs.causal_mask_function:
        yield "causal", True
    elif function is theirs.bidirectional_mask_function:
        yield "bidirectional", True
    elif found := _made_by(theirs.and_masks, function):
        for one in found["mask_functions"]:
            yield from _terms(one)
    elif found := _made_by(theirs.sliding_window_overlay, function):
        yield "window", found["sliding_window"]
    elif found := _made_by(theirs.packed_sequence_mask_function, function):
        yield "packed", found["packed_sequence_mask"]
    elif found := _made_by(getattr(theirs, "remap_positions_for_packed_sequence", None), function):
        # positions count up by one in each packed sequence, so conditions on them are conditions on the places
        yield "packed positions", True
        yield from _terms(found["mask_function"])
    else:
        yield "unknown", function


def visible_keys(
    *,
    kv_length: int,
    mask_function: Callable,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    cache_position: Tensor | None = None,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> VisibleKeys | None:
    """The arguments of a mask function of transformers' AttentionMaskInterface; None for what is not known here.

    Older versions give cache_position, the places of the queries, for q_length and q_offset. Reads a few values, as
    sdpa's own function does, and so waits for the GPU where there is padding or a static cache.
    """
    if q_length is None:
        if cache_position is None:
            return None
        q_length, q_offset = len(cache_position), cache_position[0]
    terms = list(_terms(mask_function))
    asked = dict(terms)
    causal, window, packed = "causal" in asked, asked.get("window"), asked.get("packed")
    once = len(asked) == len(terms) and "unknown" not in asked and causal != ("bidirectional" in asked)
    if not once or (window and not causal) or ("packed positions" in asked and packed is None):
        return None
    keys = int(q_offset) + q_length - kv_offset if causal else kv_length
    if keys > kv_length or (kv_offset and (not window or kv_offset > max(0, int(q_offset) - window + 1))):
        return None  # the keys before kv_offset may be gone, and not all of them are out of the window
    if packed is not None:
        if attention_mask is not None or kv_offset or not q_length == keys == packed.shape[1]:
            return None
        packing = _packing_of_sequences(packed)
        return None if packing is None else VisibleKeys(causal, window, keys, packing, 0, kv_length)
    if attention_mask is None:
        return VisibleKeys(causal, window, keys, None, kv_offset, kv_length)
    if attention_mask.dim() != 2:
        return None
    padding = attention_mask.bool()[:, : kv_offset + keys]  # of dropped keys too
    padding = F.pad(padding, (0, kv_offset + keys - padding.shape[1]))
    starts = padding & ~F.pad(padding, (1, 0))[:, :-1]
    whole, scattered = torch.stack([padding.all(), (starts.sum(1) > 1).any()]).tolist()
    if scattered and window:  # a window counts places, which leaving tokens out changes
        return None
    if whole:
        return VisibleKeys(causal, window, keys, None, kv_offset, kv_length)
    return VisibleKeys(causal, window, keys, _packing_of_padding(padding, kv_offset, q_length, causal), 0, kv_length)


def _starts(sizes: Tensor) -> Tensor:
    return F.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)


def _packing_of_padding(padding: Tensor, dropped: int, q_length: int, causal: bool) -> Packing:
    """padding [B, dropped + keys]: True for a token. If the queries are the last keys, queries at padding are left out
    too."""
    before, padding = padding[:, :dropped].sum(1), padding[:, dropped:]
    batch, keys = padding.shape
    places = torch.arange(batch * keys, device=padding.device).view(batch, keys)
    taken = padding
    if dropped:
        from ..kernels.attention.spec import CHUNK

        # a sequence's first token stands for the keys that fill a chunk before it
        fill = torch.arange(CHUNK - 1, device=padding.device) < (before % CHUNK * padding.any(1)).unsqueeze(1)
        first = places.gather(1, padding.int().argmax(1, keepdim=True))
        taken, places = torch.cat([fill, padding], 1), torch.cat([first.expand_as(fill), places], 1)
    k_rows, cu_k, keys_in_rows = places[taken], _starts(taken.sum(1)), taken.shape[1]
    if not causal:
        cu_q = torch.arange(0, (batch + 1) * q_length, q_length, dtype=torch.int32, device=padding.device)
        return Packing(None, k_rows, cu_q, cu_k, q_length, keys_in_rows)
    of_queries = padding[:, keys - q_length :]
    q_rows = of_queries.flatten().nonzero().squeeze(1)
    return Packing(q_rows, k_rows, _starts(of_queries.sum(1)), cu_k, q_length, keys_in_rows)


def _first(packed: Tensor) -> Tensor:
    """Whether a token's sequence number differs from that of the previous token in its row."""
    return F.pad(packed[:, 1:] != packed[:, :-1], (1, 0), value=True)


def _packing_of_sequences(packed: Tensor) -> Packing | None:
    """packed [B, S]: the sequence of its row that a token belongs to. None if a sequence is not contiguous."""
    first = _first(packed)
    if not torch.equal(first.sum(1), _first(packed.sort(1).values).sum(1)):
        return None
    cu = F.pad(first.flatten().nonzero().squeeze(1), (0, 1), value=packed.numel()).to(torch.int32)
    return Packing(None, None, cu, cu, packed.shape[1], packed.shape[1])


# --- to attention ---------------------------------------------------------------------------------------------------


def _pack(x: Tensor, rows: Tensor | None) -> Tensor:
    """[B, h, S, D] -> [1, h, rows, D]"""
    flat = x.transpose(1, 2).flatten(0, 1)
    return (flat if rows is None else flat.index_select(0, rows)).transpose(0, 1).unsqueeze(0)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: VisibleKeys, **options: Any) -> Tensor:
    """attention over the visible keys: q [B, h, Sq, D], k, v [B, kv, Sk, D] -> [B, h, Sq, D], 0 at padding.

    Raises:
        NotImplementedError: the model has other keys than it made its mask for.
    """
    places = visible.places
    if places is not None and not visible.keys <= k.shape[2] <= places:
        count = f"{k.shape[2]} keys, and has made its mask for {places}"
        raise NotImplementedError(_no_tensor(f"it hands over {count}, so that it would extend or cut it"))
    k, v = k[:, :, : visible.keys], v[:, :, : visible.keys]
    if visible.matrix is not None:
        k, v, matrix = from_whole_chunks(k, v, visible.matrix.to(q.device), visible.first)
        return attention(q, k, v, mask=matrix, **options)
    if visible.packing is None:
        return attention(q, k, v, causal=visible.causal, window=visible.window, first_key=visible.first, **options)
    packing = visible.packing.to(q.device)
    out = attention(
        _pack(q, packing.q_rows),
        _pack(k, packing.k_rows),
        _pack(v, packing.k_rows),
        causal=visible.causal,
        window=visible.window,
        cu_seqlens_q=packing.cu_q,
        cu_seqlens_k=packing.cu_k,
        max_seqlen_q=packing.longest_q,
        max_seqlen_k=packing.longest_k,
        **options,
    )
    rows = out[0].transpose(0, 1)
    if packing.q_rows is not None:
        places = q.shape[0] * q.shape[2]
        rows = rows.new_zeros(places, *rows.shape[1:]).index_copy(0, packing.q_rows, rows)
    # not by unflatten, a method in Python: in the mode that reroutes attention, torch.compile would end a graph at it
    return rows.view(q.shape[0], q.shape[2], *rows.shape[1:]).transpose(1, 2)
