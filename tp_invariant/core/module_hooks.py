"""Hooks of modules under keys that are the same in every layer, so that equal layers share one compiled graph."""

from __future__ import annotations

from torch.utils.hooks import RemovableHandle


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
    for found in (hooks, *extras):
        if found is not None and handle.id in found:
            found[key] = found.pop(handle.id)
    handle.id = key  # type: ignore[assignment]
    return handle
