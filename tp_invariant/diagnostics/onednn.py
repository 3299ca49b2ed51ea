"""Whether torch's own 16-bit products run on this CPU.

Some virtual machines list the matrix units of Intel's CPUs (AMX) and trap their instructions. oneDNN, which computes
torch's bfloat16 and float16 products on a CPU, goes by the list, so that any such product ends the process with SIGILL.
This library's own kernels multiply in float32; the mode off and comparisons with torch take torch's own products.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

VARIABLE, VALUE = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE"
_PRODUCTS = """
import torch
for dtype in (torch.bfloat16, torch.float16):
    x = torch.ones(96, 256, dtype=dtype)
    x @ x.t()
"""


def lists_matrix_units() -> bool:
    try:
        return " amx" in Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return False


def products_run() -> bool:
    """Whether a process of its own computes torch's 16-bit products; takes seconds, where the CPU lists AMX units."""
    if not lists_matrix_units():
        return True
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", _PRODUCTS], env=environment, capture_output=True).returncode >= 0


def avoid_trapped_units() -> None:
    """Limits oneDNN for this process and those that it starts, if its products need it and the user has set nothing."""
    if VARIABLE not in os.environ and not products_run():
        os.environ[VARIABLE] = VALUE
        print(f"torch's own 16-bit products end a process here: {VARIABLE}={VALUE} is set", file=sys.stderr, flush=True)
