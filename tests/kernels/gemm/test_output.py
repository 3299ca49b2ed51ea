"""out, accumulate and promote_every of the matmuls: the bytes of the same operations done separately by torch."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from tp_invariant.core.identity import identify
from tp_invariant.gemm.gemm_fn import RankMajor, bundled, check_dtype, gemm, gemm_into, gemm_rank_major
from tp_invariant.kernels.gemm import matmul as triton_module
from tp_invariant.kernels.gemm import matmul_tma, reference, tensor_core
from tp_invariant.kernels.gemm.matmul_configs import MatmulConfig, Product, fits_tma, promoted_block_k, tma_configs
from tp_invariant.testing import assert_bitwise_equal, assert_slice_invariant, wide_randn

GPU = torch.cuda.is_available()
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def device_of(matmul):
    return "cuda" if GPU and matmul is triton_module.matmul else "cpu"


KERNELS = pytest.mark.parametrize("matmul", [reference.matmul, triton_module.matmul], ids=["reference", "triton"])


def operands(m, n, k, dtype, device="cpu"):
    g = torch.Generator().manual_seed(m + n + k)
    spread = 2 if dtype == torch.float16 else 6
    shapes = ((m, k), (k, n), (n,))
    return [wide_randn(*shape, generator=g, spread=spread).to(device, dtype) for shape in shapes]


def buffers(m, n, dtype, device) -> dict[str, tuple[Tensor, Tensor]]:
    """Tensors for c, and the whole memory around each, which is filled with numbers."""
    g = torch.Generator().manual_seed(5)
    flat, padded, offset = (
        wide_randn(size, generator=g, spread=6).to(device, dtype) for size in (m * n, 3 * m * n, 999)
    )
    return {
        "contiguous": (flat.view(m, n), flat),
        "rows apart": (padded.view(m, 3 * n)[:, n : 2 * n], padded),
        "unaligned": (torch.cat([offset, flat])[999:].view(m, n), offset),
    }


# --- out and accumulate ---------------------------------------------------------------------------------------------


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (40, 70, 100)])
def test_the_bytes_of_add(matmul, dtype, m, n, k):
    a, b, bias = operands(m, n, k, dtype, device_of(matmul))
    for with_bias in (None, bias):
        c = matmul(a, b, bias=with_bias, out_dtype=torch.float32)
        for name, (out, _) in buffers(m, n, torch.float32, a.device).items():
            expected = out.clone().add_(c)
            version = out._version
            got = matmul(a, b, bias=with_bias, out=out, accumulate=True)
            assert got is out
            assert_bitwise_equal(out, expected, name)
            assert out._version > version, "autograd must see the change"
            # and a second time on top: the order of additions is that of the calls
            matmul(a, b, bias=with_bias, out=out, accumulate=True)
            assert_bitwise_equal(out, expected.add_(c), name)
    if k > 1:
        lossy = torch.ones_like(c).add_(matmul(a, b, bias=bias, out_dtype=torch.bfloat16).float())
        with pytest.raises(AssertionError, match="elements differ"):  # rounding to 16 bits before the sum shows
            assert_bitwise_equal(lossy, torch.ones_like(c).add_(c))


@KERNELS
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_only_out_is_written(matmul, out_dtype):
    a, b, bias = operands(40, 24, 300, torch.bfloat16, device_of(matmul))
    expected = matmul(a, b, bias=bias, out_dtype=out_dtype)
    for name, (out, memory) in buffers(40, 24, out_dtype, a.device).items():
        before = memory.clone()
        assert matmul(a, b, bias=bias, out=out) is out
        assert_bitwise_equal(out.clone(), expected, name)
        if name == "rows apart":
            kept = torch.ones(40, 3, dtype=torch.bool, device=a.device)
            kept[:, 1] = False
            kept = kept.repeat_interleave(24, 1).flatten()
            assert_bitwise_equal(memory[kept], before[kept], "what stands between the rows")


@KERNELS
def test_negative_zeros_and_subnormals(matmul):
    """-0.0 + 0.0 is 0.0, and no subnormal is flushed."""
    device = device_of(matmul)
    a, b = torch.zeros(2, 16, device=device), torch.zeros(16, 2, device=device)
    a[1, 0], b[0, 1] = 2.0**-70, 2.0**-70  # 2^-140
    out = torch.tensor([[-0.0, 1.0], [2.0**-141, -(2.0**-140)]], device=device)
    matmul(a, b, out=out, accumulate=True)
    assert_bitwise_equal(out, torch.tensor([[0.0, 1.0], [2.0**-141, 0.0]], device=device))


@KERNELS
def test_inference_tensors(matmul):
    a, b, _ = operands(4, 5, 6, torch.float32, device_of(matmul))
    with torch.inference_mode():
        out = torch.ones(4, 5, device=a.device)
        matmul(a, b, out=out, accumulate=True)
    assert_bitwise_equal(out, torch.ones_like(out) + matmul(a, b))


A, B = torch.ones(4, 8), torch.ones(8, 3)
WRONG = [
    (TypeError, "matmul: out is a list; allowed: a torch.Tensor", dict(out=[1])),
    (
        TypeError,
        "matmul: out has dtype torch.float32; allowed: out_dtype, which is torch.bfloat16",
        dict(out=torch.zeros(4, 3), out_dtype=torch.bfloat16),
    ),
    (
        TypeError,
        "matmul: out has dtype torch.bfloat16; allowed with accumulate=True: torch.float32",
        dict(out=torch.zeros(4, 3).bfloat16(), accumulate=True),
    ),
    (ValueError, "matmul: accumulate=True needs out=, the tensor to add to", dict(accumulate=True)),
    (ValueError, "matmul: out has shape (3, 4); allowed: [M, N], here (4, 3)", dict(out=torch.zeros(3, 4))),
    (ValueError, "matmul: out is on meta; allowed: the device of a, cpu", dict(out=torch.zeros(4, 3, device="meta"))),
    (
        ValueError,
        "matmul: out has strides (0, 1); allowed: contiguous rows that do not overlap",
        dict(out=torch.zeros(1, 3).expand(4, 3)),
    ),
    (ValueError, "matmul: out shares memory with b; allowed: memory of its own", dict(out=B[4:])),
    (TypeError, "promote_every=512.0 must be an int, a multiple of 128, or None", dict(promote_every=512.0)),
    (ValueError, "promote_every=64 is not a multiple of 128: pass for example 512, or None", dict(promote_every=64)),
]


@KERNELS
@pytest.mark.parametrize(("kind", "text", "options"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_refused(matmul, kind, text, options):
    a_before, b_before = A.clone(), B.clone()
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        matmul(A, B, **options)
    assert_bitwise_equal((A, B), (a_before, b_before))


@KERNELS
def test_an_out_that_requires_grad_is_refused(matmul):
    """Autograd would give it the gradient of its former contents."""
    device = device_of(matmul)
    a, b, leaf = A.to(device), B.to(device), torch.zeros(4, 3, device=device, requires_grad=True)
    for out in (leaf, leaf * 2):
        with pytest.raises(ValueError, match=r"^matmul: out requires grad, .*: pass out.detach\(\)$"):
            matmul(a, b, out=out)
        assert not out.detach().any()
    with torch.no_grad():
        matmul(a, b, out=leaf)
    assert_bitwise_equal(leaf.detach(), matmul(a, b))


@KERNELS
def test_a_bias_within_out_is_refused(matmul):
    """A tile would read it after another tile had overwritten it."""
    device = device_of(matmul)
    a, b, out = A.to(device), B.to(device), torch.zeros(4, 3, device=device)
    for bias in (out[0], out[3], out.view(-1)[5:8]):
        with pytest.raises(ValueError, match=r"^matmul: out shares memory with bias; allowed: memory of its own$"):
            matmul(a, b, bias=bias, out=out)
    memory = torch.zeros(5, 3, device=device)
    matmul(a, b, bias=memory[4].fill_(2), out=memory[:4])  # beside it: nothing is shared
    assert_bitwise_equal(memory[:4], torch.full((4, 3), 10.0, device=device))


# --- promotion ------------------------------------------------------------------------------------------------------


def stretch_by_stretch(matmul, a, b, every, **options):
    """The product of each part of K, added in fp32 one after another."""
    total = torch.zeros(a.shape[0], b.shape[1], device=a.device)
    for a_part, b_part in zip(a.split(every, 1), b.split(every, 0), strict=True):
        total = total + matmul(a_part, b_part, out_dtype=torch.float32, **options)
    return total


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", (128, 1100))
def test_promotion_is_the_sum_of_parts_of_k(matmul, dtype, k):
    a, b, bias = operands(20, 33, k, dtype, device_of(matmul))
    plain = matmul(a, b, out_dtype=torch.float32)
    for every in (384, 2048):
        got = matmul(a, b, out_dtype=torch.float32, promote_every=every)
        assert_bitwise_equal(got, stretch_by_stretch(matmul, a, b, every), f"every {every}")
        assert_bitwise_equal(matmul(a, b, bias=bias, promote_every=every), (got + bias.float()).to(dtype))
        out = torch.ones_like(got)
        matmul(a, b, out=out, accumulate=True, promote_every=every)
        assert_bitwise_equal(out, torch.ones_like(got) + got)
        if k <= every:
            assert_bitwise_equal(got, plain)
        elif k > 2 * every:
            with pytest.raises(AssertionError, match="elements differ"):
                assert_bitwise_equal(got, plain)


@pytest.mark.parametrize("config", [(16, 16, 16, 2, 1), (32, 32, 128, 4, 2), (16, 32, 256, 4, 2)], ids=str)
def test_promotion_of_every_step_of_the_generic_kernel(config):
    config = MatmulConfig(*config)
    a, b, _ = operands(20, 33, 700, torch.float32, device_of(triton_module.matmul))
    # in the interpreter block_k is a part of the bits: a stretch of 128 is walked in steps of at most 128
    alike = MatmulConfig(config.block_m, config.block_n, promoted_block_k(config.block_k, 128), 4, 2)
    for every in (128, 384):
        got = triton_module.matmul(a, b, promote_every=every, config=config)
        assert_bitwise_equal(got, stretch_by_stretch(triton_module.matmul, a, b, every, config=alike))


@pytest.mark.parametrize("every", (128, 512))
def test_the_tensor_core_model_promotes(every):
    a, b, _ = operands(5, 6, 1100, torch.bfloat16)
    got = tensor_core.matmul(a, b, out_dtype=torch.float32, promote_every=every)
    assert_bitwise_equal(got, stretch_by_stretch(tensor_core.matmul, a, b, every))
    plain = tensor_core.matmul(a, b, out_dtype=torch.float32)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(got, plain)
    exact = a.double() @ b.double()
    assert (got - exact).norm() < (plain - exact).norm()


def test_promotion_is_slice_invariant():
    promoted = bundled(promote_every=256)
    assert_slice_invariant(promoted, shapes=((33, 20, 300),), device="cpu")


# --- the kernel for TMA, in the interpreter -------------------------------------------------------------------------


@pytest.mark.skipif(GPU, reason="the interpreter runs on machines without a GPU; test_gpu_main_grad.py has the GPU's")
@pytest.mark.parametrize("config", [(16, 32, 64, 4, 2), (32, 48, 256, 4, 2, 8, True)], ids=str)
@pytest.mark.parametrize("ranks", (1, 2))
def test_the_tma_kernel(config, ranks, monkeypatch):
    """fp32 replaces 16 bits, and every step of the loop is one BLAS call, so the steps are equal on both sides."""
    monkeypatch.setattr(matmul_tma, "multiprocessors_of", lambda index: 3)
    monkeypatch.setattr(matmul_tma, "supports_tma", lambda a, c_stride, out_dtype: c_stride % 4 == 0)
    m, n, k = 24, 56, 640
    a, b, bias = operands(m, n, k, torch.float32)
    config = MatmulConfig(*config)
    operands_of = lambda x, y, out=None: matmul_tma.tma_operands(x, y, torch.float32, out)  # noqa: E731
    x = operands_of(a, b)
    if ranks == 2:
        a_shards = torch.stack(a.chunk(2, 1)).contiguous()
        b_shards = b.view(2, k // 2, n).contiguous()
        x = matmul_tma.rank_major_operands(a_shards, b_shards, b_k_dim=0, stride=1, out_dtype=torch.float32)
    for every in (None, 384):
        # rank-major steps stay within a piece of 320, promoted ones within a stretch
        block_k = promoted_block_k(config.block_k, every)
        while ranks == 2 and 320 % block_k:
            block_k //= 2
        alike = MatmulConfig(config.block_m, config.block_n, block_k, 4, 2, 8, config.halves)
        total = torch.zeros(m, n)
        for a_part, b_part in zip(a.split(every or k, 1), b.split(every or k, 0), strict=True):
            part = matmul_tma.tma_matmul(operands_of(a_part.contiguous(), b_part), None, torch.float32, alike)
            total = total + part
        exact = a.double() @ b.double()
        assert (total - exact).norm() < 1e-6 * exact.norm()
        for name, (out, _) in buffers(m, n, torch.float32, "cpu").items():
            if name == "unaligned":
                assert operands_of(a, b, out) is None
                continue
            expected = out + (total + bias)
            options = dict(out=out, accumulate=True, promote_every=every)
            assert matmul_tma.tma_matmul(x, bias, torch.float32, config, **options) is out
            assert_bitwise_equal(out.clone(), expected, f"{name}, every {every}")
            matmul_tma.tma_matmul(x, None, torch.float32, config, out=out, promote_every=every)
            assert_bitwise_equal(out.clone(), total, f"{name}, every {every}")


@pytest.mark.parametrize("promoted", (False, True))
def test_a_tile_shape_for_everything(promoted):
    for layout in ((False, True), (False, False), (True, False), (True, True)):
        for m, n, k in (
            (1, 4096, 4096),
            (128, 6144, 4096),
            (4096, 12288, 8192),
            (100, 104, 32768),
            (24576, 1024, 2048),
        ):
            product = Product(m, n, k, *layout, False, k % 16 > 0, 4, 132)
            configs = tma_configs(product, promoted)
            assert len(configs) >= 4
            assert all(fits_tma(config, 4, promoted) for _, config in configs)


# --- through gemm/gemm_fn.py ------------------------------------------------------------------------------------------


def injected(a, b, *, bias=None, out_dtype=None):
    return reference.chained_matmul(a, b, bias=bias, out_dtype=out_dtype)


@pytest.fixture
def fused(monkeypatch):
    """How often a bundled kernel was given out=."""
    calls = []
    original = reference.matmul

    def spy(a, b, **options):
        calls.append(options.get("out") is not None)
        return original(a, b, **options)

    monkeypatch.setattr(reference, "matmul", spy)
    return calls


@pytest.mark.parametrize("gemm_fn", [None, bundled(promote_every=256), injected], ids=["bundled", "promoted", "own"])
def test_gemm_into(gemm_fn, fused):
    a, b, _ = operands(33, 20, 700, torch.bfloat16)
    c = gemm(gemm_fn, a, b, out_dtype=torch.float32)
    for accumulate in (False, True):
        out = torch.full((33, 20), 3.0)
        gemm_into(gemm_fn, a, b, out, accumulate=accumulate)
        assert_bitwise_equal(out, 3.0 + c if accumulate else c)
    assert sum(fused) == (0 if gemm_fn is injected else 2)
    assert (gemm_fn is None or gemm_fn is injected) == torch.equal(c, reference.chained_matmul(a, b, out_dtype=c.dtype))


def refuse(a, b, *, bias=None, out_dtype=None):
    raise AssertionError("no gemm_fn was to be called")


def test_gemm_into_of_nothing():
    for m, n, k in ((4, 3, 0), (0, 3, 5), (4, 0, 5), (0, 0, 0)):
        for accumulate in (False, True):
            out = torch.full((m, n), -0.0)
            gemm_into(refuse, torch.ones(m, k), torch.ones(k, n), out, accumulate=accumulate)
            assert_bitwise_equal(out, torch.full((m, n), -0.0 if accumulate else 0.0))


def test_promotion_is_for_fp32_output_alone():
    a, b, bias = operands(9, 10, 1000, torch.bfloat16)
    promoted = bundled(promote_every=256)
    assert_bitwise_equal(gemm(promoted, a, b, bias=bias), gemm(None, a, b, bias=bias))
    got = gemm(promoted, a, b, out_dtype=torch.float32)
    assert_bitwise_equal(got, stretch_by_stretch(reference.matmul, a, b, 256))
    assert not torch.equal(got, gemm(None, a, b, out_dtype=torch.float32))
    a_major = torch.stack(a.chunk(2, 1)).contiguous()
    b_major = b.view(2, 500, 10).contiguous()
    major = gemm_rank_major(promoted, RankMajor(a_major, 1), RankMajor(b_major, 0), out_dtype=torch.float32)
    assert_bitwise_equal(major, got)


def test_bundled_checks_its_arguments_and_names_itself():
    with pytest.raises(ValueError, match="promote_every=100 is not a multiple of 128"):
        bundled(promote_every=100)
    assert identify(bundled(promote_every=512)) == identify(bundled(promote_every=512))
    assert identify(bundled(promote_every=512)) != identify(bundled(promote_every=256))
    with pytest.raises(TypeError, match=r"x is torch\.float64: the bundled kernels take"):
        check_dtype(bundled(promote_every=512), torch.zeros(1, dtype=torch.float64), "x")
