"""The CPU's GEMM: compared with the order that it documents, with float64, and with slices of every kind. Also: CPU
kernels do not depend on torch's defaults. Values, layouts and errors: tests/kernels/gemm/test_matmul.py."""

import contextlib
import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tp_invariant.kernels.attention import reference as reference_attention
from tp_invariant.kernels.attention.spec import AttentionSpec, PackedLengths
from tp_invariant.kernels.gemm import reference, tensor_core
from tp_invariant.kernels.gemm.reference import chained_matmul, matmul
from tp_invariant.kernels.rowwise import reference_norm, reference_softmax
from tp_invariant.kernels.vocabulary import reference_cross_entropy, reference_embedding
from tp_invariant.kernels.vocabulary.loss_spec import LossSpec
from tp_invariant.testing import assert_bitwise_equal, assert_slice_invariant, wide_randn

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BOTH = pytest.mark.parametrize("gemm_fn", [matmul, chained_matmul], ids=["matmul", "chained"])


def operands(m, n, k, dtype, seed=0, spread=None):
    generator = torch.Generator().manual_seed(seed)
    spread = spread if spread is not None else 3 if dtype == torch.float16 else 8
    shapes = ((m, k), (k, n), (n,))
    return [wide_randn(*shape, generator=generator, spread=spread).to(dtype) for shape in shapes]


@pytest.fixture
def threads():
    """Lets a test set the number of threads, and restores it."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# --- the documented order -------------------------------------------------------------------------------------------


def round_to_fp32(exact: Fraction) -> np.float32:
    """The nearest fp32, ties to even, of a value in fp32's normal range or of zero (+0.0)."""
    if exact == 0:
        return np.float32(0.0)
    exponent = math.floor(math.log2(abs(exact)))
    exponent += (abs(exact) >= Fraction(2) ** (exponent + 1)) - (abs(exact) < Fraction(2) ** exponent)
    assert -126 <= exponent <= 127
    ulp = Fraction(2) ** (exponent - 23)
    return np.float32(float(round(exact / ulp) * ulp))  # round() of a Fraction takes ties to even


def test_rounding_to_fp32():
    generator = torch.Generator().manual_seed(0)
    for value in torch.randn(200, dtype=torch.float64, generator=generator).tolist():
        assert round_to_fp32(Fraction(value)) == np.float32(value)
    assert round_to_fp32(Fraction(1) + Fraction(1, 2**24)) == np.float32(1.0)
    assert round_to_fp32(Fraction(1) + Fraction(3, 2**24)) == np.float32(1.0 + 2**-22)


def documented(a, b):
    """Blocks of 128; in each one chain of fused multiply-adds from zero; the sums of the blocks are added in order."""
    a64, b64 = a.double().tolist(), b.double().tolist()
    out = torch.empty(len(a64), b.shape[1])
    for i, row in enumerate(a64):
        for j in range(b.shape[1]):
            total = None
            for start in range(0, len(row), 128):
                part = np.float32(0.0)
                for k in range(start, min(start + 128, len(row))):
                    part = round_to_fp32(Fraction(row[k]) * Fraction(b64[k][j]) + Fraction(float(part)))
                total = part if total is None else round_to_fp32(Fraction(float(total)) + Fraction(float(part)))
            out[i, j] = float(total)
    return out


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(3, 4, 1), (2, 3, 17), (3, 2, 128), (2, 2, 129), (2, 3, 300), (1, 1, 512)])
def test_order_is_the_documented_one(gemm_fn, dtype, m, n, k):
    a, b, _ = operands(m, n, k, dtype)
    expected = documented(a, b)
    assert_bitwise_equal(gemm_fn(a, b, out_dtype=torch.float32), expected)
    assert_bitwise_equal(gemm_fn(a, b), expected.to(dtype))


