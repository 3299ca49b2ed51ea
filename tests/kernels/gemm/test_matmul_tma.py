"""The TMA kernel gives the bytes of the generic one, for every configuration and layout, and refuses other operands.

Without a GPU its logic runs in Triton's interpreter; bytes are compared on a Hopper GPU.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import re

import pytest
import torch
from matmul_cases import HOPPER, every_config, on_hopper, operands, shards

from tp_invariant.testing import assert_bitwise_equal, wide_randn

DTYPES = (torch.bfloat16, torch.float16)
SHAPES = [(8, 8, 8), (1, 64, 136), (136, 264, 1032), (304, 520, 72), (512, 768, 4096), (1000, 512, 12288)]


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", list(itertools.product((False, True), repeat=2)), ids=str)
def test_bytes_of_every_configuration(layout, dtype):
    from tp_invariant.kernels.gemm.matmul import matmul
    from tp_invariant.kernels.gemm.matmul_configs import MatmulConfig, fits_tma
    from tp_invariant.kernels.gemm.matmul_tma import tma_matmul, tma_operands

    taken = 0
    for shape, out_dtype in itertools.product(SHAPES, (dtype, torch.float32)):
        a, b = operands(shape, layout, dtype)
        bias = wide_randn(shape[1], generator=torch.Generator().manual_seed(0), spread=2).cuda()
        accepted = tma_operands(a, b, out_dtype)
        if accepted is None:  # a stride of one row that is no multiple of 16 bytes
            continue
        taken += 1
        for with_bias in (None, bias):
            generic = matmul(a, b, bias=with_bias, out_dtype=out_dtype, config=MatmulConfig(64, 64, 64, 4, 3))
            assert_bitwise_equal(matmul(a, b, bias=with_bias, out_dtype=out_dtype), generic, f"{shape}")
            for config in every_config():
                if fits_tma(config, out_dtype.itemsize):
                    got = tma_matmul(accepted, with_bias, out_dtype, config)
                    assert_bitwise_equal(got, generic, f"{shape} {config}")
    assert taken >= 8


@on_hopper
def test_a_slice_of_rows_or_columns_has_the_same_bytes():
    from tp_invariant.kernels.gemm.matmul_configs import fits_tma
    from tp_invariant.kernels.gemm.matmul_tma import tma_matmul, tma_operands

    a, b = operands((1000, 1536, 4096), (False, True), torch.bfloat16)
    whole = torch.nan  # set by the first configuration: all of them must give it
    for config in every_config():
        if not fits_tma(config, 2):
            continue
        got = tma_matmul(tma_operands(a, b, a.dtype), None, a.dtype, config)
        whole = got if not isinstance(whole, torch.Tensor) else whole
        assert_bitwise_equal(got, whole, f"{config}")
        for rows, cols in (
            (slice(7, 8), slice(None)),
            (slice(100, 621), slice(8, 1000)),
            (slice(None), slice(1480, 1536)),
        ):
            part = tma_matmul(tma_operands(a[rows], b[:, cols], a.dtype), None, a.dtype, config)
            assert_bitwise_equal(part, whole[rows, cols].contiguous(), f"{config} {rows} {cols}")


RANK_MAJOR = [  # ranks, stride, M, N, K
    (2, 1, 64, 64, 64),
    (4, 1, 136, 264, 4096),
    (4, 2, 300, 520, 4096),
    (8, 1, 1, 64, 1024),
    (3, 1, 200, 136, 48 * 7),
    (4, 3, 64, 72, 16 * 12),
    (4, 2, 128, 6144, 12288),
]


@on_hopper
@pytest.mark.parametrize("case", RANK_MAJOR, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rank_major_buffers_in_place_give_the_bytes_of_the_laid_out_form(case, dtype):
    from tp_invariant.kernels.gemm.matmul import matmul, matmul_rank_major

    ranks, stride, m, n, k = case
    a, b = operands((m, n, k), (False, True), dtype)
    bias = wide_randn(n, generator=torch.Generator().manual_seed(0), spread=2).cuda()
    a_shards, b_shards = shards(a, ranks, stride), shards(b.t(), ranks, stride)
    for out_dtype in (dtype, torch.float32):
        laid_out = matmul(a, b, bias=bias, out_dtype=out_dtype)
        for b_k_dim, buffer in ((1, b_shards), (0, b_shards.transpose(1, 2).contiguous())):
            got = matmul_rank_major(a_shards, buffer, b_k_dim=b_k_dim, stride=stride, bias=bias, out_dtype=out_dtype)
            assert got is not None
            assert_bitwise_equal(got, laid_out, f"b_k_dim={b_k_dim} {out_dtype}")
    if k >= 1024:  # the negative control: the same products in another order of K give other bytes
        order = torch.randperm(k, device="cuda")
        assert not torch.equal(matmul(a[:, order], b[order], bias=bias, out_dtype=torch.float32), laid_out)


@on_hopper
def test_rank_major_buffers_that_are_not_read_in_place():
    from tp_invariant.kernels.gemm.matmul import matmul_rank_major

    a, b = (torch.randn(4, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert matmul_rank_major(a, b, b_k_dim=1) is not None
    assert matmul_rank_major(a, b, b_k_dim=1, stride=8) is None  # pieces of 8
    assert matmul_rank_major(a[:, :, :40].contiguous(), b[:, :, :40].contiguous(), b_k_dim=1) is None
    assert matmul_rank_major(a.float(), b.float(), b_k_dim=1) is None
    assert matmul_rank_major(a[:, ::2], b, b_k_dim=1) is None
    assert matmul_rank_major(a, b[:, :60].contiguous(), b_k_dim=1) is None  # rows of c of 120 bytes


@pytest.mark.skipif(HOPPER, reason="the interpreter runs on machines without a GPU")
@pytest.mark.parametrize(
    "case", [(1, 1, 40, 96, 80), (2, 1, 33, 48, 64), (4, 2, 20, 104, 16 * 16), (3, 1, 16, 16, 144)], ids=str
)
@pytest.mark.parametrize("b_k_dim", (0, 1))
def test_the_order_of_k_in_the_interpreter(case, b_k_dim, monkeypatch):
    """Each element of K meets its counterpart: any other pairing gives another integer. fp32 replaces 16 bits."""
    from tp_invariant.kernels.gemm import matmul_tma
    from tp_invariant.kernels.gemm.matmul_configs import MatmulConfig

    monkeypatch.setattr(matmul_tma, "multiprocessors_of", lambda index: 3)
    monkeypatch.setattr(matmul_tma, "supports_tma", lambda a, n, out_dtype: True)
    ranks, stride, m, n, k = case
    a, b, bias = (torch.randint(-8, 9, shape).float() for shape in ((m, k), (n, k), (n,)))
    a_shards, b_shards = shards(a, ranks, stride), shards(b, ranks, stride)
    if b_k_dim == 0:
        b_shards = b_shards.transpose(1, 2).contiguous()
    x = matmul_tma.rank_major_operands(a_shards, b_shards, b_k_dim=b_k_dim, stride=stride, out_dtype=torch.float32)
    assert x is not None and x.ranks == ranks
    for config in (MatmulConfig(16, 32, 16, 4, 2), MatmulConfig(32, 48, 64, 4, 2, halves=True)):
        got = matmul_tma.tma_matmul(x, bias, torch.float32, config)
        torch.testing.assert_close(got, a @ b.t() + bias, rtol=0, atol=0)


A3, B3 = torch.ones(2, 8, 32), torch.ones(2, 16, 32)  # [P, M, K/P] and [P, N, K/P]


@pytest.mark.parametrize(
    "error, message, args, options",
    (
        (TypeError, "b is a list; allowed: a torch.Tensor", (A3, [1]), {}),
        (TypeError, "b has dtype torch.float16; allowed: the dtype of a, torch.float32", (A3, B3.half()), {}),
        (TypeError, "bias has dtype torch.float64; allowed: ", (A3, B3), dict(bias=torch.ones(16).double())),
        (TypeError, "out_dtype is torch.float64; allowed: ", (A3, B3), dict(out_dtype=torch.float64)),
        (ValueError, "b is on meta; allowed: the device of a, cpu", (A3, B3.to("meta")), {}),
        (ValueError, "a has shape (8, 32); allowed: three dimensions, [P, M, K/P]", (A3[0], B3), {}),
        (ValueError, "b has shape (1, 16, 32); allowed: [P, N, K/P] with the P and K/P of a", (A3, B3[:1]), {}),
        (ValueError, "b has shape (2, 16, 16); allowed: [P, N, K/P] with the P and K/P of a", (A3, B3[..., :16]), {}),
        (ValueError, "b has shape (2, 16, 32); allowed: [P, K/P, N] with the P and K/P of a", (A3, B3), {"b_k_dim": 0}),
        (ValueError, "b_k_dim is 2; allowed: 1 for b [P, N, K/P], 0 for b", (A3, B3), {"b_k_dim": 2}),
        (ValueError, "bias has shape (3,); allowed: [N], here (16,)", (A3, B3), dict(bias=torch.ones(3))),
        (ValueError, "stride is 5; allowed: an int of at least 1 that divides K/P, here 32", (A3, B3), {"stride": 5}),
        (ValueError, "promote_every=64 is not a multiple of 128", (A3, B3), dict(promote_every=64)),
    ),
)
def test_rank_major_operands_that_do_not_fit(error, message, args, options):
    from tp_invariant.kernels.gemm.matmul import matmul_rank_major

    with pytest.raises(error, match=re.escape(message)):
        matmul_rank_major(*args, **{"b_k_dim": 1, **options})
    assert matmul_rank_major(A3, B3, b_k_dim=1) is None  # these do: they are not on a Hopper
    assert matmul_rank_major(A3[:, :0], B3, b_k_dim=1) is None


@pytest.fixture
def interpreted(monkeypatch):
    """The TMA kernel takes all operands, in the interpreter."""
    from tp_invariant.kernels.gemm import matmul_tma

    if HOPPER:
        pytest.skip("the interpreter runs on machines without a GPU")
    monkeypatch.setattr(matmul_tma, "multiprocessors_of", lambda index: 3)
    monkeypatch.setattr(matmul_tma, "supports_tma", lambda a, n, out_dtype: True)
    return matmul_tma


def test_a_bias_whose_offsets_pass_32_bits_is_copied(interpreted, monkeypatch):
    """With the limit of 2^31 - 1 lowered to 200."""
    from tp_invariant.kernels import plans
    from tp_invariant.kernels.gemm.matmul import matmul

    seen = []

    class Launch(plans.Launch):
        def __call__(self, *args):
            seen.append(args[9])
            super().__call__(*args)

    monkeypatch.setattr(interpreted, "Launch", Launch)
    monkeypatch.setattr(interpreted, "MAX_SIDE", 200)
    a, b = torch.randint(-8, 9, (4, 32)).float(), torch.randint(-8, 9, (32, 20)).float()
    for stride, launched in ((1, 1), (10, 10), (11, 1)):
        bias = torch.arange(20.0 * stride)[::stride]
        assert_bitwise_equal(matmul(a, b, bias=bias), a @ b + bias, f"stride {stride}")
        assert seen.pop() == launched


@on_hopper
def test_a_repeated_call_goes_to_the_current_stream():
    from tp_invariant.kernels.gemm.matmul import matmul

    a, b = operands((64, 512, 512), (False, False), torch.bfloat16)
    wanted = a.clone()
    expected = matmul(wanted, b)
    assert not torch.equal(expected, matmul(torch.zeros_like(a), b))
    a.zero_()
    for _ in range(3):
        matmul(a, b)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # on another stream the product would be over by now, of zeros
        a.copy_(wanted)
        got = matmul(a, b)
    stream.synchronize()
    assert_bitwise_equal(got, expected)


@on_hopper
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_repeated_calls_on_a_device_that_is_not_the_current_one():
    from tp_invariant.kernels.gemm.matmul import matmul

    a, b = operands((64, 512, 512), (False, False), torch.bfloat16)
    expected = matmul(a, b)
    for current in (0, 0, 1, 1, 0):
        with torch.cuda.device(current):
            for x, y in ((a, b), (a.to("cuda:1"), b.to("cuda:1"))):
                got = matmul(x, y)
                assert got.device == x.device
                assert_bitwise_equal(got.to("cuda:0"), expected)


@on_hopper
def test_operands_that_are_supported():
    from tp_invariant.kernels.gemm.matmul_tma import tma_operands

    def layouts(a, b, out_dtype):
        x = tma_operands(a, b, out_dtype)
        return None if x is None else (x.a_transposed, x.b_transposed)

    a, b = (torch.randn(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert layouts(a, b, torch.bfloat16) == (False, False)
    assert layouts(a.t(), b.t(), torch.bfloat16) == (True, True)
    assert layouts(a[:, 1:], b[1:], torch.bfloat16) is None  # base not aligned
    assert layouts(a[:, :60], b[:60], torch.bfloat16) == (False, False)
    assert layouts(a, b[:, :60], torch.bfloat16) is None  # c's rows would not be aligned
    assert layouts(a[:, ::2], b[::2], torch.bfloat16) is None  # no dim of a has stride 1
    assert layouts(a[:1].expand(64, 64), b, torch.bfloat16) is None  # stride 0
    assert layouts(a.float(), b.float(), torch.float32) is None
    odd = torch.randn(64, 63, device="cuda", dtype=torch.bfloat16)
    assert layouts(odd, odd.t(), torch.bfloat16) is None


@on_hopper
def test_a_captured_graph_gives_the_same_bytes():
    from tp_invariant.kernels.gemm.matmul import matmul

    a, b = operands((64, 768, 4096), (False, True), torch.bfloat16)
    expected = matmul(a, b)
    static_a = torch.zeros_like(a)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        matmul(static_a, b)  # compiled and tuned before the capture, as torch asks for everything
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = matmul(static_a, b)
    static_a.copy_(a)
    graph.replay()
    assert_bitwise_equal(c, expected)


def in_a_new_thread(function):
    """The result in a thread that has not used CUDA before."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@on_hopper
