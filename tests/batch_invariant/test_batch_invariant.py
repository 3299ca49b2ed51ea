"""batch_invariant: a row's bits do not depend on its batch; torch's values; what is routed, refused and restored.

On the device that is there: the Triton kernels on CUDA, the references on a CPU. The Triton row kernels are also run
here in the interpreter, where it has them.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import threading
from unittest import mock

import hf_models
import pytest
import torch
import torch.nn.functional as F
from gpus import gpu
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tp_invariant as tpi
from tp_invariant.batch_invariant import (
    disable_batch_invariant_mode,
    enable_batch_invariant_mode,
    is_batch_invariant_mode_enabled,
    set_batch_invariant_mode,
)
from tp_invariant.functional import attention_choice
from tp_invariant.kernels.rowwise import reference_softmax
from tp_invariant.kernels.rowwise import softmax as triton_softmax
from tp_invariant.testing import assert_bitwise_equal, wide_randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BATCHES = (1, 2, 3, 5, 8, 13, 32, 64)
K = 1000  # no multiple of anything


def wide(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    spread = 3 if dtype == torch.float16 else 6
    return wide_randn(*shape, generator=torch.Generator().manual_seed(seed), spread=spread).to(DEVICE, dtype)


@pytest.fixture(autouse=True)
def restored():
    yield
    assert not is_batch_invariant_mode_enabled()


def first_bit_that_follows_the_batch(f, x: Tensor, dim: int = 0, batches=BATCHES) -> int | None:
    """The first size of a batch that gives its entries other bits than the whole of x does; None if none."""
    whole = f(x)
    dim_out = 0 if dim == 0 else -1
    for size in (size for size in batches if size <= x.shape[dim]):
        for start in {0, x.shape[dim] - size}:
            part = f(x.narrow(dim, start, size).clone(memory_format=torch.contiguous_format))
            try:
                assert_bitwise_equal(part, whole.narrow(dim_out, start, size).contiguous())
            except AssertionError:
                return size
    return None


def operations(dtype: torch.dtype) -> dict[str, tuple]:
    """name: (a function of a batch x, x, the dim of the batch)."""
    w, b = wide(K, 77, seed=1, dtype=dtype), wide(77, seed=2, dtype=dtype)
    rows, columns = wide(64, K, dtype=dtype), wide(300, 64, seed=4, dtype=dtype)
    entries, per_entry = wide(16, 3, 129, seed=5, dtype=dtype), wide(129, 7, seed=6, dtype=dtype)
    return {
        "mm": (lambda x: torch.mm(x, w), rows, 0),
        "matmul": (lambda x: x @ w, rows, 0),
        "mv": (lambda x: x @ w[:, 0], rows, 0),
        "addmm": (lambda x: torch.addmm(b, x, w), rows, 0),
        "addmm, alpha and beta": (lambda x: torch.addmm(b, x, w, alpha=0.3, beta=1.7), rows, 0),
        "linear": (lambda x: F.linear(x, w.t(), b), rows, 0),
        "linear, transposed batch": (lambda x: F.linear(x.unflatten(0, (1, -1)).transpose(0, 1), w.t(), b), rows, 0),
        "bmm": (lambda x: torch.bmm(x, per_entry.expand(len(x), -1, -1).clone()), entries, 0),
        "baddbmm": (lambda x: torch.baddbmm(x[:, :, :1], x, per_entry.expand(len(x), -1, -1)), entries, 0),
        "softmax": (lambda x: x.softmax(-1), rows, 0),
        "softmax of columns": (lambda x: (x / 64).softmax(0), columns, 1),
        "log_softmax": (lambda x: x.log_softmax(-1), rows, 0),
        "mean": (lambda x: x.mean(-1), rows, 0),
        "mean of columns": (lambda x: x.mean(0), columns, 1),
        "sum of columns": (lambda x: x.sum(0), columns, 1),
    }


NAMES = tuple(operations(torch.float32))


# --- elementwise functions whose CPU kernels go by position ----------------------------------------------------------


def mlp(activation):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 333), activation, nn.Linear(333, 10)).to(DEVICE)


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU("tanh"), nn.Softplus(), nn.ELU(), nn.SiLU(inplace=True)])
def test_an_mlp_of_odd_width_in_any_batch(activation):
    model = mlp(activation)
    x = torch.randn(64, 40, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def forward_and_dgrad(x):
        x = x.detach().requires_grad_()
        y = model(x)
        return torch.cat([y.detach(), *torch.autograd.grad(y.square().sum(), x)], dim=1)

    with tpi.batch_invariant():
        whole = forward_and_dgrad(x)
        assert first_bit_that_follows_the_batch(forward_and_dgrad, x) is None
    torch.testing.assert_close(whole, forward_and_dgrad(x), rtol=1e-4, atol=1e-5)


ODD_ONES = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "rsqrt": lambda x: x.abs().rsqrt(),
    "pow": lambda x: x.abs() ** 1.7,
    "2 to x": lambda x: 2.0**x,
    "2 to x, out": lambda x: torch.pow(2.0, x, out=torch.empty_like(x)),
    "xlogy of a number": lambda x: torch.xlogy(1.3, x.abs()),
    "xlogy with a number": lambda x: torch.xlogy(x, 1.3),
    "xlogy with a number, in place": lambda x: x.clone().xlogy_(1.3),
    "pow of two": lambda x: x.abs().pow(torch.tensor([1.3], dtype=x.dtype, device=x.device)),
    "glu": lambda x: F.glu(torch.stack([x, x * 0.7], -1)).squeeze(-1),
    "glu, first dim": lambda x: F.glu(torch.stack([x, x * 0.7]), 0).squeeze(0),
    "glu, backward": lambda x: torch.ops.aten.glu_backward(x.unsqueeze(0), torch.stack([x, x * 0.7]), 0)[1],
    "softshrink": F.softshrink,
    "add, alpha": lambda x: x.add(x.abs(), alpha=0.3),
    "in place": lambda x: x.clone().sigmoid_(),
    "out": lambda x: torch.sigmoid(x, out=torch.empty_like(x)),
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_elementwise_functions_in_any_batch(dtype):
    x = (torch.randn(130, 333, generator=torch.Generator().manual_seed(2)) * 3).to(DEVICE, dtype)
    by_position = []
    for name, f in ODD_ONES.items():
        stock, strides = f(x), f(x.t()).stride()
        with tpi.batch_invariant():
            y = f(x)
            assert first_bit_that_follows_the_batch(f, x) is None, name
            assert f(x.t()).stride() in ((1, 333), strides), name
            assert f(x[0, 0]).dtype == dtype and f(x[:0]).shape == (0, 333), name
        assert y.dtype == stock.dtype
        torch.testing.assert_close(y, stock)
        by_position += [name] if first_bit_that_follows_the_batch(f, x) is not None else []
    assert by_position or DEVICE == "cuda"  # without the mode some go by position: x can tell


# torch's own CPU kernels give these other bits in other batches; the rest it happens to keep
FOLLOWS = ("mm", "matmul", "addmm", "addmm, alpha and beta", "linear", "softmax of columns", "mean of columns",
           "sum of columns")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_entry_has_its_bits_in_any_batch(name, dtype):
    f, x, dim = operations(dtype)[name]
    with tpi.batch_invariant():
        assert first_bit_that_follows_the_batch(f, x, dim) is None
        with torch.inference_mode():  # where composite operations arrive whole
            inferred = f(x)
        assert_bitwise_equal(inferred, f(x))


@pytest.mark.skipif(DEVICE != "cpu", reason="what torch's CPU kernels do")
@pytest.mark.parametrize("name", FOLLOWS)
def test_negative_control(name):
    f, x, dim = operations(torch.float32)[name]
    assert first_bit_that_follows_the_batch(f, x, dim) is not None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(name, dtype):
    f, x, _ = operations(dtype)[name]
    with tpi.batch_invariant():
        ours = f(x)
    theirs = f(x)
    with ToDouble():
        expected = f(x.double())
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    error, torchs = ((y.double() - expected).norm() / expected.norm() for y in (ours, theirs))
    # fp32: one accumulator over K has more rounding than cuBLAS, which splits K (5.6e-7 against 1.6e-7 on an H200)
    assert error <= max(1.1 * torchs, 8 * torch.finfo(torch.float32).eps), f"{error} against torch's {torchs}"


class ToDouble(TorchDispatchMode):
    """Converts every floating-point operand to float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def convert(value):
            return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

        return func(*map(convert, args), **(kwargs or {}))


