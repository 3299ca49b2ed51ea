"""A part among NaN, by one launch: the bytes of torch's pad."""

import pytest
import torch
import torch.nn.functional as F

from tp_invariant.kernels import launch
from tp_invariant.kernels.rowwise.unread import among_nan
from tp_invariant.testing import assert_bitwise_equal, wide_randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
kernel = pytest.mark.skipif(not (launch.interpreting() or DEVICE == "cuda"), reason="needs Triton")
SHAPES = [((3, 8), 0), ((2, 5, 16), 1), ((1, 7, 1040), 1), ((9, 3, 24), 0), ((2, 3, 2, 8), 2), ((4, 2, 2056), 1)]


def padded(part, dim, before, after):
    return F.pad(part, (*(0, 0) * (part.dim() - 1 - dim), before, after), value=float("nan"))


@kernel
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_bytes_are_those_of_pad(shape, dim, dtype):
    part = wide_randn(*shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    part.view(-1)[:3] = torch.tensor([float("nan"), -0.0, float("inf")])
    for before, after in ((0, shape[dim]), (2 * shape[dim], 0), (1, 2), (0, 0)):
        got = among_nan(part, dim, before, after)
        assert got.is_contiguous()
        assert_bitwise_equal(got, padded(part, dim, before, after))


@kernel
def test_what_it_leaves_to_torch():
    x = torch.ones(4, 8, 16, device=DEVICE)
    for part, dim in (
        (x.transpose(0, 1), 0), (x._neg_view(), 0),
        (x.double(), 0), (x.int(), 0), (x[:, :, :3].contiguous(), 1), (x[:0], 0),
        (x.bfloat16(), 2), (x.view(-1)[1:321].view(4, 5, 16), 1), (torch.ones(70_000, 1, 4, device=DEVICE), 1),
    ):  # fmt: skip
        assert among_nan(part, dim, 1, 1) is None
    assert among_nan(x, 1, 1, 1) is not None
