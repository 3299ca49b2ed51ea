"""The gradient of an embedding's table in Triton: the reference's bits.

Compiled on a GPU, else in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from gpus import gpu

from tp_invariant.kernels.vocabulary import embedding
from tp_invariant.kernels.vocabulary.reference_embedding import OCCURRENCES_PER_SUM
from tp_invariant.kernels.vocabulary.reference_embedding import embedding_grad as reference_grad
from tp_invariant.testing import assert_bitwise_equal, wide_randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def grad(dy, ids, rows, dtype):
    return embedding.embedding_grad(dy.to(DEVICE), ids.to(DEVICE), rows, dtype).cpu()


def ids_of(counts: dict[int, int], generator: torch.Generator) -> torch.Tensor:
    """Ids with the given number of occurrences each, in random order."""
    ids = torch.cat([torch.full((count,), which) for which, count in counts.items()])
    return ids[torch.randperm(len(ids), generator=generator)]


def test_both_have_the_same_partial_sums():
    assert embedding.OCCURRENCES_PER_SUM == OCCURRENCES_PER_SUM == 32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("counts", "features"),
    [
        ({0: 1}, 1),
        ({1: 32, 3: 33, 4: 2}, 5),
        ({2: 65, 0: 31, 9: 40, 100: 3}, 17),  # 9 and 100 have no row
        ({9: 70}, 4),
        ({0: 33, 1: 33, 2: 33}, 3),  # as many leaves as there can be
    ],
)
def test_the_references_bits(counts, features, dtype):
    generator = torch.Generator().manual_seed(0)
    ids = ids_of(counts, generator)
    dy = wide_randn(len(ids), features, generator=generator, spread=2).to(dtype)
    assert_bitwise_equal(grad(dy, ids, 9, dtype), reference_grad(dy, ids, 9, dtype))
    assert_bitwise_equal(grad(dy, ids, 9, torch.float32), reference_grad(dy, ids, 9, torch.float32))


def test_strides_and_tiles_change_no_bit(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    ids = ids_of({0: 40, 1: 3}, generator)
    dy = wide_randn(43, 9, generator=generator)
    want = reference_grad(dy, ids, 2, torch.float32)
    assert_bitwise_equal(grad(dy.t().contiguous().t(), ids, 2, torch.float32), want)
    assert_bitwise_equal(grad(torch.cat([dy, dy], dim=1)[:, :9], ids, 2, torch.float32), want)
    monkeypatch.setattr(embedding, "MAX_BLOCK", 4)
    assert_bitwise_equal(grad(dy, ids, 2, torch.float32), want)


def test_nothing_to_sum():
    assert_bitwise_equal(
        grad(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), 2, torch.float32), torch.zeros(2, 3)
    )


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_on_a_gpu(dtype):
    generator = torch.Generator().manual_seed(0)
    ids = (torch.randn(8192, generator=generator).abs() * 300).long().clamp(max=5000)
    ids[torch.rand(8192, generator=generator) < 0.4] = 77
    dy = wide_randn(8192, 1000, generator=generator, spread=2).to(dtype)
    want = reference_grad(dy, ids, 4999, dtype)
    for _ in range(3):
        assert_bitwise_equal(grad(dy, ids, 4999, dtype), want)