def test_other_orders_give_other_bits():
    """The control: without fusing, with another block, or backwards, the same data gives other bits."""
    a, b, _ = operands(4, 4, 300, torch.float32)
    expected = documented(a, b)
    unfused = torch.zeros(4, 4)
    for k in range(300):
        unfused += (a[:, k : k + 1] * b[k : k + 1]).clone()
    backwards = documented(a.flip(1), b.flip(0))
    shifted = documented(torch.cat([a.new_zeros(4, 64), a], 1), torch.cat([b.new_zeros(64, 4), b]))
    for other in (unfused, backwards, shifted):
        with pytest.raises(AssertionError, match="elements differ"):
            assert_bitwise_equal(other, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 1), (1, 70, 129), (64, 64, 128), (65, 63, 127), (130, 33, 1000), (3, 600, 200), (520, 5, 64)],
)
def test_blas_form_has_the_chains_bits(threads, dtype, m, n, k):
    a, b, bias = operands(m, n, k, dtype)
    expected, biased = chained_matmul(a, b), chained_matmul(a, b, bias=bias, out_dtype=torch.float32)
    a_columns, b_columns = a.t().contiguous().t(), b.t().contiguous().t()
    for count in (1, 2):
        threads(count)
        for left in (a, a_columns):
            for right in (b, b_columns):
                assert_bitwise_equal(matmul(left, right), expected)
        assert_bitwise_equal(matmul(a, b, bias=bias, out_dtype=torch.float32), biased)


# --- slice invariance -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gemm_fn", [matmul, chained_matmul], ids=["matmul", "chained"])
def test_slice_invariance_of_fixed_shapes(gemm_fn):
    shapes = ((33, 40, 300), (5, 3, 17)) if gemm_fn is matmul else ((33, 20, 150),)
    assert_slice_invariant(gemm_fn, shapes=shapes, device="cpu")


@st.composite
def sliced_products(draw):
    m, n, k = draw(st.integers(1, 300)), draw(st.integers(1, 300)), draw(st.integers(1, 300))
    rows = sorted(draw(st.tuples(st.integers(0, m), st.integers(0, m)).filter(lambda t: t[0] != t[1])))
    cols = sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)).filter(lambda t: t[0] != t[1])))
    steps = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return (
        m,
        n,
        k,
        slice(*rows, steps[0]),
        slice(*cols, steps[1]),
        draw(st.sampled_from(DTYPES)),
        draw(st.integers(0, 99)),
    )


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=40)
@given(sliced_products())
def test_slice_invariance_of_any_shape(case):
    m, n, k, rows, cols, dtype, seed = case
    a, b, bias = operands(m, n, k, dtype, seed, spread=3 if dtype == torch.float16 else 20)
    whole = matmul(a, b, bias=bias)
    assert_bitwise_equal(
        matmul(a[rows], b[:, cols], bias=bias[cols]), whole[rows, cols].clone(memory_format=torch.contiguous_format)
    )


# --- accuracy -------------------------------------------------------------------------------------------------------


def relative_error(c, a, b):
    exact = a.double() @ b.double()
    return float((c.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "factor"),
    [
        (torch.bfloat16, torch.bfloat16, 1.1),
        (torch.float16, torch.float16, 1.1),
        (torch.float32, torch.float32, 2.0),
    ],
)
@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 256), (33, 70, 2048), (128, 128, 4096)])
def test_error_against_torchs(dtype, out_dtype, factor, m, n, k):
    generator = torch.Generator().manual_seed(k)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((m, k), (k, n)))
    ours, torchs = (relative_error(c, a, b) for c in (matmul(a, b, out_dtype=out_dtype), torch.matmul(a, b)))
    assert 0 < ours <= factor * torchs


def test_bias_is_added_before_the_one_rounding():
    # the product, 1 + 2^-8, lies halfway between two bfloat16; a bias of 2^-20 decides, if it comes before rounding
    a = torch.tensor([[1.0, 2.0**-8]], dtype=torch.bfloat16)
    b = torch.ones(2, 1, dtype=torch.bfloat16)
    bias = torch.tensor([2.0**-20], dtype=torch.bfloat16)
    assert (matmul(a, b) + bias).item() == 1.0, "rounding twice loses it"
    for gemm_fn in (matmul, chained_matmul):
        assert gemm_fn(a, b, bias=bias).item() == 1.0 + 2.0**-7


def test_signed_zeros():
    """The sums start from +0.0, so products that are all -0.0 give 0.0, wherever K ends in its block."""
    for k in (1, 127, 128, 129):
        a, b = torch.full((2, k), -0.0), torch.ones(k, 3)
        for gemm_fn in (matmul, chained_matmul):
            assert_bitwise_equal(gemm_fn(a, b), torch.zeros(2, 3))
            assert_bitwise_equal(gemm_fn(a, b, bias=torch.full((3,), -0.0)), torch.zeros(2, 3))


