"""Launching this package's kernels: on which device, and repeatedly at little cost for the host.

At every launch Triton determines which compiled kernel the arguments need, from their types, from which of them are 1
or multiples of 16, and from all options. This takes longer than the rest of a launch. A `Launch` does it once.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

# @triton.jit looks at TRITON_INTERPRET when it decorates, that is, when a kernel's module is imported. Setting the
# variable later changes nothing about the kernels, so what counts is its value here.
_INTERPRETED = bool(triton.knobs.runtime.interpret)
_NO_CONTEXT = contextlib.nullcontext()


def interpreting() -> bool:
    """True if the kernels of this package run in Triton's interpreter, as decided when they were imported."""
    return _INTERPRETED


# triton.cdiv and triton.next_power_of_2 are also callable in kernels, and therefore take the host 3 us each.


def cdiv(x: int, y: int) -> int:
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def launch_on(tensor: Tensor, operation: str) -> contextlib.AbstractContextManager:
    """Context in which a kernel launch goes to `tensor`'s own device.

    Raises ValueError if that device cannot run Triton kernels, or the tensor has no memory, as fake ones have none;
    `operation` names the caller in the message.
    """
    index = tensor.get_device() if tensor.is_cuda else -1
    if index >= 0 and tensor.data_ptr() and index == torch._C._cuda_getDevice():
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


_thread = threading.local()


def bind_context(device_index: int) -> None:
    """Makes the context of the current device, whose index this is, current for this thread in the CUDA driver.

    A new thread, such as autograd's, has none until its first call of the CUDA runtime that needs one; on device 0
    torch's own switch of devices makes no such call. A launch binds it, but the driver's functions that encode a tensor
    map or copy memory fail with CUDA_ERROR_INVALID_CONTEXT where nothing was launched before.
    """
    if not getattr(_thread, "has_context", False):
        torch.cuda.set_device(device_index)  # the runtime call is made even where this is the current device
        _thread.has_context = True


class _Descriptor:
    """What a launch reads of a TensorDescriptor, without the checks that building one makes."""

    __slots__ = ("base", "shape", "strides")
    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, base: Tensor | _Address, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.base, self.shape, self.strides = base, shape, strides


# Triton's own launch in Python takes 8 us with three descriptors, 3.4 of them the call into the driver. Of the versions
# here it is known what lies between; another one is launched the public way.
_KNOWN_LAUNCHERS = ("3.6.",)
_MAX_MAPS = 1024  # kept for each descriptor of a launch, shape and strides


class _Address(int):
    def data_ptr(self) -> int:
        return int(self)


