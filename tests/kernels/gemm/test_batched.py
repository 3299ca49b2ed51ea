"""The batched matmul: the bits that each matrix has alone, in one launch. On a GPU, else in Triton's interpreter."""

import itertools

import pytest
import torch
from gpus import gpu

from tp_invariant.kernels.gemm import reference
from tp_invariant.kernels.gemm.batched import batched_matmul
from tp_invariant.kernels.gemm.matmul import matmul
from tp_invariant.kernels.gemm.matmul_configs import MatmulConfig
from tp_invariant.testing import assert_bitwise_equal, wide_randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CONFIGS = (
    MatmulConfig(16, 16, 16, num_warps=2, num_stages=1, group_m=1),
    MatmulConfig(64, 16, 32, num_warps=2, num_stages=3, group_m=2),
    MatmulConfig(32, 32, 128, num_warps=8, num_stages=2, group_m=3),
)
FORMS = [(batched_matmul, matmul)] + [(reference.batched_matmul, reference.matmul)] * (DEVICE == "cpu")
both_forms = pytest.mark.parametrize("batched, alone", FORMS, ids=("triton", "cpu")[: len(FORMS)])


def rand(*shape, dtype, seed=0, spread=4):
    return wide_randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), spread=spread).to(DEVICE, dtype)


def layouts(a, b):
    """[B, M, K] and [B, K, N] in the memory layouts that models make."""
    yield a, b
    yield a, b.mT.contiguous().mT
    yield a.transpose(0, 1).contiguous().transpose(0, 1), b
    yield a[:1].expand(a.shape), b.flip(0)
    yield a[:, :, 1:], b[:, 1:]


@both_forms
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_matrix_has_the_bits_that_it_has_alone(batched, alone, dtype):
    shapes = ((3, 65, 40, 300), (5, 1, 17, 64), (2, 33, 1, 5)) if DEVICE == "cpu" else (
        (24, 512, 512, 128), (24, 512, 128, 511), (3, 65, 40, 3000), (70, 1, 333, 64), (70_000, 1, 3, 16)
    )  # fmt: skip
    for batch, m, n, k in shapes:
        a, b = rand(batch, m, k, dtype=dtype), rand(batch, k, n, dtype=dtype, seed=1)
        for (x, y), out_dtype in itertools.product(layouts(a, b), (None, torch.float32)):
            got = batched(x, y, out_dtype=out_dtype)
            assert got.is_contiguous() and got.dtype == (out_dtype or dtype)
            for i in range(0, batch, max(1, batch // 5)):
                assert_bitwise_equal(got[i], alone(x[i], y[i], out_dtype=out_dtype))


@both_forms
def test_against_float64(batched, alone):
    a, b = (rand(*shape, dtype=torch.float32, seed=shape[1], spread=0) for shape in ((4, 60, 700), (4, 700, 30)))
    exact = a.double() @ b.double()
    assert ((batched(a, b).double() - exact).norm() / exact.norm()).item() < 700**0.5 * 2.0**-24


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_tile_and_odd_shapes(config):
    """Small integers, whose sums are exact in every order: the interpreter's order follows the tile."""
    for m, n, k in ((1, 1, 1), (1, 65, 17), (17, 1, 40), (33, 70, 64), (70, 130, 15)):
        a, b = ((rand(3, *shape, dtype=torch.float32, spread=0) * 4).round() for shape in ((m, k), (k, n)))
        assert_bitwise_equal(batched_matmul(a, b, config=config), (a.double() @ b.double()).float() + 0.0)


@gpu
def test_torchs_own_depends_on_the_batch():
    """The control: torch.bmm of one matrix has other bits than of many."""
    a, b = (rand(64, 64, 4096, dtype=torch.bfloat16), rand(64, 4096, 64, dtype=torch.bfloat16, seed=1))
    assert not torch.equal(torch.bmm(a, b)[:1], torch.bmm(a[:1], b[:1]))
    assert torch.equal(batched_matmul(a, b)[:1], batched_matmul(a[:1], b[:1]))


@both_forms
@pytest.mark.parametrize(
    "a, b, error, text",
    [
        ((2, 3, 4), (2, 5, 6), ValueError, r"b has shape \(2, 5, 6\); allowed: .* of a, whose shape is \(2, 3, 4\)"),
        ((2, 3, 4), (3, 4, 6), ValueError, r"b has shape \(3, 4, 6\)"),
        ((3, 4), (2, 4, 6), ValueError, r"a has shape \(3, 4\); allowed: \[B, M, K\]"),
        ((2, 3, 0), (2, 0, 6), ValueError, r"a has shape \(2, 3, 0\).*at least 1"),
    ],
)
def test_what_is_refused(batched, alone, a, b, error, text):
    with pytest.raises(error, match=text):
        batched(torch.ones(a, device=DEVICE), torch.ones(b, device=DEVICE))
