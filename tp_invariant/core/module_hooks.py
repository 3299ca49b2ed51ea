"""Hooks of modules under keys that are the same in every layer, so that equal layers share one compiled graph.

And whether a module has a forward of its own, or one that is known.
"""

from __future__ import annotations

from collections.abc import Hashable
from types import MethodType, NoneType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from .torch_private import forward_hooks_of, forward_pre_hooks_of


def with_key(handle: RemovableHandle, name: str) -> RemovableHandle:
    """Gives the hook that was registered last, which `handle` removes, a key made of `name`.

    torch's key is a number that counts the hooks of the process. torch.compile's guards have the keys in them, so that
    the graph of a layer is not used for the next one, whose hooks have other numbers: each layer is compiled, until the
    limit of recompilations is reached, and then the rest run as in eager mode.
    """
    hooks, *extras = (ref() for ref in (handle.hooks_dict_ref, *handle.extra_dict_ref))
    assert hooks is not None and next(reversed(hooks)) == handle.id, "the hook is not the last one of its module"
    key, same = f"tp_invariant.{name}", 1
    while key in hooks:
        same += 1
        key = f"tp_invariant.{name}.{same}"
    for table in (hooks, *extras):
        if table is not None and handle.id in table:
            table[key] = table.pop(handle.id)
    handle.id = key  # type: ignore[assignment]
    return handle


def has_own_forward(module: nn.Module) -> bool:
    """Whether a call of the module calls another forward than its class's.

    accelerate leaves the class's forward on a module when it removes its hook.
    """
    own = vars(module).get("forward")
    return own is not None and own != MethodType(type(module).forward, module)


def settings_of(module: nn.Module, *, beside_ours: bool = False) -> Hashable:
    """What decides a call's result besides the values of its parameters: its class's forward and plain attributes.

    None if there may be more: hooks, modules inside, buffers, or attributes of other kinds. beside_ours: hooks of this
    library, whose keys are strings, do not count.
    """
    own = {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}
    plain = all(type(value) in (bool, int, float, str, NoneType) for value in own.values())
    hooks = [*forward_hooks_of(module), *forward_pre_hooks_of(module)]
    hooked = any(not (beside_ours and isinstance(key, str)) for key in hooks)
    if module._modules or module._buffers or hooked or not plain:
        return None
    tensors = ((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())
    attributes = ((name, type(value), value) for name, value in own.items())
    return type(module), type(module).forward, *attributes, *tensors


OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # attributes


def has_known_forward(activation: Any) -> bool:
    """Whether an activation has a forward of torch or transformers, and no tensors.

    A class that derives from one of theirs may have another forward.
    """
    if not isinstance(activation, nn.Module) or has_own_forward(activation):
        return False
    known = type(activation).forward.__module__ in ("torch.nn.modules.activation", "transformers.activations")
    return known and not any(True for _ in (*activation.parameters(), *activation.buffers()))