class TensorMaps(dict[int, tuple]):
    """The arguments that pass a descriptor of one shape and strides, by the address that it describes.

    A tensor map holds an address and sizes, and no tensor: it is made once for each.
    """

    def __init__(self, expand: Any, compiled: Any, shape: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        self._expand, self._compiled, self._shape, self._strides = expand, compiled, shape, strides

    def __missing__(self, address: int) -> tuple:
        if len(self) >= _MAX_MAPS:
            self.clear()
        bind_context(torch.cuda.current_device())
        described = _Descriptor(_Address(address), self._shape, self._strides)
        arguments = self[address] = tuple(self._expand(described, self._compiled))
        return arguments


class Launch:
    """A kernel bound to its options. The first call finds its compiled form, which later calls reuse.

    The kernel must not specialise on values, and all calls must have the same dtypes, block shapes of descriptors,
    constexprs, arguments that are None, and device. Triton's launch hooks (used by Triton's profilers) are not called.
    """

    def __init__(
        self, kernel: Any, programs: int | None = None, make_descriptor: Any = TensorDescriptor, **options: Any
    ) -> None:
        """programs: how many a launch has; None if each call says its grid. make_descriptor: for the first call, of a
        tensor, shape, strides and block shape."""
        self._kernel, self._options, self._make_descriptor = kernel, options, make_descriptor
        self._grid = None if programs is None else (programs, 1, 1)
        self._compiled: Any = None
        self._direct: Any = None  # the compiled launcher itself
        self._expand: Any = None  # from a descriptor to its arguments
        self._constant: tuple = ()  # what it is told between the stream and the arguments
        self._arguments = 0  # how many it takes
        self._layouts: list[Any] = []  # of the descriptors' boxes, as compiled
        self._maps: dict[tuple, TensorMaps] = {}  # of the position of a descriptor, its shape and strides
        self._current_stream: Any = None  # of a device's index

    def descriptor(
        self,
        position: int,
        x: Tensor,
        block: Sequence[int],
        shape: tuple[int, ...] | None = None,
        strides: tuple[int, ...] | None = None,
    ) -> tuple:
        """The arguments that pass a descriptor, of x or of what shape and strides make of its memory.

        position: the how manieth descriptor of the kernel it is, not counting those that are None.
        """
        shape, strides = shape or tuple(x.shape), strides or x.stride()
        if self._direct is not None:
            return self.tensor_maps(position, shape, strides)[x.data_ptr()]
        if x.is_cuda:
            bind_context(x.get_device())
        if self._compiled is not None:
            return (_Descriptor(x, shape, strides),)
        return (self._make_descriptor(x, list(shape), list(strides), list(block)),)

    def tensor_maps(self, position: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorMaps:
        """`descriptor` by address, of a launch that is `direct`."""
        key = position, shape, strides
        maps = self._maps.get(key)
        if maps is None:
            if len(self._maps) >= _MAX_MAPS:
                self._maps.clear()
            maps = self._maps[key] = TensorMaps(self._expand, self._layouts[position], shape, strides)
        return maps

    def describer(
        self, position: int, block: Sequence[int], shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Callable[[Tensor], tuple]:
        """`descriptor` of any tensor, as this shape and strides make of its memory."""
        if self._direct is None:
            return lambda x: self.descriptor(position, x, block, shape, strides)
        maps = self.tensor_maps(position, shape, strides)
        return lambda x: maps[x.data_ptr()]

    @property
    def direct(self) -> bool:
        """Whether arguments may be kept from call to call: descriptors are what they were made of."""
        return self._direct is not None

    def __call__(self, device_index: int | None, *args: Any, grid: tuple[int, int, int] | None = None) -> None:
        """Launches on the current stream of the current device, whose index is device_index."""
        grid = grid or self._grid
        # another thread may have found the launcher after these arguments were made
        if self._direct is not None and len(args) == self._arguments:
            self._direct(*grid, self._current_stream(device_index), *self._constant, *args)
            return
        if self._compiled is not None:
            self._compiled[grid](*args, stream=driver.active.get_current_stream(device_index))
            return
        compiled = self._kernel[grid](*args, **self._options)
        if not _INTERPRETED:
            self._compiled = compiled
            self._find_launcher(len(args))

    def _find_launcher(self, arguments: int) -> None:
        """Looks for the compiled launcher below Triton's, if this is a Triton where it is known to be."""
        run = self._compiled.run
        if not triton.__version__.startswith(_KNOWN_LAUNCHERS) or run.global_scratch_size or run.profile_scratch_size:
            return
        launcher, layouts = run.launch, []
        if hasattr(launcher, "__closure__"):  # a function around it that turns descriptors into arguments
            cells = dict(zip(launcher.__code__.co_freevars, launcher.__closure__, strict=True))
            launcher, layouts = cells["launcher"].cell_contents, cells["tensordesc_meta"].cell_contents
        if not all(layouts):  # descriptors that are no tensor maps: not Hopper
            return
        self._layouts, self._current_stream = list(layouts), driver.active.get_current_stream
        self._arguments = arguments + sum(2 * len(layout["block_size"]) for layout in layouts)  # sizes and strides too
        compiled = self._compiled
        self._constant = (
            compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None,
            compiled.packed_metadata, None, None, None,
        )  # fmt: skip
        from triton.backends.nvidia.driver import make_tensordesc_arg

        self._expand, self._direct = make_tensordesc_arg, launcher


# Allocates on the current device in a third of torch.empty's time; what inductor's compiled code calls.
_empty_strided: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, strides: tuple[int, ...] | None = None
) -> Tensor:
    """torch.empty of a kernel's result, contiguous unless it has strides; `device` is the current one."""
    if _empty_strided is None or device.type != "cuda":
        if strides is not None:
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, device=device)
    if strides is None:
        strides = (shape[1], 1) if len(shape) == 2 else (1,) if len(shape) == 1 else contiguous_strides(tuple(shape))
    return _empty_strided(tuple(shape), strides, dtype)  # which takes no torch.Size


def allocator(device: torch.device) -> Any:
    """`empty` on this device, of shape and strides, both tuples, and dtype, in less of the host's time."""
    if _empty_strided is not None and device.type == "cuda":
        return _empty_strided
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def empty_beside(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """x.new_empty(shape), in a third of the host's time where x is on the current CUDA device."""
    if _empty_strided is None or not x.is_cuda or x.get_device() != torch._C._cuda_getDevice():
        return x.new_empty(shape)
    made: Tensor = _empty_strided(shape, contiguous_strides(shape), x.dtype)
    return made


@functools.lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))


