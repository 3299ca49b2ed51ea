"""What this machine has, and which of the library's claims hold on it, by short checks that really run.

tp-invariant doctor            tables for people
tp-invariant doctor --json     for machines
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import platform
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import determinism
from ..comm.collectives import resolve_group
from ..consistency.environment import installed
from ..core import mode
from ..core.bits import assert_bitwise_equal
from ..core.layout import TokenSharding
from ..functional.attention_choice import safe_attention
from ..functional.cross_entropy import vocab_parallel_cross_entropy
from ..functional.norm import Norm, NormCall
from ..gemm.gemm_fn import BUNDLED_DTYPES, bundled_gemm_fn
from ..kernels.dtypes import HALF_DTYPES
from ..testing.checks import assert_slice_invariant, wide_randn
from ..version import __version__
from . import fingerprint, onednn

_PACKAGES = ("torch", "triton", "einops", "transformers", "safetensors", "cloudpickle", "rich")

# --- facts, as JSON values ------------------------------------------------------------------------------------------


def collect() -> dict[str, Any]:
    """All facts and claims, as JSON values. Starts CUDA if there is a GPU."""
    facts = {
        "versions": _versions(),
        "devices": _devices(),
        "gate": _gate(),
        "settings": [row._asdict() for row in determinism.report()],
        "gemm": _gemm_kernel(),
    }
    return facts | {"claims": [dataclasses.asdict(claim) for claim in claims(facts)]}


def gpu_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"tp_invariant": __version__, "python": platform.python_version()}
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpu_count() else None
    packages = {package: installed(package) for package in _PACKAGES}
    return versions | packages | {"cuda": torch.version.cuda, "nccl": nccl}


def cpu_model() -> str:
    """The CPU's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(names, platform.processor() or platform.machine())


