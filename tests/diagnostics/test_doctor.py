"""The doctor command: its facts, its verdicts on claims that do not hold, and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from gpus import gpu

from tp_invariant.diagnostics import doctor, onednn
from tp_invariant.diagnostics.cli import main
from tp_invariant.diagnostics.doctor import FAILS, HOLDS, UNCHECKED

NO_GPU = not torch.cuda.is_available()


@pytest.fixture(scope="module")
def facts():
    """All facts of this machine, collected in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TP_INVARIANT_MODE", "NVTE_TP_INVARIANT_MODE", "TP_INVARIANT_CHECK"):
            patch.delenv(name, raising=False)
        return doctor.collect()


def claim_named(facts, text):
    (found,) = [claim for claim in facts["claims"] if text in claim["claim"]]
    return found


def no_checks(monkeypatch):
    """For tests of other things: the checks that take seconds return at once."""
    monkeypatch.setattr(doctor, "_SLICES", dict.fromkeys(doctor._SLICES, lambda device: "not run"))
    for name in ("_blas", "_tensor_core"):
        monkeypatch.setattr(doctor, name, lambda: "not run")


# --- an examination -------------------------------------------------------------------------------------------------


def test_gate_and_settings(facts):
    assert facts["gate"] == {
        "TP_INVARIANT_MODE": None,
        "NVTE_TP_INVARIANT_MODE": None,
        "TP_INVARIANT_CHECK": None,
        "mode": "off",
        "error": None,
    }
    settings = {row["name"]: row for row in facts["settings"]}
    assert settings["torch.backends.cudnn.benchmark"]["is_set"] is True
    assert settings["NCCL_ALGO"]["profiles"] == ("wire", "vllm")


@pytest.mark.skipif(not NO_GPU, reason="about a machine without one")
def test_claims_without_a_gpu(facts):
    for claim in facts["claims"]:
        assert claim["status"] in (HOLDS, UNCHECKED), claim
        assert bool(claim["next_step"]) == (claim["status"] != HOLDS), claim
        if claim["claim"].startswith("GPU"):
            assert claim["status"] == UNCHECKED
            assert claim["next_step"] == "run this on a machine with one"
        if claim["claim"].startswith("CPU"):
            assert claim["status"] == HOLDS, claim
    assert claim_named(facts, "at every TP degree")["next_step"] == "tp-invariant verify --device cpu"


def test_tables_for_people(facts, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "collect", lambda: facts)
    status = main(["doctor"])
    out = capsys.readouterr().out
    assert status == (1 if any(claim["status"] == FAILS for claim in facts["claims"]) else 0)
    for text in ("Versions", "Devices", "Gate", "Claims"):
        assert text in out
    assert out.splitlines()[-1].startswith(f"Verdict: of {len(facts['claims'])} claims ")


# --- what does not hold ---------------------------------------------------------------------------------------------


def test_an_error_in_the_gate_through_the_command(tmp_path):
    code = "import sys; from tp_invariant.diagnostics.cli import main; sys.exit(main(sys.argv[1:]))"
    environment = os.environ | {"TP_INVARIANT_MODE": "yes"}
    command = [sys.executable, "-c", code, "doctor", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 1, done.stderr
    facts = json.loads(done.stdout)
    assert facts["gate"]["mode"] is None and facts["gate"]["error"].startswith("TP_INVARIANT_MODE='yes' is not ")
    claim = claim_named(facts, "gate's variables")
    assert claim["status"] == FAILS and "TP_INVARIANT_MODE='yes'" in claim["detail"]
    assert claim["next_step"] == "set them to 1 or 0, or unset them"
    assert claim_named(facts, "CPU: the bundled GEMM")["status"] == HOLDS


def test_a_gemm_that_splits_by_shape_does_not_hold(monkeypatch, capsys):
    def splits(a, b, *, bias=None, out_dtype=None):
        parts = zip(a.chunk(1 + a.shape[0] % 3, 1), b.chunk(1 + a.shape[0] % 3, 0), strict=True)
        c = sum(left.float() @ right.float() for left, right in parts)
        return (c if bias is None else c + bias.float()).to(out_dtype or a.dtype)

    no_checks(monkeypatch)
    monkeypatch.setitem(doctor._SLICES, "the bundled GEMM is slice-invariant", doctor._gemm)
    monkeypatch.setattr(doctor, "bundled_gemm_fn", lambda device: splits)
    assert main(["doctor", "--json"]) == 1
    claim = claim_named(json.loads(capsys.readouterr().out), "CPU: the bundled GEMM")
    assert claim["status"] == FAILS and "not slice-invariant for " in claim["detail"] and "report" in claim["next_step"]


def test_heads_and_rows_that_depend_on_others_do_not_hold(monkeypatch):
    def sees_other_heads(q, k, v, **options):
        return q + (k.sum() + v.sum()) * 1e-3

    monkeypatch.setattr(doctor, "safe_attention", sees_other_heads)
    with pytest.raises(AssertionError, match=r"attention of torch\.float32 heads slice"):
        doctor._attention("cpu")

    class SeesOtherRows:
        @staticmethod
        def apply(x, weight, bias, call):
            return x * x.float().sum().to(x.dtype)

    monkeypatch.setattr(doctor, "Norm", SeesOtherRows)
    with pytest.raises(AssertionError, match=r"LayerNorm of .* rows slice"):
        doctor._norms("cpu")


def test_a_blas_in_another_order_is_reported(monkeypatch):
    from tp_invariant.kernels.gemm import reference

    # sums in float64: no order of float32 sums, on any CPU; one call for all panels has the same bits on some
    exact = lambda a, b: torch.mm(torch.cat(a, 1).double(), torch.cat(b).double()).float()  # noqa: E731
    monkeypatch.setattr(reference, "_blas_tile", exact)
    reference._blas_agrees.cache_clear()
    try:
        claim = doctor._tried("fast form", doctor._blas, "slower")
    finally:
        reference._blas_agrees.cache_clear()
    assert claim.status == FAILS and "in another order than expected" in claim.detail and claim.next_step


@pytest.mark.parametrize(
    ("found", "status", "text"),
    [
        ("2.9.1", FAILS, "2.9.1 is older than tested, 2.11 to 2.13"),
        (None, FAILS, "not installed"),
        ("2.11.0+cu130", HOLDS, "2.11.0+cu130; tested are 2.11 to 2.13"),
        ("2.13.0", HOLDS, "2.13.0"),
        ("2.20.0a0", UNCHECKED, "2.20.0a0 is newer than tested"),
    ],
)
def test_versions_are_compared_with_the_tested_ones(found, status, text):
    claim = doctor._version("torch", found, doctor.TESTED_TORCH)
    assert claim.status == status and text in claim.detail
    assert bool(claim.next_step) == (status != HOLDS)


def test_matrix_units_that_are_listed_and_trapped(monkeypatch, capsys):
    monkeypatch.setattr(onednn, "lists_matrix_units", lambda: True)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert doctor._products() == "AMX units are listed, and work"
    onednn.avoid_trapped_units()
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ
    monkeypatch.setattr(onednn, "_PRODUCTS", "import os; os.kill(os.getpid(), 4)")
    with pytest.raises(AssertionError, match="is ended by a signal"):
        doctor._products()
    onednn.avoid_trapped_units()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE"
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE is set" in capsys.readouterr().err


# --- a GPU ----------------------------------------------------------------------------------------------------------


@gpu
def test_every_claim_holds_on_a_gpu(facts):
    for claim in facts["claims"]:
        assert claim["status"] != FAILS, claim
    assert claim_named(facts, "GPU: the bundled GEMM")["status"] == HOLDS