def layout(x: Tensor) -> tuple:
    """All of a tensor that decides how a kernel is compiled for it and launched, apart from its memory.

    The last but one is 0 for a tensor without memory, and 1 where its address is a multiple of 16.
    """
    address = x.data_ptr()
    return x.shape, x.stride(), x.dtype, x.get_device(), address and address % 16 + 1, x.is_neg()


def is_observed() -> bool:
    """Whether a dispatch mode sees operators. Selective checkpointing counts them and needs the same in a repetition of
    a call: then none is remembered, since one that is known allocates and views past the dispatcher."""
    return bool(torch._C._len_torch_dispatch_stack())


def layouts(*tensors: Tensor | None) -> tuple | None:
    """The layout of each, for a key of what an earlier call has found out.

    None for a call that must not be remembered: an argument that is no tensor, or has no memory, or is negated by a
    flag, which is copied first; or one that is observed.
    """
    if is_observed():
        return None
    try:
        found = tuple([None if x is None else layout(x) for x in tensors])
    except (AttributeError, RuntimeError):
        return None
    return None if any([x is not None and x[5] for x in found]) else found


def specialization(x: Any) -> Any:
    """What Triton 3.6 and 3.7 look at in an argument that is no constexpr: its type, whether a number is a multiple of
    16 or 1, which becomes a constant, and how an address aligns. One compiled kernel takes all arguments of equal ones.
    """
    kind = type(x)
    if kind is int:
        return x == 1, x % 16 == 0, -(2**31) <= x < 2**31, x < 2**63
    if kind is float or x is None:
        return kind
    return x.dtype, x.data_ptr() % 16 == 0


_NUMBERS = frozenset((int, float, type(None)))
_MAX_RECENT = 1024


class Launches:
    """A kernel that specialises on its arguments, with a `Launch` for each way to compile it.

    Its constexprs are its last parameters. To find the launch takes a few microseconds, Triton's own way 15.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel, self._options = kernel, options
        self._known: dict[tuple, Launch] = {}  # by what arguments specialise on
        self._recent: dict[tuple, Launch] = {}  # by the values of numbers, which takes the host a third of the time

    def __call__(
        self, device_index: int | None, grid: tuple[int, ...], args: tuple, constants: tuple, **options: Any
    ) -> Launch:
        """Launches, and returns what it was launched with, good for all arguments that specialise alike.

        args: those that are no constexprs; constants: those that are, each of one type in all calls; options: of this
        call, besides those of all.
        """
        options_and_device = (device_index, constants, *options.values())
        # of one type at each place
        values = [x if type(x) in _NUMBERS else (x.dtype, x.data_ptr() % 16 == 0) for x in args]
        recent = (options_and_device, *values)
        launch = self._recent.get(recent)
        if launch is None:
            key = (options_and_device, *[specialization(x) for x in args])
            launch = self._known.get(key)
            if launch is None:
                launch = self._known[key] = Launch(self._kernel, **self._options, **options)
            if len(self._recent) >= _MAX_RECENT:
                self._recent.clear()
            self._recent[recent] = launch
        launch(device_index, *args, *constants, grid=(*grid, 1, 1)[:3])
        return launch