@BOTH
def test_operands_are_not_changed_and_need_no_autograd(gemm_fn):
    a, b, bias = operands(5, 6, 40, torch.float32)
    copies = a.clone(), b.clone(), bias.clone()
    c = gemm_fn(a.requires_grad_(), b.requires_grad_(), bias=bias)
    assert not c.requires_grad
    assert c.is_contiguous()
    assert_bitwise_equal([a.detach(), b.detach(), bias], list(copies))


AROUND = {
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16),
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_autocast_and_inference_mode_change_nothing(around, fresh_check):
    """Both forms, and into out=, with a self-check made inside."""
    a, b, _ = operands(5, 6, 40, torch.float32)
    expected = chained_matmul(a, b)
    out = torch.zeros(5, 6)
    with around():
        assert_bitwise_equal([matmul(a, b), chained_matmul(a, b), matmul(a, b, out=out)], [expected] * 3)
    assert_bitwise_equal([out, matmul(a, b)], [expected] * 2)


def test_vmap():
    """torch refuses the matmul, which writes into a new tensor; the op is computed slice by slice."""
    a, b, bias = operands(6, 7, 300, torch.float32)
    stacked, op = torch.stack([a, a.flip(0)]), torch.ops.tp_invariant.gemm
    expected = torch.stack([matmul(one, b, bias=bias) for one in stacked])
    assert_bitwise_equal(torch.func.vmap(lambda one: op(one, b, bias))(stacked), expected)
    with pytest.raises(RuntimeError, match="vmap: inplace"):
        torch.func.vmap(lambda one: matmul(one, b, bias=bias))(stacked)


# --- torch's defaults -----------------------------------------------------------------------------------------------


