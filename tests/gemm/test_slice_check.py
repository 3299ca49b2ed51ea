"""A user's gemm_fn: its signature where it is set, and some slices of it at a layer's first call."""

import re

import pytest
import torch
from ranks import run_ranks

import tp_invariant as tpi
from tp_invariant.gemm import slice_check
from tp_invariant.kernels.gemm.reference import matmul
from tp_invariant.testing import RankError, assert_bitwise_equal


def torchs(a, b, *, bias=None, out_dtype=None):
    c = a @ b
    return (c if bias is None else c + bias).to(out_dtype or a.dtype)


def of_one_dtype(a, b, *, bias=None, out_dtype=None):
    return matmul(a, b, bias=bias)


def split_by_shape(a, b, *, bias=None, out_dtype=None):
    if a.shape[0] * b.shape[1] > 256:
        return matmul(a, b, bias=bias, out_dtype=out_dtype)
    half = a.shape[1] // 2
    c = matmul(a[:, :half], b[:half], out_dtype=torch.float32) + matmul(a[:, half:], b[half:], out_dtype=torch.float32)
    return (c if bias is None else c + bias.float()).to(out_dtype or a.dtype)


def without_bias(a, b, *, bias=None, out_dtype=None):
    return matmul(a, b, out_dtype=out_dtype)


def rounded_before_bias(a, b, *, bias=None, out_dtype=None):
    c = matmul(a, b)
    return (c if bias is None else c + bias).to(out_dtype or a.dtype)


def bias_in_16_bits(a, b, *, bias=None, out_dtype=None):
    c = matmul(a, b, out_dtype=torch.float32)
    return (c if bias is None else c.to(bias.dtype) + bias).to(out_dtype or a.dtype)


def good(a, b, *, bias=None, out_dtype=None):
    return matmul(a, b, bias=bias, out_dtype=out_dtype)


# --- where it is set --------------------------------------------------------------------------------------------------


LINEAR = torch.nn.Linear(4, 4)
SETTERS = {
    "argument": lambda fn: tpi.Linear(4, 4, gemm_fn=fn),
    "attribute": lambda fn: setattr(tpi.Linear(4, 4), "gemm_fn", fn),
    "from_linear": lambda fn: tpi.Linear.from_linear(LINEAR, parallel_mode=None, tp_group=None, gemm_fn=fn),
    "default": tpi.set_default_gemm_fn,
    "parallelize": lambda fn: tpi.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4)), None, {}, gemm_fn=fn),
    "experts": lambda fn: tpi.Experts(2, 4, 4, gemm_fn=fn),
}
WRAPPER = (
    "    def gemm_fn(a, b, *, bias=None, out_dtype=None):\n        return my_product(a, b, bias, out_dtype or a.dtype)"
)


@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (torch.matmul, "has no signature that Python can read: it must take (a, b, *, bias=None, out_dtype=None)"),
        (lambda a, b: a @ b, "takes (a, b) (got an unexpected keyword argument 'bias'): it must take (a, b, *,"),
    ],
)
def test_a_signature_is_refused_where_it_is_set(setter, fn, text):
    with pytest.raises(TypeError, match=f"^gemm_fn=<.*{re.escape(text)}") as caught:
        SETTERS[setter](fn)
    assert str(caught.value).endswith(WRAPPER)


@pytest.mark.parametrize("fn", [good, lambda a, b, bias=None, out_dtype=None: a, lambda *args, **options: args[0]])
def test_signatures_that_fit(fn):
    assert tpi.Linear(4, 4, gemm_fn=fn).gemm_fn is fn


# --- at the first call ------------------------------------------------------------------------------------------------


def outputs(tp_group, fn, dtype=torch.float32, only_rank=None):
    """A column- and a row-parallel layer's outputs; with only_rank the other ranks have `good`, of the same name."""

    def gemm_fn(a, b, *, bias=None, out_dtype=None):
        mine = fn if only_rank in (None, tp_group.rank()) else good
        return mine(a, b, bias=bias, out_dtype=out_dtype)

    torch.manual_seed(0)
    options = dict(tp_group=tp_group, gemm_fn=gemm_fn, dtype=dtype)
    up = tpi.Linear(512, 64, parallel_mode="column", **options)
    down = tpi.Linear(64, 512, parallel_mode="row", **options)
    with tpi.set_tp_invariant_mode(True), torch.no_grad():
        return down(up(torch.zeros(8, 512, dtype=dtype)))  # zeros would hide every order


