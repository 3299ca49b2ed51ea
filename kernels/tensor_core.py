"""The tensor core's model by its public path; it is in kernels/gemm/tensor_core.py."""

from .gemm.tensor_core import DTYPES, HOPPER, Recipe, matmul, model

__all__ = [
    "DTYPES",
    "HOPPER",
    "Recipe",
    "matmul",
    "model",
]
