"""The verify command: all checks hold here; if a kernel, a control or a bound fails, it fails and names the check."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from tp_invariant.diagnostics import verify
from tp_invariant.diagnostics.cli import main
from tp_invariant.diagnostics.verify import CHECKS, Check, Setup, _layer_cases, _splits_by_rows
from tp_invariant.diagnostics.verify_case import Case, Outcome, check_cases, error
from tp_invariant.gemm.owner_maps import OWNER_MAPS

SETUP = Setup((1, 2), "cpu", quick=True)
NAMES = [check.name for check in CHECKS]

# splits K into as many parts as the number of rows says, as a kernel that fills a chip may
BROKEN = """
import torch

def matmul(a, b, *, bias=None, out_dtype=None):
    parts = zip(a.float().chunk(1 + a.shape[0] % 3, dim=1), b.float().chunk(1 + a.shape[0] % 3, dim=0))
    c = sum(left @ right for left, right in parts)
    return (c if bias is None else c + bias.float()).to(out_dtype or a.dtype)

class Callable:
    matmul = staticmethod(matmul)

name = "no function"
"""


@dataclasses.dataclass(frozen=True)
class SumCase(Case):
    """The sum of x over ranks' parts in rank order (naive), over the whole (right), or wrong as `fault` says."""

    fault: str = ""

    def _data(self) -> Tensor:
        return torch.randn(64, 48, generator=self.generator()) * torch.exp2(torch.arange(48) % 13 - 6.0)

    def run(self, tp_group):
        rank, size = tp_group.rank(), tp_group.size()
        if self.fault == "crashes":
            raise RuntimeError("no such kernel")
        parts = 1 if self.mode or self.fault == "easy" else size
        total = sum(part.sum(1) for part in self._data().chunk(parts, 1))
        if self.fault == "one rank" and rank == 1:
            total[3] = -total[3]
        return {"sum": total * (1.001 if self.fault == "inexact" else 1)} if self.fault != "nothing" else {}

    def torch_results(self, dtype):
        return {"sum": self._data().to(dtype).sum(1)}


def outcome_of(fault: str) -> Outcome:
    return check_cases([SumCase(fault=fault)], (1, 2))


# --- the whole command ----------------------------------------------------------------------------------------------


