"""Parameters that several modules share (tied weights): sharding only one of these modules would silently untie them.

A module does not know which other modules hold its weight. Python's garbage collector can list every live module. In a
large process that takes 0.1 to 0.2 s, so it is done only if a parameter has more references than the parameter of a
newly built module.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

_ties_kept_by_caller: ContextVar[bool] = ContextVar("_ties_kept_by_caller", default=False)


@contextmanager
def ties_are_kept() -> Iterator[None]:
    """Inside, `refuse_ties` raises nothing, because the caller ties the new modules itself."""
    token = _ties_kept_by_caller.set(True)
    try:
        yield
    finally:
        _ties_kept_by_caller.reset(token)


def _references(module: nn.Module, name: str) -> int:
    return sys.getrefcount(module._parameters[name])


_ALONE = _references(nn.Linear(1, 1, device="meta"), "weight")


def holders(ids: Collection[int]) -> list[tuple[nn.Module, str, int]]:
    """(module, name, id) of each parameter or submodule with one of these ids, in all live modules."""
    found = []
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Module):  # isinstance would call __class__ of proxy objects
            for held in (thing.__dict__.get("_parameters"), thing.__dict__.get("_modules")):
                for name, value in held.items() if isinstance(held, dict) else ():
                    if value is not None and id(value) in ids:
                        found.append((thing, name, id(value)))
    return found


def others_with(module: nn.Module, name: str) -> list[str]:
    """The other modules that hold module's parameter `name`, as ["Embedding.weight"]."""
    if module._parameters.get(name) is None or _references(module, name) <= _ALONE:
        return []
    wanted = {id(module._parameters[name])}
    if all(other is module for other, _, _ in holders(wanted)):
        return []
    gc.collect()  # some of them may be unreachable
    return [f"{type(other).__name__}.{key}" for other, key, _ in holders(wanted) if other is not module]


def refuse_ties(module: nn.Module) -> None:
    """To be called before new parameters replace those of `module`.

    Raises:
        ValueError: another module holds a parameter of `module` too.
    """
    if _ties_kept_by_caller.get():
        return
    for name in module._parameters:
        if others := others_with(module, name):
            raise ValueError(
                f"{type(module).__name__}.{name} is also {' and '.join(others)}: a sharded copy of it would not be "
                "tied to it. parallelize keeps ties; or give this module a parameter of its own first "
                f"({name} = nn.Parameter({name}.detach().clone())), and tie the sharded modules afterwards"
            )


def ties_to_outside(model: nn.Module, replaced: Collection[str] = ()) -> list[str]:
    """One line for each parameter of `model`, and each of its modules to be replaced, that a module outside holds too.

    Args:
        replaced: the names of these modules.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    names |= {id(model.get_submodule(name)): name for name in replaced if name}
    own = {id(module) for module in model.modules()}

    def outside() -> list[str]:
        return sorted(
            f"{names[key]}: is also {type(module).__name__}.{name} of a module outside of the model, which would no "
            "longer be tied to it: give parallelize the model that holds both"
            for module, name, key in holders(names)
            if id(module) not in own
        )

    if not outside():
        return []
    gc.collect()
    return outside()
