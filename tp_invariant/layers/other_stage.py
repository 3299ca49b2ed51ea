"""What stands in a stage of a pipeline where the model has a module that another stage holds."""

from __future__ import annotations

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


def names_of_other_stages(model: nn.Module) -> tuple[str, ...]:
    """How the names begin that tensors of other stages have in the whole model."""
    return tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, OtherStage))
