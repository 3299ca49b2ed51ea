"""Which module computes an operation on a device: Triton's kernel on CUDA, its reference on a CPU. No Triton here."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

_MODULES = {  # (cuda, cpu), which have the same functions
    "attention": ("attention.forward", "attention.reference"),
    "batched GEMM": ("gemm.batched", "gemm.reference"),
    "cross-entropy": ("vocabulary.cross_entropy", "vocabulary.reference_cross_entropy"),
    "draw": ("vocabulary.draw", "vocabulary.reference_draw"),
    "embedding gradient": ("vocabulary.embedding", "vocabulary.reference_embedding"),
    "GEMM": ("gemm.matmul", "gemm.reference"),
    "gated activation": ("rowwise.gated", "rowwise.reference_gated"),
    "grouped GEMM": ("experts.grouped", "experts.reference_grouped"),
    "gradient norm": ("grad_norm.kernel", "grad_norm.reference"),
    "norm": ("rowwise.norm", "rowwise.reference_norm"),
    "rotary embedding": ("rowwise.rope", "rowwise.reference_rope"),
    "residual addition and norm": ("rowwise.add_norm", "rowwise.reference_add_norm"),
    "routing": ("experts.routing", "experts.reference_routing"),
    "softmax": ("rowwise.softmax", "rowwise.reference_softmax"),
}


@functools.cache
def select(operation: str, device_type: str) -> ModuleType:
    """The module is imported by the first call that needs it: those for CUDA import triton.

    Raises:
        NotImplementedError: a device_type other than "cuda" and "cpu".
    """
    if device_type not in ("cuda", "cpu"):
        raise NotImplementedError(f"no {operation} is bundled for device {device_type!r}: bundled are cuda and cpu")
    on_cuda, on_cpu = _MODULES[operation]
    return importlib.import_module(f".{on_cuda if device_type == 'cuda' else on_cpu}", __package__)
