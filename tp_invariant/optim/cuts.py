"""Before the first step of an optimizer: would it step an element otherwise where its parameter is cut?

torch computes whole vectors by one code and what is left over by another, and for some optimizers, implementations and
dtypes the two round differently (docs/optimizers.md). Of a shard other elements are left over than of the whole
parameter, so that trained weights would depend on the degree. Which optimizers do so is not listed here: the optimizer
is tried, with its own options, on a small parameter and on parts of it. Where no shard ends inside of a vector nothing
is left over, and nothing is tried.

One that steps plain shards is tried for something coarser, too: does it step an element by others of its parameter (a
norm of it, statistics of blocks, a product of matrices), or by random numbers? The parts of that trial leave nothing
over.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.bits import raw_bytes
from ..core.dtensors import is_dtensor, local_of
from ..layers.parameters import is_sharded

ALIGNED = 64  # elements: two of the widest vectors, of 16-bit elements
_SIZE, _STEPS, _TRIALS = 960, 4, 3
_ALONG_VECTORS = slice(37, 485)  # a multiple of ALIGNED, and not where blocks begin
_CUTS = (slice(0, 1), slice(0, 31), slice(3, 500), slice(77, 930), slice(450, 477), slice(901, 960))

# By the number of dims: a shape, and a part along each dim. All are multiples of ALIGNED elements, and no part begins
# where a block of 8 elements or more does; they are larger than what 8-bit optimizers leave in 32 bits.
_PARTS: dict[int, tuple[tuple[int, ...], tuple[slice, ...]]] = {
    1: ((12800,), (slice(2101, 8501),)),
    2: ((128, 100), (slice(33, 97), slice(37, 87))),
    3: ((128, 5, 33), (slice(33, 97), slice(1, 4), slice(13, 29))),
}
_STEPS_OF_PARTS = 12  # some compute a preconditioner every ten steps
_RATE = 1e-2  # a schedule may begin with a rate that no 16-bit parameter shows; 1 of those that find one themselves

_log = logging.getLogger("tp_invariant")


def check_cuts(optimizer: Optimizer) -> None:
    """Raises: ValueError: the optimizer steps an element of a shard otherwise than of the whole parameter."""
    if getattr(optimizer, "takes_shards", False):
        return
    kind: Any = type(optimizer)
    cut: dict[tuple, tuple[tuple[tuple[str, Any], ...], Tensor]] = {}
    for group in optimizer.param_groups:
        told = _options(optimizer, group)
        others = tuple(option for option in told if option[0] != "lr")  # each group may have a rate of its own
        for p in group["params"]:
            if _ends_in_a_vector(p) and p.requires_grad:
                cut.setdefault((others, p.dtype, p.device), (told, p))
    for told, p in cut.values():
        if _sees_cuts(kind, told, p.dtype, p.device):
            chosen = ", ".join(f"{name}=True" for name in ("fused", "foreach") if dict(told).get(name))
            raise ValueError(
                f"{kind.__name__}({chosen}) steps an element of a {p.dtype} parameter on {p.device.type} otherwise "
                f"where the parameter is cut elsewhere, and a shard of shape {tuple(local_of(p).shape)} is cut "
                f"inside of a vector: what it trains would depend on the degree. Let every shard have a multiple "
                f"of {ALIGNED} elements, or step float32 parameters (master weights of 16-bit ones) with "
                "fused=False, or set ATEN_CPU_CAPABILITY=default in the environment of all ranks, at every degree"
            )


def shard_that_is_no_part(optimizer: Optimizer) -> tuple[Tensor, int] | None:
    """A plain shard, and its sharded dim, along which a part is stepped otherwise than in the whole; None if none is.

    What cannot be tried alone is left to the user, with a warning in the log: an optimizer around another, say.
    """
    if getattr(optimizer, "takes_shards", False):
        return None
    kind: Any = type(optimizer)
    for group in optimizer.param_groups:
        shards: dict[tuple, Tensor] = {}
        for p in group["params"]:
            if (
                is_sharded(p)
                and p.requires_grad
                and p.dim() in _PARTS
                and 0 <= getattr(p, "partition_dim", -1) < p.dim()
            ):
                shards.setdefault((p.dim(), p.partition_dim, p.dtype, p.device), p)
        highest = max(group.get("initial_lr") or 0, group.get("lr") or 0)
        rate = 1.0 if highest > 0.1 else _RATE
        told = tuple((name, rate if name == "lr" and value else value) for name, value in _options(optimizer, group))
        for (dims, dim, dtype, device), p in shards.items():
            if _sees_others(kind, told, dims, dim, dtype, device):
                return p, dim
    return None


def _options(optimizer: Optimizer, group: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The arguments of the class and of those that it derives from, which have the rest of **arguments.

    They are in the group; or, if they are numbers or names, may be attributes of the optimizer.
    """
    own = {name: value for name, value in vars(optimizer).items() if isinstance(value, (int, float, str))}
    held = {**own, **group}
    inits = [inspect.signature(vars(base)["__init__"]) for base in type(optimizer).__mro__ if "__init__" in vars(base)]
    named = dict.fromkeys(name for init in inits for name in init.parameters if name in held and name != "params")
    told = ((name, _hashable(held[name])) for name in named)
    return tuple((name, value) for name, value in told if isinstance(value, Hashable))


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
    generator = torch.Generator().manual_seed(0)
    for _ in range(_TRIALS):
        (whole,), grads = (
            _drawn(n, (_SIZE,), least, generator).to(device, dtype) for n, least in ((1, -16), (_STEPS, -4))
        )
        try:
            with _trial(device):
                expected = _stepped(kind, options, whole, grads)

                def alike(cut: slice) -> bool:
                    stepped = _stepped(kind, options, whole[cut], grads[:, cut])  # noqa: B023
                    return torch.equal(raw_bytes(stepped), raw_bytes(expected[cut]))  # noqa: B023

                if not alike(_ALONG_VECTORS):  # it computes with whole parameters, see step_checks.py
                    return False
                if not all(map(alike, _CUTS)):
                    return True
        except Exception:  # options that go with other parameters, or an implementation that this device has not
            return False
    return False


