"""A class derived from a module's own, for a module that stays where it is and gets methods of this library's.

    module.__class__ = derived_class(type(module), Added)

It has the name, the file and the documentation of the module's class, so that whoever goes by these or by isinstance
sees the class that there was. There is one such class for all modules of a class: torch.compile takes their graphs for
one another. A module is pickled as an instance of its former class and gets its derived one when it is read, so the
former class alone must be found by name.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized


def derived_class(base: type, added: type, *options: Hashable) -> Any:
    """A class that derives from `added` and from `base`, the class of a module.

    added: its methods come first and call those of `base` by super(); its `forward`, if it has one, gets the signature
        of that of `base`. Of it `class_attributes(*options)`, if it has such a method, gives more attributes.
    options: what pickles hold of it, plain values.

    It is `added` itself where that derives from `base` already, as tpi.Linear does from nn.Linear.
    """
    if not options and issubclass(added, base):
        return added
    classes: Any = (base, added)
    return _derived(*classes, *options)


@functools.cache
def _derived(base: Any, added: Any, *options: Hashable) -> Any:
    attributes: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _reduce,
        "__deepcopy__": _deepcopy,
        "derived_from": (base, added, *options),
    }
    if added.forward is not nn.Module.forward:
        attributes["forward"] = _with_signature_of(base.forward, added.forward)
    if (more := getattr(added, "class_attributes", None)) is not None:
        attributes.update(more(*options))
    return type(base.__name__, (added, base), attributes)


def _with_signature_of(former: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, whose arguments are also taken by the names that `former` has for them."""
    names = dict(zip(_names_of(former), _names_of(forward), strict=False))

    @functools.wraps(former)
    def with_signature(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **{names.get(name, name): value for name, value in kwargs.items()})

    return with_signature


def _names_of(forward: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(forward).parameters.values()
    return [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    """As the former class does, with what is added to it."""
    former, *added = _history(type(self))
    make, args, *state = former.__reduce_ex__(self, max(protocol, 2))
    args = tuple(former if arg is type(self) else arg for arg in args)
    return _made, (make, args, added), *state


def _made(make: Any, args: tuple[Any, ...], added: list[tuple[Any, ...]]) -> Any:
    module = make(*args)
    for arguments in added:
        module.__class__ = derived_class(type(module), *arguments)
    return module


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """As the former class does; attributes of parameters are copied, which torch's parameters lose."""
    own = getattr(_history(type(self))[0], "__deepcopy__", None)
    if own is not None:
        twin = own(self, memo)
    elif is_parametrized(self):  # which refuses to be pickled
        kind: Any = type(self)
        twin = memo[id(self)] = kind.__new__(kind)
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
    else:
        make, args, *state = self.__reduce_ex__(4)
        twin = memo[id(self)] = make(*copy.deepcopy(args, memo))
        if state and state[0] is not None:
            set_state = getattr(twin, "__setstate__", twin.__dict__.update)
            set_state(copy.deepcopy(state[0], memo))
    twin.__class__ = type(self)
    if (copy_attributes := getattr(self, "_copy_attributes", None)) is not None:
        copy_attributes(twin)
    return twin


def former_class(derived: type) -> Any:
    """The class that a module had before any of this file."""
    return _history(derived)[0]


def _history(derived: Any) -> list[Any]:
    """The class that a module had before any of this file, and the arguments of each `derived_class` since."""
    history: list[Any] = []
    while hasattr(derived, "derived_from"):
        derived, *arguments = derived.derived_from
        history.insert(0, tuple(arguments))
    return [derived, *history]
