"""Cross-entropy over a sharded vocabulary: the same bytes at every degree, torch's values, and little communication."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from cases import more
from gpus import gpu, on_gpus
from ranks import run_ranks
from same_as_alone import assert_as_alone, run_all
from torch import Tensor

import tp_invariant as tpi
from tp_invariant.comm.collectives import gather_dim, resolve_group
from tp_invariant.core.layout import shard
from tp_invariant.functional import cross_entropy as cross_entropy_module
from tp_invariant.kernels.select import select
from tp_invariant.kernels.vocabulary import cross_entropy as triton_kernels
from tp_invariant.testing import assert_bitwise_equal

DEGREES = (2, 3, 4, 8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Case:
    columns: int = 504  # with padding; divides by every degree here
    vocab_size: int | None = None
    tokens: tuple[int, ...] = (11,)
    dtype: torch.dtype = torch.float32
    scale: float = 4.0
    infinities: bool = False  # -inf in some logits, a target's among them
    ignored: str = "some"  # "none", "some", "all"
    label_smoothing: float = 0.0
    reduction: str = "mean"
    z_loss: float = 0.0
    mode: bool = True
    device: str = "cpu"

    def with_(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)

    @property
    def vocabulary(self) -> int:
        return self.columns if self.vocab_size is None else self.vocab_size

    @property
    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("label_smoothing", "reduction", "z_loss", "vocab_size")}


def full_data(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """logits [.., columns], target [..], and the gradient of the loss."""
    g = torch.Generator().manual_seed(7)
    logits = (torch.randn(*case.tokens, case.columns, generator=g) * case.scale).to(case.dtype)
    target = torch.randint(0, case.vocabulary, case.tokens, generator=g)
    if case.infinities:
        logits[torch.rand(logits.shape, generator=g) < 0.3] = -math.inf
        logits[..., 0] = 1.0
    if case.ignored != "none" and target.numel():
        ignored = (
            torch.rand(case.tokens, generator=g) < 0.3 if case.ignored == "some" else torch.ones(case.tokens).bool()
        )
        target[ignored] = -100
    logits[..., case.vocabulary :] = math.nan  # padding has no effect
    grad = torch.randn(case.tokens if case.reduction == "none" else (), generator=g)
    return logits, target, grad


def run(tp_group: Any, case: Case) -> dict[str, Tensor]:
    """The loss, and the gradient of all columns, on every rank."""
    group = resolve_group(tp_group)
    logits, target, grad = (t.to(case.device) for t in full_data(case))
    local = shard(logits, dim=-1, rank=group.rank, world=group.size).requires_grad_()
    with tpi.set_tp_invariant_mode(case.mode):
        loss = tpi.vocab_parallel_cross_entropy(local, target, tp_group=tp_group, **case.options)
        loss.backward(grad)
    assert local.grad is not None
    return {"loss": loss.detach().cpu(), "dlogits": gather_dim(local.grad, local.dim() - 1, group).cpu()}


def torchs(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """torch's own cross-entropy of the logits in `dtype`, without the padding."""
    logits, target, grad = full_data(case)
    x = logits[..., : case.vocabulary].to(dtype).reshape(-1, case.vocabulary).requires_grad_()
    ids = target.reshape(-1)
    losses = F.cross_entropy(x, ids, label_smoothing=case.label_smoothing, reduction="none")
    losses = torch.where(ids == -100, 0.0, losses + case.z_loss * x.logsumexp(1).square())
    loss = losses.view(target.shape)
    if case.reduction != "none":
        loss = losses.sum() / ((ids != -100).sum() if case.reduction == "mean" else 1)
    loss.backward(grad.to(dtype))
    assert x.grad is not None
    padded = F.pad(x.grad, (0, case.columns - case.vocabulary))
    return {"loss": loss.detach(), "dlogits": padded.view(logits.shape)}


