"""ParallelNorm: the same bits with whole, token-sharded and head-sharded x; and whose norms it can stand for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn

import tp_invariant as tpi
from tp_invariant import testing
from tp_invariant.comm.collectives import gather_dim, resolve_group
from tp_invariant.layers.parallel_norm import recognise_norm
from tp_invariant.testing import assert_bitwise_equal, wide_randn

SHAPE = (2, 24, 8, 40)  # [B, S, heads, D]; for heads_dim 1, [B, heads, S, D]


def data(heads_dim: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, dy = (wide_randn(*SHAPE, generator=generator, spread=4).to(dtype) for _ in range(2))
    gamma, beta = (wide_randn(SHAPE[-1], generator=generator, spread=2).to(dtype) for _ in range(2))
    if heads_dim == 1:
        x, dy = (t.transpose(1, 2) for t in (x, dy))
    return x, dy, gamma, beta


def norm_on_rank(tp_group, sharded: str | None, heads_dim: int, options: dict[str, Any], dtype, mode) -> Any:
    """y, dx, dgamma, dbeta, whole; `sharded` is "tokens", "heads" or None."""
    group = resolve_group(tp_group)
    x, dy, gamma, beta = data(heads_dim, dtype)
    dim = {"tokens": 1, "heads": heads_dim, None: None}[sharded]
    if sharded == "heads":
        options = dict(options, heads=SHAPE[2], heads_dim=heads_dim)
    elif sharded == "tokens":
        options = dict(options, sequence_parallel=True, sequence_dim=1)
    norm = tpi.ParallelNorm(
        SHAPE[-1], 1e-5, bias="LayerNorm" in options.values(), tp_group=tp_group, dtype=dtype, **options
    )
    with torch.no_grad():
        norm.weight.copy_(gamma)
        if norm.bias is not None:
            norm.bias.copy_(beta)
    if dim is not None:
        x, dy = (t.chunk(group.size, dim)[group.rank] for t in (x, dy))
    x = x.clone().requires_grad_()
    with tpi.set_tp_invariant_mode(mode):
        y = norm(x)
        y.backward(dy)
    whole = [t if dim is None else gather_dim(t.contiguous(), dim, group) for t in (y.detach(), x.grad)]
    return *whole, norm.weight.grad, None if norm.bias is None else norm.bias.grad


OPTIONS = [dict(normalization=n, zero_centered_gamma=z) for n, z in itertools.product(("LayerNorm", "RMSNorm"), (0, 1))]


@pytest.mark.parametrize("sharded, heads_dim", [("tokens", 2), ("heads", 2), ("heads", 1)])
def test_same_bits_at_every_degree(sharded, heads_dim):
    cases = list(itertools.product(OPTIONS, (torch.float32, torch.bfloat16)))

    def every(tp_group, sharded):
        return [norm_on_rank(tp_group, sharded, heads_dim, options, dtype, True) for options, dtype in cases]

    expected = every(None, sharded)
    if sharded == "tokens":
        assert_bitwise_equal(every(None, None), expected)
    for degree in (2, 4):
        for rank, results in enumerate(run_ranks(every, degree, sharded)):
            for case, got, want in zip(cases, results, expected, strict=True):
                assert_bitwise_equal(got, want, f"rank {rank} of {degree}, {case}")


@pytest.mark.parametrize("sharded", ("tokens", "heads"))
def test_with_the_mode_off_the_bits_depend_on_the_degree(sharded):
    """The control, and the stock path's correctness."""
    args = sharded, 2, OPTIONS[2], torch.float32
    on = norm_on_rank(None, *args, True)
    results = [run_ranks(norm_on_rank, degree, *args, False)[0] for degree in (1, 2, 4)]
    assert len({testing.digest(got[2]) for got in results}) > 1
    for got in results:
        for value, expected in zip(got[:3], on[:3], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_against_float64(options, dtype):
    def torchs(dtype):
        x, dy, gamma, beta = (t.to(dtype).requires_grad_() for t in data(2, given))
        scale = gamma + 1 if options["zero_centered_gamma"] else gamma
        rms = options["normalization"] == "RMSNorm"
        y = F.rms_norm(x, x.shape[-1:], scale, 1e-5) if rms else F.layer_norm(x, x.shape[-1:], scale, beta, 1e-5)
        y.backward(dy)
        return y.detach(), x.grad, gamma.grad, None if rms else beta.grad

    given = dtype
    exact, theirs = torchs(torch.float64), torchs(dtype)
    ours = norm_on_rank(None, "heads", 2, options, dtype, True)
    for got, torchs_own, value in zip(ours, theirs, exact, strict=True):
        if value is not None:
            errors = [float((t.double() - value).norm() / value.norm()) for t in (got, torchs_own)]
            assert errors[0] <= max(1.1 * errors[1], 8 * torch.finfo(torch.float32).eps), errors


@pytest.mark.parametrize("residual", [False, True])
def test_one_row_without_token_dims(residual):
    """The bits of a row among others; x and residual may have any number of dims."""
    x, dy = wide_randn(2, 5, 40, generator=torch.Generator().manual_seed(0), spread=4).unbind()
    norm, found = tpi.ParallelNorm(40), []
    with tpi.set_tp_invariant_mode(True):
        for rows in (slice(0, 1), 0):  # [1, 40] and [40]
            row = x[rows].clone().requires_grad_()
            norm.weight.grad = None
            y = norm(row, 2 * x[rows])[0] if residual else norm(row)
            y.backward(dy[rows])
            assert y.shape == row.shape == row.grad.shape
            found.append([y.detach().flatten(), row.grad.flatten(), norm.weight.grad])
        y = norm(x[None], 2 * x[None])[0] if residual else norm(x[None])
    y += 0  # a view that an autograd function returns could not be changed in place
    assert_bitwise_equal(found[0], found[1])
    assert_bitwise_equal(found[0][0], y.detach()[0, 0])


@pytest.mark.parametrize("mode", (True, False))
def test_an_rms_norm_with_a_bias(mode):
    x, dy, gamma, beta = data()
    norm = tpi.ParallelNorm(SHAPE[-1], 1e-5, bias=True)
    with torch.no_grad():
        norm.weight.copy_(gamma)
        norm.bias.copy_(beta)
    with tpi.set_tp_invariant_mode(mode):
        y = norm(x)
        y.backward(dy)
    want = F.rms_norm(x.double(), SHAPE[-1:], gamma.double(), 1e-5) + beta.double()
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.bias.grad.double(), dy.double().sum((0, 1, 2)), rtol=1e-4, atol=1e-3)


