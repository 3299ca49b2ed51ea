"""Whether torch's own 16-bit products run on this CPU, and what to set where they end the process.

Some virtual machines list the matrix units of Intel's CPUs (AMX: amx_tile, amx_bf16, amx_fp16) and trap their
instructions. oneDNN, which computes torch's bfloat16 and float16 products on a CPU, goes by the list, so any such
product ends the process with SIGILL. `ONEDNN_MAX_CPU_ISA=AVX512_CORE` keeps oneDNN from those units; oneDNN reads it
when it is first used, not when torch is imported.

This library's own kernels need none of that: on a CPU they multiply in float32. The references in tests and in
`tp-invariant verify`, and the stock path with the mode off, are torch's own products.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .processes import how_it_ended

VARIABLE, VALUE = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE"
EXPORT = f"export {VARIABLE}={VALUE}"
_VARIABLES = (VARIABLE, "DNNL_MAX_CPU_ISA")  # the second is the name that oneDNN had before

CPUINFO = Path("/proc/cpuinfo")
_TIMEOUT_SECONDS = 120.0

# Every product is named before it runs, so that the last line of the output names the one that ended the process.
# oneDNN takes other code for small products than for large ones, and torch has code of its own for attention.
PROBE = """
import torch
import torch.nn.functional as F

def run(name, function, *shapes):
    for dtype in (torch.bfloat16, torch.float16):
        print(f"{str(dtype)[6:]} {name}", flush=True)
        tensors = [torch.ones(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        function(*tensors).sum().backward()

for m, n, k in ((96, 128, 256), (3, 5, 7)):
    run(f"matmul {m} x {n} x {k}", torch.matmul, (m, k), (k, n))
    run(f"linear {m} x {n} x {k}", F.linear, (m, k), (n, k), (n,))
    run(f"bmm 2 x {m} x {n} x {k}", torch.bmm, (2, m, k), (2, k, n))
run("conv1d", F.conv1d, (2, 32, 64), (32, 32, 3))
run("scaled_dot_product_attention", F.scaled_dot_product_attention, *[(1, 2, 64, 64)] * 3)
print("done", flush=True)
"""


@dataclass(frozen=True)
class Crash:
    """How a process ended ("ended by SIGILL"), and in which product."""

    how: str
    product: str

    def __str__(self) -> str:
        return f"a process {self.how} in torch's own product {self.product}"


@dataclass(frozen=True)
class Finding:
    """What `find` saw.

    units    the AMX units that the CPU lists; without any nothing else is asked
    died     how a process ended in which nothing was set; None if it ran through, or if the user had set the variable
    helps    whether a process with ONEDNN_MAX_CPU_ISA=AVX512_CORE ran through; None if it was not asked
    """

    units: tuple[str, ...] = ()
    died: Crash | None = None
    helps: bool | None = None

    @property
    def listed(self) -> str:
        return f"this CPU lists {', '.join(self.units)}"


def chosen() -> str | None:
    """The variable that limits oneDNN in this process and its value, by the user or by `avoid_trapped_units`."""
    return next((f"{name}={os.environ[name]}" for name in _VARIABLES if os.environ.get(name)), None)


def listed_units(cpuinfo: Path) -> tuple[str, ...]:
    """The AMX units that the CPU says it has; none where the file cannot be read, as on other systems than Linux."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return ()
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return tuple(sorted(flag for flag in flags if flag.startswith("amx")))


def probe(environment: Mapping[str, str]) -> Crash | None:
    """Runs torch's own 16-bit products, forward and backward, in a process of their own, about three seconds.

    Returns:
        How that process was ended by a signal; None if it was not.
    """
    command = [sys.executable, "-c", PROBE]
    # one thread: enough to meet the instructions, and a probe may run beside others
    environment = {**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode >= 0:
        return None
    return Crash(how_it_ended(done.returncode), (done.stdout.splitlines() or ["of torch's import"])[-1])


@functools.cache
def find() -> Finding:
    """What is so on this machine; once for a process, since it takes seconds where the CPU lists AMX units."""
    units = listed_units(CPUINFO)
    if not units:
        return Finding()
    if chosen() is not None:
        return Finding(units)
    died = probe(os.environ)
    return Finding(units, died, None if died is None else probe({**os.environ, VARIABLE: VALUE}) is None)


def avoid_trapped_units() -> Finding:
    """Sets ONEDNN_MAX_CPU_ISA for this process and those that it starts where torch's 16-bit products need it.

    To be called before the first of them. Does nothing where the CPU lists no AMX unit, where its products run, and
    where the user has set the variable.
    """
    finding = find()
    if finding.died is None:
        return finding
    if finding.helps:
        os.environ.setdefault(VARIABLE, VALUE)
        said = f"{VARIABLE}={VALUE} is set for this process and those that it starts"
    else:
        said = f"{VARIABLE}={VALUE} does not help: expect this process to end there"
    print(f"{finding.listed}, but {finding.died}; {said}", file=sys.stderr, flush=True)
    return finding
