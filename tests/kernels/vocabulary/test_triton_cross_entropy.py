"""The Triton kernels of cross-entropy: exact sums, so equal for every cut and tile; and the reference's values.

Compiled on a GPU, else in Triton's interpreter.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpus import gpu
from torch import Tensor

from tp_invariant.kernels.vocabulary import cross_entropy, reference_cross_entropy
from tp_invariant.kernels.vocabulary.loss_spec import LossSpec
from tp_invariant.testing import assert_bitwise_equal

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # log(0) of a row that is ignored
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
IGNORED = -100
OPTIONS = {
    "plain": {},
    "smoothing": dict(label_smoothing=0.1),
    "z-loss": dict(z_loss=1e-2),
    "both": dict(label_smoothing=0.3, z_loss=0.5),
}
EVERY_OPTION = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def make_spec(vocabulary: int, label_smoothing: float = 0.0, z_loss: float = 0.0) -> LossSpec:
    return LossSpec(vocabulary, IGNORED, label_smoothing, z_loss)


def data(t: int, n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """logits [t, n], and targets, of which every fourth is ignored."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    logits = (torch.randn(t, n, device=DEVICE, generator=generator) * 4).to(dtype)
    target = torch.randint(0, n, (t,), device=DEVICE, generator=generator)
    target[3::4] = IGNORED
    return logits, target


def on_parts(kernels: Any, x: Tensor, target: Tensor, cuts: tuple[int, ...], spec: LossSpec, mean: bool = True) -> Any:
    """What ranks compute that hold columns cuts[i] .. cuts[i + 1]; they must be of one width, but for the last."""
    pairs, v = itertools.pairwise(cuts), spec.vocabulary
    parts = [(first, max(0, min(last, v) - first), x[:, first:last]) for first, last in pairs]
    extremes = torch.stack([kernels.row_extremes(part, target, n, first, spec) for first, n, part in parts])
    sums = torch.stack([kernels.row_sums(part, target, n, extremes, spec) for _, n, part in parts])
    losses, stats = kernels.token_losses(extremes, sums, target, cuts[1] - cuts[0], spec)
    total, count = kernels.sum_of_tokens(losses, target, spec, mean=mean)
    grads = []
    for grad, number in ((torch.full((1,), 1.7, device=x.device), count), (losses.sin(), None)):
        dx = [kernels.logits_grad(grad, part, target, stats, number, n, first, spec) for first, n, part in parts]
        grads.append(torch.cat(dx, dim=1))
    at_counted = stats.T[target != IGNORED].contiguous()
    return [losses, at_counted, total, *([] if count is None else [count]), *grads]


def whole(kernels: Any, x: Tensor, target: Tensor, spec: LossSpec) -> tuple[Tensor, Tensor]:
    losses, stats = kernels.whole_losses(x, target, spec)
    return losses, stats.T[target != IGNORED].contiguous()


def float64_losses(x: Tensor, target: Tensor, spec: LossSpec) -> Tensor:
    losses = F.cross_entropy(x, target, reduction="none", label_smoothing=spec.label_smoothing, ignore_index=IGNORED)
    return torch.where(target == IGNORED, 0.0, losses + spec.z_loss * x.logsumexp(1).square())


# --- correctness ----------------------------------------------------------------------------------------------------


