"""What `tp-invariant verify` requires of a case: TP=1's bytes at every degree, a control that differs, a small error.

A case builds its data from a seed, runs on the ranks of a group and returns full tensors, the same on every rank. It
also has a naive form, the control, and computes the same with plain torch, whose error against float64 is the measure.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..comm.collectives import Group, gather_major
from ..core.bits import assert_bitwise_equal, digest
from ..core.layout import Stride, shard, unshard
from ..gemm.gemm_fn import GemmFn, set_default_gemm_fn
from ..testing.checks import run_ranks, wide_randn

Results = dict[str, Tensor | None]
CaseT = TypeVar("CaseT", bound="Case")


@dataclasses.dataclass(frozen=True)
class Case:
    """The base of all cases: hashable, picklable data with a `run`.

    mode     False: the control, which takes the stock path (or another naive way) and must depend on the degree
    device   "cpu" or "cuda"
    """

    dtype: torch.dtype = dataclasses.field(default=torch.float32, kw_only=True)
    device: str = dataclasses.field(default="cpu", kw_only=True)
    seed: int = dataclasses.field(default=1234, kw_only=True)
    mode: bool = dataclasses.field(default=True, kw_only=True)

    def with_(self: CaseT, **changes: Any) -> CaseT:
        return dataclasses.replace(self, **changes)

    @property
    def as_reference(self: CaseT) -> CaseT:
        """The case for TP=1, without options that only decide how work is distributed over ranks."""
        return self

    @property
    def control(self: CaseT) -> CaseT:
        return self.with_(mode=False)

    @property
    def allowed(self) -> float:
        """The largest error that the results may have, in multiples of torch's own error in this dtype."""
        return 2.0 if self.dtype == torch.float32 else 1.1

    @property
    def noise(self) -> float:
        """An error that is always allowed: a tensor core truncates its fp32 accumulator, up to 1e-5 for a long K."""
        return 2e-6 if self.device == "cpu" else 1e-5

    @property
    def label(self) -> str:
        """The fields that differ from their defaults."""
        shown = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        values = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in shown)
        return f"{type(self).__name__}({values})"

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def run(self, tp_group: Any) -> Results:
        """Every full result, on every rank of tp_group (None is TP=1)."""
        raise NotImplementedError

    def torch_results(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Some or all results of `run`, by name, computed by torch's own functions in `dtype` from the same data."""
        raise NotImplementedError


@dataclasses.dataclass
class Outcome:
    """What was compared. `worst` is the largest error in multiples of torch's own; 0 if all were within the noise."""

    cases: int = 0
    tensors: int = 0
    bytes: int = 0
    controls: int = 0
    worst: float = 0.0

    def count(self, results: Mapping[str, Any]) -> None:
        counted = [t for t in results.values() if isinstance(t, Tensor)]
        self.tensors += len(counted)
        self.bytes += sum(t.numel() * t.element_size() for t in counted)

    def __str__(self) -> str:
        compared = f", {self.tensors} tensors, {self.bytes / 1e6:.1f} MB" if self.tensors else ""
        measure = f"error {self.worst:.2f} of torch's" if self.worst else "error at rounding level"
        return f"{self.cases} cases{compared}; controls that differ: {self.controls}; {measure}"


def wide(*shape: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Random data whose sums depend on their order: scales from 2^-6 to 2^6 (fp16: 2^-2 to 2^2, to stay in range)."""
    return wide_randn(*shape, generator=generator, spread=2 if dtype == torch.float16 else 6).to(dtype)


def error(got: Tensor, exact: Tensor) -> float:
    """The norm-wise relative error; the absolute one if `exact` is zero."""
    norm = float(exact.double().norm())
    return float((got.double() - exact.double()).norm()) / (norm or 1.0)


def part(full: Tensor, dim: int | None, group: Group, stride: Stride = 1) -> Tensor:
    """This rank's part of `full` along dim, or a copy for None, as a leaf that requires a gradient if it can."""
    if dim is not None:
        full = shard(full, dim=dim, rank=group.rank, world=group.size, stride=stride)
    return full.detach().clone().requires_grad_(full.is_floating_point())


def whole(local: Tensor, dim: int | None, group: Group, stride: Stride = 1) -> Tensor:
    """The full tensor of all ranks' parts along dim; `local` for None."""
    if dim is None:
        return local.detach()
    return unshard(gather_major(local.detach(), group), dim=dim % local.dim(), stride=stride)


def grad_of(t: Tensor) -> Tensor:
    assert t.grad is not None
    return t.grad


def load_gemm_fn(name: str | None) -> GemmFn | None:
    """The gemm_fn of "module:name"; None for None, which means the bundled one.

    Raises:
        ValueError: no such module or name, or an object that is not callable.
    """
    if name is None:
        return None
    try:
        named = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as problem:
        raise ValueError(f"{name!r} cannot be loaded: {problem}; give module:name, as in my_kernels:matmul") from None
    if not callable(named):
        raise ValueError(f"{name!r} is a {type(named).__name__}: give a gemm_fn(a, b, *, bias=None, out_dtype=None)")
    return named


def run_cases(tp_group: Any, cases: Sequence[Case], gemm_fn: str | None) -> list[Results]:
    """On a rank: every case's results, on the CPU. The pool resets the default gemm_fn afterwards."""
    set_default_gemm_fn(load_gemm_fn(gemm_fn))
    return [
        {name: None if tensor is None else tensor.cpu() for name, tensor in case.run(tp_group).items()}
        for case in cases
    ]


def check_cases(cases: Sequence[Case], degrees: Sequence[int], gemm_fn: str | None = None) -> Outcome:
    """Runs the cases, and their controls, at every degree, and compares with TP=1 and with torch.

    Raises:
        AssertionError: names the first case, degree, rank and tensor where a byte differs, a control that does not
            differ, or an error that is too large.
        RankError: a case failed on some rank.
    """
    outcome = Outcome(cases=len(cases))
    device = cases[0].device
    references = _references(cases, gemm_fn)
    for case, reference in references.items():
        if not any(isinstance(t, Tensor) and t.numel() for t in reference.values()):
            raise AssertionError(f"{case.label} returns no tensors: there is nothing to compare")
    for degree in degrees:
        for rank, results in enumerate(run_ranks(run_cases, degree, cases, gemm_fn, device=device)):
            for case, result in zip(cases, results, strict=True):
                try:
                    assert_bitwise_equal(result, references[case.as_reference])
                except AssertionError as problem:
                    where = f"rank {rank} of TP={degree} differs from TP=1"
                    raise AssertionError(f"{where}: {problem} in {case.label}") from None
                outcome.count(result)
    for case, reference in references.items():
        outcome.worst = max(outcome.worst, check_accuracy(case, reference))
    outcome.controls = check_controls([case.control for case in cases], degrees, gemm_fn)
    return outcome


def _references(cases: Sequence[Case], gemm_fn: str | None) -> dict[Case, Results]:
    references = list(dict.fromkeys(case.as_reference for case in cases))
    (results,) = run_ranks(run_cases, 1, references, gemm_fn, device=references[0].device)
    return dict(zip(references, results, strict=True))


def check_controls(controls: Sequence[Case], degrees: Sequence[int], gemm_fn: str | None = None) -> int:
    """The number of controls; each must differ from its own TP=1 result at every other degree.

    Raises:
        AssertionError: names a control that does not; its data could not show a wrong result either.
    """
    controls = list(dict.fromkeys(controls))
    references = {case: digest(results) for case, results in _references(controls, gemm_fn).items()}
    for degree in degrees:
        if degree == 1:
            continue
        results = run_ranks(run_cases, degree, controls, gemm_fn, device=controls[0].device)[0]
        for case, result in zip(controls, results, strict=True):
            if digest(result) == references[case.as_reference]:
                raise AssertionError(
                    f"the control at TP={degree} does not differ from TP=1, so this data proves nothing: {case.label}"
                )
    return len(controls)


def check_accuracy(case: Case, results: Results) -> float:
    """The largest error of `results` against float64, in multiples of torch's own in the case's dtype.

    Raises:
        AssertionError: names a result whose error is more than `case.allowed` times torch's.
    """
    exact, theirs = case.torch_results(torch.float64), case.torch_results(case.dtype)
    worst = 0.0
    for name, value in exact.items():
        got = results[name]
        if got is None:
            raise AssertionError(f"{name} is None where torch has a value, in {case.label}")
        ours, torchs = error(got, value.cpu()), error(theirs[name].cpu(), value.cpu())
        if not ours <= max(case.allowed * torchs, case.noise):
            raise AssertionError(
                f"{name} has relative error {ours:.1e} against float64, torch's own has {torchs:.1e}, in {case.label}"
            )
        if ours > case.noise:
            worst = max(worst, ours / torchs)
    return worst
