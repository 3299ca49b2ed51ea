"""Every matrix product: the gemm_fn, which rank computes what (owner maps), and gathers that start ahead of use."""

from ..kernels.gemm.autotune import autotune
from .gemm_fn import (
    BUNDLED_DTYPES,
    GemmFn,
    RankMajor,
    bundled,
    bundled_gemm_fn,
    check_dtype,
    check_norm_dtype,
    check_signature,
    column_sums,
    gemm,
    gemm_fn_name,
    gemm_into,
    gemm_rank_major,
    resolve_gemm_fn,
    set_default_gemm_fn,
    uses_bundled,
)

__all__ = [
    "BUNDLED_DTYPES",
    "GemmFn",
    "RankMajor",
    "autotune",
    "bundled",
    "bundled_gemm_fn",
    "check_dtype",
    "check_norm_dtype",
    "check_signature",
    "column_sums",
    "gemm",
    "gemm_fn_name",
    "gemm_into",
    "gemm_rank_major",
    "resolve_gemm_fn",
    "set_default_gemm_fn",
    "uses_bundled",
]
