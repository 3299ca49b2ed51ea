"""CPUs that list AMX units and trap their instructions: what is set, by whom; the library needs no such product."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import tp_invariant as tpi
from tp_invariant.core import amx
from tp_invariant.diagnostics import verify_checks
from tp_invariant.diagnostics.doctor_claims import FAILS, HOLDS, products_claim
from tp_invariant.examples.small_transformer import causal_attention
from tp_invariant.functional.attention_choice import safe_attention
from tp_invariant.testing import run_ranks

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TRAPPED = "processor\t: 0\nflags\t\t: fpu avx512f amx_bf16 avx512_bf16 amx_tile amx_int8\n"

# stands for torch's products on such a machine: ends like them unless oneDNN is told to leave the units alone
DIES = """
import os, signal
print("float16 matmul", flush=True)
if os.environ.get("ONEDNN_MAX_CPU_ISA") != "AVX512_CORE":
    print("bfloat16 matmul", flush=True)
    os.kill(os.getpid(), signal.SIGILL)
"""
ALWAYS_DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
RUNS = "print('done')"
BROKEN = "raise SystemExit(4)"  # no signal: torch is broken in another way, which this is not about


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(flags, probe): simulates a machine for `amx`, with no variable set."""

    def pretend(cpuinfo, program):
        (tmp_path / "cpuinfo").write_text(cpuinfo)
        monkeypatch.setattr(amx, "CPUINFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(amx, "PROBE", program)
        amx.find.cache_clear()

    for name in amx._VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back, whatever sets it
        monkeypatch.delenv(name)
    yield pretend
    amx.find.cache_clear()


def test_products_that_are_trapped_set_the_variable_once_it_is_known_to_help(machine, capsys):
    machine(TRAPPED, DIES)
    finding = amx.avoid_trapped_units()
    assert finding.units == ("amx_bf16", "amx_int8", "amx_tile")
    assert finding.died == amx.Crash("ended by SIGILL", "bfloat16 matmul") and finding.helps is True
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE"
    assert capsys.readouterr().err == (
        "this CPU lists amx_bf16, amx_int8, amx_tile, but a process ended by SIGILL in torch's own product bfloat16 "
        "matmul; ONEDNN_MAX_CPU_ISA=AVX512_CORE is set for this process and those that it starts\n"
    )


def test_a_variable_that_does_not_help_is_not_set_and_is_reported(machine, capsys):
    machine(TRAPPED, ALWAYS_DIES)
    finding = amx.avoid_trapped_units()
    assert finding.died is not None and finding.helps is False
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE does not help" in capsys.readouterr().err


@pytest.mark.parametrize("program", [RUNS, BROKEN])
def test_products_that_run_need_no_variable(machine, program, capsys):
    machine(TRAPPED, program)
    assert amx.avoid_trapped_units().died is None
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ and capsys.readouterr().err == ""


def test_no_process_is_started_where_no_unit_is_listed(machine, monkeypatch, tmp_path):
    machine("flags\t\t: fpu avx512f avx512_bf16\n", DIES)
    monkeypatch.setattr("subprocess.run", None)
    assert amx.avoid_trapped_units() == amx.Finding()
    monkeypatch.setattr(amx, "CPUINFO", tmp_path / "no such file")
    amx.find.cache_clear()
    assert amx.avoid_trapped_units() == amx.Finding()


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_a_value_that_the_user_has_set_is_not_changed(machine, monkeypatch, name):
    machine(TRAPPED, DIES)
    monkeypatch.setenv(name, "AVX2")
    monkeypatch.setattr("subprocess.run", None)
    assert amx.avoid_trapped_units().died is None and amx.chosen() == f"{name}=AVX2"
    assert os.environ[name] == "AVX2" and os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX2") == "AVX2"


def test_doctor_says_what_to_export(machine, monkeypatch):
    machine("flags\t\t: fpu avx512f avx512_bf16\n", DIES)
    assert products_claim().status == HOLDS
    machine(TRAPPED, RUNS)
    assert products_claim().status == HOLDS
    machine(TRAPPED, DIES)
    claim = products_claim()
    assert claim.status == FAILS and "ended by SIGILL in torch's own product bfloat16 matmul" in claim.detail
    assert claim.next_step == "export ONEDNN_MAX_CPU_ISA=AVX512_CORE before Python starts"
    amx.avoid_trapped_units()
    assert products_claim().status == HOLDS and "ONEDNN_MAX_CPU_ISA=AVX512_CORE is set" in products_claim().detail
    machine(TRAPPED, DIES)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX")
    claim = products_claim()
    assert claim.status == FAILS and claim.next_step == "export ONEDNN_MAX_CPU_ISA=AVX512_CORE instead"
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    machine(TRAPPED, ALWAYS_DIES)
    claim = products_claim()
    assert claim.status == FAILS and "ONEDNN_MAX_CPU_ISA=AVX512_CORE does not help" in claim.next_step


def test_the_probe_runs_every_product_here():
    """The program itself, on this machine: it must end by itself, or die as it reports."""
    environment = {name: value for name, value in os.environ.items() if name not in amx._VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", amx.PROBE], env=environment, capture_output=True, text=True, timeout=500
    )
    if done.returncode >= 0:
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "done"
        assert {line.split()[1] for line in done.stdout.splitlines()[:-1]} == {
            *("matmul", "linear", "bmm", "conv1d", "scaled_dot_product_attention")
        }
    else:
        assert amx.listed_units(Path("/proc/cpuinfo")), "products die, and the CPU lists no unit by which we would ask"


WHOLE_PATH = """
import os, runpy, sys
from pathlib import Path
from tp_invariant.core import amx
amx.CPUINFO, amx.PROBE = Path(sys.argv[1]), sys.argv[2]
runpy.run_path(sys.argv[3])
from tp_invariant.testing import run_ranks

def variable(tp_group):
    return os.environ.get("ONEDNN_MAX_CPU_ISA")

print(variable(None), *run_ranks(variable, 1, device="cpu"))
"""


def test_the_tests_own_start_sets_it_for_this_process_and_its_ranks(tmp_path):
    """conftest.py, then ranks: on a machine whose products are trapped both have the variable."""
    (tmp_path / "cpuinfo").write_text(TRAPPED)
    environment = {name: value for name, value in os.environ.items() if name not in amx._VARIABLES}
    arguments = [str(tmp_path / "cpuinfo"), DIES, str(CONFTEST)]
    done = subprocess.run(
        [sys.executable, "-c", WHOLE_PATH, *arguments], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "AVX512_CORE AVX512_CORE"


# --- the library itself ---------------------------------------------------------------------------------------------

PRODUCTS = re.compile(
    r"aten::_?(mm|addmm|addmm_|bmm|baddbmm|addbmm|mv|addmv|dot|vdot|matmul|linear|addr|ger|convolution|conv\w*"
    r"|scaled_dot_product\w*|scaled_grouped_mm|grouped_mm|int_mm|\w*lstm\w*|einsum)$|mkldnn|onednn"
)
SIXTEEN_BITS = {"c10::BFloat16", "c10::Half"}


def products_in_16_bits(run):
    """The names of torch's products that `run` called with 16-bit operands, in forward and backward."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        run()
    events = recorded.profiler.kineto_results.events()
    return sorted({e.name() for e in events if PRODUCTS.search(e.name()) and SIXTEEN_BITS & set(e.dtypes())})


def run_all(tp_group, cases):
    """The 16-bit products of all cases of verify, and of code outside them."""

    def run():
        for case in cases:
            case.run(tp_group)
        attention_in_every_way()
        demo_attention()

    return products_in_16_bits(run)


def attention_in_every_way():
    """Every code path of `safe_attention` and `attention`."""
    q, k, v = (torch.randn(1, 4, 24, 16).bfloat16().requires_grad_() for _ in range(3))
    mask = torch.rand(24, 24) > 0.2
    for options in ({"attn_mask": mask}, {"is_causal": True, "softcap": 20.0}, {"attn_mask": mask.bfloat16()}):
        safe_attention(q, k, v, **options).sum().backward()
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = (torch.randn(1, 4, 24, 16).to(dtype).requires_grad_() for _ in range(3))
        tpi.attention(q, k, v, causal=True, window=5).sum().backward()
        tpi.attention(q[:, :, :1], k, v, causal=True)


def demo_attention():
    with tpi.set_tp_invariant_mode(True):
        q, k, v = (torch.randn(1, 2, 16, 8).bfloat16().requires_grad_() for _ in range(3))
        causal_attention(q, k, v).sum().backward()


@pytest.fixture(scope="module")
def cases_of_verify():
    """Every case that `tp-invariant verify --quick` runs, in both 16-bit dtypes."""
    cases = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_checks, "check_cases", lambda some, *rest: cases.extend(some))
        for check in verify_checks.CHECKS:
            if check.name not in ("gemm", "state", "checkpoint"):  # a product by itself; training steps once more
                check.run(verify_checks.Setup((1, 2), "cpu", quick=True))
    assert len({type(case) for case in cases}) >= 8
    return list(dict.fromkeys(c.with_(dtype=dtype) for c in cases for dtype in (torch.bfloat16, torch.float16)))


def test_the_librarys_own_path_needs_none_of_torchs_16_bit_products(cases_of_verify):
    cases = {dtype: [case for case in cases_of_verify if case.dtype == dtype] for dtype in (torch.bfloat16, torch.half)}
    assert run_ranks(run_all, 2, cases[torch.bfloat16], device="cpu") == [[], []]
    assert run_ranks(run_all, 1, cases[torch.half], device="cpu") == [[]]


def test_the_stock_path_does_so_that_the_test_above_can_fail(cases_of_verify):
    def run():
        with tpi.set_tp_invariant_mode(False):
            layer = tpi.Linear(64, 32, dtype=torch.bfloat16)
            layer(torch.randn(8, 64).bfloat16()).sum().backward()

    assert products_in_16_bits(run)
    q = torch.randn(1, 2, 16, 8).bfloat16()
    assert products_in_16_bits(lambda: F.scaled_dot_product_attention(q, q, q))