@pytest.mark.parametrize("calls", (1, 3), ids=("a known kernel", "a known launch"))
def test_the_first_call_of_a_thread(calls):
    """Its tensor maps are encoded before anything else has bound a CUDA context to the thread."""
    from tp_invariant.kernels.gemm.matmul import matmul

    a, b = operands((256, 192, 2048), (True, False), torch.bfloat16)
    for _ in range(calls):
        expected = matmul(a, b)
    del expected  # its memory serves the thread, whose first call would otherwise be cudaMalloc
    elsewhere = a.t().clone().t()  # new addresses: new maps
    torch.cuda.synchronize()
    assert_bitwise_equal(in_a_new_thread(lambda: matmul(elsewhere, b)), matmul(a, b))


@on_hopper
def test_the_first_call_of_the_thread_of_backward():
    from tp_invariant.kernels.gemm.matmul import matmul

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return matmul(a, b)

        @staticmethod
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            return matmul(grad, b.t()), matmul(a.t(), grad)

    def run():
        x, y = (t.clone().requires_grad_() for t in (a, b))
        grad = torch.ones(256, 192, device="cuda", dtype=torch.bfloat16)
        torch.autograd.backward([Product.apply(x, y)], [grad])
        return x.grad, y.grad

    a, b = operands((256, 192, 2048), (False, False), torch.bfloat16)
    ones = torch.ones(256, 192, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):  # every kernel is compiled in this thread
        expected = matmul(ones, b.t()), matmul(a.t(), ones)
    for got, wanted in zip(in_a_new_thread(run), expected, strict=True):
        assert_bitwise_equal(got, wanted)
