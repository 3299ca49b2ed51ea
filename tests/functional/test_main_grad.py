"""fuse_wgrad_accumulation: fp32 weight gradients in main_grad, the same bits at every degree, mode on."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from ranks import run_ranks

import tp_invariant as tpi
from tp_invariant.comm.collectives import gather_dim, resolve_group
from tp_invariant.core.layout import shard
from tp_invariant.diagnostics.verify_case import error, wide
from tp_invariant.gemm import bundled, gemm
from tp_invariant.kernels.gemm import reference
from tp_invariant.testing import assert_bitwise_equal

K, N, TOKENS, MICRO_BATCHES = 40, 48, (24, 7), 3
DEGREES = (2, 4, 8)


def chained(a, b, *, bias=None, out_dtype=None):
    """An injected gemm_fn, for which no accumulation is fused."""
    return reference.chained_matmul(a, b, bias=bias, out_dtype=out_dtype)


@dataclasses.dataclass(frozen=True)
class Setup:
    parallel_mode: str | None
    dtype: torch.dtype = torch.bfloat16
    norm: bool = False
    sequence_parallel: bool = False
    stride: int = 1
    autocast: bool = False  # fp32 parameters under bf16 autocast
    overwrite: bool = False
    megatron: bool = False  # what its DistributedDataParallel sets
    tokens: tuple[int, ...] = TOKENS
    gemm_fn: str | None = None
    mode: bool = True

    def with_(self, **changes) -> Setup:
        return dataclasses.replace(self, **changes)


GEMM_FNS = {None: None, "chained": chained, "promoted": bundled(promote_every=256)}


def data_of(setup):
    """The full weight, and x and dy of every micro-batch."""
    g = torch.Generator().manual_seed(7)
    weight = wide(N, K, generator=g, dtype=torch.float32)
    batches = [
        [wide(*setup.tokens, size, generator=g, dtype=torch.float32) for size in (K, N)] for _ in range(MICRO_BATCHES)
    ]
    if setup.autocast:
        return weight, batches
    return weight.to(setup.dtype), [[t.to(setup.dtype) for t in batch] for batch in batches]


def make(setup, tp_group):
    options = dict(
        parallel_mode=setup.parallel_mode, tp_group=tp_group, sequence_parallel=setup.sequence_parallel,
        partition_stride=setup.stride, gemm_fn=GEMM_FNS[setup.gemm_fn], fuse_wgrad_accumulation=True,
        dtype=torch.float32 if setup.autocast else setup.dtype,
    )  # fmt: skip
    layer = (tpi.LayerNormLinear if setup.norm else tpi.Linear)(K, N, **options)
    layer.weight.main_grad = torch.full_like(layer.weight, 0.375, dtype=torch.float32)
    if setup.overwrite:
        layer.weight.overwrite_main_grad = True
    if setup.megatron:
        layer.weight.grad_added_to_main_grad = False
    return layer


def run(tp_group, setup):
    """(full main_grad after all micro-batches, dx of the last, .grad of weight and bias) on one rank."""
    group = resolve_group(tp_group)
    full, batches = data_of(setup)
    sharded_tokens = setup.sequence_parallel and group.size > 1
    cut = dict(rank=group.rank, world=group.size)
    row, column = setup.parallel_mode == "row", setup.parallel_mode == "column"
    with tpi.set_tp_invariant_mode(setup.mode):
        layer = make(setup, tp_group)
        with torch.no_grad():
            layer.weight.copy_(layer.shard_spec("weight").local(full))
        for x, dy in batches:
            if row:
                x = shard(x, dim=-1, stride=setup.stride, **cut)
            elif sharded_tokens:
                x = shard(x, dim=0, **cut)
            if column:
                dy = shard(dy, dim=-1, stride=setup.stride, **cut)
            elif sharded_tokens:
                dy = shard(dy, dim=0, **cut)
            x = x.clone().requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=setup.autocast):
                y = layer(x)
            y.backward(dy.to(y.dtype))
    spec = layer.shard_spec("weight")
    return {
        "main_grad": spec.full(layer.weight.main_grad),
        "dx": None if row or not sharded_tokens else gather_dim(x.grad, 0, group),
        "grad": layer.weight.grad,
        "added": getattr(layer.weight, "grad_added_to_main_grad", None),
        "bias": layer.shard_spec("bias").full(layer.bias.grad),
    }


def run_all(tp_group, setups):
    return [run(tp_group, setup) for setup in setups]


def expected_main_grad(setup):
    """0.375, then the fp32 dw of each micro-batch, added in order by separate operations."""
    _, batches = data_of(setup)
    total = torch.full((N, K), 0.375)
    dtype = torch.bfloat16 if setup.autocast else setup.dtype
    for x, dy in batches:
        x, dy = x.to(dtype), dy.to(dtype)
        if setup.norm:
            with tpi.set_tp_invariant_mode(True):
                layer = tpi.LayerNormLinear(K, N, dtype=dtype, return_layernorm_output=True)
                x = layer(x)[1].detach()
        dw = gemm(GEMM_FNS[setup.gemm_fn], dy.flatten(0, -2).t(), x.flatten(0, -2), out_dtype=torch.float32)
        total = dw if setup.overwrite else total + dw
    return total


COLUMN, ROW, WHOLE = Setup("column"), Setup("row"), Setup(None)
SETUPS = [
    COLUMN,
    COLUMN.with_(sequence_parallel=True),
    COLUMN.with_(sequence_parallel=True, stride=2, norm=True, megatron=True),
    COLUMN.with_(autocast=True, sequence_parallel=True),
    COLUMN.with_(overwrite=True, dtype=torch.float32),
    COLUMN.with_(gemm_fn="chained"),
    ROW,
    ROW.with_(sequence_parallel=True, megatron=True),
    ROW.with_(autocast=True, gemm_fn="promoted"),
    ROW.with_(gemm_fn="chained", sequence_parallel=True, dtype=torch.float16),
    WHOLE.with_(sequence_parallel=True, gemm_fn="promoted"),
    WHOLE.with_(norm=True, sequence_parallel=True, autocast=True, megatron=True),
]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_main_grad_is_the_sum_of_each_micro_batches_dw(setup):
    result = run(None, setup)
    assert_bitwise_equal(result["main_grad"], expected_main_grad(setup))
    if setup.megatron:
        assert result["added"] is True
        assert result["grad"].count_nonzero() == 0 and result["grad"].shape == (N, K)
    else:
        assert result["added"] is None and result["grad"] is None
    assert result["bias"].count_nonzero() == N, "the bias keeps its .grad"


@pytest.mark.parametrize("degree", DEGREES)
def test_the_same_bits_at_every_degree(degree):
    references = [run(None, setup) for setup in SETUPS]
    for rank, results in enumerate(run_ranks(run_all, degree, SETUPS)):
        for setup, result, expected in zip(SETUPS, results, references, strict=True):
            for name in ("main_grad", "bias", "added"):
                assert_bitwise_equal(result[name], expected[name], f"{name}, rank {rank} of {degree}, {setup}")
            assert (result["grad"] is None) == (expected["grad"] is None)


def test_the_controls_differ():
    """The mode off at another degree; dw rounded to 16 bits; K in another order."""
    setup = ROW.with_(sequence_parallel=True, tokens=(64, 9))
    off = WHOLE.with_(sequence_parallel=True, mode=False)
    alone = [run(None, s)["main_grad"] for s in (setup, off)]
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(run_ranks(run_all, 4, [off])[0][0]["main_grad"], alone[1])
    rounded = torch.full((N, K), 0.375)
    for x, dy in data_of(setup)[1]:
        rounded += gemm(None, dy.flatten(0, -2).t(), x.flatten(0, -2)).float()
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(rounded, alone[0])
    promoted = setup.with_(gemm_fn="promoted")
    assert_bitwise_equal(run(None, promoted)["main_grad"], expected_main_grad(promoted))
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(run(None, promoted)["main_grad"], alone[0])


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("setup", [COLUMN, ROW, WHOLE], ids=str)
def test_right_at_every_degree(setup, mode):
    """Against float64: far better than dw in bf16 could be. And dx, in both modes."""
    cases = [s.with_(mode=mode) for s in (setup, setup.with_(sequence_parallel=True), setup.with_(overwrite=True))]
    for results in (run_all(None, cases), *run_ranks(run_all, 2, cases)):
        for case, result in zip(cases, results, strict=True):
            full, batches = data_of(case)
            exact, start = torch.zeros(N, K, dtype=torch.float64), 0.0 if case.overwrite else 0.375
            for x, dy in batches[-1:] if case.overwrite else batches:
                exact += dy.double().flatten(0, -2).t() @ x.double().flatten(0, -2)
            assert error(result["main_grad"], exact + start) < 1e-6, case
            if result["dx"] is not None:
                x, dy = batches[-1]
                assert error(result["dx"], dy.double() @ full.double()) < 4e-3, case


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
def test_the_rest_of_the_layer_is_the_same(mode):
    """y, dx and the bias's gradient are the same as without the option; so is dw if main_grad starts at 0."""
    with tpi.set_tp_invariant_mode(mode):
        results = []
        for fused in (False, True):
            torch.manual_seed(0)
            layer = tpi.Linear(K, N, fuse_wgrad_accumulation=fused)
            layer.weight.main_grad = torch.zeros(N, K)
            x = torch.randn(5, K, requires_grad=True)
            y = layer(x)
            y.square().sum().backward()
            results.append((y, x.grad, layer.bias.grad, layer.weight.main_grad if fused else layer.weight.grad))
        assert_bitwise_equal(*results)