@pytest.fixture
def bare_environment(tmp_path):
    """An environment in which optional packages, and those that only tests need, cannot be imported."""
    for name in ("pytest", "cloudpickle", "rich", "hypothesis", "matplotlib"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is not here')\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TP_INVARIANT"))}
    return kept | {"PYTHONPATH": str(tmp_path)}


@pytest.mark.more
def test_every_check_holds_without_optional_packages(bare_environment, tmp_path):
    code = "import sys; from tp_invariant.diagnostics.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "verify", "--quick", "--device", "cpu", "--degrees", "2", "--seed", "3"]
    done = subprocess.run(command, cwd=tmp_path, env=bare_environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *lines, last = done.stdout.splitlines()
    assert first == "TP=1, 2 on the CPU (gloo); float32, bfloat16; seed 3; gemm_fn bundled"
    assert [line.split()[:2] for line in lines] == [["held", name] for name in NAMES]
    assert all("controls that differ: " in line and "differ: 0" not in line for line in lines)
    assert last.startswith(f"Verdict: all {len(NAMES)} checks held: TP=1, 2 are byte for byte the same on every rank (")


def test_a_gemm_fn_that_splits_k_by_shape_fails_by_name(tmp_path, monkeypatch, capfd):
    (tmp_path / "broken_gemm.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)  # where a module of the user's is found
    monkeypatch.setattr(sys, "path", list(sys.path))
    only = ["--only", "gemm", "--only", "linear-row", "--only", "data-parallel"]
    options = ["--gemm-fn", "broken_gemm:Callable.matmul", "--quick", "--device", "cpu", "--degrees", "1,2"]
    assert main(["verify", *options, *only]) == 1
    out = capfd.readouterr().out
    assert "gemm_fn broken_gemm:Callable.matmul\n" in out
    assert "FAILED  gemm " in out and "not slice-invariant for a (33, 300)" in out
    assert "FAILED  linear-row " in out and "fails the check of a layer's first call: 1 of " in out
    assert "held    data-parallel " in out, "it has no GEMM"
    assert out.splitlines()[-1].startswith("Verdict: FAILED: gemm, linear-row (2 of 3 checks, ")


# --- what makes a check fail ----------------------------------------------------------------------------------------


def test_a_sum_that_is_right_holds():
    outcome = outcome_of("")
    assert (outcome.cases, outcome.tensors, outcome.bytes, outcome.controls) == (1, 3, 3 * 64 * 4, 1)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("one rank", r"rank 1 of TP=2 differs from TP=1: \['sum'\]: 1 of 64 elements differ; the first at index"),
        ("easy", r"the control at TP=2 does not differ from TP=1, so this data proves nothing: SumCase\(mode=False"),
        (
            "inexact",
            r"sum has relative error 1.0e-03 against float64, torch's own has .*, in SumCase\(fault='inexact'\)",
        ),
        ("nothing", "returns no tensors: there is nothing to compare"),
        ("crashes", "RuntimeError: no such kernel"),
    ],
)
def test_faults_are_named(fault, text):
    with pytest.raises(AssertionError, match=text):
        outcome_of(fault)


def test_a_failure_of_one_check_does_not_stop_the_others(capsys):
    def raises(setup):
        raise OSError("no space left")

    checks = [
        Check("crash", "", raises),
        Check("rank", "", lambda setup: outcome_of("crashes")),
        Check("control", "", lambda setup: outcome_of("easy")),
        Check("good", "", lambda setup: outcome_of("")),
    ]
    assert verify.run_checks(checks, SETUP) == ["crash", "rank", "control"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if line[0] != " "] == [
        ["FAILED", "crash"],
        ["FAILED", "rank"],
        ["FAILED", "control"],
        ["held", "good"],
    ]
    assert "        OSError: no space left" in lines


def test_the_control_of_the_gemm_check_is_right_and_splits():
    from tp_invariant.kernels.gemm.reference import matmul

    a, b = torch.randn(40, 600), torch.randn(600, 24)
    split = _splits_by_rows(matmul)
    assert error(split(a, b), a.double() @ b.double()) < 1e-6
    assert torch.equal(split(a[:5], b), matmul(a[:5], b)) and not torch.equal(split(a, b)[:5], matmul(a, b)[:5])


# --- what is covered ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [False, True], ids=["default", "quick"])
@pytest.mark.parametrize(("parallel_mode", "norm"), [("column", None), ("row", None), ("column", "RMSNorm")])
def test_layers_are_checked_with_every_owner_map(parallel_mode, norm, quick):
    setup = Setup((1, 2, 3, 8), "cpu", quick=quick)
    cases = list(_layer_cases(setup, parallel_mode, norm, {}))
    assert {case.owner_map for case in cases if case.stride == 2 and case.sequence_parallel} == set(OWNER_MAPS)
    assert {case.sequence_parallel for case in cases} == {False, True}
    assert all(case.bias for case in cases[:5]) and {case.norm for case in cases} == {norm}
    if not quick:
        assert {case.stride for case in cases} == {1, 2}
        assert not all(case.bias for case in cases)
        options = ("late_stride", "return_bias", *(("return_norm", "zero_centered") if norm else ()))
        for option in options:
            assert any(getattr(case, option) for case in cases), option


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--degrees 1", "--degrees 1 leaves nothing to compare: give one more, as in 1,2"),
        ("--degrees 0,2", "invalid _degrees value: '0,2'"),
        ("--degrees 5,7,8", "sizes are multiples of all of them, 280, which is too large; give fewer"),
        ("--only nonsense", "invalid choice: 'nonsense'"),
        ("--gemm-fn no_such_module:f", "--gemm-fn: 'no_such_module:f' cannot be loaded: No module named"),
        ("--gemm-fn torch:no_such", "give module:name, as in my_kernels:matmul"),
        ("--gemm-fn torch", "'torch' is a module: give a gemm_fn(a, b, *, bias=None, "),
        ("--gemm-fn torch:__version__", "'torch:__version__' is a TorchVersion: give a gemm_fn(a, b, *, bias=None, "),
        ("--device tpu", "invalid choice: 'tpu'"),
    ],
)
def test_usage_errors(options, text, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as caught:
        main(["verify", "--device", "cpu", *options.split()])
    assert caught.value.code == 2 and text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "options", "degrees"),
    [
        (0, "", (1, 2, 3, 4, 8)),
        (0, "--quick", (1, 2, 3, 4)),
        (1, "", (1, 2, 3, 4, 8)),
        (2, "", (1, 2)),
        (4, "", (1, 2, 3, 4)),
        (8, "--quick", (1, 2, 3, 4, 8)),
        (8, "--device cpu --degrees 6", (1, 6)),
        (16, "", (1, 2, 3, 4, 8, 16)),
    ],
)
def test_default_degrees_are_not_only_powers_of_two(gpus, options, degrees, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    setup = verify._setup(verify._parser().parse_args(options.split()), pytest.fail)
    assert setup.degrees == degrees
    for size in (setup.features(2), setup.multiple(100), setup.multiple(100, 5)):
        assert all(size % degree == 0 for degree in degrees) and size < 3200
    if setup.device == "cuda":
        assert all(setup.features(2) // degree % (2 * 16) == 0 for degree in degrees)


@pytest.mark.parametrize("gpus", [0, 1])
def test_too_few_gpus(gpus, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    with pytest.raises(SystemExit) as caught:
        main(["verify", "--device", "cuda"])
    assert caught.value.code == 2
    assert f"torch sees {gpus} GPUs here, and comparing degrees takes two" in capsys.readouterr().err


def test_without_safetensors_the_checkpoint_check_is_left_out_with_a_message(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    chosen = verify._chosen(None, pytest.fail)
    assert [check.name for check in chosen] == [name for name in NAMES if name != "checkpoint"]
    assert capsys.readouterr().out == "checkpoint is not run: it needs safetensors (pip install safetensors)\n"


# --- GPUs -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_every_check_holds_on_gpus():
    assert main(["verify", "--quick", "--device", "cuda"]) == 0
