"""Weights whose memory torch's fully_shard (FSDP2) frees and fills again, at another address, and at no other version.

A tensor does not say so. fully_shard keeps the parameters that forward and backward compute with, and this looks there.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from .dtensors import is_dtensor


def is_resharded(weight: Tensor) -> bool:
    """Whether fully_shard manages the memory of a weight that is used now.

    The same on every rank: while a forward or a backward uses a weight of fully_shard's, its module is alive, since
    fully_shard's hooks hold it. What other modules a process has or had plays no part.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if fsdp is None:
        return False
    from torch.distributed._composable_state import _module_state_mapping

    memory = weight.untyped_storage()._cdata
    for state in {reference() for reference in list(_module_state_mapping.values())}:
        for whole in map(_whole, _parameters(state)) if isinstance(state, fsdp.FSDPState) else ():
            if type(whole) in (Tensor, nn.Parameter) and whole.untyped_storage()._cdata == memory:
                return True
    return False


def _parameters(state: Any) -> list[Any]:
    # one group, or in later versions of torch several
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups
    return [parameter for group in groups if group is not None for parameter in group.fsdp_params]


def _whole(parameter: Any) -> Any:
    """This rank's tensor that is gathered over the data parallel ranks; None before the first forward."""
    whole = getattr(parameter, "_unsharded_param", None)
    return whole._local_tensor if is_dtensor(whole) else whole
