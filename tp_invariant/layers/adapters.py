"""Adapters of other packages that would take a shard for a whole layer: PEFT's are refused when they wrap one.

`Linear` is an nn.Linear, and PEFT would make its own LoRA of it: with whole adapters on this rank's part, or with
adapters whose gradients are summands that nothing adds up. torch tells who gets a submodule, so that it is noticed in
get_peft_model. integrations/peft.py has the adapters that are right; this module needs no PEFT.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..core.graph_breaks import never_a_frame_of_its_own
from .parameters import ShardedModule


@never_a_frame_of_its_own
def _refuse(owner: nn.Module, name: str, child: nn.Module | None) -> None:
    """A hook of every registration of a submodule, in any module.

    Raises:
        ValueError: a class of PEFT's own gets a module in which there is a layer of this library, other than for LoRA.
    """
    kind = type(owner)
    if kind.__module__.partition(".")[0] != "peft" or child is None:
        return
    layer = next((module for module in child.modules() if isinstance(module, ShardedModule)), None)
    if layer is None or kind.__name__ in ("LoraModel", "ModulesToSaveWrapper"):
        return
    if name == "base_model" and type(child).__name__ == "LoraModel":
        return
    where = f"{kind.__module__}.{kind.__name__} on rank {layer.group.rank} of {layer.group.size}"
    if name == "base_layer" and kind.__module__.startswith("peft.tuners.lora."):
        raise ValueError(
            f"{where} would take a {type(layer).__name__} of tp_invariant for a whole layer of torch's. Pass the "
            "LoraConfig to tp_invariant.integrations.peft.register before get_peft_model; PeftModel.from_pretrained "
            "takes config=register(LoraConfig.from_pretrained(..))"
        )
    raise ValueError(
        f"{where} is given a {type(layer).__name__} of tp_invariant: of PEFT's methods LoRA alone is supported on "
        "tensor-parallel layers (tp_invariant.integrations.peft.register)"
    )


register_module_module_registration_hook(_refuse)
