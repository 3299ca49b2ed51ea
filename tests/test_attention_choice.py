"""safe_attention: a head's bits do not depend on the other heads; torch's values; what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tp_invariant as tpi
from tp_invariant import attention_choice
from tp_invariant.attention_choice import SafeSdpa, safe_attention
from tp_invariant.elementwise import WholeVectors, in_whole_vectors
from tp_invariant.testing import assert_bitwise_equal, wide_randn

HEADS, KV_HEADS = 8, 4
MASKS = ("none", "causal", "bool", "float", "per head")


def tensors(s: int, t: int, dim: int, dtype: torch.dtype, kv_heads: int = KV_HEADS) -> list[Tensor]:
    """q, k, v and the gradient of the output, laid out as models do: [B, S, heads, D] transposed."""
    generator = torch.Generator().manual_seed(s * 1000 + t)
    shapes = ((s, HEADS, dim), (t, kv_heads, dim), (t, kv_heads, dim), (s, HEADS, dim))
    return [wide_randn(2, *shape, generator=generator, spread=2).to(dtype).transpose(1, 2) for shape in shapes]


def mask_of(kind: str, s: int, t: int) -> Tensor | None:
    generator = torch.Generator().manual_seed(3)
    if kind in ("none", "causal"):
        return None
    heads = HEADS if kind == "per head" else 1
    allowed = torch.rand(2, heads, s, t, generator=generator) > 0.3
    allowed[..., 0] = True
    return torch.zeros(allowed.shape).masked_fill(~allowed, -1e9) if kind == "float" else allowed


def attend(q, k, v, grad, attention=safe_attention, **options) -> dict[str, Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, enable_gqa=True, **options)
    out.backward(grad.to(out.dtype))
    return {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_heads_do_not_see_each_other(kind, dtype):
    for (s, t), softcap in itertools.product(((1, 37), (13, 13), (75, 75)), (None, 5.0)):
        q, k, v, grad = tensors(s, t, 24, dtype)
        mask = mask_of(kind, s, t)
        whole = attend(q, k, v, grad, attn_mask=mask, is_causal=kind == "causal", softcap=softcap)
        for parts in (2, 4):
            for part in range(parts):

                def mine(x, part=part, parts=parts):
                    return x.chunk(parts, dim=1)[part].clone(memory_format=torch.contiguous_format)

                own = mask if mask is None or mask.shape[1] == 1 else mine(mask)
                options = dict(attn_mask=own, is_causal=kind == "causal", softcap=softcap)
                got = attend(*map(mine, (q, k, v, grad)), **options)
                assert_bitwise_equal(got, {name: mine(x) for name, x in whole.items()}, f"part {part} of {parts}")


@pytest.mark.parametrize("threads", (1, 2))
def test_threads_do_not_count(threads):
    q, k, v, grad = tensors(40, 40, 24, torch.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        got = attend(q, k, v, grad, is_causal=True, softcap=3.0)
    finally:
        torch.set_num_threads(before)
    assert_bitwise_equal(got, attend(q, k, v, grad, is_causal=True, softcap=3.0))


def test_a_shared_sum_over_heads_would_show():
    """The control: one number that all heads share, as a kernel's choice of splits would be, changes bits."""
    q, k, v, grad = tensors(40, 40, 24, torch.float32)
    whole = attend(q, k, v, grad)["out"]
    half = attend(q[:, :4], k[:, :2], v[:, :2], grad[:, :4], scale=24**-0.5 * (1 + 2**-20))["out"]
    with pytest.raises(AssertionError):
        assert_bitwise_equal(half, whole[:, :4].contiguous())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_values_are_torchs(kind, dtype):
    for s, t in ((1, 37), (33, 33), (20, 45), (45, 20)):
        data = tensors(s, t, 16, dtype)
        mask = mask_of(kind, s, t)
        options = dict(attn_mask=mask, is_causal=kind == "causal")
        sdpa = F.scaled_dot_product_attention
        as_64 = dict(options, attn_mask=mask.double() if kind == "float" else mask)
        exact = attend(*(x.double() for x in data), sdpa, **as_64)
        as_dtype = dict(options, attn_mask=mask.to(dtype) if kind == "float" and dtype != torch.float16 else mask)
        if kind == "float" and dtype == torch.float16:  # -1e9 is beyond fp16
            as_dtype["attn_mask"] = mask == 0
        theirs, ours = attend(*data, sdpa, **as_dtype), attend(*data, **options)
        for name, value in exact.items():
            if not value.any():  # one query that sees one key has no slope
                assert (kind, s) == ("causal", 1)
                continue
            allowed = max(2 * error(theirs[name], value), 4 * torch.finfo(torch.float32).eps)
            assert error(ours[name], value) <= allowed, (name, s, t, error(ours[name], value), allowed)
            assert ours[name].dtype == dtype


def test_softcap():
    q, k, v, grad = tensors(20, 20, 16, torch.float64)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    scores = (q @ k.repeat_interleave(2, 1).mT) * 0.3
    weights = (4 * torch.tanh(scores / 4)).masked_fill(~torch.ones(20, 20, dtype=torch.bool).tril(), -torch.inf)
    (weights.softmax(-1) @ v.repeat_interleave(2, 1)).backward(grad)
    ours = attend(*(x.detach().float() for x in (q, k, v, grad)), is_causal=True, scale=0.3, softcap=4.0)
    for name, exact in (("dq", q.grad), ("dk", k.grad), ("dv", v.grad)):
        assert error(ours[name], exact) < 1e-6


