"""The gradient of a softmax: the bytes of `row_sums` and torch's operations, on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tp_invariant.kernels.rowwise import reference_softmax, softmax
from tp_invariant.testing import assert_bitwise_equal, wide_randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = [softmax] if DEVICE == "cuda" else [softmax, reference_softmax]


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda module: module.__name__.rpartition(".")[2])
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_it_is_made_of_row_sums(kernels, dtype):
    """The control: another order of the sum, that of the reversed row, has other bits."""
    for rows, h in ((5, 1), (3, 60), (7, 128), (2, 256), (3, 1000), (0, 8)):
        generator = torch.Generator().manual_seed(h)
        dy = wide_randn(rows, h, generator=generator, spread=3).to(DEVICE)
        y = torch.softmax(wide_randn(rows, h, generator=generator, spread=1), dim=1).to(DEVICE)
        products = dy * y
        dots, others = (
            kernels.row_sums(x.contiguous(), divisor=1, out_dtype=torch.float32) for x in (products, products.flip(1))
        )
        dx = kernels.softmax_backward(dy.t().contiguous().t(), y, out_dtype=dtype)
        assert_bitwise_equal(dx, (y * (dy - dots.unsqueeze(1))).to(dtype))
        assert h < 1000 or not torch.equal(dots, others)
        exact = y.double() * (dy.double() - (dy.double() * y.double()).sum(1, keepdim=True))
        unit = torch.finfo(dtype).eps / 2 + 20 * 2.0**-24
        scale = y.double() * (dy.double().abs() + (dy.double() * y.double()).abs().sum(1, keepdim=True))
        assert ((dx.double() - exact).abs() <= unit * scale).all()
