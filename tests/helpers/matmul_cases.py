"""Shared by the tests of the TMA kernel: operands, shards, configurations."""

from __future__ import annotations

import pytest
import torch
from einops import rearrange

from tp_invariant.testing import wide_randn

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def on_hopper(test):
    return pytest.mark.gpu(pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")(test))


CONFIGS = [  # block_m, block_n, block_k, num_warps, num_stages, group_m, halves
    (128, 256, 64, 8, 3, 4, False),
    (128, 256, 64, 8, 4, 8, True),
    (256, 128, 64, 8, 3, 8, False),
    (128, 128, 64, 4, 4, 8, False),
    (64, 64, 128, 4, 6, 8, False),
    (16, 32, 256, 4, 5, 8, False),
    (16, 64, 128, 4, 6, 8, False),
    (64, 128, 16, 4, 4, 1, True),
    (128, 192, 64, 8, 4, 4, True),
    (64, 48, 128, 4, 6, 8, True),
    (128, 96, 64, 4, 4, 8, True),
]


def operands(shape, layout, dtype):
    """Wide-exponent a [M, K] and b [K, N], each transposed in memory or not."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(m + n + k)
    spread = 2 if dtype == torch.float16 else 8

    def matrix(rows, cols, transposed):
        x = wide_randn(rows, cols, generator=generator, spread=spread).to("cuda", dtype)
        return x.t().contiguous().t() if transposed else x

    return matrix(m, k, layout[0]), matrix(k, n, layout[1])


def every_config():
    """The configurations above and all of the table."""
    from tp_invariant.kernels.gemm.matmul_configs import MatmulConfig
    from tp_invariant.kernels.gemm.matmul_table import TIMES

    fields = {*CONFIGS, *(config for times in TIMES.values() for config in times)}
    return [MatmulConfig(*each) for each in sorted(fields)]


def shards(x, ranks, stride):
    """[rows, K] -> [P, rows, K/P], as gathered from ranks whose K is in `stride` pieces."""
    return rearrange(x, "row (stride rank k) -> rank row (stride k)", rank=ranks, stride=stride).contiguous()
