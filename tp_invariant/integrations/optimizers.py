"""Which optimizers step an element alike wherever the parameter that holds it is cut: see docs/optimizers.md."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

_ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)
_NAMES = ", ".join(kind.__name__ for kind in _ELEMENTWISE)


def _differs_in_16_bits(kind: type, group: dict) -> bool:
    """On a CPU: where differences were seen. torch's loops round a product and a sum once, their remainders each."""
    if kind is RMSprop:
        return bool(group["centered"] or group["momentum"])
    return kind in (SGD, ASGD) or (kind is Adam and bool(group["weight_decay"]))


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuses an optimizer whose bits depend on where a parameter is cut.

    Raises:
        TypeError: it is none of torch's elementwise ones, and does not say takes_shards = True.
        ValueError: one of these in a form that rounds differently at a cut: fused on a CPU, among others.
    """
    kind, rank = type(optimizer), dist.get_rank() if dist.is_initialized() else 0
    if getattr(optimizer, "takes_shards", False):
        return
    if kind not in _ELEMENTWISE:
        raise TypeError(
            f"{kind.__name__} on rank {rank} is not known to step an element alike wherever its parameter is cut: use "
            f"one of torch's {_NAMES}, tp_invariant.optim.Muon, or one that says takes_shards = True"
        )
    for group in optimizer.param_groups:
        fused = bool(group.get("fused"))
        for p in group["params"]:
            on_cpu = p.device.type == "cpu"
            if on_cpu and fused:
                reason = "fused=True on a CPU has other bits where a parameter is cut: use fused=False"
            elif on_cpu and p.dtype != torch.float32 and _differs_in_16_bits(kind, group):
                reason = f"on a CPU it has other bits where a parameter of {p.dtype} is cut: use AdamW, or float32"
            elif not on_cpu and fused and kind is Adam and group["weight_decay"]:
                reason = "fused=True with weight_decay has other bits where a parameter is cut: use AdamW"
            else:
                continue
            raise ValueError(f"{kind.__name__} on rank {rank}: {reason} (docs/optimizers.md)")
