"""Classes of modules that are not ours, each with another forward that computes the same.

parallelize gives a module such a class as layers/replicate.py gives others: of the former one's name, derived from it,
and one for all modules alike, so that torch.compile takes their graphs for one another. So copies, pickles and hooks of
such a module are as before, and whoever changes a submodule (an adapter, an offloading hook) is heard, since forwards
call submodules. So is a library that puts another forward in the place of the former class's, before or afterwards.
"""

from __future__ import annotations

import copyreg
import dis
import functools
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

# (the former class, *options) -> the forward, by the name of what makes it
_MAKERS: dict[str, Callable[..., Callable[..., Any]]] = {}


class _WithForward(type):
    """The class of these classes, by which pickle finds how they are made."""


def maker(function: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """Registers what makes a forward, by its name. Its options are what pickles hold: plain values."""
    _MAKERS[function.__name__] = function
    return function


def class_with_forward(base: Any, name: str, *options: Any) -> Any:
    """A class of base's name that derives from it, with the forward that the maker of this name gives.

    While base has another forward than it has now, that one is called.
    """
    return _class_with_forward(base, base.forward, name, *options)


@functools.cache
def _class_with_forward(base: Any, former: Callable[..., Any], name: str, *options: Any) -> Any:
    own, code = _MAKERS[name](base, *options), getattr(former, "__code__", None)

    @functools.wraps(former)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        present = base.forward
        same = present is former and (code is None or present.__code__ is code)
        return (own if same else present)(self, *args, **kwargs)

    attributes = {
        "forward": forward,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_made_of": (base, name, *options),
    }
    if base.__reduce_ex__ is object.__reduce_ex__ and base.__reduce__ is object.__reduce__:
        attributes["__reduce_ex__"] = _reduce_module
    return _WithForward(base.__name__, (base,), attributes)


def takes_a_forward(module: Any) -> bool:
    """Whether the module's class can be replaced: it has no metaclass, and no forward of the module's own hides it."""
    return type(type(module)) in (type, _WithForward) and "forward" not in module.__dict__


def _reduce_module(self: Any, protocol: Any) -> Any:
    """As `object` does, with what the class is made of: cloudpickle asks no one about a class without a name in a file,
    and takes its functions apart."""
    reduced: Any = object.__reduce_ex__(self, max(protocol, 2))
    made_of = type(self).__dict__.get("_made_of")
    return reduced if made_of is None else (_made, made_of, *reduced[2:])


def _made(*made_of: Any) -> Any:
    kind = class_with_forward(*made_of)
    return kind.__new__(kind)


def _reduce(cls: Any) -> Any:
    made_of = cls.__dict__.get("_made_of")
    return cls.__qualname__ if made_of is None else (class_with_forward, made_of)


copyreg.pickle(_WithForward, _reduce)


def is_straight(code: CodeType) -> bool:
    """Whether a function has no branch, loop or inner function, so that a trace of one call shows every call."""
    jumps = {*dis.hasjrel, *dis.hasjabs}
    branches = any(instruction.opcode in jumps for instruction in dis.get_instructions(code))
    return not branches and not code.co_freevars and not any(isinstance(c, CodeType) for c in code.co_consts)


class Found(NamedTuple):
    """What a function finds by its name in a file, and may be replaced there or get another `__code__`."""

    names: dict[str, Any]
    name: str
    value: Any
    code: Any


def found_at(names: dict[str, Any], name: str) -> Found:
    value = names.get(name)
    return Found(names, name, value, getattr(value, "__code__", None))


def what_it_finds(function: FunctionType) -> list[Found]:
    """The globals of a function, and what it takes from those of them that are modules, as `silu` of F.silu."""
    places, found = [function.__globals__], []
    for name in function.__code__.co_names:  # in the order of their use: F before silu
        for names in [names for names in places if name in names]:
            found.append(found_at(names, name))
            if isinstance(found[-1].value, ModuleType):
                places.append(vars(found[-1].value))
    return found


def are_as_found(found: list[Found]) -> bool:
    same = True
    for names, name, value, code in found:  # all() of a generator takes longer
        present = names.get(name)
        same = same and present is value and (code is None or present.__code__ is code)
    return same
