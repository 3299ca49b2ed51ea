"""Cases of the layers: those of `tp-invariant verify`, also compiled, and compared with TP=1 of this process."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import tp_invariant as tpi
from tp_invariant.diagnostics import verify_case
from tp_invariant.diagnostics.verify_case import Results, run_cases
from tp_invariant.diagnostics.verify_layers import LayerCase


@dataclasses.dataclass(frozen=True)
class Case(LayerCase):
    backend: str | None = None  # of torch.compile, with fullgraph=True; None: not compiled

    @property
    def as_reference(self) -> Case:
        return super().as_reference.with_(backend=None)

    @property
    def allowed(self) -> float:
        return 2.0 if self.dtype == torch.float32 else 1.1  # of few elements too: this data is always the same

    @property
    def noise(self) -> float:
        # both round fp32 sums; one fp32 accumulator on a tensor core truncates to 24 bits: to 1.4e-5 at K = 12288
        return 4 * torch.finfo(torch.float32).eps if self.device == "cpu" else 2e-6

    def build(self, tp_group: Any) -> tpi.Linear:
        layer = super().build(tp_group)
        if self.backend:
            torch.compiler.reset()  # code compiled for other cases counts towards its limit
            layer.compile(backend=self.backend, fullgraph=True)
        return layer


def run_all(tp_group: Any, cases: list[Case]) -> list[Results]:
    """Every result of each case, in its full shape, on the CPU."""
    return run_cases(tp_group, cases, None)


def run(tp_group: Any, case: Case) -> Results:
    return run_all(tp_group, [case])[0]


def assert_cases_invariant(cases: list[Case], degree: int, device: str = "cpu") -> None:
    """Every case at `degree` against TP=1 in this process, byte for byte, on every rank."""
    references = {case: run(None, case) for case in dict.fromkeys(case.as_reference for case in cases)}
    for rank, results in enumerate(tpi.testing.run_ranks(run_all, degree, cases, device=device)):
        for case, result in zip(cases, results, strict=True):
            try:
                tpi.testing.assert_bitwise_equal(result, references[case.as_reference])
            except AssertionError as error:
                raise AssertionError(f"rank {rank} of {degree}, {case}: {error}") from None


def check_accuracy(case: Case) -> None:
    """TP=1 in the mode is as near to float64 as torch: see Case.allowed."""
    verify_case.check_accuracy(case, run(None, case.as_reference))
