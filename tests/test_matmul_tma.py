"""The TMA kernel gives the bytes of the generic one, for every configuration and layout, and takes only what it can."""

from __future__ import annotations

import itertools

import pytest
import torch

from tp_invariant.testing import assert_bitwise_equal, wide_randn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
DTYPES = (torch.bfloat16, torch.float16)
CONFIGS = [  # block_m, block_n, block_k, num_warps, num_stages, group_m, halves
    (128, 256, 64, 8, 3, 4, False),
    (128, 256, 64, 8, 4, 8, True),
    (256, 128, 64, 8, 3, 8, False),
    (128, 128, 64, 4, 4, 8, False),
    (64, 64, 128, 4, 6, 8, False),
    (16, 32, 256, 4, 5, 8, False),
    (16, 64, 128, 4, 6, 8, False),
    (64, 128, 16, 4, 4, 1, True),
]
SHAPES = [(8, 8, 8), (1, 64, 136), (136, 264, 1032), (304, 520, 72), (512, 768, 4096), (1000, 512, 12288)]


def operands(shape, layout, dtype):
    """Wide-exponent a [M, K] and b [K, N], each as it stands or transposed in memory."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(m + n + k)
    spread = 2 if dtype == torch.float16 else 8

    def matrix(rows, cols, transposed):
        x = wide_randn(rows, cols, generator=generator, spread=spread).to("cuda", dtype)
        return x.t().contiguous().t() if transposed else x

    return matrix(m, k, layout[0]), matrix(k, n, layout[1])


def fits(config, out_dtype):
    """Whether a Hopper chip's 227 KiB of shared memory hold the operands' stages and the output tile."""
    stages = (config.block_m + config.block_n) * config.block_k * 2 * config.num_stages
    tile = config.block_m * config.block_n * out_dtype.itemsize // (2 if config.halves else 1)
    return stages + tile < 226 * 1024


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", list(itertools.product((False, True), repeat=2)), ids=str)
def test_bytes_of_every_configuration(layout, dtype):
    from tp_invariant.kernels.matmul import matmul
    from tp_invariant.kernels.matmul_configs import MatmulConfig
    from tp_invariant.kernels.matmul_tma import tma_layouts, tma_matmul

    taken = 0
    for shape, out_dtype in itertools.product(SHAPES, (dtype, torch.float32)):
        a, b = operands(shape, layout, dtype)
        bias = wide_randn(shape[1], generator=torch.Generator().manual_seed(0), spread=2).cuda()
        layouts = tma_layouts(a, b, out_dtype)
        if layouts is None:  # a stride of one row that is no multiple of 16 bytes
            continue
        taken += 1
        for with_bias in (None, bias):
            generic = matmul(a, b, bias=with_bias, out_dtype=out_dtype, config=MatmulConfig(64, 64, 64, 4, 3))
            assert_bitwise_equal(matmul(a, b, bias=with_bias, out_dtype=out_dtype), generic, f"{shape}")
            for fields in CONFIGS:
                config = MatmulConfig(*fields)
                if not fits(config, out_dtype):
                    continue
                got = tma_matmul(a, b, with_bias, out_dtype, layouts, config)
                assert_bitwise_equal(got, generic, f"{shape} {config}")
    assert taken >= 8


def test_what_it_takes():
    from tp_invariant.kernels.matmul_tma import tma_layouts

    a, b = (torch.randn(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert tma_layouts(a, b, torch.bfloat16) == (False, False)
    assert tma_layouts(a.t(), b.t(), torch.bfloat16) == (True, True)
    assert tma_layouts(a[:, 1:], b[1:], torch.bfloat16) is None  # base not aligned
    assert tma_layouts(a[:, :60], b[:60], torch.bfloat16) == (False, False)
    assert tma_layouts(a, b[:, :60], torch.bfloat16) is None  # c's rows would not be aligned
    assert tma_layouts(a[:, ::2], b[::2], torch.bfloat16) is None  # no dim of a has stride 1
    assert tma_layouts(a[:1].expand(64, 64), b, torch.bfloat16) is None  # stride 0
    assert tma_layouts(a.float(), b.float(), torch.float32) is None
    odd = torch.randn(64, 63, device="cuda", dtype=torch.bfloat16)
    assert tma_layouts(odd, odd.t(), torch.bfloat16) is None


def test_error_is_no_worse_than_torch():
    from tp_invariant.kernels.matmul import matmul

    for shape in ((512, 768, 4096), (1000, 512, 12288)):
        a, b = operands(shape, (False, True), torch.bfloat16)
        exact = a.double() @ b.double()
        ours, theirs = ((c.double() - exact).norm() / exact.norm() for c in (matmul(a, b), a @ b))
        assert ours <= 1.1 * theirs