@pytest.mark.parametrize(
    ("fn", "dtype", "text"),
    [
        (torchs, torch.float32, "1 of 8 rows alone differ from the whole product, a (8, 512) @ b (512, 64), "),
        (split_by_shape, torch.float32, "1 of 8 rows alone differ from the whole product, "),
        (of_one_dtype, torch.bfloat16, "it ignores out_dtype: it returned (8, 64) torch.bfloat16 on cpu; for a (8, 5"),
        (rounded_before_bias, torch.bfloat16, "it rounds the sum to torch.bfloat16 before it adds bias or "),
        (bias_in_16_bits, torch.bfloat16, "it rounds the sum to torch.bfloat16 before it adds bias or "),
        (without_bias, torch.bfloat16, "it ignores bias, which must be added in fp32 before the one rounding"),
    ],
)
def test_wrong_ones_get_an_error_at_tp_2(fn, dtype, text):
    before = "gemm_fn '.*gemm_fn' of Linear(512, 64, 'column') on rank 0 fails the check of a layer's first call: "
    with pytest.raises(RankError) as caught:
        run_ranks(outputs, 2, fn, dtype)
    for rank, error in caught.value.errors.items():
        wanted = re.escape(before + text).replace(r"\.\*", ".*").replace("rank\\ 0", f"rank\\ {rank}")
        assert isinstance(error, ValueError) and re.match(wanted, str(error)), error


def test_an_error_of_one_rank_reaches_all():
    with pytest.raises(RankError) as caught:
        run_ranks(outputs, 2, split_by_shape, torch.float32, 1)
    assert len(caught.value.errors) == 2
    for error in caught.value.errors.values():
        assert "1 of 8 rows alone differ from the whole product" in str(error) and "on rank 1" in str(error)


def test_a_good_one_has_the_bits_of_tp_1():
    (whole,) = run_ranks(outputs, 1, good)
    for part in run_ranks(outputs, 2, good):
        assert_bitwise_equal(part, whole)


def counted(monkeypatch, **layer_options):
    calls = []
    monkeypatch.setattr(slice_check, "_try_slices", lambda *args: calls.append(args[1]))
    return calls, tpi.Linear(16, 8, gemm_fn=good, **layer_options)


def test_it_is_tried_once_for_each_layer_and_gemm_fn(monkeypatch):
    calls, layer = counted(monkeypatch)
    layer(torch.ones(3, 16))
    with tpi.set_tp_invariant_mode(True):
        for rows in (3, 3, 5):
            layer(torch.ones(rows, 16))
        assert calls == [(3, 16, 8)]
        layer.gemm_fn = split_by_shape
        layer(torch.ones(5, 16))
        layer.gemm_fn = None  # the bundled one
        layer(torch.ones(5, 16))
    assert calls == [(3, 16, 8), (5, 16, 8)]


def test_it_is_not_tried_in_a_capture_or_compiled_code(monkeypatch):
    calls, layer = counted(monkeypatch)
    with tpi.set_tp_invariant_mode(True), torch.no_grad():
        torch.compile(layer, backend="eager")(torch.ones(3, 16))
        with monkeypatch.context() as patch:
            patch.setattr(slice_check, "is_capturing", lambda: True)
            layer(torch.ones(3, 16))
        assert calls == []
        layer(torch.ones(5, 16))
        assert calls == [(5, 16, 8)]


def test_large_products_are_cut():
    shapes = []

    def noted(a, b, *, bias=None, out_dtype=None):
        shapes.append((*a.shape, b.shape[1]))
        return good(a, b, bias=bias, out_dtype=out_dtype)

    slice_check._try_slices(noted, (2048, 4096, 4096), torch.bfloat16, torch.device("cpu"), 4, False)
    assert shapes == [(128, 4096, 128), (1, 4096, 128), (32, 4096, 128), (128, 4096, 1), (128, 4096, 32)]


def test_a_wrong_signature_is_refused_before_slices_are_tried():
    with pytest.raises(TypeError, match="has no signature that Python can read: it must take"):
        tpi.testing.assert_slice_invariant(torch.matmul)