def test_a_query_that_sees_nothing_gives_zeros():
    q, k, v, grad = tensors(5, 5, 16, torch.float32)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    results = attend(q, k, v, grad, attn_mask=mask)
    assert_bitwise_equal(results["out"][:, :, 2], torch.zeros(2, HEADS, 16))
    assert all(torch.isfinite(x).all() for x in results.values())


# --- elementwise functions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", (nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.Tanh()), ids=str)
def test_elementwise_functions_do_not_see_where_an_element_lies(activation):
    """Slices of odd sizes and offsets; the control is the function itself, where one shows on this machine."""
    x = wide_randn(70001, generator=torch.Generator().manual_seed(0), spread=2)

    def both(fn, x):
        x = x.clone().requires_grad_()
        y = fn(x)
        y.sum().backward()
        return y.detach(), x.grad

    y, dx = both(lambda x: in_whole_vectors(activation, x), x)
    torch.testing.assert_close(y, activation(x))
    for cut in (slice(0, 1), slice(3, 36), slice(1, 70001), slice(5, 40000)):
        part = both(lambda x: in_whole_vectors(activation, x), x[cut])
        assert_bitwise_equal(part, (y[cut], dx[cut]), str(cut))
    with tpi.set_tp_invariant_mode(True):
        assert_bitwise_equal(WholeVectors(activation)(x[3:36]), y[3:36])
    with tpi.set_tp_invariant_mode(False):
        assert_bitwise_equal(WholeVectors(activation)(x[3:36]), activation(x[3:36]))


def test_torchs_own_silu_sees_it():
    """The control: if this fails, elementwise.py is not needed any more."""
    x = wide_randn(4096, generator=torch.Generator().manual_seed(0), spread=2)
    assert any(not torch.equal(F.silu(x[i : i + 7]), F.silu(x)[i : i + 7]) for i in range(0, 4000, 7))


# --- in place of F.scaled_dot_product_attention ---------------------------------------------------------------------


class Plain(nn.Module):
    def forward(self, q, k, v, **options):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


def test_inside_a_module():
    q, k, v, _ = tensors(9, 9, 16, torch.float32)
    module = Plain()
    SafeSdpa(module)
    with tpi.set_tp_invariant_mode(True):
        assert_bitwise_equal(module(q, k, v, is_causal=True), safe_attention(q, k, v, is_causal=True, enable_gqa=True))
        with pytest.raises(ValueError, match=r"dropout_p=0\.5: with the TP-invariant mode on"):
            module(q, k, v, dropout_p=0.5)
        outside = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # also after the error
    stock = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert_bitwise_equal(outside, stock)
    with tpi.set_tp_invariant_mode(False):
        assert_bitwise_equal(module(q, k, v, is_causal=True), stock)


class InContainers(nn.Module):
    def __init__(self):
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (4, 8)).transpose(1, 2) for p in self.projections)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_in_a_plain_model_whose_projections_stand_in_a_container(monkeypatch):
    calls = []
    monkeypatch.setattr(attention_choice, "safe_attention", lambda *a, **k: calls.append(0) or safe_attention(*a, **k))
    model = nn.Sequential(InContainers(), InContainers())
    model = tpi.parallelize(model, None, {"*.projections.*": "colwise"})
    for mode, expected in ((True, 2), (False, 0)):
        calls.clear()
        with tpi.set_tp_invariant_mode(mode):
            model(torch.randn(2, 5, 32))
        assert len(calls) == expected


def test_an_interrupted_forward_leaves_nothing_behind_with_the_mode_off():
    class Interrupted(nn.Module):
        def forward(self):
            raise KeyboardInterrupt

    module = Interrupted()
    hooks = SafeSdpa(module)
    with tpi.set_tp_invariant_mode(True), pytest.raises(KeyboardInterrupt):
        module()
    q, k, v, _ = tensors(9, 9, 16, torch.float32)
    F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True)  # torch's own: ours takes no dropout
    hooks._leave(module, None, None)  # for the tests that follow


# --- what is refused ------------------------------------------------------------------------------------------------


def test_a_forced_backend():
    q, k, v, _ = tensors(4, 4, 16, torch.float32)
    with sdpa_kernel(SDPBackend.MATH):
        safe_attention(q, k, v, enable_gqa=True)
    for forced in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(forced), pytest.raises(ValueError, match=r"allows neither SDPBackend\.EFFICIENT"):
            safe_attention(q, k, v, enable_gqa=True)


def test_heads_and_masks_that_do_not_fit():
    q, k, v, _ = tensors(4, 4, 16, torch.float32)
    with pytest.raises(ValueError, match="with enable_gqa=True a divisor"):
        safe_attention(q, k, v)
    with pytest.raises(ValueError, match="with enable_gqa=True a divisor"):
        safe_attention(q[:, :6], k, v, enable_gqa=True)
    mask = torch.ones(4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="attn_mask and is_causal=True exclude each other"):
        safe_attention(q, k, v, enable_gqa=True, attn_mask=mask, is_causal=True)
    with pytest.raises(ValueError, match="a gradient for it are not supported"):
        safe_attention(q, k, v, enable_gqa=True, attn_mask=mask.float().requires_grad_())
    with pytest.raises(TypeError, match=r"q is torch\.float64"):
        safe_attention(q.double(), k.double(), v.double(), enable_gqa=True)