# --- models ---------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(K, 192), nn.Linear(192, 50)
        self.to(DEVICE, dtype)

    def forward(self, x):
        return self.down(F.relu(self.up(x))).softmax(-1)


def attend(x: Tensor, **options) -> Tensor:
    """[B, S, 64] -> [B, S, 64], 4 heads of 16 that share 2 of keys and values."""
    q, k, v = (t.unflatten(-1, (-1, 16)).transpose(1, 2) for t in (x, x[..., :32], x[..., 32:]))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, **options)
    return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_attention(dtype):
    x = wide(8, 10, 64, dtype=dtype) / 8
    with tpi.batch_invariant():
        assert first_bit_that_follows_the_batch(attend, x, batches=(1, 2, 5)) is None
        ours = attend(x)
    exact = attend(x.double())
    error, torchs = ((y.double() - exact).norm() / exact.norm() for y in (ours, attend(x)))
    assert error <= max(2 * torchs, 1e-6), f"{error} against torch's {torchs}"


@pytest.mark.parametrize("need_weights", (True, False), ids=("weights", "fused"))
def test_multihead_attention(need_weights):
    """torch calls its linears from C++ and lays them out by need_weights and batch_first."""
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(64, 4, batch_first=True).to(DEVICE), wide(8, 3, 64) / 64

    def f(x):
        return layer(x, x, x, need_weights=need_weights)[0].detach()

    with tpi.batch_invariant():
        assert first_bit_that_follows_the_batch(f, x, batches=(1, 2, 5)) is None
        ours = f(x)
        with torch.no_grad(), pytest.raises(NotImplementedError, match=re.escape("set_fastpath_enabled(False)")):
            layer.eval()(x, x, x)
    layer.train()
    theirs = f(x)
    layer.double()
    exact = f(x.double())
    error, torchs = ((y.double() - exact).norm() / exact.norm() for y in (ours, theirs))
    assert error <= max(2 * torchs, 1e-6), f"{error} against torch's {torchs}"


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_this_librarys_layers_keep_their_bits(dtype):
    """The layers use the same kernels already, so the context changes nothing, forward or backward."""
    torch.manual_seed(0)
    layer = tpi.Linear(K, 24, parallel_mode="row", device=DEVICE, dtype=dtype)
    x = wide(5, K, dtype=dtype)

    def results():
        layer.zero_grad()
        y = layer(x)
        y.square().sum(-1).backward(torch.ones(5, device=DEVICE, dtype=dtype))
        return y.detach(), layer.weight.grad, layer.bias.grad

    with tpi.set_tp_invariant_mode(True):
        outside = results()
        with tpi.batch_invariant():
            assert_bitwise_equal(results()[0], outside[0])
            assert_bitwise_equal(F.linear(x, layer.weight, layer.bias).detach(), outside[0])  # a plain one, too
            inside = results()
    assert_bitwise_equal(inside[1:], outside[1:])


