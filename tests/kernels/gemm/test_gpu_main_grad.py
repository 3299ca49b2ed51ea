"""On a GPU: accumulation and promotion in the epilogue, by both kernels and every tile shape, and their accuracy."""

from __future__ import annotations

import pytest
import torch
from matmul_cases import every_config, on_hopper, operands, shards

import tp_invariant as tpi
from tp_invariant.gemm import bundled, gemm
from tp_invariant.testing import assert_bitwise_equal

GENERIC = [(64, 64, 64, 4, 3), (128, 128, 64, 8, 4), (16, 32, 128, 4, 4), (128, 64, 32, 4, 3)]
SHAPES = [(8, 8, 8), (136, 264, 1032), (512, 768, 4096), (304, 520, 12288)]


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


@on_hopper
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("layout", [(True, False), (False, True)], ids=["wgrad", "fwd"])
@pytest.mark.parametrize("promote_every", [None, 128, 512])
def test_bytes_of_every_configuration(promote_every, layout, dtype):
    """Both kernels add in their epilogues what torch adds to the generic kernel's product of each part of K."""
    from tp_invariant.kernels.gemm.matmul import matmul
    from tp_invariant.kernels.gemm.matmul_configs import MatmulConfig, fits_tma
    from tp_invariant.kernels.gemm.matmul_tma import tma_matmul, tma_operands

    plain = MatmulConfig(*GENERIC[0])
    for shape in SHAPES:
        a, b = operands(shape, layout, dtype)
        every = promote_every or shape[2]
        product = torch.zeros(shape[0], shape[1], device="cuda")
        for a_part, b_part in zip(a.split(every, 1), b.split(every, 0), strict=True):
            product = product + matmul(a_part, b_part, out_dtype=torch.float32, config=plain)
        before = operands((shape[0], shape[1], shape[1]), (False, False), torch.bfloat16)[0].float()
        memory = torch.full((shape[0], 2 * shape[1]), torch.nan, device="cuda")

        def check(name, run, before=before, memory=memory, product=product):
            places = {"contiguous": before.clone(), "rows apart": memory[:, : before.shape[1]]}
            for place, out in places.items():
                out.copy_(before)
                run(out, True)
                assert_bitwise_equal(out.clone(), before.clone().add_(product), f"{name}, {place}")
                run(out, False)
                assert_bitwise_equal(out.clone(), product, f"{name}, {place}")
            assert memory[:, before.shape[1] :].isnan().all()

        for fields in (None, *GENERIC):
            config = None if fields is None else MatmulConfig(*fields)
            check(
                f"{shape} generic {config}",
                lambda out, accumulate, a=a, b=b, config=config: matmul(
                    a, b, out=out, accumulate=accumulate, promote_every=promote_every, config=config
                ),
            )
        tried = 0
        for config in every_config():
            if not fits_tma(config, 4):  # those that spill registers are right, too
                continue
            tried += 1

            def by_tma(out, accumulate, a=a, b=b, config=config):
                x = tma_operands(a, b, torch.float32, out)
                assert x is not None
                options = dict(out=out, accumulate=accumulate, promote_every=promote_every)
                tma_matmul(x, None, torch.float32, config, **options)

            check(f"{shape} TMA {config}", by_tma)
        assert tried > 10
    with pytest.raises(AssertionError, match="elements differ"):  # K in another order shows in the last shape
        order = torch.randperm(shape[2], device="cuda")
        assert_bitwise_equal(
            matmul(a[:, order], b[order], out_dtype=torch.float32, promote_every=promote_every), product
        )


@on_hopper
def test_rank_major_buffers_are_promoted_alike():
    from tp_invariant.kernels.gemm.matmul import matmul, matmul_rank_major

    a, b = operands((300, 520, 4096), (False, True), torch.bfloat16)
    expected = matmul(a, b, out_dtype=torch.float32, promote_every=512)
    assert not torch.equal(expected, matmul(a, b, out_dtype=torch.float32))
    for ranks, stride in ((4, 2), (8, 1), (2, 1)):
        b_shards = shards(b.t(), ranks, stride)
        for b_k_dim, buffer in ((1, b_shards), (0, b_shards.transpose(1, 2).contiguous())):
            options = dict(b_k_dim=b_k_dim, stride=stride, out_dtype=torch.float32, promote_every=512)
            got = matmul_rank_major(shards(a, ranks, stride), buffer, **options)
            assert_bitwise_equal(got, expected, f"{ranks} ranks, stride {stride}, b_k_dim {b_k_dim}")


@on_hopper
def test_the_model_of_the_tensor_core_predicts_promotion():
    from tp_invariant.kernels.gemm import tensor_core
    from tp_invariant.kernels.gemm.matmul import matmul

    a, b = operands((64, 72, 1160), (True, False), torch.bfloat16)
    for promote_every in (None, 128, 512):
        got = matmul(a, b, out_dtype=torch.float32, promote_every=promote_every)
        predicted = tensor_core.matmul(a.cpu(), b.cpu(), out_dtype=torch.float32, promote_every=promote_every)
        assert_bitwise_equal(got.cpu(), predicted, f"{promote_every}")


@on_hopper
@pytest.mark.parametrize("k", [4096, 12288, 32768])
def test_promoted_error_is_no_worse_than_cublas(k):
    from tp_invariant.kernels.gemm.matmul import matmul

    generator = torch.Generator("cuda").manual_seed(k)
    shapes = ((k, 1024), (k, 1024))
    dy, x = (torch.randn(s, device="cuda", generator=generator).bfloat16() for s in shapes)
    a, b = dy.t(), x
    exact = a.double() @ b.double()

    def error(c):
        return float((c.double() - exact).norm() / exact.norm())

    cublas = error(torch.mm(a, b, out_dtype=torch.float32))
    errors = {every: error(matmul(a, b, out_dtype=torch.float32, promote_every=every)) for every in (None, 2048, 512)}
    print(f"K {k}: cuBLAS {cublas:.3g}, " + ", ".join(f"every {e}: {errors[e]:.3g}" for e in errors))
    assert errors[512] <= 1.1 * cublas
    assert errors[512] < errors[2048] < errors[None]


@on_gpu
@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("promote_every", [None, 512])
def test_a_layers_main_grad(promote_every, mode):
    """On one rank: the sum of each micro-batch's dw, for a bf16 layer and for an fp32 layer under autocast."""
    gemm_fn = bundled(promote_every=promote_every)
    for autocast in (False, True):
        torch.manual_seed(0)
        dtype = torch.float32 if autocast else torch.bfloat16
        layer = tpi.Linear(256, 384, fuse_wgrad_accumulation=True, gemm_fn=gemm_fn, device="cuda", dtype=dtype)
        layer.weight.main_grad = torch.zeros(384, 256, device="cuda")
        expected = torch.zeros(384, 256, device="cuda")
        with tpi.set_tp_invariant_mode(mode):
            for _ in range(3):
                x = torch.randn(2048, 256, device="cuda", dtype=dtype)
                with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
                    y = layer(x)
                dy = torch.randn_like(y)
                y.backward(dy)
                expected += gemm(gemm_fn, dy.t(), x.bfloat16(), out_dtype=torch.float32)
        assert layer.weight.grad is None
        if mode:
            assert_bitwise_equal(layer.weight.main_grad, expected)
        else:  # cuBLAS's own order, but fp32 and not bf16
            assert (layer.weight.main_grad - expected).norm() < 1e-4 * expected.norm()