# --- other libraries' norms -----------------------------------------------------------------------------------------


class OnePlusWeight(nn.RMSNorm):
    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight + 1)


class Own(nn.Module):
    def __init__(self, compute, size=16) -> None:
        super().__init__()
        self.weight, self.eps, self.compute = nn.Parameter(torch.rand(size)), 1e-6, compute

    def forward(self, x):
        return self.compute(x, self.weight)


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


KNOWN = {
    "LayerNorm": (nn.LayerNorm(16, eps=1e-6), ("LayerNorm", False, 1e-6)),
    "LayerNorm without bias": (nn.LayerNorm(16, bias=False), ("LayerNorm", False, 1e-5)),
    "RMSNorm": (nn.RMSNorm(16, eps=1e-4), ("RMSNorm", False, 1e-4)),
    "RMSNorm of the dtype's eps": (nn.RMSNorm(16), ("RMSNorm", False, None)),
    "Llama's": (Own(lambda x, w: w * rms(x, 1e-6)), ("RMSNorm", False, 1e-6)),
    "Gemma's": (Own(lambda x, w: rms(x, 1e-6) * (1 + w)), ("RMSNorm", True, 1e-6)),
    "Cohere's": (Own(lambda x, w: w * F.layer_norm(x, (16,), None, None, 1e-6)), ("LayerNorm", False, 1e-6)),
}


class Counting(Own):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


class WithDropout(Own):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