def test_frozen_and_without_grad_need_no_main_grad():
    layer = tpi.Linear(K, N, fuse_wgrad_accumulation=True)
    x = torch.randn(5, K, requires_grad=True)
    for mode in (True, False):
        with tpi.set_tp_invariant_mode(mode):
            with torch.no_grad():
                layer(x)
            layer.weight.requires_grad_(False)
            layer(x).sum().backward()
            layer.weight.requires_grad_(True)


def refusals():
    """(what main_grad is, the error, its text)"""
    name = f"main_grad of the weight of Linear({K}, {N}, 'column') on rank 0"
    wanted = f"it must be float32 of shape ({N}, {K}) on cpu"
    yield (
        None,
        ValueError,
        (
            f"{name} is missing, which fuse_wgrad_accumulation=True adds to: set weight.main_grad to a tensor, float32 "
            f"of shape ({N}, {K}) on cpu, before forward (Megatron's DistributedDataParallel does)"
        ),
    )
    megatron = " (in Megatron, accumulate_allreduce_grads_in_fp32=True)"
    yield torch.zeros(N, K).bfloat16(), TypeError, f"{name} is torch.bfloat16: {wanted}{megatron}"
    yield 3, TypeError, f"{name} is a int: {wanted}{megatron}"
    yield torch.zeros(K, N), ValueError, f"{name} has shape ({K}, {N}) on cpu: {wanted}"
    yield torch.zeros(K, N).t(), ValueError, f"{name} has strides (1, {N}): it must be contiguous"


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@pytest.mark.parametrize(("main_grad", "kind", "text"), list(refusals()), ids=lambda value: str(type(value).__name__))
def test_what_is_refused(main_grad, kind, text, mode):
    layer = tpi.Linear(K, N, parallel_mode="column", fuse_wgrad_accumulation=True)
    layer.weight.main_grad = main_grad
    with tpi.set_tp_invariant_mode(mode), pytest.raises(kind, match=f"^{re.escape(text)}$"):
        layer(torch.randn(3, K))


