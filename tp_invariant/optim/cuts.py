"""Before the first step of an optimizer of torch's: would it step an element otherwise where its parameter is cut?

torch computes whole vectors by one code and what is left over by another, and for some optimizers, implementations and
dtypes the two round differently (docs/optimizers.md). Of a shard other elements are left over than of the whole
parameter, so that trained weights would depend on the degree. Which optimizers do so is not listed here: the optimizer
is tried, with its own options, on a small parameter and on parts of it. Where no shard ends inside of a vector nothing
is left over, and nothing is tried.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..core.bits import raw_bytes
from ..core.dtensors import is_dtensor, local_of
from ..layers.parameters import is_sharded

ALIGNED = 64  # elements: two of the widest vectors, of 16-bit elements
_SIZE, _STEPS, _TRIALS = 960, 4, 3
_ALONG_VECTORS = slice(64, 512)
_CUTS = (slice(0, 1), slice(0, 31), slice(3, 500), slice(77, 930), slice(450, 477), slice(901, 960))


def check_cuts(optimizer: Optimizer) -> None:
    """Raises: ValueError: the optimizer is torch's, and steps an element of a shard otherwise than of the whole."""
    kind = type(optimizer)
    if vars(torch.optim).get(kind.__name__) is not kind:
        return
    for group in optimizer.param_groups:
        cut = {(p.dtype, p.device): p for p in reversed(group["params"]) if _ends_in_a_vector(p) and p.requires_grad}
        named = [name for name in inspect.signature(kind).parameters if name in group and name != "params"]
        for (dtype, device), p in cut.items():
            told = tuple((name, _hashable(group[name])) for name in named)
            if _sees_cuts(kind, told, dtype, device):
                chosen = ", ".join(f"{name}=True" for name in ("fused", "foreach") if dict(told).get(name))
                raise ValueError(
                    f"{kind.__name__}({chosen}) steps an element of a {dtype} parameter on {device.type} otherwise "
                    f"where the parameter is cut elsewhere, and a shard of shape {tuple(local_of(p).shape)} is cut "
                    f"inside of a vector: what it trains would depend on the degree. Let every shard have a multiple "
                    f"of {ALIGNED} elements, or step float32 parameters (master weights of 16-bit ones) with "
                    "fused=False, or set ATEN_CPU_CAPABILITY=default in the environment of all ranks, at every degree"
                )


def _hashable(option: Any) -> Any:
    """Numbers for tensors (a learning rate), which tensors may be given for in turn."""
    if isinstance(option, (tuple, list)):
        return tuple(map(_hashable, option))
    return float(option) if isinstance(option, Tensor) else option


def _ends_in_a_vector(p: Tensor) -> bool:
    local = local_of(p)
    return (local.numel() < p.numel() if is_dtensor(p) else is_sharded(p)) and local.numel() % ALIGNED != 0


@functools.lru_cache(maxsize=64)
def _sees_cuts(kind: Any, options: tuple[tuple[str, Any], ...], dtype: torch.dtype, device: torch.device) -> bool:
    step = inspect.unwrap(kind.step)  # without the hooks of all optimizers, which are for a user's

    def stepped(whole: Tensor, grads: list[Tensor], cut: slice) -> Tensor:
        parameter = nn.Parameter(whole[cut].clone())
        made = kind([parameter], **dict(options))
        for grad in grads:
            parameter.grad = grad[cut].clone()
            step(made)
        return raw_bytes(parameter.detach())

    generator = torch.Generator().manual_seed(0)

    def drawn(count: int, least: int) -> Tensor:
        """Of many magnitudes, so that a step's last bit shows in some elements whatever the learning rate."""
        scales = torch.exp2(torch.randint(least, 3, (count, _SIZE), generator=generator).float())
        return (torch.randn(count, _SIZE, generator=generator) * scales).to(device, dtype)

    for _ in range(_TRIALS):
        (whole,), grads = drawn(1, -16), list(drawn(_STEPS, -4))
        try:
            with torch.no_grad():
                expected = stepped(whole, grads, slice(None)).view(_SIZE, -1)

                def alike(cut: slice) -> bool:
                    return torch.equal(stepped(whole, grads, cut).view(-1), expected[cut].view(-1))  # noqa: B023

                if not alike(_ALONG_VECTORS):  # it computes with whole parameters, see step_checks.py
                    return False
                if not all(map(alike, _CUTS)):
                    return True
        except Exception:  # options that go with other parameters, or an implementation that this device has not
            return False
    return False