@EVERY_OPTION
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("t, n", ((1, 1), (5, 17), (4, 300), (2, 5001)))
def test_against_float64_and_the_reference(t, n, dtype, options):
    spec = make_spec(n, **options)
    x, target = data(t, n, dtype)
    ours = on_parts(cross_entropy, x, target, (0, n), spec)
    losses, _, total, count, dx, dx_of_losses = ours
    exact_x = x.double().requires_grad_()
    exact = float64_losses(exact_x, target, spec)
    counted = (target != IGNORED).sum()
    exact_total = exact.sum() / counted
    torch.testing.assert_close(losses.double(), exact.detach(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(total.double(), exact_total.detach(), rtol=1e-6, atol=2e-6)
    assert_bitwise_equal(count, counted)
    assert dx.dtype == dtype and total.dtype == torch.float32
    for got, of, grad in ((dx, exact_total, torch.tensor(1.7)), (dx_of_losses, exact, losses.sin())):
        (want,) = torch.autograd.grad(of, exact_x, grad.to(of), retain_graph=True)
        assert (got.double() - want).norm() <= torch.finfo(dtype).eps / 2 * want.norm() + 2e-6 * (
            want.norm() + grad.norm()
        )

    theirs = on_parts(reference_cross_entropy, x.cpu(), target.cpu(), (0, n), spec)
    for got, want in zip(ours, theirs, strict=True):
        rtol = 2e-5 + 2 * torch.finfo(want.dtype).eps if want.is_floating_point() else 0
        torch.testing.assert_close(got.cpu(), want, rtol=rtol, atol=1e-5)


def test_the_integers_are_what_the_reference_says():
    """Of the sum of x - top, which has no exp in it, to the last bit; the sum of exp(x - top) to an fp32 unit."""
    x, target = data(6, 700)
    spec = make_spec(700, label_smoothing=0.1)
    extremes = cross_entropy.row_extremes(x, target, 700, 0, spec)
    counted = target.cpu() != IGNORED
    their_extremes = reference_cross_entropy.row_extremes(x.cpu(), target.cpu(), 700, 0, spec)
    assert_bitwise_equal(extremes.cpu().T[counted].contiguous(), their_extremes.T[counted].contiguous())
    exps, shifts = cross_entropy.row_sums(x, target, 700, extremes[None], spec).cpu()
    their_exps, their_shifts = reference_cross_entropy.row_sums(x.cpu(), target.cpu(), 700, their_extremes[None], spec)
    assert_bitwise_equal(shifts[counted], their_shifts[counted])
    torch.testing.assert_close(exps[counted].double(), their_exps[counted].double(), rtol=1e-6, atol=0)
    exact = (x.double() - x.double().amax(1, keepdim=True)).exp().sum(1).cpu()
    torch.testing.assert_close(exps[counted].double() * 2.0**-spec.exp_bits, exact[counted], rtol=1e-6, atol=0)


def test_the_gradient_is_the_derivative_of_the_loss():
    """Central differences in float64 of what the kernels' formula means, in a few directions."""
    spec = make_spec(40, label_smoothing=0.2, z_loss=0.1)
    x, target = data(4, 40)
    stats = cross_entropy.whole_losses(x, target, spec)[1]
    grad = torch.tensor([0.3, -2.0, 1.0, 5.0], device=DEVICE)
    dx = cross_entropy.logits_grad(grad, x, target, stats, None, 40, 0, spec).double()
    generator = torch.Generator(DEVICE).manual_seed(5)
    for _ in range(4):
        step = torch.randn(x.shape, generator=generator, device=DEVICE, dtype=torch.float64) * 1e-4
        above, below = (float64_losses(x.double() + sign * step, target, spec) for sign in (1, -1))
        change = ((above - below) / 2 * grad.double()).sum()
        torch.testing.assert_close((dx * step).sum(), change, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("t", (0, 1, 7, 2048, 2049, 5000))
def test_the_order_of_the_sum_over_tokens(t):
    """A lane adds its tokens in order, and lanes are added by halves: the bits of that order, written in torch."""
    generator = torch.Generator(DEVICE).manual_seed(t)
    losses = torch.rand(t, device=DEVICE, generator=generator) * 10
    losses[::3] *= 2.0**-30
    target = torch.zeros(t, dtype=torch.int64, device=DEVICE)
    total, count = cross_entropy.sum_of_tokens(losses, target, make_spec(8), mean=False)
    assert count is None
    assert cross_entropy.LANES == 2048
    rows = F.pad(losses.double(), (0, -t % 2048)).view(-1, 2048)
    lanes = torch.zeros(2048, dtype=torch.float64, device=DEVICE)
    for row in rows:
        lanes = lanes + row
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    assert_bitwise_equal(total, lanes[0].float())


# --- invariance -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        *((torch.float32, options) for options in OPTIONS.values()),
        *((dtype, OPTIONS["both"]) for dtype in DTYPES if dtype != torch.float32),  # which matters to loads alone
    ],
    ids=str,
)
def test_any_cut_gives_the_same_bits(dtype, options, monkeypatch):
    """Parts of any width and alignment, padding, other tiles, other strides: losses, their total and the gradients."""
    n = 531
    x, target = data(6, n, dtype)
    spec = make_spec(n, **options)
    want = on_parts(cross_entropy, x, target, (0, n), spec)
    assert not want[-1][3].any() and not want[0][3]
    assert_bitwise_equal(whole(cross_entropy, x, target, spec), want[:2])
    for width in (177, 133, 64):
        cuts = (*range(0, n, width), n)
        assert_bitwise_equal(on_parts(cross_entropy, x, target, cuts, spec), want, f"parts of {width}")
    padded = F.pad(x, (0, 9), value=math.nan)
    cuts = tuple(range(0, 541, 180))
    *got, dx, dx_of_losses = on_parts(cross_entropy, padded, target, cuts, spec)
    assert_bitwise_equal([*got, dx[:, :n].contiguous(), dx_of_losses[:, :n].contiguous()], want, "padding")
    assert not dx[:, n:].any() and not dx_of_losses[:, n:].any()
    elsewhere = target.repeat_interleave(3)[::3]
    for other in (x.t().contiguous().t(), torch.cat([x[:, :1], x], dim=1)[:, 1:]):
        assert_bitwise_equal(on_parts(cross_entropy, other, elsewhere, (0, 400, n), spec), want, "strides")
        assert_bitwise_equal(whole(cross_entropy, other, elsewhere.int(), spec), want[:2], "strides")
    for block in (64, 256):
        monkeypatch.setattr(cross_entropy, "MAX_BLOCK", block)
        assert_bitwise_equal(on_parts(cross_entropy, x, target, (0, 200, 400, n), spec), want, f"tiles of {block}")
        assert_bitwise_equal(whole(cross_entropy, x, target, spec), want[:2], f"tiles of {block}")


def test_a_row_does_not_depend_on_other_rows():
    x, target = data(300, 70)
    spec = make_spec(70, label_smoothing=0.1, z_loss=1e-3)
    losses, stats = cross_entropy.whole_losses(x, target, spec)
    grad = torch.ones(1, device=DEVICE)
    dx = cross_entropy.logits_grad(grad, x, target, stats, None, 70, 0, spec)
    for rows in (slice(0, 1), slice(5, 6), slice(129, 300), slice(2, 200, 3)):
        some, some_stats = cross_entropy.whole_losses(x[rows], target[rows], spec)
        assert_bitwise_equal(some, losses[rows].contiguous())
        some_dx = cross_entropy.logits_grad(grad, x[rows], target[rows], some_stats, None, 70, 0, spec)
        assert_bitwise_equal(some_dx, dx[rows].contiguous())


@gpu
def test_more_logits_than_32_bits_can_count():
    t, n = 14500, 151936
    assert t * n > 2**31
    x, target = torch.randn(t, n, device=DEVICE, dtype=torch.bfloat16), torch.arange(t, device=DEVICE) * 10
    spec, grad = make_spec(n, label_smoothing=0.1), torch.ones(1, device=DEVICE)
    losses, stats = cross_entropy.whole_losses(x, target, spec)
    dx = cross_entropy.logits_grad(grad, x, target, stats, None, n, 0, spec)
    for rows in (slice(0, 3), slice(t - 3, t)):
        some, some_stats = cross_entropy.whole_losses(x[rows].clone(), target[rows], spec)
        assert_bitwise_equal(some, losses[rows].clone())
        some_dx = cross_entropy.logits_grad(grad, x[rows].clone(), target[rows], some_stats, None, n, 0, spec)
        assert_bitwise_equal(some_dx, dx[rows].clone())
        assert some.isfinite().all() and some_dx.any(dim=1).all()


def test_float_sums_do_depend_on_the_cut():
    """The control: the same parts with torch's sums give other bits for some row."""
    x, _ = data(40, 531)
    exps = (x - x.amax(1, keepdim=True)).exp()
    cut = torch.stack([part.sum(1) for part in exps.split(133, dim=1)]).sum(0)
    assert not torch.equal(cut, exps.sum(1))


def test_columns_beyond_the_part_have_no_effect():
    """Neither has a row whose target is ignored."""
    x, target = data(5, 40)
    target[target != IGNORED] %= 23
    spec = make_spec(23, label_smoothing=0.1)
    want = on_parts(cross_entropy, x[:, :23].contiguous(), target, (0, 23), spec)
    x[:, 23:] = math.nan
    x[3] = math.nan
    *got, dx, dx_of_losses = on_parts(cross_entropy, x, target, (0, 40), spec)
    padded = [F.pad(part, (0, 17)) for part in want[-2:]]
    assert_bitwise_equal([*got, dx, dx_of_losses], [*want[:-2], *padded])


# --- special values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", (0.0, 0.1))
def test_parts_of_padding_alone_and_no_rows(smoothing):
    x, target = data(5, 12)
    target[target != IGNORED] %= 5
    spec = make_spec(5, smoothing)
    want = on_parts(cross_entropy, x[:, :5].contiguous(), target, (0, 5), spec)
    x[:, 5:] = math.nan
    assert cross_entropy.row_extremes(x[:, 8:], target, 0, 8, spec)[0].tolist() == [-math.inf] * 5
    *got, dx, dx_of_losses = on_parts(cross_entropy, x, target, (0, 4, 8, 12), spec)
    assert_bitwise_equal([*got, dx, dx_of_losses], [*want[:-2], *(F.pad(part, (0, 7)) for part in want[-2:])])
    nothing = on_parts(cross_entropy, x[:0], target[:0], (0, 5, 10, 12), spec)
    assert nothing[0].shape == (0,) and nothing[2].isnan() and nothing[-1].shape == (0, 12)
    assert on_parts(cross_entropy, x[:0], target[:0], (0, 12), spec, mean=False)[2].item() == 0


@EVERY_OPTION
def test_values_that_are_not_finite(options):
    """As torch: NaN for a row with a NaN, an inf, or nothing but -inf; a target of -inf costs inf."""
    n = 33
    x, target = data(8, n)
    target[:] = torch.arange(8)
    target[7] = IGNORED
    x[0, 5], x[1, 6], x[2, 7], x[4, 4], x[7, 3] = math.nan, math.inf, -math.inf, -math.inf, math.nan
    x[3] = -math.inf
    spec = make_spec(n, **options)
    want = on_parts(cross_entropy, x, target, (0, n), spec)
    smoothing = spec.label_smoothing > 0
    assert want[0].isnan().tolist() == [True, True, False, True] + [False] * 4
    assert (want[0] == math.inf).tolist() == [False, False, smoothing, False, True] + [False] * 3
    assert want[-2].isnan().all(1).tolist() == [True, True, False, True] + [False] * 4
    assert want[0][7] == 0 and not want[-1][7].any()
    nans = want[0][want[0].isnan()]
    assert_bitwise_equal(nans, torch.full_like(nans, math.nan))
    exact = float64_losses(x.double(), target, spec)
    torch.testing.assert_close(want[0].double(), exact, rtol=1e-6, atol=2e-6, equal_nan=True)
    finite = [2, 4, 5, 6]
    got = on_parts(cross_entropy, x, target, (0, 11, 22, n), spec)
    assert_bitwise_equal(got[0], want[0])
    assert_bitwise_equal(got[-2][finite], want[-2][finite])
    assert_bitwise_equal(whole(cross_entropy, x, target, spec)[0], want[0])


@pytest.mark.parametrize("scale", (1e-30, 1e30))
def test_large_and_small_logits(scale):
    x, target = data(4, 100)
    x *= scale
    spec = make_spec(100, label_smoothing=0.1)
    losses = on_parts(cross_entropy, x, target, (0, 50, 100), spec)[0]
    torch.testing.assert_close(losses.double(), float64_losses(x.double(), target, spec), rtol=1e-6, atol=0)
