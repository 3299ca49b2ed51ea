"""Every Triton kernel compiles for a Hopper GPU, also without one: the interpreter accepts more than the compiler.

With the installed Triton; nothing is launched, so this does not test results.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

from triton.runtime.jit import KernelInterface

from tp_invariant import kernels

TESTS = Path(__file__).parents[1]


def kernel_names():
    """The kernels that are launched; they call the others."""
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, KernelInterface) and name.endswith("kernel"):
                yield f"{Path(value.fn.__code__.co_filename).stem}.{name}"


def compile_in_a_process(tmp_path, worker=TESTS / "helpers" / "compile_worker.py"):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_CACHE_DIR": str(tmp_path)}
    return subprocess.run([sys.executable, str(worker)], env=environment, capture_output=True, text=True, timeout=500)


def test_every_kernel(tmp_path):
    done = compile_in_a_process(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = set(kernel_names())
    assert len(expected) > 20
    assert set(done.stdout.split()) == expected


def test_a_kernel_that_does_not_compile(tmp_path):
    """The control: a comprehension, which the interpreter accepts."""
    source = (TESTS / "helpers" / "compile_worker.py").read_text()
    for text, broken in (
        ("driver.set_active(NoGPU())", "driver.set_active(NoGPU()); grad_norm._fold = Launches(broken)"),
        ("compiled: set[str] = set()", "compiled: set[str] = set()\n\n\n" + BROKEN),
        ("products(dtype, False)", "clipping(dtype)"),
    ):
        assert text in source
        source = source.replace(text, broken)
    worker = tmp_path / "worker.py"
    worker.write_text(source)
    done = compile_in_a_process(tmp_path, worker)
    assert done.returncode != 0
    assert "UnsupportedLanguageConstruct" in done.stderr


BROKEN = """
import triton
import triton.language as tl
from tp_invariant.kernels.launch import Launches


@triton.jit
def broken(v_ptr, out_ptr, COUNT: tl.constexpr):
    first, second = (tl.load(v_ptr + i) for i in tl.static_range(2))
    tl.store(out_ptr, first + second)
"""
