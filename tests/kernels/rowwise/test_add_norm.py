"""A residual addition and a norm in one launch: the bytes of the addition and of the norm after one another."""

from __future__ import annotations

import pytest
import torch
from gpus import gpu

from tp_invariant.kernels.rowwise import add_norm, norm, reference_add_norm, reference_norm
from tp_invariant.testing import assert_bitwise_equal, wide_randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAIRS = [(add_norm, norm)] if DEVICE == "cuda" else [(add_norm, norm), (reference_add_norm, reference_norm)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@gpu
@pytest.mark.parametrize("h", (1024, 1000, 4096, 5120, 8192, 20000))
@pytest.mark.parametrize("rms", (True, False), ids=("RMSNorm", "LayerNorm"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_rows_on_a_gpu(h, rms, dtype):
    test_the_bytes_of_the_two(add_norm, norm, h, rms, dtype)


@pytest.mark.parametrize("fused, after_it", PAIRS, ids=("kernel", "reference")[: len(PAIRS)])
@pytest.mark.parametrize("h", (64, 40))
@pytest.mark.parametrize("rms", (True, False), ids=("RMSNorm", "LayerNorm"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bytes_of_the_two(fused, after_it, h, rms, dtype):
    if fused is add_norm and DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter rounds to bfloat16 towards zero; float16 tests the same lines")
    generator = torch.Generator().manual_seed(0)
    x, r = (wide_randn(7, h, generator=generator, spread=4).to(DEVICE, dtype) for _ in range(2))
    weight, b = (torch.randn(h, generator=generator).to(DEVICE, dtype) for _ in range(2))
    bias, options = None if rms else b, dict(eps=1e-5, rms=rms, zero_centered=rms)
    s = x + r
    expected = [s, *after_it.norm_forward(s, weight, bias, **options)]
    for _ in range(2):  # the second time by what is remembered
        found = fused.add_norm_forward(x, r, weight, bias, **options)
        assert_bitwise_equal([t for t in found if t is not None], [t for t in expected if t is not None])
    rows = fused.add_norm_forward(x[2:3], r[2:3], weight, bias, **options)
    assert_bitwise_equal(rows[1], expected[1][2:3])
    with pytest.raises(AssertionError):  # the control
        assert_bitwise_equal(fused.add_norm_forward(x, x, weight, bias, **options)[1], expected[1])


@pytest.mark.parametrize("fused, after_it", PAIRS, ids=("kernel", "reference")[: len(PAIRS)])
def test_errors(fused, after_it):
    x, weight = torch.ones(2, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    options = dict(eps=1e-5, rms=True, zero_centered=False)
    with pytest.raises(ValueError, match=r"residual has shape \(2, 4\)"):
        fused.add_norm_forward(x, x[:, :4], weight, None, **options)
    with pytest.raises(TypeError, match=r"residual has dtype torch.bfloat16"):
        fused.add_norm_forward(x, x.bfloat16(), weight, None, **options)
