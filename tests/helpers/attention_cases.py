"""Shared by the attention tests: data, a call with its gradients, the formula, and a naive form as the control."""

from __future__ import annotations

import torch
from torch import Tensor

import tp_invariant as tpi
from tp_invariant.functional.paged_attention import paged_attention
from tp_invariant.testing import wide_randn

KINDS = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window=37),
    "softcap": dict(causal=True, softcap=3.0, scale=0.3),
}


ALL = dict(causal=True, window=37, softcap=3.0, scale=0.3)


def tensors(device, dtype, batch, heads, kv_heads, queries, keys, dim, spread=2) -> list[Tensor]:
    """q, k, v and the gradient of the output, laid out as models do: [B, S, heads, D] transposed."""
    generator = torch.Generator(device).manual_seed(1000 * queries + keys)
    shapes = ((queries, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, dim), (queries, heads, dim))
    made = (wide_randn(batch, *shape, generator=generator, spread=spread) for shape in shapes)
    return [x.to(device, dtype).transpose(1, 2) for x in made]


def attend(q, k, v, grad, attention=tpi.attention, **options) -> dict[str, Tensor]:
    """out and the gradients of q, k, v and the options that require one."""
    learned = {name: x for name, x in options.items() if isinstance(x, Tensor) and x.requires_grad}
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    learned = {name: x.detach().requires_grad_() for name, x in learned.items()}
    out = attention(q, k, v, **{**options, **learned})
    grads = torch.autograd.grad(out, (q, k, v, *learned.values()), grad.to(out.dtype))
    return {"out": out.detach()} | {f"d{name}": x for name, x in zip(("q", "k", "v", *learned), grads, strict=True)}


def assert_same_bytes(got: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    """assert_bitwise_equal's result, computed on the device: on a GPU these tensors are large and many."""
    assert got.keys() == expected.keys()
    for name, x in got.items():
        y = expected[name]
        assert x.dtype == y.dtype and x.shape == y.shape, f"{name}, {what}"
        as_int = {2: torch.int16, 4: torch.int32}[x.element_size()]
        differ = int((x.contiguous().view(as_int) != y.contiguous().view(as_int)).sum())
        assert not differ, f"{what}: {differ} of {x.numel()} elements of {name} differ"


def part_of(results: dict[str, Tensor], dim: int, index: int, parts: int) -> dict[str, Tensor]:
    return {name: x.chunk(parts, dim)[index] for name, x in results.items()}


def fresh(x: Tensor) -> Tensor:
    """A copy in the memory layout that a rank's own projection gives."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def visible(queries: int, keys: int, options: dict, device: str) -> Tensor:
    position = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    key = torch.arange(keys, device=device)
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if options.get("causal"):
        seen &= key <= position
    if options.get("window"):
        seen &= key > position - options["window"]
    return seen


def plainly(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """The formula, in the tensors' dtype; softmax at least in fp32."""
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).mT * options.get("scale", q.shape[-1] ** -0.5)
    if softcap := options.get("softcap"):
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(q.shape[2], k.shape[2], options, q.device)
    scores, seen = masked(scores, seen, options.get("mask"))
    sinks = options.get("sinks")
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is None:
        scores = scores.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    else:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(v.dtype)
    return weights[..., : k.shape[2]] * seen @ v.repeat_interleave(groups, 1)


def masked(scores: Tensor, seen: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """With a matrix's biases, and what it leaves visible; -inf hides, so that it needs no gradient there."""
    if mask is None:
        return scores, seen
    if mask.dtype == torch.bool:
        return scores, seen & mask
    allowed = mask > float("-inf")
    return scores + mask.masked_fill(~allowed, 0.0).to(scores.dtype), seen & allowed


def naively(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None, **options) -> Tensor:
    """The control: keys are cut into as many parts as fill the GPU (flash-decoding), so by heads and queries."""
    groups, calls = q.shape[1] // k.shape[1], q.shape[0] * q.shape[1] * -(-q.shape[2] // 64)
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    seen = visible(q.shape[2], k.shape[2], options, q.device)
    if hidden is not None:
        seen &= ~hidden
    tops, totals, outs = [], [], []
    for keys in torch.arange(k.shape[2], device=q.device).tensor_split(max(1, min(48 // calls, k.shape[2]))):
        scores = (q @ k[:, :, keys].mT).float() * options.get("scale", q.shape[-1] ** -0.5)
        if softcap := options.get("softcap"):
            scores = softcap * torch.tanh(scores / softcap)
        mask = options.get("mask")
        if mask is not None:
            mask = mask.expand(*mask.shape[:-1], k.shape[2])[..., keys]
        scores, see = masked(scores, seen[:, keys], mask)
        scores = scores.masked_fill(~see, -1e30)
        tops.append(scores.amax(-1, keepdim=True))
        weights = (scores - tops[-1]).exp() * see
        totals.append(weights.sum(-1, keepdim=True))
        outs.append((weights.to(v.dtype) @ v[:, :, keys]).float())
    top = torch.stack(tops).amax(0)
    shrink = [(one - top).exp() for one in tops]
    out = sum(s * o for s, o in zip(shrink, outs, strict=True))
    total = sum(s * t for s, t in zip(shrink, totals, strict=True))
    if (sinks := options.get("sinks")) is not None:
        total = total + (sinks.float()[:, None, None] - top).exp()
    return (out / total).to(q.dtype)


def paged_and_whole(q, k, v, steps, page, options) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The rows of q, k, v [1, .., S, D] for queries start .. stop of some sequences that begin alike, against keys in
    pages of `page` rows, whose other rows have NaN; and those rows of one call."""
    tables, spread, device = [], torch.Generator().manual_seed(page), q.device
    most = max(-(-stop // page) for _, stop in steps)
    places = torch.randperm(most * len(steps) + 3, generator=spread)
    pages = [x.new_full((len(places), page, x.shape[1], x.shape[3]), torch.nan).transpose(1, 2) for x in (k, v)]
    for n, (_, stop) in enumerate(steps):
        keys, own = torch.arange(stop), places[n * most : (n + 1) * most]
        tables.append(own)
        for x, paged in zip((k, v), pages, strict=True):
            paged[own[keys // page].to(device), :, (keys % page).to(device)] = x[0, :, :stop].transpose(0, 1)
    of_q = [0, *(stop - start for start, stop in steps)]
    of_k = [0, *(stop for _, stop in steps)]
    cu_q, cu_k = (torch.tensor(sizes, device=device).cumsum(0).int() for sizes in (of_q, of_k))
    options = {name: x for name, x in options.items() if name != "causal"}
    with torch.no_grad():
        got = paged_attention(
            torch.cat([q[:, :, start:stop] for start, stop in steps], 2), *pages,
            page_table=torch.stack(tables).int().to(device), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
            max_seqlen_q=max(of_q), max_seqlen_k=max(of_k), **options,
        )  # fmt: skip
        whole = tpi.attention(q, k, v, causal=True, **options)
    return {"out": got}, {"out": torch.cat([whole[:, :, start:stop] for start, stop in steps], 2)}
