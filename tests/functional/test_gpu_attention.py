"""safe_attention on a GPU: a head's bits, forward and backward, do not depend on which other heads are in the call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tp_invariant.functional.attention_choice import safe_attention
from tp_invariant.testing import wide_randn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LENGTHS = ((1, 300), (77, 77), (512, 512), (1000, 1000), (2048, 2048), (300, 4096))  # queries, keys
HEADS = ((32, 8), (32, 32), (12, 4), (8, 1))  # of queries, of keys


def data(heads: tuple[int, int], s: int, t: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the output's gradient, laid out as models do: [B, S, heads, D] transposed."""
    generator = torch.Generator("cuda").manual_seed(s + t + dim)
    shapes = ((s, heads[0], dim), (t, heads[1], dim), (t, heads[1], dim), (s, heads[0], dim))
    return [torch.randn(2, *shape, generator=generator, device="cuda").to(dtype).transpose(1, 2) for shape in shapes]


def attend(q, k, v, grad, attention=safe_attention, **options) -> dict[str, Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, enable_gqa=True, **options)
    out.backward(grad)
    return {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def options_of(kind: str, s: int, t: int) -> dict:
    if kind == "causal":
        return dict(is_causal=True)
    if kind == "mask":  # padding on the left, as a batch of prompts has it, and causal
        allowed = torch.ones(s, t, dtype=torch.bool, device="cuda").tril(t - s).repeat(2, 1, 1, 1)
        allowed[1, :, :, : t // 3] = False
        return dict(attn_mask=allowed)
    return {}


def same_bytes(x: Tensor, y: Tensor) -> bool:
    """assert_bitwise_equal's result, computed on the GPU, because these tensors are large and many."""
    as_int = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return x.dtype == y.dtype and torch.equal(x.contiguous().view(as_int), y.contiguous().view(as_int))


def slices_that_differ(tensors: list[Tensor], options: dict, attention, parts: tuple[int, ...]) -> list[str]:
    """Which of out, dq, dk and dv of which slice of the heads differ from the bytes of the whole call.

    If all slices have the whole one key head, their dk and dv are sums over other query heads.
    """
    whole = attend(*tensors, attention, **options)
    one_key_head = tensors[1].shape[1] == 1
    differ = []
    for count in parts:
        for part in range(count):
            # a rank's heads come from its own projection: contiguous in [B, S, heads/P, D]
            mine = [x if x.shape[1] == 1 else x.chunk(count, dim=1)[part] for x in tensors]
            mine = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in mine]
            for name, value in attend(*mine, attention, **options).items():
                if one_key_head and name in ("dk", "dv"):
                    continue
                if not same_bytes(value, whole[name].chunk(count, dim=1)[part]):
                    differ.append(f"{name} of part {part} of {count}")
    return differ


@pytest.mark.parametrize("kind", ("full", "causal", "mask"))
@pytest.mark.parametrize("dim", (64, 96, 128, 256))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_heads_do_not_depend_on_each_other(dtype, dim, kind):
    for heads in HEADS:
        for s, t in LENGTHS:
            if kind == "causal" and s != t:
                continue
            tensors, options = data(heads, s, t, dim, dtype), options_of(kind, s, t)
            parts = (2, 4) if heads[1] == 4 else (2, 4, 8)
            differ = slices_that_differ(tensors, options, safe_attention, parts)
            assert not differ, f"{heads} heads, {s} queries, {t} keys: {differ}"
            again, once = attend(*tensors, **options), attend(*tensors, **options)
            assert all(same_bytes(again[name], once[name]) for name in once), "the same call again"


def test_torchs_own_choice_depends_on_the_other_heads():
    """The control: SDPA with the kernel that it picks, and its memory-efficient kernel without the flag."""
    tensors = data((32, 32), 2048, 2048, 128, torch.bfloat16)

    def sdpa(backend):
        def attention(q, k, v, **options):
            with torch.nn.attention.sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, **options)

        return attention

    found = {}
    for backend in (torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        found[backend] = slices_that_differ(tensors, dict(is_causal=True), _without_gqa(sdpa(backend)), (2, 4))
    assert all(found.values()), found


def _without_gqa(attention):
    return lambda q, k, v, enable_gqa, **options: attention(q, k, v, **options)


@pytest.mark.parametrize("dim", (64, 96, 128, 256))
@pytest.mark.parametrize("kind", ("full", "causal", "mask"))
def test_values(kind, dim):
    """At most 1.1x the error of torch's math path in the same dtype, against float64."""
    s = 300
    tensors, options = data((8, 4), s, s, dim, torch.bfloat16), options_of(kind, s, s)
    exact = attend(*(x.double() for x in tensors), F.scaled_dot_product_attention, **options)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        theirs = attend(*tensors, F.scaled_dot_product_attention, **options)
    ours = attend(*tensors, **options)
    for name, value in exact.items():
        errors = [float((x[name].double() - value).norm() / value.norm()) for x in (ours, theirs)]
        # the kernel keeps its probabilities in 16 bit, which the math path does not always
        assert errors[0] <= max(1.1 * errors[1], 4e-3), (name, errors)


def test_float32_with_a_mask():
    generator = torch.Generator().manual_seed(0)
    tensors = [wide_randn(1, 8, 65, 40, generator=generator, spread=2).cuda() for _ in range(4)]
    options = dict(attn_mask=torch.ones(65, 65, dtype=torch.bool, device="cuda").tril())
    assert not slices_that_differ(tensors, options, safe_attention, (2, 4))
    for softcap in (None, 5.0):
        ours = attend(*tensors, **options, softcap=softcap)
        exact = attend(*(x.double() for x in tensors), by_formula, **options, softcap=softcap)
        for name, value in exact.items():
            assert float((ours[name].double() - value).norm() / value.norm()) < 1e-5, (name, softcap)


def by_formula(q, k, v, attn_mask, softcap, enable_gqa):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~attn_mask, -torch.inf).softmax(-1) @ v