def _devices() -> list[dict[str, Any]]:
    """The CPU, then every GPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices: list[dict[str, Any]] = [
        {"device": "cpu", "name": cpu_model(), "capability": torch.backends.cpu.get_cpu_capability(), "cores": cores}
    ]
    for index in range(gpu_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory GiB": round(properties.total_memory / 2**30, 1),
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return devices


def _gate() -> dict[str, Any]:
    """The variables, and the mode that follows from them or the error that every layer would raise."""
    names = (mode.MODE_VARIABLE, mode.ALIAS_VARIABLE, mode.CHECK_VARIABLE)
    gate: dict[str, Any] = {name: os.environ.get(name) for name in names} | {"mode": None, "error": None}
    try:
        gate["mode"] = "on" if mode.is_tp_invariant_mode_enabled() else "off"
        mode.is_call_check_enabled()
    except ValueError as error:
        gate["error"] = str(error)
    return gate


def _gemm_kernel() -> dict[str, Any]:
    """The bundled kernel that computes a 16-bit product, and whether its tiles were measured on this chip."""
    if not gpu_count():
        return {"kernel": "plain torch: BLAS in fixed blocks of K", "tiles measured here": None}
    try:
        from ..kernels.gemm.matmul_table import MEASURED_MULTIPROCESSORS
        from ..kernels.gemm.matmul_tma import tma_operands
    except ImportError as error:
        return {"kernel": f"none: {error}", "tiles measured here": False}
    a, b = (torch.zeros(64, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    on_tma = tma_operands(a, b, torch.bfloat16) is not None
    count = torch.cuda.get_device_properties(0).multi_processor_count
    return {
        "kernel": "Triton with TMA (Hopper)" if on_tma else "Triton, generic",
        "tiles measured here": on_tma and count == MEASURED_MULTIPROCESSORS,
    }


# --- claims ---------------------------------------------------------------------------------------------------------

HOLDS, FAILS, UNCHECKED = "holds", "does not hold here", "not checked"
TESTED_TORCH = (2, 11), (2, 13)
TESTED_TRITON = (3, 6), (3, 7)
_BROKEN = "this is a bug or a broken installation: please report it with the output of tp-invariant doctor --json"


@dataclasses.dataclass(frozen=True)
class Claim:
    """`next_step` says what to do if it does not hold, or how to check it."""

    claim: str
    status: str
    detail: str
    next_step: str = ""


def claims(facts: dict[str, Any]) -> list[Claim]:
    """Runs the checks and returns every claim; `facts` come from `collect`."""
    versions, gpus = facts["versions"], gpu_count()
    triton = "triton is a version that was tested"
    checked = [
        _version("torch", versions["torch"], TESTED_TORCH),
        _version("triton", versions["triton"], TESTED_TRITON)
        if versions["triton"] or gpus
        else Claim(triton, UNCHECKED, "not installed, and not needed without a GPU", "pip install triton"),
        _tried("the gate's variables are understood", _understood, "set them to 1 or 0, or unset them"),
        _tried("CPU: torch's own 16-bit products run", _products, f"export {onednn.VARIABLE}={onednn.VALUE}"),
        _tried(
            "CPU: the GEMM's fast form adds in the order of its definition",
            _blas,
            "the bits are still right, from a slower form; another build of torch may have a faster BLAS",
        ),
    ]
    for device in ("cpu", "cuda"):
        for what, check in _SLICES.items():
            name = f"{'CPU' if device == 'cpu' else 'GPU'}: {what}"
            if device == "cpu" or gpus:
                checked.append(_tried(name, functools.partial(check, device), _BROKEN))
            else:
                checked.append(Claim(name, UNCHECKED, "torch sees no GPU", "run this on a machine with one"))
    checked += _of_gpus(facts) if gpus else []
    device = "cuda" if gpus > 1 else "cpu"
    degrees = "outputs, gradients and training steps are the same bytes at every TP degree"
    return [*checked, Claim(degrees, UNCHECKED, "takes minutes", f"tp-invariant verify --device {device}")]


def _of_gpus(facts: dict[str, Any]) -> list[Claim]:
    name, hopper = torch.cuda.get_device_name(), torch.cuda.get_device_capability() == (9, 0)
    model = "GPU: 16-bit GEMMs have the bits of the tensor core's model"
    speed = "GPU: the GEMM's tiles were measured on this chip, near cuBLAS's speed"
    tiles, kernel = facts["gemm"]["tiles measured here"], facts["gemm"]["kernel"]
    return [
        _tried(model, _tensor_core, _BROKEN)
        if hopper
        else Claim(model, UNCHECKED, f"{name} is not Hopper, as the model is", "same contract, other bits"),
        Claim(speed, HOLDS, f"{kernel}, its table measured on this kind of chip")
        if tiles
        else Claim(speed, UNCHECKED, f"{kernel}: same contract", "python benchmarks/bench_gemm.py"),
    ]


def _tried(claim: str, check: Callable[[], str], next_step: str) -> Claim:
    """HOLDS with the text that check() returns, or FAILS with its error, so that other claims are still checked."""
    try:
        return Claim(claim, HOLDS, check())
    except Exception as error:
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        return Claim(claim, FAILS, f"{kind}{error}", next_step)


def _version(package: str, here: str | None, tested: tuple[tuple[int, int], tuple[int, int]]) -> Claim:
    claim = f"{package} is a version that was tested"
    low, high = (".".join(map(str, bound)) for bound in tested)
    if here is None:
        return Claim(claim, FAILS, "not installed", f"pip install {package}")
    release = tuple(int(part) for part in re.findall(r"\d+", here)[:2])
    if release < tested[0]:
        return Claim(claim, FAILS, f"{here} is older than tested, {low} to {high}", f"pip install '{package}>={low}'")
    if release > tested[1]:
        detail = f"{here} is newer than tested, {low} to {high}"
        return Claim(claim, UNCHECKED, detail, "tp-invariant verify shows whether the contract holds")
    return Claim(claim, HOLDS, f"{here}; tested are {low} to {high}")


def _understood() -> str:
    checked = "every call is compared" if mode.is_call_check_enabled() else "first calls are compared"
    return f"the mode is {'on' if mode.is_tp_invariant_mode_enabled() else 'off'}; {checked} between ranks"


def _products() -> str:
    assert onednn.products_run(), "a process that computes them is ended by a signal"
    return "AMX units are listed, and work" if onednn.lists_matrix_units() else "no AMX units are listed"


def _gemm(device: str) -> str:
    assert_slice_invariant(bundled_gemm_fn(torch.device(device)), shapes=((33, 65, 300),), device=device)
    return f"slices, strides and repeats of a product in {len(BUNDLED_DTYPES)} dtypes, against float64 too"


def _blas() -> str:
    """Products of one tile and of several, in every layout; the reference compares each tile shape with the chain."""
    from ..kernels.gemm.reference import chained_matmul, matmul

    generator = torch.Generator().manual_seed(0)
    a, b = wide_randn(70, 300, generator=generator), wide_randn(300, 600, generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for left in (a, a.t().contiguous().t()):
            for right in (b, b.t().contiguous().t()):
                assert_bitwise_equal(matmul(left, right), chained_matmul(left, right), "product")
    return "BLAS calls give the bits of the elementwise chain"


def _same_in_slices(what: str, function: Callable[..., Sequence[Tensor]], *data: Tensor) -> None:
    """Compares function(*data) with its results of slices of the first dim."""
    whole, size = function(*data), len(data[0])
    for rows in (slice(0, 1), slice(1, size // 3), slice(size // 3, size)):
        assert_bitwise_equal(list(function(*(t[rows] for t in data))), [t[rows] for t in whole], f"{what} {rows}")


def _norms(device: str) -> str:
    generator = torch.Generator().manual_seed(0)
    for rms, dtype in itertools.product((False, True), BUNDLED_DTYPES):
        call = NormCall(resolve_group(None), TokenSharding(1, 0), 1e-5, rms, False)
        x = wide_randn(24, 257, generator=generator, spread=2).to(device, dtype)
        weight = wide_randn(257, generator=generator, spread=2).to(device, dtype)
        fixed = weight, None if rms else weight, call
        what = f"{'RMSNorm' if rms else 'LayerNorm'} of {dtype} rows"
        _same_in_slices(what, lambda x, fixed=fixed: [Norm.apply(x, *fixed)], x)
    return "LayerNorm and RMSNorm of slices of rows"


def _losses(device: str) -> str:
    def loss_of(logits: Tensor, target: Tensor) -> list[Tensor]:
        own = logits.clone().requires_grad_()
        with mode.set_tp_invariant_mode(True):
            loss = vocab_parallel_cross_entropy(own, target, tp_group=None, reduction="none")
        return [loss.detach(), *torch.autograd.grad(loss.sum(), own)]

    generator = torch.Generator().manual_seed(0)
    target = torch.randint(257, (24,), generator=generator).to(device)
    for dtype in BUNDLED_DTYPES:
        logits = wide_randn(24, 257, generator=generator, spread=2).to(device, dtype)
        _same_in_slices(f"loss of {dtype} tokens", loss_of, logits, target)
    return f"cross-entropy of slices of tokens, forward and backward, {len(BUNDLED_DTYPES)} dtypes"


def _attention(device: str) -> str:
    def attend(*heads_first: Tensor) -> list[Tensor]:
        q, k, v, dy = (t.transpose(0, 1).contiguous() for t in heads_first)
        inputs = [t.requires_grad_() for t in (q, k, v)]
        y = safe_attention(*inputs, is_causal=True)
        return [t.detach().transpose(0, 1) for t in (y, *torch.autograd.grad(y, inputs, dy))]

    generator = torch.Generator().manual_seed(0)
    for dtype in BUNDLED_DTYPES if device == "cuda" else (torch.float32, torch.bfloat16):
        data = [torch.randn(6, 1, 33, 64, generator=generator).to(device, dtype) for _ in range(4)]
        _same_in_slices(f"attention of {dtype} heads", attend, *data)
    return "slices of 6 heads, forward and backward"


def _tensor_core() -> str:
    """The GPU's 16-bit GEMM lines of the fingerprint against the model's."""
    gpu = list(fingerprint.gemm_lines(bundled_gemm_fn(torch.device("cuda")), HALF_DTYPES, "cuda"))
    model = fingerprint.tensor_core_fingerprint()
    if differ := [line.key for line, other in zip(gpu, model, strict=True) if line.digest != other.digest]:
        raise AssertionError(f"{len(differ)} of {len(gpu)} products have other bits, the first {differ[0]}")
    return f"all {len(gpu)} products of the fingerprint"


_SLICES: dict[str, Callable[[str], str]] = {
    "the bundled GEMM is slice-invariant": _gemm,
    "norms of rows do not depend on other rows": _norms,
    "a token's loss does not depend on other tokens": _losses,
    "a head's attention does not depend on other heads": _attention,
}

# --- printing -------------------------------------------------------------------------------------------------------


def tables(facts: dict[str, Any]) -> dict[str, list[tuple[str, ...]]]:
    """The rows of every table by its title."""

    def named(values: dict[str, Any]) -> list[tuple[str, ...]]:
        return [(name, "-" if value is None else str(value)) for name, value in values.items()]

    devices: list[tuple[str, ...]] = [
        (device["device"], ", ".join(f"{name} {value}" for name, value in device.items() if name != "device"))
        for device in facts["devices"]
    ]
    claims = [("claim", "status", "detail", "next step"), *(tuple(claim.values()) for claim in facts["claims"])]
    return {"Versions": named(facts["versions"]), "Devices": devices, "Gate": named(facts["gate"]), "Claims": claims}


def print_table(title: str, rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"\n{title}")
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def verdict(statuses: Sequence[str]) -> str:
    names = {HOLDS: "hold", FAILS: "do not hold here", UNCHECKED: "were not checked"}
    counts = (f"{statuses.count(status)} {text}" for status, text in names.items() if status in statuses)
    return f"Verdict: of {len(statuses)} claims {', '.join(counts)}."


# --- the command ----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """The `doctor` command. Exit status 0 if every claim that was checked holds, 1 if one does not; 2: bad usage."""
    parser = argparse.ArgumentParser(
        prog="tp-invariant doctor",
        description="What this machine has, and which of the library's claims hold on it.",
        epilog="Exit status: 0 if all that was checked holds, 1 if something does not, 2 for a wrong option.",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args(list(argv))
    facts = collect()
    statuses = [claim["status"] for claim in facts["claims"]]
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        for title, rows in tables(facts).items():
            print_table(title, rows)
        print("\nSettings for code around the layers: print(tp_invariant.determinism.report())")
        print(f"\n{verdict(statuses)}")
    return 1 if FAILS in statuses else 0