def cases(dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Case]:
    base = Case(dtype=dtype, device=device)
    smooth = base.with_(label_smoothing=0.1, reduction="sum")
    return [
        base,
        base.with_(tokens=(3, 5), reduction="none", z_loss=1e-2),
        smooth,
        smooth.with_(z_loss=1e-3, reduction="none"),
        base.with_(vocab_size=487, tokens=(70,), label_smoothing=0.3),
        base.with_(columns=24, vocab_size=5, z_loss=0.1),  # ranks that hold padding alone
        base.with_(columns=24, vocab_size=5, label_smoothing=0.1),
        base.with_(columns=24, vocab_size=1, ignored="none"),
        base.with_(infinities=True, reduction="none"),
        base.with_(infinities=True, reduction="none", label_smoothing=0.1),
        base.with_(scale=3e4 if dtype != torch.float16 else 1e4, reduction="none", label_smoothing=0.1),
        base.with_(scale=1e-30, label_smoothing=0.1),
        base.with_(ignored="all", reduction="sum", label_smoothing=0.1),
        base.with_(ignored="all"),
        base.with_(tokens=(), ignored="none"),
        base.with_(tokens=(1,), ignored="none"),
        base.with_(tokens=(0,), reduction="sum"),
        base.with_(tokens=(2, 0), reduction="none"),
    ]


# --- invariance -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_at_every_degree(dtype, degree):
    assert_as_alone(run, cases(dtype), degree)


