"""Weight gradients that are added to `weight.main_grad`, in fp32, instead of being stored in `weight.grad`.

The weight's attributes have the names that Transformer Engine (`fuse_wgrad_accumulation`) and Megatron-LM
(`gradient_accumulation_fusion`) use:

    main_grad                  float32, of the weight's shape; managed by the code that runs the optimizer
    overwrite_main_grad        True: the gradient is written to main_grad instead of added
    grad_added_to_main_grad    set to True if the attribute exists. Then `.grad` is zeros: Megatron's hooks wait for a
                               `.grad` and ignore its value, or add it under `zero_out_wgrad`. If the attribute does not
                               exist, `.grad` is not changed
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.differentiation import is_executed


@dataclass(frozen=True, eq=False)
class MainGrad:
    """Adds the gradient of `weight` to its main_grad. `weight` is the parameter, not the copy that autocast makes."""

    weight: Tensor
    name: str  # for errors
    rank: int

    def buffer(self) -> Tensor:
        """The current main_grad.

        Raises:
            ValueError: it is missing, has another shape or device than the weight, or is not contiguous.
            TypeError: it is not a tensor, or not float32.
        """
        weight, where = self.weight, f"main_grad of {self.name} on rank {self.rank}"
        main_grad = getattr(weight, "main_grad", None)
        wanted = f"float32 of shape {tuple(weight.shape)} on {weight.device}"
        if main_grad is None:
            raise ValueError(
                f"{where} is missing, which fuse_wgrad_accumulation=True adds to: set weight.main_grad to a tensor, "
                f"{wanted}, before forward (Megatron's DistributedDataParallel does)"
            )
        if not isinstance(main_grad, Tensor) or main_grad.dtype != torch.float32:
            what = main_grad.dtype if isinstance(main_grad, Tensor) else f"a {type(main_grad).__name__}"
            raise TypeError(
                f"{where} is {what}: it must be {wanted} (in Megatron, accumulate_allreduce_grads_in_fp32=True)"
            )
        if main_grad.shape != weight.shape or main_grad.device != weight.device:
            raise ValueError(f"{where} has shape {tuple(main_grad.shape)} on {main_grad.device}: it must be {wanted}")
        if not main_grad.is_contiguous():
            raise ValueError(f"{where} has strides {main_grad.stride()}: it must be contiguous")
        return main_grad

    @property
    def accumulate(self) -> bool:
        return not getattr(self.weight, "overwrite_main_grad", False)

    def done(self, weight: Tensor) -> Tensor | None:
        """The gradient to return to autograd for `weight`, the tensor that the layer multiplied by."""
        self.weight._gradient_is_in_main_grad = True  # type: ignore[attr-defined]
        if not hasattr(self.weight, "grad_added_to_main_grad"):
            return None
        self.weight.grad_added_to_main_grad = True
        return torch.zeros_like(weight)


def is_asked_for(ctx: Any, index: int) -> bool:
    """In a backward: whether this run of it wants the gradient of the forward's tensor argument `index`.

    What a run adds to main_grad that is not to have this gradient would be added again by the one that is.
    """
    return ctx.needs_input_grad[index] and is_executed(ctx.next_functions[index][0]) is not False


def refuse_fused(labelled: Iterable[tuple[str, Tensor]], caller: str) -> None:
    """To be called by code that reads gradients from .grad only.

    Args:
        labelled: (what errors call it, see core/parameter_names.py; the parameter) for each parameter.
        caller: its name, for errors.

    Raises:
        RuntimeError: a layer has added the gradient of one of the parameters to its main_grad.
    """
    for label, p in labelled:
        if getattr(p, "_gradient_is_in_main_grad", False):
            raise RuntimeError(
                f"{caller} takes gradients from .grad, but a layer with fuse_wgrad_accumulation=True has added that of "
                f"{label} with shape {tuple(p.shape)} into its main_grad, micro-batch by micro-batch: build "
                "the layer with fuse_wgrad_accumulation=False"
            )
