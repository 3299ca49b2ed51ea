"""A linear layer whose products repeat earlier ones: the results of a first call, whatever has changed in between.

The path that GPUs take runs here on CPU tensors in Triton's interpreter: they say that they are on a GPU, and a launch
is given what it knows by address. Values are small integers, so that every product is exact.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tp_invariant as tpi
from tp_invariant import gemm
from tp_invariant.gemm import gemm_fn
from tp_invariant.kernels.gemm import matmul, matmul_tma
from tp_invariant.kernels.recent_calls import RecentCalls
from tp_invariant.testing import assert_bitwise_equal

TOKENS, K, N = (2, 4), 32, 16


def at_address(address, shape, strides):
    extent = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    memory = torch.frombuffer((ctypes.c_float * extent).from_address(address), dtype=torch.float32)
    return memory.as_strided(shape, strides)


class ByAddress(matmul_tma.Launch):
    direct = True

    def __call__(self, index, *args):
        *descriptors, bias, m, n, steps, promoted_steps, stride = args[:10]
        if stride:
            bias = at_address(bias, (n,), (stride,))
        super().__call__(index, *descriptors, bias, m, n, steps, promoted_steps, stride, *args[10:])

    def descriptor(self, position, x, block, *layout):
        self.blocks = {**getattr(self, "blocks", {}), position: block}
        return super().descriptor(position, x, block, *layout)

    def tensor_maps(self, position, shape, strides):
        class Maps(dict):
            def __missing__(_, address):
                x = at_address(address, shape, strides)
                return super(ByAddress, self).descriptor(position, x, self.blocks[position])

        return Maps()


@pytest.fixture
def served(monkeypatch):
    """Where the products are that were served by what earlier ones have left."""
    if torch.cuda.is_available():
        pytest.skip("tests/kernels/gemm/test_matmul_tma.py has a GPU's own")
    served = []
    original = matmul_tma.Prepared.__call__

    def serve(*args):
        c = original(*args)
        served.append(c.data_ptr())
        return c

    into = matmul_tma.Prepared.into

    def serve_into(self, out, *args):
        done = into(self, out, *args)
        served.extend([out.data_ptr()] * done)
        return done

    monkeypatch.setattr(matmul_tma.Prepared, "__call__", serve)
    monkeypatch.setattr(matmul_tma.Prepared, "into", serve_into)
    monkeypatch.setattr(matmul_tma, "Launch", ByAddress)
    monkeypatch.setattr(matmul_tma, "multiprocessors_of", lambda index: 3)
    monkeypatch.setattr(matmul_tma, "supports_tma", lambda a, n, out_dtype: True)
    for known in ("_prepared", "_prepared_together"):
        monkeypatch.setattr(matmul_tma, known, {})
    monkeypatch.setattr(matmul_tma, "_recent", RecentCalls())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True), raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(gemm_fn, "bundled_gemm_fn", lambda device: matmul.matmul)
    matmul_tma._plan.cache_clear()
    with tpi.set_tp_invariant_mode(True):
        yield served
    matmul_tma._plan.cache_clear()


def integers(*shape):
    return torch.randint(-4, 5, shape).float()


def write(layer):
    with torch.no_grad():
        for p in layer.parameters():
            p -= p.grad


def set_data(layer):
    layer.weight.data = integers(K, N).t()  # the same object with other strides


def unaligned_bias(layer):
    layer.bias = nn.Parameter(integers(N + 1)[1:])


def own_gemm(layer):
    layer.gemm_fn = lambda a, b, *, bias=None, out_dtype=None: (a @ b if bias is None else a @ b + bias) * 2


CHANGES = {  # what changes before a call, and how many of its products are served without a look at the operands
    "nothing": (lambda layer: None, 4),
    "written parameters": (write, 4),
    "weight.data": (set_data, 2),
    "another weight": (lambda layer: setattr(layer, "weight", nn.Parameter(integers(N, K))), 4),
    "a bias at another alignment": (unaligned_bias, 3),
    "no bias": (lambda layer: setattr(layer, "bias", None), 2),
    "a weight without a gradient": (lambda layer: layer.weight.requires_grad_(False), 3),
    "a bias without a gradient": (lambda layer: layer.bias.requires_grad_(False), 3),
    "its gemm_fn": (own_gemm, 0),
    "the default gemm_fn": (lambda layer: gemm.set_default_gemm_fn(lambda *args, **kw: torch.mm(*args)), 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes(served, name):
    torch.manual_seed(0)
    layer = tpi.Linear(K, N)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(integers(*p.shape))

    def step(x):
        served.clear()
        for p in layer.parameters():
            p.grad = None
        y = layer(x)
        dy = integers(*y.shape)
        y.backward(dy)
        return y, dy

    kept = [integers(*TOKENS, K).requires_grad_() for _ in range(4)]  # so that no address is used again
    for x in kept[:3]:
        step(x)
    assert len(served) == 4
    change, expected = CHANGES[name]
    try:
        change(layer)
        weight, bias = layer.weight.detach(), layer.bias
        y, dy = step(kept[3])
        factor, added = (2 if name == "its gemm_fn" else 1), bias is not None and name != "the default gemm_fn"
        rows, x = dy.view(-1, N), kept[3].detach().view(-1, K)
        want = x @ weight.t() + bias.detach() if added else x @ weight.t()
        assert_bitwise_equal(y, factor * want.view(y.shape))
        assert_bitwise_equal(kept[3].grad, factor * (dy @ weight))
        if layer.weight.requires_grad:
            assert_bitwise_equal(layer.weight.grad, factor * (rows.t() @ x))
        if bias is not None and bias.requires_grad:
            assert_bitwise_equal(bias.grad, factor * rows.sum(0))
        if expected == 4:
            grads = (kept[3].grad, *(p.grad for p in layer.parameters()))
            assert {grad.data_ptr() for grad in grads} <= set(served), "autograd has copied a gradient"
    finally:
        gemm.set_default_gemm_fn(None)
    assert len(served) == expected


INPUTS = {  # and how many products of a step are served
    "the same": (lambda: integers(*TOKENS, K), 3),
    "other token dims": (lambda: integers(4, 2, K), 3),
    "fewer tokens": (lambda: integers(2, 3, K), 0),
    "a transposed one": (lambda: integers(4, 2, K).transpose(0, 1), 3),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs(served, name):
    layer = tpi.Linear(K, N, bias=False)
    with torch.no_grad():
        layer.weight.copy_(integers(N, K))
    kept, counts = [], []
    for make, _ in (*[INPUTS["the same"]] * 3, INPUTS[name]):
        kept.append(x := make().requires_grad_())
        layer.weight.grad = None
        served.clear()
        y = layer(x)
        y.backward(dy := integers(*y.shape))
        counts.append(len(served))
        assert_bitwise_equal(y, x.detach() @ layer.weight.detach().t())
        assert_bitwise_equal(x.grad, dy @ layer.weight.detach())
        assert_bitwise_equal(layer.weight.grad, dy.flatten(0, -2).t() @ x.detach().flatten(0, -2))
    assert counts[2:] == [3, INPUTS[name][1]]


def test_main_grad(served):
    """Added to what main_grad is at the time, or written to it; and a call that only looks like a known one."""
    layer = tpi.Linear(K, N, bias=False, fuse_wgrad_accumulation=True)
    with torch.no_grad():
        layer.weight.copy_(integers(N, K))
    want, kept = torch.zeros(N, K), []

    def step():
        served.clear()
        kept.append(x := integers(*TOKENS, K))
        y = layer(x)
        y.backward(dy := integers(*y.shape))
        return dy.flatten(0, -2).t() @ x.flatten(0, -2)

    layer.weight.main_grad = torch.zeros(N, K)
    for turn in range(4):
        want += step()
        assert_bitwise_equal(layer.weight.main_grad, want)
        assert (layer.weight.main_grad.data_ptr() in served) == (turn > 0)
    layer.weight.main_grad = elsewhere = torch.zeros(N, 2 * K)[:, :K].contiguous()
    gradient = step()
    assert_bitwise_equal(elsewhere, gradient)
    assert elsewhere.data_ptr() in served
    layer.weight.overwrite_main_grad = True
    assert_bitwise_equal(elsewhere, (step(), elsewhere)[0])
    layer.weight.overwrite_main_grad = False
    before = layer.weight
    layer.weight = nn.Parameter(integers(N, K))
    layer.weight.main_grad = torch.zeros(N, K)
    assert_bitwise_equal(layer.weight.main_grad, (step(), layer.weight.main_grad)[0])
    assert not any(found[0].main_grad.weight is before for found in layer._agreed.resolved.values())
    del layer.weight.main_grad
    with pytest.raises(ValueError, match=r"main_grad of the weight .* is missing"):
        layer(kept[0])


def test_an_output_that_shares_memory_with_an_operand_of_a_known_call(served):
    a, b, out = integers(8, 32), integers(32, 32), torch.zeros(8, 32)
    for _ in range(3):
        matmul.matmul(a, b, out=out)
        assert_bitwise_equal(out, a @ b)
    assert out.data_ptr() in served
    rows = torch.zeros(40, 32)
    for name, operands in {"a": (rows[:8], b, rows[7:15]), "b": (a, rows[:32], rows[31:39])}.items():
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            matmul.matmul(*operands[:2], out=operands[2])
    with pytest.raises(ValueError, match="out requires grad"):
        matmul.matmul(a, b, out=torch.zeros(8, 32, requires_grad=True))
