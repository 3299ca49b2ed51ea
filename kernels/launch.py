"""How kernels of this package are launched: where, and again and again at little cost to the host.

Triton works out at every launch which compiled kernel the arguments call for: their types, which are 1 or multiples of
16, all options. That takes longer than everything else of a launch. A `Launch` does it once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

# @triton.jit looks at TRITON_INTERPRET when it decorates, that is, when a kernel's module is imported. Setting the
# variable later changes nothing about the kernels, so what counts is its value here.
_INTERPRETED = bool(triton.knobs.runtime.interpret)
_NOTHING = contextlib.nullcontext()


def interpreting() -> bool:
    """True if the kernels of this package run in Triton's interpreter, as decided when they were imported."""
    return _INTERPRETED


def launch_on(tensor: Tensor, operation: str) -> contextlib.AbstractContextManager:
    """Context in which a kernel launch goes to `tensor`'s own device.

    Raises ValueError if that device cannot run Triton kernels; `operation` names the caller in the message.
    """
    if tensor.device.type != "cuda":
        if _INTERPRETED:
            return _NOTHING
        raise ValueError(
            f"{operation}: the Triton kernel needs CUDA tensors, got device {tensor.device}; allowed: a CUDA device, "
            f"or use {operation} of tp_invariant.kernels.reference, which runs anywhere"
        )
    if tensor.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(tensor.device)


class _Descriptor:
    """What a launch reads of a TensorDescriptor, without the checks that building one makes."""

    __slots__ = ("base", "shape", "strides")
    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, base: Tensor, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.base, self.shape, self.strides = base, shape, strides


class Launch:
    """A kernel bound to its options, which finds its compiled form at the first call and keeps it.

    Its kernel must not specialise on values, and all calls must agree in what is left to specialise on: dtypes, block
    shapes of descriptors, constexprs, which arguments are None, and the device.
    """

    def __init__(self, kernel: Any, programs: int | None = None, **options: Any) -> None:
        """programs: how many a launch has; None if each call says its grid."""
        self._kernel, self._options = kernel, options
        self._grid = None if programs is None else (programs, 1, 1)
        self._compiled: Any = None

    def descriptor(
        self, x: Tensor, block: Sequence[int], shape: Sequence[int] | None = None, strides: Sequence[int] | None = None
    ) -> TensorDescriptor | _Descriptor:
        """A descriptor to pass, of x or of what shape and strides make of its memory; a kernel remembers its block."""
        shape, strides = shape or x.shape, strides or x.stride()
        if self._compiled is not None:
            return _Descriptor(x, shape, strides)
        return TensorDescriptor(x, list(shape), list(strides), list(block))

    def __call__(self, device_index: int | None, *args: Any, grid: tuple[int, int, int] | None = None) -> None:
        """Launches on the current stream of the current device, whose index is device_index."""
        grid = grid or self._grid
        if self._compiled is not None:
            self._compiled[grid](*args, stream=driver.active.get_current_stream(device_index))
            return
        compiled = self._kernel[grid](*args, **self._options)
        if not _INTERPRETED:
            self._compiled = compiled
