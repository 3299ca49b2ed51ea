"""The table of plans: what calls of one operation with the same layouts have in common is prepared once.

    planned    of a function of sizes, strides, dtypes and options: its result, such as a tile configuration and a grid
    Kernel     of a kernel and the kinds of its arguments: its compiled form, which is then launched directly
    store      of a key that an operation makes, with `layouts` of its operands: what `find` gives a later call
    descriptor of a shape, strides, a block and a dtype: all but the tensor of a descriptor, which Triton has checked

Kernels and functional/ remember no call elsewhere. The table holds no tensor and no address, and what it holds follows
from the key alone. So to forget it, as to have it filled by another thread at the same time, changes the speed only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.nn import Parameter
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import bind_context, interpreting

_MAX_PLANS = 16384  # then all of them are made again: sizes may change at every call
_plans: dict[tuple, Any] = {}
_PLAIN = (Tensor, Parameter)
Planned = TypeVar("Planned", bound=Callable[..., Any])


def layouts(*tensors: Tensor | None) -> tuple | None:
    """All that decides whether and how an operation takes these tensors, for a key; None in the place of a None.

    None altogether where a plan is not for them: subclasses of Tensor, and tensors that torch negates by a flag alone.
    """
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN or x.is_neg()):
            return None
    return tuple(
        [None if x is None else (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16 == 0) for x in tensors]
    )


def find(key: tuple) -> Any:
    """The plan that `store` was given with this key, or None."""
    return _plans.get(key)


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
    return kind, x.base.dtype, *x.block_shape


class Kernel:
    """A kernel of Triton with the options of all its launches. Its constexprs are its last parameters.

    Triton determines at every launch which compiled form the arguments need, which takes longer than the launch itself.
    Here the table has it, and Triton is asked where it does not.
    """

    def __init__(self, function: Any, **options: Any) -> None:
        self._function, self._options = function, options

    def __call__(
        self, device_index: int | None, grid: tuple[int, ...], args: tuple, constants: tuple, **options: Any
    ) -> None:
        """Launches on the current stream of the current device, whose index is `device_index`.

        args: those that are no constexprs, tensors, descriptors, numbers or None. constants: those that are, each of
        one type in all calls. options: of this call, besides those of all.
        """
        grid = (*grid, 1, 1)[:3]
        if interpreting():
            self._function[grid](*args, *constants, **self._options, **options)
            return
        call = self, device_index, constants, *options.items()
        # integers by their values, which takes a third of the time; floats by their class, so that 1.0 is not 1
        key = *call, *[x if type(x) is int else specialization(x) for x in args]
        compiled = _plans.get(key)
        if compiled is None:
            of_kinds = *call, *[specialization(x) for x in args]
            compiled = _plans.get(of_kinds)
            if compiled is None:
                compiled = self._function[grid](*args, *constants, **self._options, **options)
                store(of_kinds, compiled)
                store(key, compiled)
                return
            store(key, compiled)
        compiled[grid](*args, *constants)


def descriptor(
    x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...], make: Any = TensorDescriptor
) -> Any:
    """What a kernel reads blocks of x's memory through by TMA, seen with this shape and these strides.

    make: of x and three lists, shape, strides and block, the descriptor of a kernel of Gluon's.
    """
    if x.is_cuda:
        bind_context(x.get_device())
    key = make, x.dtype, x.data_ptr() % 16 == 0, shape, strides, block
    plan = _plans.get(key)
    if plan is None:
        described = make(x, list(shape), list(strides), list(block))  # Triton checks them
        store(key, (type(described), {**vars(described), "base": None}))
        return described
    kind, fields = plan
    described = object.__new__(kind)
    vars(described).update(fields, base=x)
    return described
