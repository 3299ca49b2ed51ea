"""Products whose operands or output TMA cannot address: through copies they have the generic kernel's bytes."""

from __future__ import annotations

import itertools

import pytest
import torch
from matmul_cases import HOPPER, on_hopper, operands

from tp_invariant.testing import assert_bitwise_equal, wide_randn

LAYOUTS = list(itertools.product((False, True), repeat=2))


@pytest.fixture
def interpreted(monkeypatch):
    """The TMA kernel takes what has aligned rows, in the interpreter, whose products of small integers are exact."""
    from tp_invariant.kernels.gemm import aligned_copies, matmul_tma

    if HOPPER:
        pytest.skip("the interpreter runs on machines without a GPU")
    monkeypatch.setattr(matmul_tma, "multiprocessors_of", lambda index: 3)
    monkeypatch.setattr(matmul_tma, "supports_tma", lambda a, n, out_dtype: n * out_dtype.itemsize % 16 == 0)
    return aligned_copies


def integers(rows, cols, transposed=False, **place):
    x = torch.randint(-8, 9, (cols, rows) if transposed else (rows, cols)).to(**place)
    return x.t() if transposed else x


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("m, n, k", [(5, 7, 3), (33, 21, 19), (1, 40, 33), (40, 1, 16), (300, 9, 8)])
def test_sums_in_the_interpreter(interpreted, monkeypatch, m, n, k, layout):
    """Of all rows at once, and of 256 and the rest; into a new tensor, a part of another, and added to it."""
    for at_once in (1 << 30, 1):
        monkeypatch.setattr(interpreted, "_BYTES_AT_ONCE", at_once)
        a, b = integers(m, k, layout[0], dtype=torch.float32), integers(k, n, layout[1], dtype=torch.float32)
        bias = torch.arange(n).float()
        got = interpreted.copied_matmul(a, b, bias, torch.float32, always=True)
        assert got.is_contiguous()
        assert_bitwise_equal(got, a @ b + bias)
        around = integers(m, n + 3, dtype=torch.float32)
        for accumulate in (False, True):
            out, before = around[:, 1 : n + 1], around.clone()
            given = interpreted.copied_matmul(a, b, None, torch.float32, out, accumulate, always=True)
            assert given is out
            assert_bitwise_equal(out.clone(), a @ b + accumulate * before[:, 1 : n + 1])
            assert_bitwise_equal(around[:, :1].clone(), before[:, :1].clone())
            assert_bitwise_equal(around[:, n + 1 :].clone(), before[:, n + 1 :].clone())


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_rows_are_copied_by_units_that_divide_them(interpreted, dtype):
    """Whatever the distance between rows, their length and their first byte are, and nothing beside them is written."""
    for cols, start, extra in itertools.product((1, 2, 3, 4, 8, 300), (0, 1, 2, 4), (0, 1, 3, 4)):
        around = torch.randn(9, start + cols + extra).to(dtype)
        x = around[:, start : start + cols]
        if cols == 3:
            x = torch.randn(cols, 9).to(dtype).t()  # no contiguous rows
        target = torch.randn(9, extra + cols + 5).to(dtype)
        for to in (target[:, extra : extra + cols], interpreted._with_room(x)):
            wanted = target.clone()
            wanted[:, extra : extra + cols] = x
            assert interpreted._copy_rows(x, to) is to
            assert_bitwise_equal(to.clone(), x.clone(), f"{cols} columns from {start}, {extra}")
        assert_bitwise_equal(target, wanted)


def test_rows_in_memory_that_begins_anywhere(interpreted):
    """That of another library, whose tensor begins where elements begin, and views of it."""
    memory = bytearray(torch.randn(100).bfloat16().view(torch.uint8).numpy())
    for begin, first in itertools.product(range(0, 8, 2), range(4)):
        x = torch.frombuffer(memory, dtype=torch.bfloat16, offset=begin)[first : first + 80].view(8, 10)
        assert_bitwise_equal(interpreted._copy(x).clone(), x.clone(), f"{begin}, {first}")


def test_no_memory_for_a_copy(interpreted, monkeypatch):
    """What TMA can address is read as it is, and B that it cannot is left to the generic kernel."""

    def full(x):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(interpreted, "_copy", full)
    for k, addressable in ((8, True), (9, False)):
        a, b = integers(5, k, dtype=torch.float32), integers(k, 16, dtype=torch.float32)
        for copies in ((True, False, False), (False, True, False)):
            monkeypatch.setattr(interpreted, "_which", lambda *args, copies=copies: copies)
            if copies[1]:
                assert interpreted.copied_matmul(a, b, None, torch.float32) is None
            elif addressable:
                assert_bitwise_equal(interpreted.copied_matmul(a, b, None, torch.float32), a @ b)
            else:
                with pytest.raises(torch.OutOfMemoryError, match="full"):
                    interpreted.copied_matmul(a, b, None, torch.float32)


@on_hopper
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bytes_are_those_of_the_generic_kernel(layout, dtype, monkeypatch):
    """Also where rows are copied 256 at a time, and through `matmul`, which decides by itself."""
    from tp_invariant.kernels.gemm import aligned_copies
    from tp_invariant.kernels.gemm.matmul import matmul
    from tp_invariant.kernels.gemm.matmul_configs import MatmulConfig

    generic = MatmulConfig(64, 64, 64, 4, 3)
    for m, n, k in ((1, 33, 35), (300, 257, 1031), (517, 1000, 4097), (1024, 50257, 768), (640, 513, 2048)):
        a, b = operands((m, n, k), layout, dtype)
        bias = wide_randn(n, generator=torch.Generator().manual_seed(0), spread=2).cuda()
        for out_dtype, every in itertools.product((dtype, torch.float32), (None, 512)):
            wanted = matmul(a, b, bias=bias, out_dtype=out_dtype, promote_every=every, config=generic)
            assert_bitwise_equal(matmul(a, b, bias=bias, out_dtype=out_dtype, promote_every=every), wanted)
            for at_once in (1 << 28, 1):
                monkeypatch.setattr(aligned_copies, "_BYTES_AT_ONCE", at_once)
                got = aligned_copies.copied_matmul(a, b, bias, out_dtype, promote_every=every, always=True)
                assert_bitwise_equal(got, wanted, f"{m, n, k}, {at_once} at once")
        sums = [torch.ones(m, n, device="cuda") for _ in range(2)]
        matmul(a, b, out=sums[0], accumulate=True, config=generic)
        aligned_copies.copied_matmul(a, b, None, torch.float32, sums[1], True, always=True)
        assert_bitwise_equal(*sums)
        exact = a.double() @ b.double()
        errors = [float((c.double() - exact).norm() / exact.norm()) for c in (matmul(a, b), a @ b)]
        assert errors[0] <= 1.1 * errors[1] + 1e-6
