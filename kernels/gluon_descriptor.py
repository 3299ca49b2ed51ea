"""Descriptors for kernels in Gluon. Imported by the first call that needs it, because Gluon has no interpreter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import plans

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def make(x: Tensor, shape: list[int], strides: list[int], block: list[int]) -> Any:
    """A descriptor in the layout that a kernel has by default."""
    return TensorDescriptor(x, shape, strides, block, gl.NVMMASharedLayout.get_default_for(block, _DTYPES[x.dtype]))


def descriptor(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]) -> Any:
    """A TMA descriptor of x's memory, seen with this shape and these strides."""
    return plans.descriptor(x, shape, strides, block, make)