counting = Counting(lambda x, w: w * rms(x, 1e-6))
counting.calls = 0
UNKNOWN = {
    "counting its calls": counting,
    "of clamped rows": Own(lambda x, w: w * rms(x.clamp(-9, 9), 1e-6)),
    "with dropout, in evaluation": WithDropout(lambda x, w: w * rms(x, 1e-6)).eval(),
    "another eps": Own(lambda x, w: w * rms(x, 1e-5)),
    "no norm": Own(lambda x, w: w * x),
    "gated": Own(lambda x, w: w * rms(x, 1e-6) * x.sigmoid()),
    "squared weight": Own(lambda x, w: w * w * rms(x, 1e-6)),
    "BatchNorm": nn.BatchNorm1d(16),
    "several dims": nn.LayerNorm((4, 4)),
    "GroupNorm": nn.GroupNorm(1, 16),  # over all dims but the first
    "GroupNorm of as many features as rows": nn.GroupNorm(1, 3),
    "over dim 1": Own(lambda x, w: (w * rms(x.transpose(1, -1), 1e-6)).transpose(1, -1)),
    "of the dtype's eps, with a forward of its own": OnePlusWeight(16),
}


@pytest.mark.parametrize("name", KNOWN)
def test_norms_that_are_recognised(name):
    norm, (normalization, zero_centered, eps) = KNOWN[name]
    before = {key: value.clone() for key, value in norm.state_dict().items()}
    found = recognise_norm(norm)
    assert found == dict(normalization=normalization, zero_centered_gamma=zero_centered, eps=eps)
    assert_bitwise_equal(dict(norm.state_dict()), before)
    ours = tpi.ParallelNorm.from_norm(norm, tp_group=None)
    assert list(ours.state_dict()) == list(norm.state_dict())
    x = torch.randn(5, 16)
    with tpi.set_tp_invariant_mode(True):
        torch.testing.assert_close(ours(x), norm(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", UNKNOWN)
def test_norms_that_are_not(name):
    assert recognise_norm(UNKNOWN[name]) is None
    with pytest.raises(ValueError, match="computes no LayerNorm or RMSNorm over its last dim"):
        tpi.ParallelNorm.from_norm(UNKNOWN[name], tp_group=None)


class Replaced(nn.Module):
    """An RMSNorm whose class changes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (8,), self.weight, self.variance_epsilon)


def test_what_is_recognised_is_what_the_class_computes_now(monkeypatch):
    """A norm is tried once for each class and its settings."""
    assert recognise_norm(Replaced()) == recognise_norm(Replaced())
    assert recognise_norm(Replaced())["zero_centered_gamma"] is False
    other = Replaced()
    other.variance_epsilon = 1e-3
    assert recognise_norm(other)["eps"] == 1e-3
    monkeypatch.setattr(Replaced, "forward", lambda self, x: F.rms_norm(x, (8,), self.weight + 1, 1e-6))
    assert recognise_norm(Replaced())["zero_centered_gamma"] is True
    hooked = Replaced()
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    assert recognise_norm(hooked) is None


# --- errors ---------------------------------------------------------------------------------------------------------


def test_errors():
    with pytest.raises(ValueError, match="normalization='BatchNorm' is unknown"):
        tpi.ParallelNorm(8, normalization="BatchNorm")
    with pytest.raises(ValueError, match="heads=4 and heads_dim=None go together"):
        tpi.ParallelNorm(8, heads=4)
    with pytest.raises(ValueError, match="exclude each other"):
        tpi.ParallelNorm(8, heads=4, heads_dim=2, sequence_parallel=True)
    norm = tpi.ParallelNorm(8, heads=4, heads_dim=2)
    with pytest.raises(ValueError, match=r"its dim 2 \(heads_dim\) must hold 4 heads"):
        norm(torch.ones(2, 4, 3, 8))
    with pytest.raises(ValueError, match="its last dim must be features=8"):
        norm(torch.ones(2, 3, 4, 7))
    with tpi.set_tp_invariant_mode(True), pytest.raises(TypeError, match=r"x on rank 0 is torch\.float64"):
        norm.double()(torch.ones(2, 3, 4, 8, dtype=torch.float64))


def many_heads_on_rank(tp_group):
    with pytest.raises(ValueError, match="heads=3 is not divisible by TP degree=2"):
        tpi.ParallelNorm(8, heads=3, heads_dim=2, tp_group=tp_group)


def test_heads_that_the_degree_does_not_divide():
    run_ranks(many_heads_on_rank, 2)
