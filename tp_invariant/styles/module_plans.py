"""parallelize_module, which besides finds what a style alone cannot see: attention in a module's forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed.tensor.parallel as torch_styles
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..consistency.agreement import numbers_given_back
from ..functional.attention_choice import SafeSdpa, callers
from ..layers.in_place import undone_on_error
from ..layers.linear import Linear
from .parallel_styles import ColwiseParallel, RowwiseParallel, SequenceParallel

ParallelStyle = torch_styles.ParallelStyle
_TORCHS = torch_styles.ColwiseParallel, torch_styles.RowwiseParallel, torch_styles.SequenceParallel
_OURS = ColwiseParallel, RowwiseParallel, SequenceParallel  # derived from torch's


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """torch's parallelize_module, for plans with this library's styles and torch's PrepareModule..; attention, too.

    F.scaled_dot_product_attention gives a head other bits when fewer heads are in the call. In `module`, and in the
    modules of it that have sharded layers, it is replaced while the mode is on, as `parallelize` does. After torch's
    own parallelize_module a model has to call tpi.attention instead.

    What no style names stays as it is: `tpi.replicate_(model, mesh)` makes DTensors of the parameters that are left,
    once the whole model has its styles. Torch's clipping and optimizers need that, and this library's checkpoints.

    Args:
        src_data_rank: as torch's, but with this library's styles all ranks must have the same weights in any case.

    Raises:
        ValueError: a style of torch's that adds on the wire where this library has one, or a class derived from such
            a style; and what a style raises. Nothing was changed: the styles before it are undone.
    """
    plan = parallelize_plan if isinstance(parallelize_plan, Mapping) else {"": parallelize_plan}
    for name, style in plan.items():
        if isinstance(style, _TORCHS) and not isinstance(style, _OURS):
            base = next(one.__name__ for one in _TORCHS if isinstance(style, one))
            derived = "" if type(style) in _TORCHS else "of a class that is derived from "
            raise ValueError(
                f"parallelize_plan[{name!r}]={style} is {derived}torch's, whose bits depend on the degree: import "
                f"{base} from tp_invariant in place of torch.distributed.tensor.parallel"
            )
    with numbers_given_back(), undone_on_error(module):
        result = torch_styles.parallelize_module(
            module,
            device_mesh,
            parallelize_plan,  # type: ignore[arg-type]
            src_data_rank=src_data_rank,
        )
    sharded = {name: child.group.size for name, child in module.named_modules()
               if isinstance(child, Linear) and child.parallel_mode}  # fmt: skip
    if sharded and not isinstance(module, Linear):
        alone = max(sharded.values()) == 1
        for caller in (callers(module, sharded) | {id(module): module}).values():
            SafeSdpa(caller, _allow_mask if alone else None)
    return result


def _allow_mask(node: Any, name: str) -> None:
    """The CheckMask of a group of one rank."""
