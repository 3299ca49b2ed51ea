"""The properties of a process that affect bits: versions, the device, switches. They must be equal on all ranks."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..core.mode import is_call_check_enabled, is_tp_invariant_mode_enabled
from ..core.variables import CHECK_VARIABLE, TRANSPORT_VARIABLE
from ..version import __version__


@cache
def installed(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def architecture(device: torch.device) -> str:
    """The kind of device, as far as it affects bits: "cuda 9.0", "cpu x86_64 AVX512"."""
    if device.type == "cuda":
        return "cuda {}.{}".format(*torch.cuda.get_device_capability(device))
    if device.type == "cpu":
        return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return device.type


FLUSHES = "whether the CPU flushes subnormal numbers"


def flushes_subnormals() -> bool:
    return not (torch.full((1,), 1e-40, dtype=torch.float32, device="cpu") * 1.0).item()


@cache
def _kernel_sources() -> str:
    """A digest of the kernels' source files, because an edited copy has the same version as the original."""
    sha = hashlib.sha256()
    folder = Path(import_module("tp_invariant.kernels").__path__[0])
    for name in sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py")):
        sha.update(name.encode() + b"\0" + (folder / name).read_bytes() + b"\0")
    return sha.hexdigest()[:12]


def _switch(read: Callable[[], bool]) -> bool | str:
    try:
        return read()
    except ValueError as error:  # an invalid value of the variable: the comparison shows it to the other ranks
        return str(error)


def environment_facts(device: torch.device) -> dict[str, Any]:
    """{name: value on this rank}, for tensors on `device`."""
    return {
        "the version of tp_invariant": __version__,
        "the source of tp_invariant's kernels": _kernel_sources(),
        "the version of torch": torch.__version__,
        "the version of triton": installed("triton") or "none",
        "the version of Python": ".".join(platform.python_version_tuple()[:2]),
        "the device": architecture(device),
        "TRITON_INTERPRET": os.environ.get("TRITON_INTERPRET", "0"),
        FLUSHES: flushes_subnormals(),
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "the TP-invariant mode": _switch(is_tp_invariant_mode_enabled),
        CHECK_VARIABLE: _switch(is_call_check_enabled),
        TRANSPORT_VARIABLE: os.environ.get(TRANSPORT_VARIABLE, "auto"),
    }
