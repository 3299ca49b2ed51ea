"""Weight gradients that are added into `weight.main_grad`, in fp32, and do not become `weight.grad`.

The attributes of the weight, by the names of Transformer Engine (`fuse_wgrad_accumulation`) and Megatron-LM
(`gradient_accumulation_fusion`):

    main_grad                  float32, of the weight's shape; belongs to whoever steps the optimizer
    overwrite_main_grad        True: written instead of added to
    grad_added_to_main_grad    set to True where it exists. Megatron's hooks then wait for a `.grad`, whose value they
                               ignore, or add under `zero_out_wgrad`: they get zeros. Where it does not exist `.grad`
                               stays as it is
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class MainGrad:
    """Where the gradient of `weight` goes: the parameter itself, also where autocast hands the layer a copy."""

    weight: Tensor
    name: str  # for errors
    rank: int

    def buffer(self) -> Tensor:
        """main_grad as it is now.

        Raises:
            ValueError: none, or one of another shape or device, or without contiguous rows.
            TypeError: no tensor, or not float32.
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
        """What autograd is given as the gradient of `weight`, the tensor that the layer multiplied by."""
        self.weight._gradient_is_in_main_grad = True  # type: ignore[attr-defined]
        if not hasattr(self.weight, "grad_added_to_main_grad"):
            return None
        self.weight.grad_added_to_main_grad = True
        return torch.zeros_like(weight)


def refuse_fused(parameters: Iterable[Tensor], who: str, start: int = 0) -> None:
    """For what takes gradients from .grad alone. start: the number of the first parameter, for errors.

    Raises:
        RuntimeError: a layer has added the gradient of one of them into its main_grad.
    """
    for index, p in enumerate(parameters, start):
        if getattr(p, "_gradient_is_in_main_grad", False):
            raise RuntimeError(
                f"{who} takes gradients from .grad, but a layer with fuse_wgrad_accumulation=True has added that of "
                f"parameter {index} with shape {tuple(p.shape)} into its main_grad, micro-batch by micro-batch: build "
                "the layer with fuse_wgrad_accumulation=False"
            )
