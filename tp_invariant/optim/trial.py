"""Does an optimizer step a part of a parameter as it steps the same elements of the whole parameter?

Only then do trained weights not depend on the degree. Two kinds of optimizers do not: those that compute with several
elements of a parameter (norms, statistics of blocks or rows, products of matrices) or with random numbers; and
elementwise ones in implementations that round differently at the end of a vector, of which a CPU has some
(docs/optimizers.md). No list of optimizers could be complete, so `check` makes the optimizer's class again, with its
options, for a small parameter and for parts of it, and compares what a few steps make of both.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..core.bits import raw_bytes
from ..core.dtensors import is_dtensor, local_of
from ..layers.parameters import is_sharded

ALIGNED = 64  # elements: two of the widest vectors, of 16-bit elements

# By the number of dims: the shape of a parameter, and a part along each dim. The parts have multiples of ALIGNED
# elements, begin inside of blocks of 8 elements or more, and are larger than what 8-bit optimizers leave in 32 bits.
_ALIGNED_PARTS: dict[int, tuple[tuple[int, ...], tuple[slice, ...]]] = {
    1: ((12800,), (slice(2101, 8501),)),
    2: ((128, 100), (slice(33, 97), slice(37, 87))),
    3: ((128, 5, 33), (slice(33, 97), slice(1, 4), slice(13, 29))),
}
_ROWS, _PARTS = 960, (slice(0, 1), slice(0, 31), slice(3, 500), slice(77, 930), slice(450, 477), slice(901, 960))
_STEPS = 12  # some optimizers compute a preconditioner every ten steps
_RATE = (
    1e-2  # a schedule may begin with a rate that changes no 16-bit parameter; 1 of those that find a rate themselves
)


def check(optimizer: Optimizer) -> None:
    """Refuses an optimizer whose steps would depend on where its parameters are sharded.

    Call it once, on every rank, before the first step. It tries the optimizer's class with the options of each
    parameter group, which takes some 20 ms for each kind of shard, and changes neither parameters nor random states.
    An optimizer with `takes_shards = True` is not tried: it knows of shards, or is right where these are cut.

    Args:
        optimizer: of plain shards, DTensors or whole parameters, of 1 to 3 dims; whole ones are not tried.

    Raises:
        TypeError: it steps an element by other elements of the parameter or by random numbers; or it cannot be made
            from its parameter groups' options, or stepped without a closure, and so cannot be tried.
        ValueError: it rounds differently at the end of a vector, where a shard of this rank ends inside of one.
    """
    if getattr(optimizer, "takes_shards", False):
        return
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        shards: dict[tuple, Tensor] = {}  # one of each kind
        for p in group["params"]:
            if p.requires_grad and p.dim() in _ALIGNED_PARTS:
                for dim in _sharded_dims(p):
                    shards.setdefault((dim, p.dim(), p.dtype, p.device, local_of(p).numel() % ALIGNED == 0), p)
        options = _options(optimizer, group)
        for (dim, dims, dtype, device, ends_with_a_vector), p in shards.items():
            described = f"{name} of a shard of shape {tuple(local_of(p).shape)} along dim {dim}"
            shape, parts = _ALIGNED_PARTS[dims]
            try:
                whole_alike = _steps_alike(type(optimizer), options, shape, dim, parts[dim : dim + 1], dtype, device)
                alike = whole_alike and (
                    ends_with_a_vector
                    or _steps_alike(type(optimizer), options, (_ROWS, *(1,) * (dims - 1)), 0, _PARTS, dtype, device)
                )
            except Exception as error:
                raise TypeError(
                    f"{described} could not be tried on a small parameter and a part of it: {error}. If it steps each "
                    "element by itself, or knows of shards, set takes_shards = True of it"
                ) from error
            if not whole_alike:
                raise TypeError(
                    f"{described}: it steps a part of a parameter otherwise than the whole, as a trial with a small "
                    "one has shown. It computes with several elements of a parameter (a norm, a block's statistics, a "
                    "matrix), or with random numbers, so that what it trains would depend on the degree. Use AdamW, "
                    "SGD or another elementwise one, or tp_invariant.optim.Muon. An optimizer that knows of shards "
                    "says so by an attribute, takes_shards = True"
                )
            if not alike:
                forms = ", ".join(f"{form}=True" for form in ("fused", "foreach") if group.get(form))
                raise ValueError(
                    f"{described}: {name}({forms}) steps elements of {dtype} on {device.type} otherwise at the end of "
                    f"a vector, and this shard ends inside of one. Let every shard have a multiple of {ALIGNED} "
                    "elements, or step float32 parameters (master weights of 16-bit ones) with fused=False, or set "
                    "ATEN_CPU_CAPABILITY=default in the environment of all ranks, at every degree"
                )


def _sharded_dims(p: Any) -> list[int]:
    if is_dtensor(p):
        return [
            q.dim for q, size in zip(p.placements, p.device_mesh.shape, strict=True) if size > 1 and hasattr(q, "dim")
        ]
    return [p.partition_dim] if is_sharded(p) and 0 <= getattr(p, "partition_dim", -1) < p.dim() else []


def _options(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the class and of its base classes, as the group has them or, as numbers, the optimizer."""
    values = {key: value for key, value in vars(optimizer).items() if isinstance(value, (int, float, str))} | group
    inits = [vars(base)["__init__"] for base in type(optimizer).__mro__ if "__init__" in vars(base)]
    names = {name for init in inits for name in inspect.signature(init).parameters} - {"params"}
    options = {name: values[name] for name in names if name in values}
    if options.get("lr"):
        options["lr"] = 1.0 if max(group.get("initial_lr") or 0, group["lr"]) > 0.1 else _RATE
    return options


