"""Elementwise functions that a model's own code calls on sharded features: on a CPU the same bits wherever one lies."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tp_invariant as tpi
from tp_invariant.core.elementwise import POSITION_DEPENDENT_FUNCTIONS
from tp_invariant.functional.attention_choice import SafeSdpa
from tp_invariant.testing import assert_bitwise_equal, full_grads, run_ranks, wide_randn

CALLS = {
    "torch.sigmoid": torch.sigmoid,
    "Tensor.sigmoid": Tensor.sigmoid,
    "torch.special.i0e": torch.special.i0e,
    "torch.arctanh": lambda x: torch.arctanh(x / (1 + x.abs())),
    "special.expit": torch.special.expit,
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x * 1, inplace=True),
    "silu in place, by position": lambda x: F.silu(x * 1, True),
    "sigmoid_": lambda x: (x * 1).sigmoid_(),
    "by name": lambda x: F.silu(input=x),
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "softplus": lambda x: F.softplus(x, 2.0),
    "elu": lambda x: F.elu(x, 0.7),
    "exp": lambda x: x.clamp(max=9).exp(),
    "pow": lambda x: (1 + x * x) ** 0.3,
    "squares and cubes": lambda x: x.pow(2) - x**3 + 1,
    "rpow": lambda x: 1.7 ** x.clamp(-9, 9),
    "rpow of 2": lambda x: 2 ** x.clamp(-9, 9),
    "pow of a number": lambda x: torch.pow(1.7, exponent=x.clamp(-9, 9)),
    "logsigmoid": F.logsigmoid,
    "ipow": lambda x: (1 + x * x).__ipow__(0.3),
    "mish": F.mish,
}


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def both(function, x, mode=True):
    """The result and the gradient, by a module with the hooks."""
    module = Calls(function)
    SafeSdpa(module)
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with tpi.set_tp_invariant_mode(mode):
        y = module(x)
        y.backward(torch.linspace(-1, 1, 1000, dtype=y.dtype)[7].expand(y.shape))
    return y.detach(), x.grad


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_the_position_of_an_element(name, dtype):
    """Of one head of 20 among 8, and of some tokens; with torch's values and strides."""
    function = CALLS[name]
    x = wide_randn(33, 8, 20, generator=torch.Generator().manual_seed(0), spread=2).to(dtype)
    y, dx = both(function, x)
    assert_bitwise_equal(both(function, x[:, 3:4]), (y[:, 3:4].contiguous(), dx[:, 3:4].contiguous()))
    assert_bitwise_equal(both(function, x[5:9]), (y[5:9], dx[5:9]))
    other = x.transpose(0, 1)
    assert_bitwise_equal(both(function, other)[0].transpose(0, 1), y)
    if name not in ("rpow", "rpow of 2", "pow of a number", "logsigmoid"):  # whose result torch makes contiguous
        assert both(function, other)[0].stride() == function(other).stride()
    assert both(function, x[..., 3:17])[0].stride() == function(x[..., 3:17]).stride()
    exact = function(x.double())
    error, own = ((result.double() - exact).abs().max() for result in (y, function(x)))
    assert error <= 2 * own + 1e-6


@pytest.mark.parametrize("count", (64, 70, 3 << 14), ids=str)
def test_in_place(count):
    """Of one block, of one with a tail, and of several: the values, and the gradient of what is no more."""
    x = torch.randn(count)
    y, dx = both(F.silu, x)
    assert_bitwise_equal(both(lambda x: F.silu(x * 1, inplace=True), x), (y, dx))


def test_halves():
    x = wide_randn(33, 2, 20, generator=torch.Generator().manual_seed(0), spread=2)
    for call in (F.glu, lambda x: F.glu(x, dim=-1), lambda x: F.glu(x.transpose(1, 2), 1).transpose(1, 2)):
        y, dx = both(call, x)
        torch.testing.assert_close(y, F.glu(x))
        got = both(call, x[4:5])
        assert_bitwise_equal([t.contiguous() for t in got], [y[4:5].contiguous(), dx[4:5].contiguous()])