def every_kernel():
    """A call of each CPU kernel, on data created here."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (wide_randn(70, 48, generator=generator, spread=3) for _ in range(2))
    w, bias = (wide_randn(48, generator=generator, spread=3) for _ in range(2))
    a, b, b_bias = operands(70, 33, 300, torch.bfloat16)
    a[3, 5], a[4, 6] = math.nan, math.inf
    a32, b32, _ = operands(70, 33, 300, torch.float32)
    ids, target = torch.randint(0, 9, (70,), generator=generator), torch.arange(70) % 60
    q, dout = (torch.randn(2, 4, 9, 16, generator=generator) for _ in range(2))
    k, v = (torch.randn(2, 2, 140, 16, generator=generator) for _ in range(2))
    cu = torch.tensor([0, 3, 9], dtype=torch.int32), torch.tensor([0, 130, 140], dtype=torch.int32)
    lengths = PackedLengths(*cu, 6, 130)
    stats = {rms: reference_norm.norm_forward(x, w, None, eps=1e-5, rms=rms, zero_centered=False) for rms in (0, 1)}

    def of_norm(rms):
        y = reference_norm.norm_forward(x, w, bias, eps=1e-5, rms=rms, zero_centered=True)
        _, mean, rstd = stats[rms]
        dx = reference_norm.norm_backward_input(dy, x, w, mean, rstd, rms=rms, zero_centered=True)
        sums = reference_norm.norm_weight_partial_sums(dy, x, mean, rstd, rows_per_sum=32, rms=rms, with_bias=True)
        return [t for t in (*y, dx, sums, reference_norm.fold_partial_sums(sums)) if t is not None]

    def of_logits():
        spec = LossSpec(60, -100, 0.1, 0.1)
        extremes = [reference_cross_entropy.row_extremes(x, target, n, first, spec) for n, first in ((48, 0), (12, 48))]
        major = torch.stack(extremes)
        sums = torch.stack([reference_cross_entropy.row_sums(x, target, n, major, spec) for n in (48, 12)])
        losses, stats = reference_cross_entropy.token_losses(major, sums, target, 48, spec)
        total, count = reference_cross_entropy.sum_of_tokens(losses, target, spec, mean=True)
        whole = reference_cross_entropy.whole_losses(x, target % 48, LossSpec(48, -100, 0.0, 0.0))
        grad = reference_cross_entropy.logits_grad(total.view(1), x, target, stats, count, 12, 48, spec)
        return [major, sums, losses, stats, total, count, *whole, grad]

    def of_rows():
        row_sums = reference_softmax.row_sums(x, divisor=48, out_dtype=torch.float16)
        return [row_sums, *(reference_softmax.softmax(x, log=log, out_dtype=torch.bfloat16) for log in (False, True))]

    def of_attention():
        spec = AttentionSpec(causal=True, scale=0.25, window=100, softcap=20.0)
        results = []
        for some, of_all in ((slice(None), None), (slice(0, 1), lengths)):
            tensors = [t[some] for t in (q, k, v)]
            sinks = tensors[0][0, :, 0, 0].float()
            out, lse = reference_attention.forward(*tensors, spec, of_all, sinks)
            results += [out, lse, *reference_attention.backward(dout[some], *tensors, out, lse, spec, of_all, sinks)]
        return results

    def of_embedding():
        return [reference_embedding.embedding_grad(dy, ids, 8, dtype) for dtype in DTYPES]

    def of_the_tensor_core():
        fp32 = tensor_core.matmul(a, b, bias=b_bias, out_dtype=torch.float32, promote_every=128)
        return [fp32, tensor_core.matmul(a.half(), b.half())]

    def of_matmul():
        products = [
            matmul(*ab, out_dtype=torch.float32, promote_every=p) for ab in ((a, b), (a32, b32)) for p in (None, 128)
        ]
        return [*products, matmul(a32, b32), matmul(a32.t()[:, :64].t(), b32), chained_matmul(a32, b32)]

    norms = [lambda: of_norm(False), lambda: of_norm(True)]
    return [of_matmul, *norms, of_logits, of_rows, of_attention, of_embedding, of_the_tensor_core]


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("default", DEFAULTS)
def test_torchs_defaults_change_nothing(default, fresh_check):
    """Nor do they change the self-check, whose wrong result would stay for the rest of the process."""
    calls = every_kernel()
    expected = [call() for call in calls]
    reference._blas_agrees.cache_clear()
    with warnings.catch_warnings(), DEFAULTS[default]():
        warnings.simplefilter("error")
        assert torch.empty(0).dtype != torch.float32 or torch.empty(0).device.type == "meta"
        inside = [call() for call in calls]
    assert_bitwise_equal(inside, expected)
    assert_bitwise_equal([call() for call in calls], expected, "with what the self-check found inside")


# --- the self-check -------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_check():
    reference._blas_agrees.cache_clear()
    yield
    reference._blas_agrees.cache_clear()


def _backwards(a_panels, b_panels):
    return torch.mm(torch.cat(a_panels, 1).flip(1), torch.cat(b_panels).flip(0))


def _one_bit_off(a_panels, b_panels):
    c = reference._chain_tile(a_panels, b_panels)
    c.view(torch.int32)[-1, -1] ^= 1
    return c


@pytest.mark.parametrize("wrong", [_backwards, _one_bit_off])
def test_a_blas_with_another_order_is_noticed(monkeypatch, fresh_check, wrong):
    a, b, bias = operands(70, 33, 300, torch.bfloat16)
    monkeypatch.setattr(reference, "_blas_tile", wrong)
    text = (
        "the BLAS of this torch sums a 128 x 128 by 128 x 64 product on .* threads in another order than expected; "
        "tp_invariant uses its elementwise form instead: the same bits, but slower"
    )
    with pytest.warns(RuntimeWarning, match=f"^{text}$"):
        c = matmul(a, b, bias=bias)
    assert_bitwise_equal(c, chained_matmul(a, b, bias=bias))
    with warnings.catch_warnings():  # once for a shape
        warnings.simplefilter("error")
        assert_bitwise_equal(matmul(a, b, bias=bias), c)


def test_this_machines_blas_agrees(fresh_check):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a, b, _ = operands(70, 33, 300, torch.bfloat16)
        matmul(a, b)


# --- errors ---------------------------------------------------------------------------------------------------------


@BOTH
def test_other_devices_are_refused(gemm_fn):
    """The errors that all devices share: tests/kernels/gemm/test_matmul.py."""
    with pytest.raises(ValueError, match=r"a is on meta: this gemm_fn is for the CPU; on CUDA use kernels\.matmul"):
        gemm_fn(torch.ones(2, 3, device="meta"), torch.ones(3, 2, device="meta"))