def test_gradients():
    """Forward and backward inside, against float64; and rows of the input's gradient in any batch."""

    def grads(x, dtype, context):
        model = Classifier(dtype)
        x = x.detach().to(dtype).requires_grad_()
        with context:
            (model(x).log() * wide(64, 50, seed=9)[: len(x)].to(dtype)).sum(1).square().sum().backward()
        return {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}

    x = wide(64, K) / 64
    ours = grads(x, torch.float32, tpi.batch_invariant())
    exact = grads(x, torch.float64, set_batch_invariant_mode(False))
    theirs = grads(x, torch.float32, set_batch_invariant_mode(False))
    for name, expected in exact.items():
        error, torchs = ((g[name].double() - expected).norm() / expected.norm() for g in (ours, theirs))
        assert error <= max(2 * torchs, 1e-6), f"{name}: {error} against torch's {torchs}"
    for size in (1, 5, 32):
        assert_bitwise_equal(grads(x[:size], torch.float32, tpi.batch_invariant())["x"], ours["x"][:size])
    if DEVICE == "cpu":
        assert not torch.equal(grads(x[:1], torch.float32, set_batch_invariant_mode(False))["x"], theirs["x"][:1])


@pytest.mark.parametrize("log", (False, True))
def test_softmax_gradients(log):
    x, grad = wide(6, 40).requires_grad_(), wide(6, 40, seed=1)
    f = torch.log_softmax if log else torch.softmax
    with tpi.batch_invariant():
        (ours,) = torch.autograd.grad(f(x / 64, -1), x, grad)
    (exact,) = torch.autograd.grad(f(x.double() / 64, -1), x, grad.double())
    assert (ours - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpointing(reentrant):
    """The recomputed forward gives the same bits: torch rounds this layout twice."""
    model = Classifier(torch.bfloat16).up
    x = wide(3, 4, K, dtype=torch.bfloat16).transpose(0, 1).requires_grad_()
    grad = wide(4, 3, 192, seed=1, dtype=torch.bfloat16)
    again = []

    def watched(x):
        again.append(model(x).detach())
        return model(x).square()

    def input_grad(f):
        (got,) = torch.autograd.grad(f(x), x, grad)
        return got

    with tpi.batch_invariant():
        got = input_grad(lambda x: checkpoint(watched, x, use_reentrant=reentrant)) if not reentrant else None
        if reentrant:  # torch.autograd.grad is not for it
            leaf = x.detach().requires_grad_()
            checkpoint(watched, leaf, use_reentrant=True).backward(grad)
            got = leaf.grad
        assert_bitwise_equal(got, input_grad(lambda x: model(x).square()))
    assert len(again) == 2
    assert_bitwise_equal(again[1], again[0])
    assert not torch.equal(model(x), again[0]) or DEVICE == "cuda"


class Counted:
    """A backend of torch.compile that runs the graph as it is and counts."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph, example_inputs):
        def run(*args):
            self.runs += 1
            return graph.forward(*args)

        return run


def test_compiled_functions_run_eagerly():
    """Inside no graph runs, because a compiler may have fused it, compiled before or not; outside graphs run again."""
    w, x, backend = wide(K, 16, seed=1), wide(8, K), Counted()
    before, new, entering = (torch.compile(f, backend=backend) for f in 3 * [lambda x: (x @ w).softmax(-1)])

    def enters(x):
        with tpi.batch_invariant():
            return (x @ w).softmax(-1)

    entering = torch.compile(enters, backend=backend)
    before(x)
    assert backend.runs == 1
    with tpi.batch_invariant():
        expected = (x @ w).softmax(-1)
        with set_batch_invariant_mode(False):
            before(x)
        assert_bitwise_equal([before(x), new(x), entering(x)], 3 * [expected])
    assert_bitwise_equal(entering(x), expected)
    assert backend.runs == 1
    before(x)
    assert backend.runs == 2 and not is_batch_invariant_mode_enabled()


# --- products: alpha, beta, out, in place ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ((7,), (1, 7), (5, 1), (5, 7), (1,), ()), ids=str)
@pytest.mark.parametrize(("alpha", "beta"), ((1, 1), (2, 1), (1, -0.5), (0.3, 1.7), (1, 0), (0, 1)))
def test_addmm(shape, alpha, beta, dtype):
    c, a, b = wide(*shape, seed=1, dtype=dtype), wide(5, K, dtype=dtype), wide(K, 7, seed=2, dtype=dtype)
    with tpi.batch_invariant():
        ours = torch.addmm(c, a, b, alpha=alpha, beta=beta)
        batch = torch.baddbmm(c, a[None], b[None], alpha=alpha, beta=beta)[0]
        vector = torch.addmv(c.expand(5, 7)[:, 0], a, b[:, 0], alpha=alpha, beta=beta)
        if shape == (5, 7):
            assert_bitwise_equal(c.clone().addmm_(a, b, alpha=alpha, beta=beta), ours)
            assert_bitwise_equal(c.clone()[None].baddbmm_(a[None], b[None], alpha=alpha, beta=beta)[0], ours)
    exact = torch.addmm(c.double(), a.double(), b.double(), alpha=alpha, beta=beta)
    tolerance = torch.finfo(dtype).eps + 1e-6 * (alpha != 0)
    assert (ours - exact).norm() <= tolerance * exact.norm()
    assert_bitwise_equal(batch, ours)
    assert_bitwise_equal(vector, ours[:, 0].contiguous())


def test_beta_zero_reads_nothing():
    with tpi.batch_invariant():
        y = torch.addmm(torch.full((7,), math.nan, device=DEVICE), wide(5, 9), wide(9, 7), beta=0)
    assert y.isfinite().all()


@pytest.mark.parametrize("start", ("empty", "right"))
def test_out(start):
    a, b, c, x = wide(5, K), wide(K, 7, seed=1), wide(7, seed=2), wide(3, 5, K, seed=3)
    calls = {
        "mm": (torch.mm, (a, b)),
        "matmul": (torch.matmul, (a, b)),
        "matmul of many": (torch.matmul, (x, b)),
        "bmm": (torch.bmm, (x, b.expand(3, -1, -1))),
        "addmm": (torch.addmm, (c, a, b)),
        "baddbmm": (torch.baddbmm, (c, x, b.expand(3, -1, -1))),
        "mv": (torch.mv, (a, b[:, 0])),
        "dot": (torch.dot, (a[0], b[:, 0])),
        "softmax": (torch.softmax, (a, -1)),
        "log_softmax": (torch.log_softmax, (a, 0)),
        "mean": (torch.mean, (a, 0)),
        "sum": (torch.sum, (x, (0, 2))),
    }
    for name, (f, args) in calls.items():
        with tpi.batch_invariant():
            expected = f(*args)
            out = torch.full_like(expected, math.nan) if start == "right" else expected.new_empty(0)
            assert f(*args, out=out) is out
        assert_bitwise_equal(out, expected, name)
    with tpi.batch_invariant():
        with pytest.raises(TypeError, match=re.escape("aten.mm.out: out is torch.float64: it must be torch.float32")):
            torch.mm(a, b, out=torch.empty(5, 7, dtype=torch.float64, device=DEVICE))
        with pytest.raises(ValueError, match=re.escape("out has shape (7, 5): it must be (5, 7), or empty")):
            torch.mm(a, b, out=torch.empty(7, 5, device=DEVICE))


def test_other_dtypes_out():
    a, b = wide(5, K, dtype=torch.bfloat16), wide(K, 7, seed=1, dtype=torch.bfloat16)
    with tpi.batch_invariant():
        y = torch.mm(a, b, out_dtype=torch.float32)
        assert y.dtype == torch.float32
        assert_bitwise_equal(y.bfloat16(), a @ b)
        for name, got in {
            "mean": a.mean(1, dtype=torch.float32),
            "sum": a.sum(1, keepdim=True, dtype=torch.float32),
            "softmax": a.softmax(1, dtype=torch.float32),
        }.items():
            assert got.dtype == torch.float32, name
        assert a.sum(1, keepdim=True).shape == (5, 1)
        assert_bitwise_equal(a.mean(1, dtype=torch.float32).bfloat16(), a.mean(1))


def test_empty_and_scalar():
    x = wide(4, 6)
    with tpi.batch_invariant():
        assert_bitwise_equal(x[:0] @ wide(6, 3), torch.zeros(0, 3, device=DEVICE))
        assert_bitwise_equal(x[:, :0] @ wide(0, 3), torch.zeros(4, 3, device=DEVICE))
        assert torch.bmm(x[:0, None], wide(0, 6, 3)).shape == (0, 1, 3)
        assert x[:0].softmax(-1).shape == (0, 6) and x[:, :0].log_softmax(-1).shape == (4, 0)
        assert_bitwise_equal(x[:, :0].sum(1), torch.zeros(4, device=DEVICE))
        assert x[:, :0].mean(1).isnan().all() and x[:0].mean(1).shape == (0,)
        scalar = torch.tensor(3.0, device=DEVICE)
        assert scalar.softmax(0) == 1 and scalar.log_softmax(0) == 0 and scalar.mean(0) == 3
        assert_bitwise_equal(F.linear(x[0], x), F.linear(x[:1], x)[0])


# --- the row kernels ------------------------------------------------------------------------------------------------

KERNELS = [triton_softmax] if DEVICE == "cuda" else [triton_softmax, reference_softmax]


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda module: module.__name__.rpartition(".")[2])
@pytest.mark.parametrize("h", (1, 7, 16, 300, 1024, 17001))
def test_row_kernels(kernels, h):
    x = wide(3, h)
    for log, exact in ((False, torch.softmax), (True, torch.log_softmax)):
        expected = exact(x.double(), -1)
        got = kernels.softmax(x, log=log, out_dtype=torch.float32)
        assert (got - expected).norm() <= 4e-7 * expected.norm() + 1e-30
        for dtype in (torch.bfloat16, torch.float16):
            assert_bitwise_equal(kernels.softmax(x, log=log, out_dtype=dtype), got.to(dtype))
        padded = torch.full((3, h + 3), math.nan, device=DEVICE)
        padded[:, 1:-2] = x  # other alignment, neighbours that would be seen
        assert_bitwise_equal(kernels.softmax(padded[1:2, 1:-2], log=log, out_dtype=torch.float32), got[1:2])
    sums = kernels.row_sums(x, divisor=3, out_dtype=torch.float32)
    exact_sums = x.double().sum(1) / 3
    assert (sums - exact_sums).norm() <= 1e-6 * x.double().norm()
    assert_bitwise_equal(kernels.row_sums(padded[1:2, 1:-2], divisor=3, out_dtype=torch.float32), sums[1:2])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kernels", KERNELS, ids=lambda module: module.__name__.rpartition(".")[2])
@pytest.mark.parametrize("log", (False, True))
def test_values_that_are_not_finite(kernels, log):
    x = wide(6, 40)
    x[1, 3], x[2, 5], x[4, 7] = math.nan, math.inf, -math.inf
    x[3] = -math.inf
    got = kernels.softmax(x, log=log, out_dtype=torch.float32)
    expected = (torch.log_softmax if log else torch.softmax)(x.double(), -1)
    assert_bitwise_equal(got.isnan(), expected.isnan())
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=1e-7, equal_nan=True)


def test_safe_softmax():
    x = wide(3, 8)
    x[1] = -math.inf
    with tpi.batch_invariant():
        y = torch.ops.aten._safe_softmax(x, -1)
        assert_bitwise_equal(y[[0, 2]], x[[0, 2]].softmax(-1))
    assert_bitwise_equal(y[1], torch.zeros(8, device=DEVICE))


# --- what is refused, and what is left alone ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "text", "call"),
    (
        (TypeError, "aten.mm.default: self is torch.float64: inside", lambda x: torch.mm(x.double(), x.double())),
        (TypeError, "aten.mean.dim: dtype is torch.float64", lambda x: x.mean(0, dtype=torch.float64)),
        (TypeError, "aten.mm.default: self has layout torch.sparse_coo: ", lambda x: torch.mm(x.to_sparse(), x)),
        (NotImplementedError, "aten.mm.default: self is on meta: ", lambda x: torch.mm(x.to("meta"), x.to("meta"))),
        (NotImplementedError, "aten.convolution.default: inside", lambda x: F.conv1d(x[None], x[None])),
        (NotImplementedError, "write it as matmul", lambda x: torch.addbmm(x, x[None], x[None])),
        (ValueError, "shapes (4, 4) and (3, 4) cannot be multiplied", lambda x: torch.mm(x, x[:3])),
        (ValueError, "(1, 4, 4) and (1, 3, 4) cannot be multiplied", lambda x: torch.bmm(x[None], x[None, :3])),
        (IndexError, "dim 2 is out of range: it must be from -2 to 1", lambda x: x.mean(2)),
        (ValueError, "dropout_p=0.5: inside", lambda x: attend(wide(1, 2, 64), dropout_p=0.5)),
    ),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_refused(error, text, call):
    with tpi.batch_invariant(), pytest.raises(error, match=re.escape(text)):
        call(wide(4, 4))


OVER_DIMS = {
    "prod": lambda x, **dim: x.prod(**dim),
    "norm": lambda x, **dim: x.norm(p=3, **dim),
    "vector_norm": lambda x, **dim: torch.linalg.vector_norm(x, **dim),
    "var": lambda x, **dim: x.var(**dim),
    "std": lambda x, **dim: x.std(**dim),
    "var_mean": lambda x, **dim: torch.var_mean(x, **dim)[0],
    "std_mean": lambda x, **dim: torch.std_mean(x, **dim)[0],
    "nansum": lambda x, **dim: x.nansum(**dim),
}


@pytest.mark.parametrize("name", OVER_DIMS)
def test_other_sums_are_refused_over_dims_alone(name):
    x, call = wide(4, 1000), OVER_DIMS[name]
    for dim in ({"dim": -1}, {"dim": (0,) if name != "prod" else 0}):
        outside = call(x, **dim)
        with tpi.batch_invariant(), pytest.raises(NotImplementedError, match="do not depend on the batch; write it"):
            call(x, **dim)
        assert_bitwise_equal(call(x, **dim), outside)
    with tpi.batch_invariant():
        inside = call(x)
    assert_bitwise_equal(inside, call(x))


def test_fused_attention_is_refused():
    q = wide(1, 2, 4, 8, dtype=torch.bfloat16)
    flash = f"_scaled_dot_product_flash_attention{'_for_cpu' if DEVICE == 'cpu' else ''}"
    with tpi.batch_invariant(), torch.inference_mode():
        with pytest.raises(NotImplementedError, match=r"call F\.scaled_dot"):
            getattr(torch.ops.aten, flash)(q, q, q)
        by_name = torch.ops.aten.scaled_dot_product_attention(q, q, q)  # what torch's own C++ calls
        assert_bitwise_equal(by_name, F.scaled_dot_product_attention(q, q, q))


def test_integers_are_not_routed():
    x = torch.arange(6, device=DEVICE).view(2, 3)
    with tpi.batch_invariant():
        assert (x + 1).prod(-1).tolist() == [6, 120]
        assert_bitwise_equal(x.sum(1), torch.tensor([3, 12], device=DEVICE))
        assert_bitwise_equal((x > 1).sum(0), torch.tensor([1, 1, 2], device=DEVICE))
        assert_bitwise_equal(x.sum(1, dtype=torch.float32), torch.tensor([3.0, 12.0], device=DEVICE))
        if DEVICE == "cpu":
            assert_bitwise_equal(x @ x.t(), torch.tensor([[5, 14], [14, 50]]))
            out = torch.zeros(2, 2, dtype=torch.int64)
            assert torch.mm(x, x.t(), out=out) is out and out[1, 1] == 50
            assert out.addmm_(x, x.t()) is out and out[1, 1] == 100


def test_default_gemm_fn_applies():
    seen = []

    def gemm_fn(a, b, *, bias=None, out_dtype=None):
        seen.append(tuple(a.shape))
        return (a @ b if len(seen) == 1 else F.linear(a, b.t())).to(out_dtype)  # not routed again: no recursion

    tpi.set_default_gemm_fn(gemm_fn)
    try:
        with tpi.batch_invariant():
            torch.mm(wide(2, 3), wide(3, 4))
            for grad in (False, True):
                with torch.set_grad_enabled(grad):
                    F.linear(wide(2, 3), wide(4, 3).requires_grad_())
            assert is_batch_invariant_mode_enabled()
    finally:
        tpi.set_default_gemm_fn(None)
    assert seen == 3 * [(2, 3)]


NEW_TILES = """
import faulthandler; faulthandler.dump_traceback_later(100, exit=True)  # a deadlock, and whose
import torch, tp_invariant as tpi
from tp_invariant.kernels.gemm import reference
a, b = (torch.randn(s, generator=torch.Generator().manual_seed(1)) for s in ((70, 300), (300, 130)))
layer = tpi.Linear(300, 130, bias=False)
layer.weight.data.copy_(b.t())

def trained():
    x = a.clone().requires_grad_()
    with tpi.set_tp_invariant_mode(True):
        y = layer(x)
    return y.detach(), *torch.autograd.grad(y.square().sum(), (x, layer.weight))

calls = {f.__name__: f for f in (reference.matmul, reference.chained_matmul, torch.ops.tp_invariant.gemm, torch.mm)}
calls = {name: lambda f=f: (f(a, b),) for name, f in calls.items()} | {"layer": trained}
for name, call in calls.items():
    reference._blas_agrees.cache_clear()  # no shape of a tile was met
    with tpi.batch_invariant():
        inside = call()
    reference._blas_agrees.cache_clear()
    outside = (reference.matmul(a, b),) if name == "mm" else call()
    assert all(torch.equal(one, other) for one, other in zip(inside, outside, strict=True)), name
    assert (inside[0] - a.double() @ b.double()).norm() < 1e-6 * inside[0].norm(), name
assert not torch.equal(torch.mm(a, b), inside[0])  # torch's bits are others
"""


def test_this_librarys_products_are_not_routed_back():
    """The CPU matmul calls the BLAS through torch while it checks a new tile shape with a lock held."""
    subprocess.run([sys.executable, "-W", "error", "-c", NEW_TILES], check=True, timeout=500)


# --- the context ----------------------------------------------------------------------------------------------------


def is_routed() -> bool:
    """Whether products are routed: float64 is refused then."""
    try:
        torch.mm(torch.ones(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64))
    except TypeError:
        return True
    return False


def test_nests_and_restores():
    sets = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    assert not is_routed()
    with pytest.raises(KeyError), tpi.batch_invariant():
        assert is_routed() and is_batch_invariant_mode_enabled()
        with tpi.batch_invariant():
            assert is_routed()
        with pytest.raises(KeyError), set_batch_invariant_mode(False):
            assert not is_routed() and not is_batch_invariant_mode_enabled()
            with set_batch_invariant_mode():
                assert is_routed()
            assert not is_routed()
            raise KeyError
        with pytest.raises(TypeError, match=r"float64"):
            torch.mm(torch.ones(1, 1).double(), torch.ones(1, 1).double())
        assert is_routed()
        raise KeyError
    assert not is_routed() and not is_batch_invariant_mode_enabled()
    assert sets == (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())
    with pytest.raises(TypeError, match="enabled=1 is not understood"):
        set_batch_invariant_mode(1).__enter__()


def test_as_a_decorator():
    @tpi.batch_invariant()
    def inside():
        return is_routed()

    assert inside() and inside() and not is_routed()


def test_enable_and_disable():
    disable_batch_invariant_mode()  # nothing to undo
    enable_batch_invariant_mode()
    try:
        enable_batch_invariant_mode()  # twice is as once
        assert is_routed() and is_batch_invariant_mode_enabled()
        with set_batch_invariant_mode(False):
            assert not is_routed()
            with pytest.raises(RuntimeError, match="leave that one first"):
                disable_batch_invariant_mode()
        assert is_routed()
    finally:
        disable_batch_invariant_mode()
    assert not is_routed()


def test_applies_to_its_own_thread_only():
    seen = {}
    with tpi.batch_invariant():
        thread = threading.Thread(target=lambda: seen.update(other=is_routed()))
        thread.start()
        thread.join()
        seen["own"] = is_routed()
    assert seen == {"other": False, "own": True}


def test_threads_that_torch_starts_inherit_it():
    """As the threads of a CUDA backward do."""
    unit = torch.jit.CompilationUnit(
        """
        def product(x):
            return torch.mm(x, x)

        def elsewhere(x):
            return torch.jit.wait(torch.jit.fork(product, x))
        """
    )
    x = torch.ones(2, 2).double()
    with tpi.batch_invariant(), pytest.raises(RuntimeError, match=r"aten\.mm\.default: self is torch\.float64: inside"):
        unit.elsewhere(x)
    assert unit.elsewhere(x).sum() == 8


SUMS_AS_OUTSIDE = """
import torch, torch.nn.functional as F
from tp_invariant.batch_invariant import batch_invariant
x = torch.randn(130, 333, generator=torch.Generator().manual_seed(2)) * 3
names = ("silu", "selu", "celu", "sigmoid", "exp", "sigmoid_", "selu_")
f = [lambda x, f=getattr(F, n, None) or getattr(torch, n): f(x.clone()) for n in names] + [lambda x: x.abs() ** 1.7]
f += [lambda x: torch.add(x, x.sin().sin(), alpha=0.3), lambda x: torch.sub(x, 1.7, alpha=0.3)]
f += [lambda x: x.clone().add_(x.sin().sin(), alpha=0.3)]
tensors = [x, x.t(), torch.tensor(2.5), torch.arange(6), x[0].bfloat16(), torch.tensor(1.5, dtype=torch.bfloat16)]
tensors += [x > 0, torch.randn(2, 2, dtype=torch.complex64), x[:0]]
tensors += [x[:120].view(2, 3, 4, -1).to(memory_format=torch.channels_last)]
forms = [lambda a, b: a + b, lambda a, b: b + a, lambda a, b: a - b, lambda a, b: b - a, torch.rsub]
forms += [lambda a, b: torch.add(a, b, alpha=2), lambda a, b: a.clone().add_(b)]
forms += [lambda a, b: a.clone().sub_(b, alpha=2)]

def result(form, a, b):
    try:
        y = form(a, b)
    except (RuntimeError, TypeError) as error:
        return type(error), str(error).splitlines()[0]
    return y.dtype, y.shape, y.stride(), y.contiguous().view(-1).tolist()

def sums():
    others = (1, 1.5, True, 2 + 1j, torch.tensor(3), torch.tensor(0.1))
    found = [result(form, a, b) for a in tensors for b in (*others, a) for form in forms]
    w = torch.ones(4, requires_grad=True)
    v = w.clone()
    v.add_(1)
    v.add_(w, alpha=2)
    v.square().sum().backward()
    return [*found, w.grad.tolist(), v._version]

plain = sums()
stock = [(g(x), g(x[1:2])) for g in f]
with batch_invariant():
    for g in f:
        assert torch.equal(g(x)[1:2], g(x[1:2])), g
    assert sums() == plain
    x.requires_grad_()
    F.selu(x).sum(-1).sum(0).backward()
assert sums() == plain
for g, (whole, row) in zip(f, stock, strict=True):
    assert torch.equal(g(x), whole) and torch.equal(g(x[1:2]), row)
assert any(not torch.equal(whole[1:2], row) for whole, row in stock) and x.grad.isfinite().all()
"""


def test_sums_of_all_kinds_are_torchs_and_nothing_changes_outside():
    subprocess.run([sys.executable, "-W", "error", "-c", SUMS_AS_OUTSIDE], check=True)


# --- other users of torch's dispatcher ------------------------------------------------------------------------------


def layer_of(w: Tensor, b: Tensor):
    return lambda x: F.silu(F.linear(x, w, b)).softmax(-1)


@pytest.mark.parametrize("mode_first", (True, False))
def test_under_other_modes(mode_first):
    """In either order of entering: the other modes see the operations, and what they call is routed."""
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    f, x = layer_of(wide(5, K), wide(5, seed=1)), wide(4, K, seed=2) / 64
    modes = [Mode(), tpi.batch_invariant()] if mode_first else [tpi.batch_invariant(), Mode()]
    with modes[0], modes[1]:
        y = f(x)
    assert {"aten::addmm", "aten::silu", "aten::_softmax"} <= set(seen)
    with tpi.batch_invariant():
        assert_bitwise_equal(y, f(x))


def test_transforms_of_functions():
    # small enough that no softmax is 0 or 1, whose gradient would be as inexact as chance has it
    w, bias, x = wide(5, K) / 2**20, wide(5, seed=1) / 2**8, wide(40, 3, K, seed=2)
    f = layer_of(w, bias)

    def loss(x):
        return f(x).square().sum()

    with tpi.batch_invariant():
        assert_bitwise_equal(torch.func.vmap(f)(x), f(x))
        ours = torch.func.grad(loss)(x)
        assert_bitwise_equal(torch.func.vmap(torch.func.grad(loss))(x), ours)
    theirs = torch.func.grad(loss)(x)
    f = layer_of(w.double(), bias.double())
    exact = torch.func.grad(loss)(x.double())
    error, torchs = ((g.double() - exact).norm() / exact.norm() for g in (ours, theirs))
    assert error <= max(2 * torchs, 1e-6), f"{error} against torch's {torchs}"


def test_autocast():
    f, x = layer_of(wide(5, K), wide(5, seed=1)), wide(64, K, seed=2) / 64
    with tpi.batch_invariant(), torch.autocast(DEVICE, torch.bfloat16):
        assert first_bit_that_follows_the_batch(f, x) is None
        inside = F.linear(x, wide(5, K), wide(5, seed=1))
    assert inside.dtype == torch.bfloat16


def test_subclasses_dispatch_first():
    """For example a DTensor: its own dispatch unwraps it, and the local operation is routed."""
    seen = []

    class Wrapper(Tensor):
        @staticmethod
        def __new__(cls, inner):
            return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            seen.append((func, is_batch_invariant_mode_enabled()))
            return func(*(a.inner if isinstance(a, Wrapper) else a for a in args), **(kwargs or {}))

    a, b = wide(3, K), wide(K, 5, seed=1)
    with tpi.batch_invariant():
        got = torch.mm(Wrapper(a), b)
        expected = torch.mm(a, b)
    assert seen == [(torch.ops.aten.mm.default, True)]
    assert_bitwise_equal(got, expected)


# --- on a GPU -------------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_real_sizes(dtype):
    """Rows of 1 to 2048 tokens; torch's own mm gives other bits for some of them, so the test can fail."""
    x, w, b = wide(2048, 4096, dtype=dtype), wide(4096, 1024, seed=1, dtype=dtype), wide(1024, seed=2, dtype=dtype)
    batches = (1, 2, 16, 33, 64, 512)

    def f(x):
        return F.linear(x, w.t(), b).log_softmax(-1)

    with tpi.batch_invariant():
        assert first_bit_that_follows_the_batch(f, x, batches=batches) is None
        for h in (32000, 4097):
            rows = wide(70, h, seed=3, dtype=dtype)
            for g in (lambda x: x.softmax(-1), lambda x: x.log_softmax(-1), lambda x: x.mean(-1), lambda x: x.sum(-1)):
                assert first_bit_that_follows_the_batch(g, rows) is None
    assert first_bit_that_follows_the_batch(lambda x: x @ w, x, batches=batches) is not None


@gpu
def test_a_hugging_face_model():
    """Four of Qwen3-0.6B's layers, causal and without a mask: fused attention, and a row's logits in any batch."""
    pytest.importorskip("transformers")
    layers, batches = 4, (1, 2, 4, 8, 16, 32, 64)
    sizes = dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    with torch.device(DEVICE):
        model = hf_models.build("qwen3", torch.bfloat16, num_hidden_layers=layers, vocab_size=4096, **sizes).eval()
    ids = torch.randint(3, 4096, (max(batches), 40), generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def logits(ids: Tensor) -> Tensor:
        return model(input_ids=ids, use_cache=False).logits

    with torch.no_grad():
        with tpi.batch_invariant():
            assert first_bit_that_follows_the_batch(logits, ids, batches=batches) is None
            fused = mock.patch.object(attention_choice, "attention", wraps=attention_choice.attention)
            with fused as calls:
                ours = logits(ids[:2])
            assert [call.kwargs["causal"] for call in calls.call_args_list] == [True] * layers
        assert first_bit_that_follows_the_batch(logits, ids, batches=batches) is not None
        theirs = logits(ids[:2])
        model.float()
        exact = logits(ids[:2])
    error, torchs = (float((y - exact).norm() / exact.norm()) for y in (ours, theirs))
    assert error <= 1.2 * torchs < 0.5, f"{error} against torch's {torchs}"


@gpu
def test_backward_threads_are_routed():
    """Autograd runs a CUDA backward on a thread of its own, which inherits the mode."""
    x = wide(4, 4).double().requires_grad_()
    y = x @ x
    with tpi.batch_invariant(), pytest.raises(TypeError, match="float64"):
        y.backward(torch.ones_like(y))
