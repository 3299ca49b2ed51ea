"""CPUs that list AMX units and trap their instructions: what is set, by whom, and that the library itself needs none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tp_invariant import amx

CONFTEST = Path(__file__).with_name("conftest.py")
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
FAILS = "raise SystemExit(4)"  # no signal: torch is broken in another way, which this is not about


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(flags, probe): what this machine seems to be to `amx`, with nothing set."""

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
    assert finding.died == amx.Death("SIGILL", "bfloat16 matmul") and finding.helps is True
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE"
    assert capsys.readouterr().err == (
        "this CPU lists amx_bf16, amx_int8, amx_tile, but torch's own product bfloat16 matmul ends the process with "
        "SIGILL; ONEDNN_MAX_CPU_ISA=AVX512_CORE is set for this process and those that it starts\n"
    )


def test_a_variable_that_does_not_help_is_not_set_and_it_is_said(machine, capsys):
    machine(TRAPPED, ALWAYS_DIES)
    finding = amx.avoid_trapped_units()
    assert finding.died is not None and finding.helps is False
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE does not help" in capsys.readouterr().err


@pytest.mark.parametrize("program", [RUNS, FAILS])
def test_products_that_run_are_left_alone(machine, program, capsys):
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
def test_what_the_user_has_set_stays(machine, monkeypatch, name):
    machine(TRAPPED, DIES)
    monkeypatch.setenv(name, "AVX2")
    monkeypatch.setattr("subprocess.run", None)
    assert amx.avoid_trapped_units().chosen == f"{name}=AVX2"
    assert os.environ[name] == "AVX2" and os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX2") == "AVX2"


def test_the_probe_runs_every_product_here():
    """The program itself, on this machine: it must end of its own accord, or die as it says."""
    environment = {name: value for name, value in os.environ.items() if name not in amx._VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", amx.PROBE], env=environment, capture_output=True, text=True, timeout=120
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
from tp_invariant import amx
amx.CPUINFO, amx.PROBE = Path(sys.argv[1]), sys.argv[2]
runpy.run_path(sys.argv[3])
from tp_invariant.testing import run_ranks

def variable(tp_group):
    return os.environ.get("ONEDNN_MAX_CPU_ISA")

print(variable(None), *run_ranks(variable, 2, device="cpu"))
"""


def test_the_tests_own_start_sets_it_for_this_process_and_its_ranks(tmp_path):
    """conftest.py, then ranks: on a machine whose products die both have the variable."""
    (tmp_path / "cpuinfo").write_text(TRAPPED)
    environment = {name: value for name, value in os.environ.items() if name not in amx._VARIABLES}
    arguments = [str(tmp_path / "cpuinfo"), DIES, str(CONFTEST)]
    done = subprocess.run(
        [sys.executable, "-c", WHOLE_PATH, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "AVX512_CORE AVX512_CORE AVX512_CORE"