def one_lacks_it(tp_group):
    layer = tpi.Linear(K, N, parallel_mode="column", tp_group=tp_group, fuse_wgrad_accumulation=True)
    if torch.distributed.get_rank() == 0:
        layer.weight.main_grad = torch.zeros_like(layer.weight)
    with tpi.set_tp_invariant_mode(True), pytest.raises((ValueError, RuntimeError)) as caught:
        layer(torch.randn(3, K))
    return str(caught.value)


def test_an_error_is_raised_on_every_rank():
    for text in run_ranks(one_lacks_it, 2):
        assert "main_grad" in text and "rank 1" in text and "is missing" in text


def test_a_shared_weight_counts_twice():
    """Two uses in one graph, and two backward passes through one graph."""
    with tpi.set_tp_invariant_mode(True):
        layer = tpi.Linear(K, K, bias=False, fuse_wgrad_accumulation=True)
        layer.weight.main_grad = torch.zeros(K, K)
        x = torch.randn(5, K)
        h = layer(x)
        y = layer(h)
        dy = torch.randn(5, K)
        y.backward(dy, retain_graph=True)
        once = layer.weight.main_grad.clone()
        second, dh = gemm(None, dy.t(), h.detach()), gemm(None, dy, layer.weight.detach())
        assert_bitwise_equal(once, torch.zeros(K, K) + second + gemm(None, dh.t(), x))
        y.backward(dy)
        assert not torch.equal(layer.weight.main_grad, once)
        torch.testing.assert_close(layer.weight.main_grad, 2 * once)


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("parallel_mode", ["column", "row", None], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_backward_in_two_halves_adds_once(autocast, parallel_mode, mode):
    """As in pipeline schedules that split it: of the inputs, then of the weights. The first alone adds nothing."""
    layer = tpi.Linear(K, N, parallel_mode=parallel_mode, fuse_wgrad_accumulation=True)
    layer.weight.grad_added_to_main_grad = False  # without it, autograd is told that there is no gradient
    x = torch.randn(5, K, requires_grad=True)

    def backward(*halves):
        layer.weight.main_grad = torch.zeros(N, K)
        with tpi.set_tp_invariant_mode(mode), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = layer(x)
        found = []
        for inputs in halves:
            found += torch.autograd.grad(y, inputs, torch.ones_like(y), retain_graph=True)
        return layer.weight.main_grad, found

    whole, (dx, dw, db) = backward([x, layer.weight, layer.bias])
    exact = torch.ones(N, 5, dtype=torch.float64) @ x.detach().double()
    assert (whole - exact).norm() < (4e-3 if autocast else 1e-6) * exact.norm()
    assert_bitwise_equal(backward([x], [layer.weight, layer.bias]), (whole, [dx, dw, db]))
    nothing, found = backward([x], [layer.bias])
    assert not nothing.any()
    assert_bitwise_equal(found, [dx, db])
    with tpi.set_tp_invariant_mode(mode):
        y = layer(x).sum()
    y.backward(inputs=[x], retain_graph=True)
    assert not layer.weight.main_grad.any()
    y.backward(inputs=[layer.weight])
    assert layer.weight.main_grad.any()


def test_no_tokens_change_nothing():
    for mode in (True, False):
        for overwrite in (False, True):
            layer = tpi.Linear(K, N, fuse_wgrad_accumulation=True)
            layer.weight.main_grad = torch.full((N, K), -0.0)
            layer.weight.overwrite_main_grad = overwrite
            with tpi.set_tp_invariant_mode(mode):
                layer(torch.randn(0, K)).sum().backward()
            assert layer.weight.main_grad.abs().sum() == 0
            if mode and not overwrite:
                assert_bitwise_equal(layer.weight.main_grad, torch.full((N, K), -0.0))


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
def test_compiled_code_has_a_graph_break(mode):
    torch._dynamo.reset()
    with tpi.set_tp_invariant_mode(mode):
        results = []
        for compiled in (False, True):
            torch.manual_seed(0)
            layer = tpi.Linear(K, N, fuse_wgrad_accumulation=True)
            layer.weight.main_grad = torch.zeros(N, K)
            x = torch.randn(5, K, requires_grad=True)
            forward = torch.compile(lambda x, layer=layer: layer(x + 1) * 2, backend="eager") if compiled else None
            y = forward(x) if forward else layer(x + 1) * 2
            y.backward(torch.ones(5, N))
            results.append((y, x.grad, layer.weight.main_grad))
            assert layer.weight.grad is None
    assert_bitwise_equal(*results)
