"""The dtype of torch.autocast, also while torch.compile traces."""

from __future__ import annotations

import torch

from .compiled import constant


@constant  # torch.compile of torch 2.11 does not trace torch's function
def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that torch.autocast selects on this device; None if autocast is off, or the device has none."""
    if not _has_autocast(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)
