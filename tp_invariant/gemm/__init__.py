"""Every matrix product: the gemm_fn, which rank computes what (owner maps), and gathers that start ahead of use."""

from ..kernels.gemm.autotune import autotune
from .gemm_fn import GemmFn, bundled, bundled_gemm_fn, gemm, set_default_gemm_fn

__all__ = ["GemmFn", "autotune", "bundled", "bundled_gemm_fn", "gemm", "set_default_gemm_fn"]
