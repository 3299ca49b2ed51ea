"""Parameters and modules of a model that a module outside of it holds too: sharding would silently untie them."""

from __future__ import annotations

import gc
from collections.abc import Collection

from torch import nn


def ties_to_outside(model: nn.Module, replaced: Collection[str] = ()) -> list[str]:
    """One line for each parameter of `model`, and each of its modules to be replaced, that a module outside holds too.

    Args:
        replaced: the names of these modules.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    names |= {id(model.get_submodule(name)): name for name in replaced if name}
    own = {id(module) for module in model.modules()}

    def outside() -> list[str]:
        found = []
        for thing in gc.get_objects():
            if id(thing) in own or not issubclass(type(thing), nn.Module):  # isinstance would call a proxy's __class__
                continue
            for held in (thing.__dict__.get("_parameters"), thing.__dict__.get("_modules")):
                for name, value in held.items() if isinstance(held, dict) else ():
                    if value is not None and id(value) in names:
                        found.append(
                            f"{names[id(value)]}: is also {type(thing).__name__}.{name} of a module outside of the "
                            "model, which would no longer be tied to it: give parallelize the model that holds both"
                        )
        return sorted(found)

    if not outside():
        return []
    gc.collect()  # some of them may be unreachable
    return outside()
