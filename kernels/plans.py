"""The table of plans: what calls of one operation with the same layouts have in common is prepared once.

    run        of a function that checks an operation's arguments and prepares it: what it returns, for their layouts
    planned    of a function of sizes, strides, dtypes and options: its result, such as a tile configuration and a grid
    Launch     of a kernel for arguments of the same layouts: its compiled form, which is then launched directly
    Kernel     of a kernel and the kinds of its arguments: the same, for an operation that is not prepared
    descriptor of a shape, strides, a block and a dtype: all but the tensor of a descriptor, which Triton has checked

Kernels and functional/ remember no call elsewhere. The table holds no tensor and no address, and what it holds follows
from the key alone. So to forget it, as to have it filled by another thread at the same time, changes the speed only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.accelerator import current_device_index
from torch.nn import Parameter
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import bind_context, interpreting, thread

_MAX_PLANS = 16384  # then all of them are made again: sizes may change at every call
_plans: dict[tuple, Any] = {}
_PLAIN = (Tensor, Parameter)
_KINDS = {type(None), bool, int, float, str, torch.dtype}  # of options that are equal where they mean the same
Planned = TypeVar("Planned", bound=Callable[..., Any])


def layouts(*tensors: Tensor | None) -> tuple | None:
    """All that decides whether and how an operation takes these tensors, for a key; None in the place of a None.

    None altogether where a plan is not for them: subclasses of Tensor, and tensors that torch negates by a flag alone.
    """
    key: list = []
    for x in tensors:
        if x is None:
            key += (None,)
        elif type(x) not in _PLAIN or x.is_neg():
            return None
        else:  # an address of 0 is of memory that has been freed, as fully_shard frees it: a plan's checks refuse it
            key += x.shape, x.stride(), x.dtype, x.get_device(), (x.data_ptr() or 0.5) % 16
    return tuple(key)


def run(prepare: Callable[..., Callable], tensors: tuple[Tensor | None, ...], *options: Any) -> Any:
    """What `prepare(*tensors, *options)` returns is called with the tensors, and with later ones of the same layouts.

    prepare: checks its arguments, which is not done again.
    """
    kinds, of_tensors = (*map(type, options),), layouts(*tensors)
    if of_tensors is None or not _KINDS.issuperset(kinds):
        return prepare(*tensors, *options)(*tensors)
    key = prepare, of_tensors, options, kinds  # 1.0 and True are equal to 1
    call = _plans.get(key)
    if call is None:
        call = prepare(*tensors, *options)
        if not interpreting():
            store(key, call)
    return call(*tensors)


def store(key: tuple, plan: Any) -> None:
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    _plans[key] = plan


def planned(function: Planned) -> Planned:
    """`function`, computed once for equal arguments, which are hashable and given by position."""

    @functools.wraps(function)
    def find(*args: Any) -> Any:
        key = function, *args
        plan = _plans.get(key, _plans)
        if plan is _plans:  # there is none
            plan = function(*args)
            store(key, plan)
        return plan

    return find  # type: ignore[return-value]


def specialization(x: Any) -> Any:
    """What Triton compiles apart for, of an argument that is no constexpr: its type, whether a number is 1 or a
    multiple of 16 and how many bits it takes, how an address aligns, and the block of a descriptor."""
    kind = type(x)
    if kind is Tensor or isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if kind is int:
        return x == 1, x % 16 == 0, -(2**31) <= x < 2**31, x < 2**63
    if kind is float or x is None:
        return kind
    return TensorDescriptor, x.base.dtype, *x.block_shape


@functools.cache
def _stream_of() -> Callable[[int | None], int]:
    """Of a device, its current stream as Triton's launches take it. They ask for it where it is not given."""
    return driver.active.get_current_stream  # type: ignore[no-any-return]


