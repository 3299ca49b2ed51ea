"""What stands in a stage of a pipeline where the model has a module that another stage holds."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from torch import nn

from ..core.derived_class import derived_class


class OtherStage(nn.Module):
    """Returns its first argument, such as hidden states, and holds nothing."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states


def leave_to_other_stage(module: nn.Module) -> None:
    """Makes `module` an OtherStage where it stands: its name, its attributes and the hooks on it stay."""
    for held in (module._parameters, module._buffers, module._modules):
        held.clear()
    module.__class__ = derived_class(type(module), OtherStage)


def copy_apart(module: nn.Module, apart: Collection[str], prefix: str = "") -> nn.Module:
    """A copy of `module` and of its descendants of the names `apart`, and of what is on the way to them.

    All other descendants, and all parameters, are those of `module` itself. Hooks are copied, too.
    """
    twin = type(module).__new__(type(module))
    vars(twin).update({key: copy.copy(x) if isinstance(x, dict) else x for key, x in vars(module).items()})
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        if any(f"{other}.".startswith(f"{name}.") for other in apart):
            setattr(twin, key, copy_apart(child, apart, f"{name}."))
    return twin


def stages_of(model: nn.Module) -> list[nn.Module]:
    """The stages of this rank that `parallelize(.., stages_per_rank=..)` has cut a model into, in their order.

    Each is the model, in which the modules of all other stages pass their input on; its parameters and layers are those
    of the model itself. It has the attribute `pipeline_stage`: (its number, how many there are in all).

    Args:
        model: what parallelize has returned. With stages_per_rank=1, or of another origin, it is the only stage itself.
    """
    return vars(model).get("stages_of_rank", [model])


def names_of_other_stages(model: nn.Module) -> tuple[str, ...]:
    """How the names begin that tensors of other stages have in the whole model."""
    return tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, OtherStage))
