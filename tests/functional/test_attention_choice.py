"""safe_attention: a head's bits do not depend on the other heads; torch's values; errors."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from attention_cases import naively
from torch import Tensor, nn

import tp_invariant as tpi
from tp_invariant.core.elementwise import in_whole_vectors
from tp_invariant.functional import attention_choice
from tp_invariant.functional.attention_choice import SafeSdpa, safe_attention
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
def test_heads_do_not_depend_on_each_other(kind, dtype):
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


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_chunks_of_keys_that_depend_on_the_number_of_heads_give_other_bits(dtype):
    """The control, on a mask and sizes of the cases above: out and all gradients of half the heads differ."""
    q, k, v, grad = tensors(75, 75, 24, dtype)
    hidden = ~mask_of("bool", 75, 75)[0, 0]

    def control(*data, enable_gqa):
        return naively(*data, hidden=hidden)

    whole = attend(q, k, v, grad, control)
    half = attend(*(x.chunk(2, dim=1)[0] for x in (q, k, v, grad)), control)
    assert all(not torch.equal(x, whole[name].chunk(2, dim=1)[0]) for name, x in half.items())


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
            allowed = max(2 * error(theirs[name], value), 8 * torch.finfo(torch.float32).eps)
            if dtype != torch.float32 and name in ("dq", "dk"):  # from out as it was rounded
                allowed += torch.finfo(dtype).eps
            assert error(ours[name], value) <= allowed, (name, s, t, error(ours[name], value), allowed)
            assert ours[name].dtype == dtype


@pytest.mark.parametrize("kind", ("causal", "bool", "float"))
def test_softcap(kind):
    q, k, v, grad = tensors(20, 20, 16, torch.float64)
    mask = mask_of(kind, 20, 20)
    added = torch.zeros(20, 20).masked_fill(~torch.ones(20, 20, dtype=torch.bool).tril(), -torch.inf)
    if mask is not None:
        added = mask if kind == "float" else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    scores = (q @ k.repeat_interleave(2, 1).mT) * 0.3
    out = (4 * torch.tanh(scores / 4) + added).softmax(-1) @ v.repeat_interleave(2, 1)
    out.backward(grad)
    data = (x.detach().float() for x in (q, k, v, grad))
    ours = attend(*data, attn_mask=mask, is_causal=kind == "causal", scale=0.3, softcap=4.0)
    for name, exact in (("out", out.detach()), ("dq", q.grad), ("dk", k.grad), ("dv", v.grad)):
        assert error(ours[name], exact) < 1e-6, name


def test_without_keys_the_output_is_zeros():
    """As with SDPA, with a mask or without; without queries the output is empty."""
    q, k, v, grad = tensors(5, 3, 16, torch.float32)
    for mask in (None, torch.ones(5, 0, dtype=torch.bool)):
        got = attend(q, k[:, :, :0], v[:, :, :0], grad, attn_mask=mask)
        assert_bitwise_equal(got["out"], torch.zeros(2, HEADS, 5, 16))
        assert not got["dq"].any() and got["dk"].shape == (2, KV_HEADS, 0, 16)
    got = attend(q[:, :, :0], k, v, grad[:, :, :0], attn_mask=torch.ones(0, 3, dtype=torch.bool))
    assert got["out"].shape == (2, HEADS, 0, 16) and not got["dv"].any()


def test_a_query_that_sees_no_key_gives_zeros():
    q, k, v, grad = tensors(5, 5, 16, torch.float32)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    results = attend(q, k, v, grad, attn_mask=mask)
    assert_bitwise_equal(results["out"][:, :, 2], torch.zeros(2, HEADS, 16))
    assert all(torch.isfinite(x).all() for x in results.values())


@pytest.mark.parametrize("scale", (0.0, -0.4))
@pytest.mark.parametrize("causal", (False, True))
def test_scales_that_are_not_positive(scale, causal):
    """Those of torch's values; and of a part of the heads the same bytes, with a control."""
    q, k, v, grad = tensors(9, 9, 16, torch.float32)
    got = attend(q, k, v, grad, is_causal=causal, scale=scale)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]  # torch's own is wrong for causal on a CPU
    scores = scale * leaves[0] @ leaves[1].repeat_interleave(HEADS // KV_HEADS, 1).transpose(2, 3)
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1) if causal else torch.zeros(9, 9, dtype=torch.bool)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    out = weights @ leaves[2].repeat_interleave(HEADS // KV_HEADS, 1)
    out.backward(grad.double())
    for value, name in zip((out.detach(), *(x.grad for x in leaves)), ("out", "dq", "dk", "dv"), strict=True):
        torch.testing.assert_close(got[name].double(), value, rtol=1e-4, atol=1e-4, msg=name)
    first = slice(HEADS // KV_HEADS)  # the heads that share a key
    part = attend(q[:, first], k[:, :1], v[:, :1], grad[:, first], is_causal=causal, scale=scale)
    assert_bitwise_equal(part["out"], got["out"][:, first])
    assert not torch.equal(attend(q, k, v, grad, is_causal=causal, scale=0.4)["out"], got["out"])


# --- elementwise functions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", (nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.Tanh()), ids=str)
def test_elementwise_functions_do_not_depend_on_the_position(activation):
    """Slices of odd sizes and offsets; the control is the function itself, if it depends on the position here."""
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
    SafeSdpa(module := copy.deepcopy(activation))
    with tpi.set_tp_invariant_mode(True):
        assert_bitwise_equal(module(x[3:36]), y[3:36])
    with tpi.set_tp_invariant_mode(False):
        assert_bitwise_equal(module(x[3:36]), activation(x[3:36]))


def test_torchs_own_silu_depends_on_the_position():
    """The control: if this fails, core/elementwise.py is no longer needed."""
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
        with pytest.raises(ValueError, match=r"dropout_p=0\.5 is not supported with the TP-invariant mode on where a"):
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


def test_in_a_plain_model_whose_projections_are_in_a_container(monkeypatch):
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


Q, KV, MASK = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 6, 8), torch.ones(5, 6, dtype=torch.bool)
REFUSED = [
    (dict(enable_gqa=False), ValueError, "with enable_gqa=True k a divisor"),
    (dict(q=Q[0]), ValueError, r"q \(4, 5, 8\), .* must be \[batch, heads, sequence, head size\]"),
    (dict(q=[1.0]), TypeError, "q, k and v are list, Tensor, Tensor"),
    (dict(attn_mask=MASK, is_causal=True), ValueError, "attn_mask and is_causal=True exclude each other"),
    (dict(attn_mask=MASK.long()), TypeError, r"attn_mask is torch\.int64: it must be .*torch\.bool.* or of a floating"),
    (dict(attn_mask=MASK[:, :5]), ValueError, r"attn_mask is \(5, 5\) on cpu: .* here \(2, 4, 5, 6\)"),
]


@pytest.mark.parametrize("given, error, text", REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_refused(given, error, text):
    with pytest.raises(error, match=text):
        safe_attention(**{"q": Q, "k": KV, "v": KV, "enable_gqa": True, **given})