class Kernel:
    """A kernel of Triton with the options of all its launches. Its constexprs are its last parameters.

    Triton determines at every launch which compiled form the arguments need, which takes longer than the launch itself.
    Here the table has it, and Triton is asked where it does not.
    """

    def __init__(self, function: Any, **options: Any) -> None:
        self.function, self.options = function, options

    def __call__(
        self, device_index: int | None, grid: tuple[int, ...], args: tuple, constants: tuple, **options: Any
    ) -> None:
        """Launches on the current stream of the current device, whose index is `device_index`.

        args: those that are no constexprs, tensors, descriptors, numbers or None. constants: those that are, each of
        one type in all calls. options: of this call, besides those of all.
        """
        grid = (*grid, 1, 1)[:3]
        if interpreting():
            self.function[grid](*args, *constants, **self.options, **options)
            return
        call = self, device_index, constants, *options.items()
        # integers by their values, which takes a third of the time; floats by their class, so that 1.0 is not 1
        key = *call, *[x if type(x) is int else specialization(x) for x in args]
        compiled = _plans.get(key)
        if compiled is None:
            compiled, launched = self.form(device_index, grid, args, constants, **options)
            store(key, compiled)
            if launched:
                return
        compiled[grid](*args, *constants, stream=_stream_of()(device_index))

    def form(
        self, device_index: int | None, grid: tuple[int, ...], args: tuple, constants: tuple, **options: Any
    ) -> tuple[Any, bool]:
        """What is compiled for arguments of these kinds, and whether they were launched, as the first of a kind are."""
        key = self, device_index, constants, *options.items(), *[specialization(x) for x in args]
        compiled = _plans.get(key)
        if compiled is not None:
            return compiled, False
        compiled = self.function[grid](*args, *constants, **self.options, **options)
        store(key, compiled)
        return compiled, True


class Launch:
    """What an operation that is prepared launches: a kernel, for arguments that differ in their memory alone.

    So the form that is compiled for the first ones serves all.
    """

    def __init__(
        self, kernel: Kernel, device_index: int, grid: tuple[int, ...], constants: tuple, **options: Any
    ) -> None:
        """The arguments are Kernel's. device_index: -1 for a CPU."""
        self._kernel, self._index, self._grid, self._constants = kernel, device_index, (*grid, 1, 1)[:3], constants
        self._options = options
        self.compiled: Callable | None = None

    def __call__(self, *args: Any) -> None:
        """Launches on the current stream of the device."""
        index, compiled = self._index, self.compiled
        if index >= 0 and current_device_index() != index:
            with torch.cuda.device(index):
                self(*args)
            return
        if index >= 0 and not thread.has_context:
            bind_context(index)
        if compiled is None:
            kernel, grid, constants = self._kernel, self._grid, self._constants
            if interpreting():
                kernel.function[grid](*args, *constants, **kernel.options, **self._options)
                return
            form, launched = kernel.form(index, grid, args, constants, **self._options)
            self.compiled = compiled = form[grid]
            if launched:
                return
        compiled(*args, *self._constants, stream=_stream_of()(index))


def _set_base(descriptor: Any, x: Tensor) -> None:
    descriptor.base = x


def described(
    x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...], make: Any = TensorDescriptor
) -> Callable[[Tensor], Any]:
    """What a kernel reads blocks of x's memory through by TMA, seen with this shape and these strides.

    It is a class of descriptors that have all but the tensor in common: called with a tensor of x's dtype and alignment
    it gives one, which Triton need not check.

    make: of x and three lists, shape, strides and block, the descriptor of a kernel of Gluon's.
    """
    key = make, x.dtype, x.data_ptr() % 16 == 0, shape, strides, block
    plan = _plans.get(key)
    if plan is None:
        checked = make(x, list(shape), list(strides), list(block))
        kind = type(checked)
        plan = type(kind.__name__, (kind,), {**vars(checked), "base": None, "__init__": _set_base})
        store(key, plan)
    return plan  # type: ignore[no-any-return]


def descriptor(x: Tensor, *view: Any) -> Any:
    """`described` of x. On CUDA the driver encodes it, for which it needs a context."""
    if x.is_cuda and not thread.has_context:
        bind_context(x.get_device())
    return described(x, *view)(x)