def test_the_control():
    """Without the mode an element's bits depend on where it lies, for some of these functions."""
    x = wide_randn(33, 8, 20, generator=torch.Generator().manual_seed(0), spread=2)
    differ = [
        name
        for name, function in CALLS.items()
        if not torch.equal(both(function, x[:, 3:4], False)[0], both(function, x, False)[0][:, 3:4])
    ]
    assert "torch.sigmoid" in differ and "silu" in differ, differ


def test_what_is_left_to_torch():
    x, module = torch.randn(3, 5), Calls(torch.sigmoid)
    SafeSdpa(module)
    with tpi.set_tp_invariant_mode(True):
        assert module(torch.randn(3, 5, device="meta")).shape == (3, 5)
        module.function = lambda x: x.pow(2)
        assert module(torch.randn(3, 5, requires_grad=True)).grad_fn.name() == "PowBackward0"
        module.function = lambda x: torch.sigmoid(x, out=torch.empty_like(x))
        with pytest.raises(ValueError, match=r"sigmoid\(.., out=\) .* leave out= away"):
            module(x)
    assert len(POSITION_DEPENDENT_FUNCTIONS) > 100


@pytest.mark.parametrize(
    "function",
    (
        lambda x: x[0].expand(2, 4, 6).exp().view(-1),
        lambda x: x[:, :0].t().exp(),
        lambda x: x.to_sparse().sin().to_dense(),
        lambda x: x**True,
        lambda x: F.glu(x[:, :3]),
        lambda x: F.glu(x[:, :1]),
        lambda x: x.long().exp_(),
        lambda x: x.long().pow_(0.5),
    ),
    ids=("expanded", "empty", "sparse", "a power of True", "odd", "one column", "integers", "roots of integers"),
)
def test_results_and_errors_are_those_of_torch(function):
    def outcome(mode):
        with tpi.set_tp_invariant_mode(mode):
            try:
                y = module(x)
            except RuntimeError as error:
                return str(error)
        return y.shape, y.stride(), y.dtype, y.tolist()

    x, module = torch.arange(24.0).view(4, 6) / 64, Calls(function)
    SafeSdpa(module)
    assert outcome(True) == outcome(False)


@pytest.mark.parametrize("function", (torch.log, torch.rsqrt, lambda x: x**0.3, torch.acosh))
def test_what_fills_a_vector_has_a_derivative(function):
    with torch.autograd.detect_anomaly():
        y, dx = both(function, torch.rand(3, 5) + 1.5)
    assert y.isfinite().all() and dx.isfinite().all()


class Gated(nn.Module):
    """Heads of 20 with a gate, as some models' attention has, called as a function on a part of a projection."""

    def __init__(self):
        super().__init__()
        self.both, self.out = nn.Linear(512, 8 * 40, bias=False), nn.Linear(160, 512, bias=False)

    def forward(self, x):
        values, gate = self.both(x).unflatten(-1, (-1, 40)).chunk(2, dim=-1)
        return self.out((values * torch.sigmoid(gate)).flatten(-2))


def gated(tp_group, mode, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(Gated()).to(dtype)
    x = wide_randn(3, 512, generator=torch.Generator().manual_seed(1), spread=2).to(dtype).requires_grad_()
    plan = {"0.both": "colwise", "0.out": "rowwise"}
    if dtype is torch.float32:
        tpi.parallelize(model, tp_group, plan)
    with tpi.set_tp_invariant_mode(mode):
        y = model(x)
        y.square().mean().backward()
    grads = full_grads(model) if dtype is torch.float32 else {n: p.grad for n, p in model.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **grads}


@pytest.mark.parametrize("degree", (2, 8))
def test_a_gate(degree):
    want = run_ranks(gated, 1, True)[0]
    exact = gated(None, False, torch.float64)
    for name, value in exact.items():
        torch.testing.assert_close(want[name].double(), value, rtol=1e-4, atol=1e-5 * float(value.abs().max()))
    for got in run_ranks(gated, degree, True):
        assert_bitwise_equal(got, want)
    assert not torch.equal(run_ranks(gated, degree, False)[0]["y"], run_ranks(gated, 1, False)[0]["y"])
