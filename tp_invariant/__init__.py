"""Tensor-parallel layers whose bits do not depend on the tensor-parallel degree."""

from . import testing
from .gemm import set_default_gemm_fn
from .grad_norm import clip_grad_norm_
from .layernorm_linear import LayerNormLinear
from .linear import Linear
from .mode import is_tp_invariant_mode_enabled, set_tp_invariant_mode
from .version import __version__

__all__ = [
    "LayerNormLinear",
    "Linear",
    "__version__",
    "clip_grad_norm_",
    "is_tp_invariant_mode_enabled",
    "set_default_gemm_fn",
    "set_tp_invariant_mode",
    "testing",
]