@functools.lru_cache(maxsize=64)
def _sees_others(
    kind: Any, options: tuple[tuple[str, Any], ...], dims: int, dim: int, dtype: torch.dtype, device: torch.device
) -> bool:
    shape, parts = _PARTS[dims]
    generator = torch.Generator().manual_seed(0)
    (whole,), grads = (_drawn(n, shape, -4, generator).to(device, dtype) for n in (1, _STEPS_OF_PARTS))
    grads += grads[:1].clone()  # a direction in which some make their rate larger
    size = parts[dim].stop - parts[dim].start
    try:
        with _trial(device):
            _seed(device)
            expected = _stepped(kind, options, whole, grads).narrow(dim, parts[dim].start, size)
            _seed(device)
            part, of_part = (x.narrow(dim - dims, parts[dim].start, size) for x in (whole, grads))
            return not torch.equal(raw_bytes(_stepped(kind, options, part, of_part)), raw_bytes(expected))
    except Exception as error:
        _warn(kind, str(error))
        return False


_warned: set[type] = set()


def _warn(kind: type, why: str) -> None:
    if kind in _warned or kind.__module__.partition(".")[0] == "torch":  # torch's own are known, or around others
        return
    _warned.add(kind)
    _log.warning(
        "%s steps parameters of which this rank has a part, and could not be tried on a small parameter and a part of "
        "it (%s). If it computes with several elements of a parameter (a norm, a block's statistics), what it trains "
        "depends on the degree. Set takes_shards = True of it if it does not, or if it knows of shards",
        kind.__name__,
        why,
    )


def _stepped(
    kind: Any, options: tuple[tuple[str, Any], ...], start: Tensor, grads: Sequence[Tensor] | Tensor
) -> Tensor:
    step = inspect.unwrap(kind.step)  # without the hooks of all optimizers, which are for a user's
    parameter = nn.Parameter(start.clone(memory_format=torch.contiguous_format))
    own = inspect.signature(kind).parameters
    made = kind([parameter], **{name: value for name, value in options if name in own})
    made.param_groups[0].update((name, value) for name, value in options if name in made.param_groups[0])
    getattr(made, "train", lambda: None)()  # of the schedulefree package
    for grad in grads:
        parameter.grad = grad.clone(memory_format=torch.contiguous_format)
        step(made)
    return parameter.detach()


def _drawn(count: int, shape: tuple[int, ...], least: int, generator: torch.Generator) -> Tensor:
    """Of many magnitudes, so that a step's last bit shows in some elements whatever the learning rate."""
    scales = torch.exp2(torch.randint(least, 3, (count, *shape), generator=generator).float())
    return torch.randn(count, *shape, generator=generator) * scales


def _seed(device: torch.device) -> None:
    """torch.manual_seed would seed the generators of all devices, also those that `_trial` does not restore."""
    torch.default_generator.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(0)


@contextmanager
def _trial(device: torch.device) -> Iterator[None]:
    """The state of random generators is restored at its end.

    What the optimizer has compiled runs uncompiled: torch would never compile again what it met in a dispatch mode.
    """
    eager, drawing = torch.compiler.set_stance("force_eager"), [device] if device.type == "cuda" else []
    with eager, torch.random.fork_rng(drawing), torch.no_grad(), _Alone():
        yield


class _Alone(TorchDispatchMode):
    """Inside, what communicates is an error: another rank may not try the same."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError(f"it communicates by {func}")
        return func(*args, **(kwargs or {}))
