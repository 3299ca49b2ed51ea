"""Where this package's kernels run, on which device, in which context, or in Triton's interpreter; what they read."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.accelerator import current_device_index

# @triton.jit looks at TRITON_INTERPRET when it decorates, that is, when a kernel's module is imported. Setting the
# variable later changes nothing about the kernels, so what counts is its value here.
_INTERPRETED = bool(triton.knobs.runtime.interpret)
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_NO_CONTEXT = contextlib.nullcontext()


def interpreting() -> bool:
    """True if the kernels of this package run in Triton's interpreter, as decided when they were imported."""
    return _INTERPRETED


# triton.cdiv and triton.next_power_of_2 are also callable in kernels, and therefore take the host 3 us each.


def cdiv(x: int, y: int) -> int:
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """What makes new contiguous tensors, without values: in half the time of torch.empty, which works out strides."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return functools.partial(torch.empty_strided, (*shape,), (*reversed(strides),), dtype=dtype, device=device)


def readable_rows(x: Tensor) -> Tensor:
    """x as a kernel reads it: the elements of a row are adjacent, and torch negates none by a flag alone.

    The interpreter gets bfloat16 and its subnormals wrong, and so sees fp32 only.
    """
    x = x.resolve_neg()
    if _INTERPRETED and x.is_floating_point():
        x = x.float()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def launch_on(tensor: Tensor, operation: str) -> contextlib.AbstractContextManager:
    """Context in which a kernel launch goes to `tensor`'s own device.

    Raises ValueError if that device cannot run Triton kernels, or the tensor has no memory, as fake ones have none;
    `operation` names the caller in the message.
    """
    index = tensor.get_device() if tensor.is_cuda else -1
    if index >= 0 and tensor.data_ptr() and index == current_device_index():
        return _NO_CONTEXT
    if tensor.data_ptr() == 0 and tensor.numel():
        raise ValueError(
            f"{operation}: a {type(tensor).__name__} {tuple(tensor.shape)} has no memory for a kernel to read; under "
            "FakeTensorMode call the operators of torch.ops.tp_invariant, or torch.compile the code"
        )
    if tensor.device.type != "cuda":
        if _INTERPRETED:
            return _NO_CONTEXT
        raise ValueError(
            f"{operation}: the Triton kernel needs CUDA tensors, got device {tensor.device}; allowed: a CUDA device, "
            f"or use {operation} of tp_invariant.kernels.gemm.reference, which runs anywhere"
        )
    return torch.cuda.device(tensor.device)


@functools.cache
def can_overlap(device_index: int | None) -> bool:
    """Whether a kernel may be launched before the kernel that it waits for has ended: Hopper's programmatic launch."""
    if device_index is None or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device_index)[0] >= 9


@functools.cache
def multiprocessors_of(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


class _Thread(threading.local):
    has_context = False


thread = _Thread()


def bind_context(device_index: int) -> None:
    """Makes the context of the current device, whose index this is, current for this thread in the CUDA driver.

    A new thread, such as autograd's, has none until its first call of the CUDA runtime that needs one; on device 0
    torch's own switch of devices makes no such call. A launch binds it, but the driver's functions that encode a tensor
    map or copy memory fail with CUDA_ERROR_INVALID_CONTEXT where nothing was launched before.
    """
    if not thread.has_context:
        torch.cuda.set_device(device_index)  # the runtime call is made even where this is the current device
        thread.has_context = True
