"""Which optimizers step an element alike wherever its parameter is cut: what docs/optimizers.md says of torch's."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.fixture
def script(monkeypatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import optimizer_cuts

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield optimizer_cuts
    torch.set_num_threads(threads)


def entries(script: ModuleType, device: str = "cpu") -> list[tuple[str, str]]:
    return [(o, i) for o, i in itertools.product(script.OPTIMIZERS, script.IMPLEMENTATIONS) if script.has(o, i, device)]


def test_in_float32_every_cut_holds(script):
    for optimizer, implementation in entries(script):
        if implementation != "fused":
            found = script.different_cuts(optimizer, implementation, torch.float32, seeds=2, count=12)
            assert not found, f"{optimizer}, {implementation}: {found}"


def test_at_multiples_of_the_vectors_every_optimizer_holds(script):
    for (optimizer, implementation), dtype in itertools.product(entries(script), script.DTYPES):
        found = script.different_cuts(optimizer, implementation, dtype, seeds=1, count=6, multiple=script.ALIGNED)
        assert not found, f"{optimizer}, {implementation}, {dtype}: {found}"


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="shows what the vector loops of x86 leave over",
)
@pytest.mark.parametrize(
    "optimizer, implementation, dtype",
    [
        ("SGD, momentum", "fused", torch.float32),
        ("AdamW", "fused", torch.float32),
        ("SGD", "foreach", torch.bfloat16),
        ("SGD, momentum", "for-loop", torch.float16),
        ("RMSprop, centered, momentum", "foreach", torch.bfloat16),
        ("Adam, weight decay", "for-loop", torch.float16),
    ],
)
def test_what_does_not_hold(script, optimizer, implementation, dtype):
    """The page's other entries: some cut differs. It also shows that the comparison above can fail."""
    assert script.different_cuts(optimizer, implementation, dtype, seeds=3, count=20)


def test_without_vectors_every_cut_holds_in_16_bits():
    """ATEN_CPU_CAPABILITY is read when torch is loaded, so in a process of its own."""
    code = """
import torch, optimizer_cuts as script
torch.set_num_threads(1)
assert torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512")
for optimizer in ("SGD", "SGD, momentum", "RMSprop, centered, momentum", "Adam, weight decay"):
    for implementation in ("for-loop", "foreach"):
        assert not script.different_cuts(optimizer, implementation, torch.bfloat16, seeds=2, count=12), optimizer
"""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": str(ROOT / "benchmarks")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=500)


def test_the_page_has_every_optimizer(script):
    page = (ROOT / "docs" / "optimizers.md").read_text()
    (equal,) = re.findall("No cut of (.*) differs[.]", page)
    named = [*re.findall(r"^\| (.*?) \| \d", page, re.MULTILINE), *equal.split(", ")]
    assert sorted(named) == sorted(script.OPTIMIZERS)


@pytest.mark.gpu
def test_on_a_gpu_every_cut_holds_but_of_one(script):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    for (optimizer, implementation), dtype in itertools.product(entries(script, "cuda"), script.DTYPES):
        one = (optimizer, implementation, dtype) == ("Adam, weight decay", "fused", torch.float32)
        for multiple in (1, script.ALIGNED)[one:]:
            found = script.different_cuts(
                optimizer, implementation, dtype, seeds=1, count=8, multiple=multiple, device="cuda"
            )
            assert not found, f"{optimizer}, {implementation}, {dtype}: {found}"
    assert script.different_cuts("Adam, weight decay", "fused", torch.float32, seeds=3, count=16, device="cuda")