def _steps_alike(
    kind: Any,
    options: dict[str, Any],
    shape: tuple[int, ...],
    dim: int,
    parts: Sequence[slice],
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    generator = torch.Generator().manual_seed(0)
    whole, *grads = (_drawn(shape, least, generator).to(device, dtype) for least in (-16, *(-4,) * _STEPS))
    grads.append(grads[0])  # a direction in which some optimizers make their rate larger
    with _same_random_numbers(device) as restart:
        expected = _stepped(kind, options, whole, grads)
        for part in parts:
            restart()
            narrow = (dim, part.start, part.stop - part.start)
            stepped = _stepped(kind, options, whole.narrow(*narrow), [grad.narrow(*narrow) for grad in grads])
            if not torch.equal(raw_bytes(stepped), raw_bytes(expected.narrow(*narrow))):
                return False
    return True


def _stepped(kind: Any, options: dict[str, Any], start: Tensor, grads: Sequence[Tensor]) -> Tensor:
    parameter = nn.Parameter(start.clone(memory_format=torch.contiguous_format))
    own = inspect.signature(kind).parameters
    made = kind([parameter], **{name: value for name, value in options.items() if name in own})
    made.param_groups[0].update((key, value) for key, value in options.items() if key in made.param_groups[0])
    getattr(made, "train", lambda: None)()  # of the schedulefree package
    for grad in grads:
        parameter.grad = grad.clone(memory_format=torch.contiguous_format)
        made.step()
    return parameter.detach()


def _drawn(shape: tuple[int, ...], least: int, generator: torch.Generator) -> Tensor:
    """Of many magnitudes, so that a step's last bit shows in some elements whatever the learning rate."""
    scales = torch.exp2(torch.randint(least, 3, shape, generator=generator, device="cpu").float())
    return torch.randn(shape, generator=generator, device="cpu") * scales


@contextmanager
def _same_random_numbers(device: torch.device) -> Iterator[Any]:
    """Gives a function after which the same random numbers are drawn again; the states are restored at the end."""

    def restart() -> None:
        torch.default_generator.manual_seed(0)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(0)

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        restart()
        yield restart