@pytest.mark.parametrize("name", ["loss", "dlogits"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_with_the_mode_off_the_bits_depend_on_the_degree(name, label_smoothing):
    """The control: on this data the stock path differs, so the tests of equality can fail."""
    case = Case(tokens=(40,), reduction="none", label_smoothing=label_smoothing, mode=False)
    want = run(None, case)[name]
    for degree in DEGREES:
        assert not torch.equal(run_ranks(run, degree, case)[0][name], want)


def test_the_order_of_the_vocabulary_changes_no_bit():
    """So no way to cut the vocabulary changes a bit; torch's own sums do depend on the order."""
    case = Case(tokens=(40,), reduction="none", label_smoothing=0.1, ignored="none")
    logits, target, _ = full_data(case)
    order = torch.randperm(case.columns, generator=torch.Generator().manual_seed(1))
    place = torch.argsort(order)[target]
    with tpi.set_tp_invariant_mode(True):
        ours = [
            tpi.vocab_parallel_cross_entropy(x, ids, tp_group=None, reduction="none", label_smoothing=0.1)
            for x, ids in ((logits, target), (logits[:, order], place))
        ]
    assert_bitwise_equal(ours[1], ours[0])
    theirs = [
        F.cross_entropy(x, ids, reduction="none", label_smoothing=0.1)
        for x, ids in ((logits, target), (logits[:, order], place))
    ]
    assert not torch.equal(*theirs)


def test_padding_changes_nothing():
    whole = Case(tokens=(9,), columns=500, label_smoothing=0.1, z_loss=1e-3)
    logits, target, grad = full_data(whole)
    results = []
    for extra in (0, 4, 140):
        x = F.pad(logits, (0, extra), value=3.0).requires_grad_()
        with tpi.set_tp_invariant_mode(True):
            loss = tpi.vocab_parallel_cross_entropy(x, target, tp_group=None, **whole.with_(vocab_size=500).options)
        loss.backward(grad)
        assert not x.grad[:, 500:].any()
        results.append({"loss": loss.detach(), "dlogits": x.grad[:, :500]})
    assert_bitwise_equal(results[1], results[0])
    assert_bitwise_equal(results[2], results[0])


def test_strides_and_threads_change_no_bit():
    logits, target, _ = full_data(Case(tokens=(300,), dtype=torch.bfloat16))

    def both(x):
        x = x.detach().requires_grad_()
        with tpi.set_tp_invariant_mode(True):
            loss = tpi.vocab_parallel_cross_entropy(x, target, tp_group=None, label_smoothing=0.1)
        loss.backward()
        return loss.detach(), x.grad

    want = both(logits)
    threads = torch.get_num_threads()
    for other in (logits.t().contiguous().t(), torch.cat([logits[:, :1], logits], dim=1)[:, 1:]):
        assert_bitwise_equal(both(other), want)
    try:
        torch.set_num_threads(threads + 1)
        assert_bitwise_equal(both(logits), want)
    finally:
        torch.set_num_threads(threads)


# --- the Triton kernels on ranks ------------------------------------------------------------------------------------


def run_in_triton(tp_group: Any, case: Case) -> dict[str, Tensor]:
    """`run` with the kernels of GPUs, in Triton's interpreter."""
    with mock.patch.object(cross_entropy_module, "select", lambda *args: triton_kernels):
        return run(tp_group, case)


def triton_cases() -> list[Case]:
    base = Case(columns=48, tokens=(5,))
    smooth = base.with_(label_smoothing=0.1, z_loss=1e-2)
    return [
        base,
        base.with_(tokens=(2, 3), reduction="none", dtype=torch.bfloat16),
        smooth.with_(vocab_size=43, dtype=torch.float16),
        smooth.with_(infinities=True, reduction="none"),
        base.with_(columns=24, vocab_size=5, z_loss=0.1),  # ranks that hold padding alone
        base.with_(tokens=(), ignored="none", reduction="sum"),
        smooth.with_(tokens=(0,), reduction="sum"),
        smooth.with_(ignored="all"),
    ]


@pytest.mark.parametrize("degree", (2, more(4), 8))
def test_the_triton_kernels_give_the_same_bits_at_every_degree(degree):
    assert_as_alone(run_in_triton, triton_cases(), degree)


# --- communication --------------------------------------------------------------------------------------------------


def gathered_sizes(tp_group: Any, case: Case) -> list[int]:
    """How many elements this rank receives from each collective of one call."""
    sizes = []
    whole = cross_entropy_module.gather_major

    def spy(local, group, **options):
        sizes.append(local.numel() * group.size)
        return whole(local, group, **options)

    cross_entropy_module.gather_major = spy
    try:
        run(tp_group, case)
    finally:
        cross_entropy_module.gather_major = whole
    return sizes


@pytest.mark.parametrize(("smoothing", "most"), [(0.0, [2, 1]), (0.1, [3, 2])])
def test_communication_does_not_grow_with_the_vocabulary(smoothing, most):
    for columns in (48, 504):
        case = Case(tokens=(6,), columns=columns, label_smoothing=smoothing)
        assert run_ranks(gathered_sizes, 4, case) == [[6 * 4 * each for each in most]] * 4


# --- correctness ----------------------------------------------------------------------------------------------------


def assert_near(got: Tensor, exact: Tensor, theirs: Tensor, dtype: torch.dtype, name: str) -> None:
    """Norm-wise: at most twice torch's own fp32 error, or an fp32 unit, plus one rounding to `dtype`."""
    norm = exact.norm()
    rounding = torch.finfo(dtype).eps / 2 if name == "dlogits" else 0.0
    allowed = max(2 * (theirs.double() - exact).norm(), 2 * torch.finfo(torch.float32).eps * norm) + rounding * norm
    assert (got.double() - exact).norm() <= allowed, name


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(dtype, mode):
    for case in cases(dtype):
        case = case.with_(mode=mode)
        got, exact, theirs = run(None, case), torchs(case, torch.float64), torchs(case, torch.float32)
        assert got["loss"].dtype == torch.float32
        assert got["dlogits"].dtype == dtype
        if case.ignored == "all":
            exact["dlogits"].zero_()  # the mean of none is NaN, and so is torch's gradient of it; ours is zero
        for name, want in exact.items():
            assert got[name].shape == want.shape, case
            finite = want.isfinite()
            torch.testing.assert_close(got[name][~finite].double(), want[~finite], equal_nan=True)
            assert_near(got[name][finite], want[finite], theirs[name][finite], dtype, name)


@pytest.mark.parametrize("degree", (2, 4))
def test_mode_off_against_float64_on_ranks(degree):
    some = [case.with_(mode=False) for case in cases() if case.ignored != "all"]
    for results in run_ranks(run_all, degree, run, some):
        for case, got in zip(some, results, strict=True):
            for name, want in torchs(case, torch.float64).items():
                torch.testing.assert_close(got[name].double(), want, rtol=1e-5, atol=1e-6, msg=f"{name}, {case}")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_logits_that_are_not_finite(bad, smoothing):
    """As with torch, only the row is NaN. But a row that is ignored has gradient 0, not NaN."""
    logits, target = torch.randn(4, 12, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 2, -100, 3])
    logits[1, 5] = bad
    logits[2, 7] = bad
    logits[3] = -math.inf
    x = logits.clone().requires_grad_()
    with tpi.set_tp_invariant_mode(True):
        options = dict(tp_group=None, reduction="none", label_smoothing=smoothing)
        loss = tpi.vocab_parallel_cross_entropy(x, target, **options)
    loss.sum().backward()
    assert loss.isnan().tolist() == [False, True, False, True]
    assert loss[2] == 0
    assert x.grad.isnan().all(dim=1).tolist() == [False, True, False, True]
    assert x.grad.isfinite().all(dim=1).tolist() == [True, False, True, False]
    assert not x.grad[2].any()
    theirs = F.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)
    assert theirs.isnan().tolist() == loss.isnan().tolist()


def nan_bits(tp_group: Any, dtype: torch.dtype, smoothing: float, reduction: str, bad: float) -> list[Tensor]:
    """Loss and all columns' gradient, with NaNs of both signs (or infinities) in a few rows."""
    group = resolve_group(tp_group)
    logits = torch.randn(40, 504, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[3, 5], logits[7, 130], logits[8, 500], logits[9, 250:] = bad, -bad, bad, -bad
    target = torch.arange(40)
    local = shard(logits, dim=-1, rank=group.rank, world=group.size).requires_grad_()
    options = dict(tp_group=tp_group, reduction=reduction, label_smoothing=smoothing, z_loss=smoothing)
    with tpi.set_tp_invariant_mode(True):
        loss = tpi.vocab_parallel_cross_entropy(local, target, **options)
    loss.sum().backward()
    assert local.grad is not None
    return [loss.detach(), gather_dim(local.grad, 1, group)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_nan_has_the_same_bits_at_every_degree(dtype):
    """torch on a CPU makes NaNs whose sign and payload depend on rank, row and position in a vector."""
    arguments = list(itertools.product((0.0, 0.1), ("mean", "none"), (math.nan, math.inf)))

    def every(tp_group):
        return [nan_bits(tp_group, dtype, *each) for each in arguments]

    wanted = every(None)
    for tensor in itertools.chain(*wanted):
        nans = tensor[tensor.isnan()]
        assert len(nans)
        assert_bitwise_equal(nans, torch.full_like(nans, math.nan))
    for degree in DEGREES:
        for rank, results in enumerate(run_ranks(every, degree)):
            for each, got, want in zip(arguments, results, wanted, strict=True):
                assert_bitwise_equal(got, want, f"rank {rank} of {degree}, {each}")


def test_a_row_of_many_equal_logits_keeps_its_small_terms():
    """The fixed-point sum has spare bits: 2^18 equal terms, and one large among 2^18 that matter only together."""
    n = 1 << 18
    rows = torch.zeros(2, n)
    rows[1, 0] = 12.0
    target = torch.tensor([5, 0])
    with tpi.set_tp_invariant_mode(True):
        loss = tpi.vocab_parallel_cross_entropy(rows, target, tp_group=None, reduction="none")
    exact = F.cross_entropy(rows.double(), target, reduction="none")
    torch.testing.assert_close(loss.double(), exact, rtol=1e-7, atol=0)


def test_targets_of_any_strides_and_dtype():
    """One column of a matrix of ids, and an expanded id."""
    logits, target, _ = full_data(Case(tokens=(6,), ignored="none"))
    wide = torch.stack([target, torch.zeros_like(target)], dim=1)

    def both(x, ids):
        x = x.clone().requires_grad_()
        with tpi.set_tp_invariant_mode(True):
            loss = tpi.vocab_parallel_cross_entropy(x, ids, tp_group=None, reduction="none")
        loss.sum().backward()
        return loss.detach(), x.grad

    for chosen in (select, lambda *args: triton_kernels):
        with mock.patch.object(cross_entropy_module, "select", chosen):
            want = both(logits, target)
            for other in (wide[:, 0], target.int(), wide.int()[:, 0]):
                assert_bitwise_equal(both(logits, other), want)
            shaped = both(logits.view(2, 3, -1), wide[:, 0].view(2, 3))
            assert_bitwise_equal([t.view(w.shape) for t, w in zip(shaped, want, strict=True)], want)
            one = target[:1].expand(6)
            assert_bitwise_equal(both(logits, one), both(logits, one.contiguous()))


@pytest.mark.parametrize("chosen", (select, lambda *args: triton_kernels), ids=("reference", "triton"))
def test_an_ignore_index_inside_of_the_vocabulary(chosen):
    logits, target, grad = full_data(Case(tokens=(60,), columns=12, ignored="none"))
    assert 1 < (target == 5).sum() < 55
    options = dict(label_smoothing=0.1, ignore_index=5)
    results = []
    for loss_of in (functools.partial(tpi.vocab_parallel_cross_entropy, tp_group=None), F.cross_entropy):
        x = logits.clone().requires_grad_()
        with tpi.set_tp_invariant_mode(True), mock.patch.object(cross_entropy_module, "select", chosen):
            loss = loss_of(x, target, **options)
        loss.backward(grad)
        results.append((loss.detach(), x.grad))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)
    assert not results[0][1][target == 5].any()


def test_a_loss_may_be_changed_in_place():
    logits, target, _ = full_data(Case(tokens=(6,), ignored="none"))
    grads = []
    for change in (lambda loss: loss.mul_(2.0), lambda loss: loss * 2.0):
        x = logits.clone().requires_grad_()
        with tpi.set_tp_invariant_mode(True):
            loss = tpi.vocab_parallel_cross_entropy(x, target, tp_group=None, reduction="none")
        change(loss).sum().backward()
        grads.append(x.grad)
    assert_bitwise_equal(*grads)


# --- errors ---------------------------------------------------------------------------------------------------------

ERRORS = {
    "an id": (
        dict(target=torch.tensor([0, 9, 12, -1])),
        IndexError,
        "target holds 12 on rank 0 (2 of 4 ids are out of range): allowed is from 0 to 11, or ignore_index=-100",
    ),
    "ids as floats": (
        dict(target=torch.zeros(4)),
        TypeError,
        "target is torch.float32 on rank 0: it must be torch.int64 or torch.int32",
    ),
    "logits as integers": (
        dict(logits=torch.zeros(4, 12, dtype=torch.int64)),
        TypeError,
        "logits is torch.int64 on rank 0: it must be one of torch.bfloat16, torch.float16, torch.float32",
    ),
    "shapes": (
        dict(target=torch.zeros(3, dtype=torch.int64)),
        ValueError,
        "logits has shape (4, 12) and target (3,) on rank 0: they must be [.., n] with n at least 1, the vocabulary "
        "last, and [..]",
    ),
    "vocab_size": (
        dict(vocab_size=13),
        ValueError,
        "vocab_size=13 is out of range: for logits with 12 columns on each of 1 ranks it must be from 1 to 12",
    ),
    "label_smoothing": (
        dict(label_smoothing=1.0),
        ValueError,
        "label_smoothing=1.0 is out of range: it must be from 0 to below 1",
    ),
    "z_loss": (dict(z_loss=-1.0), ValueError, "z_loss=-1.0 is out of range: it must be 0 or more"),
    "reduction": (
        dict(reduction="avg"),
        ValueError,
        "reduction='avg' is unknown: choose one of 'mean', 'sum', 'none'",
    ),
}


@pytest.mark.parametrize("mode", [True, False], ids=["on", "off"])
@pytest.mark.parametrize(("changes", "kind", "text"), ERRORS.values(), ids=ERRORS)
def test_what_is_refused(changes, kind, text, mode):
    options = {"logits": torch.zeros(4, 12), "target": torch.zeros(4, dtype=torch.int64), **changes}
    logits, target = options.pop("logits"), options.pop("target")
    with tpi.set_tp_invariant_mode(mode), pytest.raises(kind, match=f"^{re.escape(text)}$"):
        tpi.vocab_parallel_cross_entropy(logits, target, tp_group=None, **options)


def refused_on_ranks(tp_group: Any) -> tuple[str, str]:
    rank = tp_group.rank()
    target = torch.zeros(2, dtype=torch.int64)
    with tpi.set_tp_invariant_mode(True):
        with pytest.raises(IndexError) as outside:
            tpi.vocab_parallel_cross_entropy(torch.zeros(2, 3), target + 6, tp_group=tp_group)
        with pytest.raises(RuntimeError) as disagreed:
            reduction = "sum" if rank else "mean"
            tpi.vocab_parallel_cross_entropy(torch.zeros(2, 3), target, tp_group=tp_group, reduction=reduction)
        loss = tpi.vocab_parallel_cross_entropy(torch.zeros(2, 3), target, tp_group=tp_group)  # still in step
    assert loss.item() == pytest.approx(math.log(6))
    return str(outside.value), str(disagreed.value)


def test_every_rank_raises():
    results = run_ranks(refused_on_ranks, 2)
    for rank, (outside, disagreed) in enumerate(results):
        assert outside.startswith(f"target holds 6 on rank {rank} (2 of 2 ids are out of range)")
        assert "'mean', 0.0) on rank 0" in disagreed and "'sum', 0.0) on rank 1" in disagreed


# --- on GPUs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", on_gpus(1, 2, 4, 8))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_gpus(dtype, degree):
    divisible = [case for case in cases(dtype, "cuda") if case.columns % degree == 0]
    large = Case(columns=152064, vocab_size=151936, tokens=(257,), dtype=dtype, device="cuda")
    assert_as_alone(run, [*divisible, large, large.with_(label_smoothing=0.1, z_loss=1e-4)], degree, "cuda")


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accuracy_on_a_gpu(dtype):
    for case in (Case(columns=152064, vocab_size=151936, tokens=(64,), dtype=dtype, label_smoothing=0.1), Case()):
        case = case.with_(dtype=dtype)
        got, exact, theirs = (
            run(None, case.with_(device="cuda")),
            torchs(case, torch.float64),
            torchs(case, torch.float32),
        )
        for name, want in exact.items():
            assert_near(got[name], want, theirs[name], dtype, name)


@gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_nan_on_a_gpu_is_torchs_nan(reduction):
    x = torch.zeros(3, 40, device="cuda")
    x[1, 5] = -math.nan
    with tpi.set_tp_invariant_mode(True):
        loss = tpi.vocab_parallel_cross_entropy(
            x, torch.tensor([1, 2, 3], device="cuda"), tp_group=None, reduction=reduction
        )
    nans = loss[loss.isnan()]
    assert nans.numel() == 1
    assert_bitwise_equal(nans.cpu(), torch.full((1,), math.nan))


OUT_OF_RANGE = """
import torch, tp_invariant as tpi
tpi.set_tp_invariant_mode(True)
x = torch.zeros(4, 12, device="cuda")
tpi.vocab_parallel_cross_entropy(x, torch.tensor([0, -100, 11, 3], device="cuda"), tp_group=None)
torch.cuda.synchronize()
print("in range", flush=True)
tpi.vocab_parallel_cross_entropy(x, torch.tensor([0, {bad}, 11, 3], device="cuda"), tp_group=None)
torch.cuda.synchronize()
print("not reached")
"""


@gpu
@pytest.mark.parametrize("bad", (-1, 12))
def test_an_id_out_of_range_on_a_gpu_fails_an_assertion(bad):
    done = subprocess.run([sys.executable, "-c", OUT_OF_RANGE.format(bad=bad)], capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stdout.strip() == "in range"
    assert "target holds an id that is neither in the vocabulary nor ignore_index" in done.stdout + done.stderr


@pytest.mark.parametrize("kernels", (select("cross-entropy", "cpu"), triton_kernels), ids=("reference", "triton"))
def test_logits_further_apart_than_fp32_reaches(kernels):
    """As torch in fp32: with label smoothing their mean is -inf, and without it the loss is finite."""
    x, target = torch.tensor([[3e38, -3e38, 0.0, 0.0]]), torch.tensor([0])
    for smoothing in (0.0, 0.1):
        spec = cross_entropy_module.LossSpec(4, -100, smoothing, 0.0)
        losses, _ = kernels.whole_losses(x, target, spec)
        assert torch.equal(losses, F.cross_entropy(x, target, label_smoothing=smoothing, reduction="none"))
