"""Full state dicts: what the unsharded model would have, and back; full_optimizer_state.py has the optimizer's.

Full tensors do not know the degree they come from, so what one degree wrote any other can take. One tensor at a time
is gathered. The whole model still passes through each rank's memory: checkpoint.py writes shards instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .agreement import check_agreement
from .bits import raw_bytes
from .collectives import Group
from .layout import piece_sizes
from .parameters import ShardSpec, named_shard_specs
from .wire import gather_objects

T = TypeVar("T")
WHOLE = ShardSpec(Group(None, 0, 1), None, 1)


@dataclass(frozen=True)
class Entry:
    """A tensor as this rank holds it and how it is sharded."""

    tensor: Tensor
    spec: ShardSpec

    @property
    def full_shape(self) -> torch.Size:
        shape, spec = list(self.tensor.shape), self.spec
        if spec.dim is not None:
            shape[spec.dim] = shape[spec.dim] * spec.group.size - spec.padding
        return torch.Size(shape)

    def pieces(self) -> list[tuple[torch.Size, Tensor]]:
        """(offsets in the full tensor, view of this rank's tensor) of each box of it: partition_stride boxes."""
        spec, local = self.spec, self.tensor.detach()
        if spec.dim is None:
            return [(torch.Size([0] * local.dim()), local)]
        world, total = spec.group.size, local.shape[spec.dim] * spec.group.size
        here = before = 0  # where the piece begins in this rank's tensor, and in the full one
        boxes = []
        for piece in piece_sizes(total, spec.stride if world > 1 else 1, world):
            width, offsets = piece // world, [0] * local.dim()
            offsets[spec.dim] = before + spec.group.rank * width
            size = min(width, self.full_shape[spec.dim] - offsets[spec.dim])  # less where the rest is padding
            if size > 0:
                boxes.append((torch.Size(offsets), local.narrow(spec.dim, here, size)))
            here, before = here + width, before + piece
        return boxes


class IncompatibleKeys(NamedTuple):
    """What `load_full_state_dict` with strict=False left alone."""

    missing_keys: list[str]
    unexpected_keys: list[str]


# --- what there is to save or load ----------------------------------------------------------------------------------


def model_group(model: nn.Module) -> Group:
    """The tensor-parallel group of a model's layers; one of size 1 where none is sharded.

    Raises:
        ValueError: layers with different groups.
    """
    groups = {id(s.group.process_group): s.group for _, _, s in named_shard_specs(model) if s.group.size > 1}
    if len(groups) > 1:
        raise ValueError(f"the model's layers have {len(groups)} different tp_groups: only one is supported")
    return next(iter(groups.values()), WHOLE.group)


def model_entries(model: nn.Module) -> dict[str, Entry]:
    """The model's state dict, buffers included, with how each tensor is sharded."""
    specs = {id(parameter): spec for _, parameter, spec in named_shard_specs(model)}
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} in the model's state dict is a {type(value).__name__}: only tensors are supported")
    return {name: Entry(tensor, specs.get(id(tensor), WHOLE)) for name, tensor in state.items()}


# --- errors on every rank -------------------------------------------------------------------------------------------


def together(group: Group, what: str, step: Callable[[], T]) -> T:
    """step() on every rank; where it fails on some rank, an error on every rank, so that none waits for another.

    Raises:
        RuntimeError: names the ranks and their errors. Where all ranks have the same error, that error itself.
    """
    failure: Exception | None = None
    result: Any = None
    try:
        result = step()
    except Exception as error:
        failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    texts: list[str | None] = [text]
    if group.size > 1:
        texts = gather_objects(text, group)
    if failure is not None and len(set(texts)) == 1:
        raise failure
    if any(texts):
        named = "\n".join(f"rank {rank} of {group.size}: {text}" for rank, text in enumerate(texts) if text)
        raise RuntimeError(f"{what} failed:\n{named}") from failure
    return result


def check_match(
    entries: Mapping[str, Entry], found: Mapping[str, tuple[torch.Size, torch.dtype]], *, strict: bool, source: str
) -> IncompatibleKeys:
    """Compares the model's entries with what a source has to offer.

    Raises:
        ValueError: one error that names every key that is missing, unexpected (with strict), or of another shape or
            dtype than the model's.
    """
    missing, unexpected = sorted(entries.keys() - found.keys()), sorted(found.keys() - entries.keys())
    problems = []
    if strict and missing:
        problems.append(f"missing in the {source}: {', '.join(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected in the {source}: {', '.join(unexpected)}")
    for name in entries.keys() & found.keys():
        entry, (shape, dtype) = entries[name], found[name]
        if entry.tensor.is_meta:
            problems.append(f"{name} is on the meta device: call model.to_empty(device=...) first")
        elif entry.full_shape != shape or entry.tensor.dtype != dtype:
            problems.append(
                f"{name} is {dtype} {tuple(shape)} in the {source} and {entry.tensor.dtype} {tuple(entry.full_shape)} "
                "in the model"
            )
    if problems:
        raise ValueError(f"the {source} does not fit the model:\n" + "\n".join(sorted(problems)))
    return IncompatibleKeys(missing, unexpected)


# --- gathering ------------------------------------------------------------------------------------------------------


def full_state_dict(model: nn.Module, *, rank0_only: bool = False, cpu_offload: bool = False) -> dict[str, Tensor]:
    """The state dict that the unsharded model would have: keys, shapes, dtypes and order. A collective.

    Gated layers are in TP=1's order, a padded vocabulary has its own rows alone. No two tensors share memory, tied
    weights neither, so that `safetensors.torch.save_file` takes them.

    Args:
        rank0_only: {} on other ranks than the group's first.
        cpu_offload: move each tensor to the CPU as soon as it is gathered.

    Raises:
        ValueError: layers of different tp_groups.
        TypeError: something else than tensors in the state dict.
    """
    return gather_entries(model_entries(model), model_group(model), rank0_only, cpu_offload)


def gather_entries(
    entries: Mapping[Any, Entry], group: Group, rank0_only: bool, cpu_offload: bool
) -> dict[Any, Tensor]:
    """Each entry's full tensor, one after another; options as for `full_state_dict`."""
    if group.size > 1 and entries:
        names = hashlib.sha256(repr(list(entries)).encode()).hexdigest()[:12]
        devices = (entry.tensor.device for entry in entries.values())
        # not that of `step` and its like, which is out of NCCL's reach
        device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
        check_agreement({"what is in the state dict": f"{len(entries)} tensors, {names}"}, group, device, set())
    full: dict[Any, Tensor] = {}
    for name, entry in entries.items():
        tensor = entry.spec.full(entry.tensor)
        if not rank0_only or group.rank == 0:
            full[name] = tensor.cpu() if cpu_offload else tensor
    return full


# --- loading --------------------------------------------------------------------------------------------------------


def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor], strict: bool = True) -> IncompatibleKeys:
    """Copies this rank's part of each full tensor into the model. Every rank needs the whole `state_dict`.

    Args:
        state_dict: as `full_state_dict` or an unsharded model's `state_dict()` gives it, at any degree. Of tied names
            one is enough, as Hugging Face saves them.
        strict: whether missing and unexpected keys are an error.

    Returns:
        (missing_keys, unexpected_keys), for strict=False.

    Raises:
        ValueError: on every rank, and before anything is written: keys, shapes or dtypes that differ, all named; or,
            whatever `strict`, two values for tied names.
    """
    entries, group = model_entries(model), model_group(model)
    found = {name: (tensor.shape, tensor.dtype) for name, tensor in state_dict.items()}
    given: dict[int, list[str]] = {id(entry.tensor): [] for entry in entries.values()}  # several names: tied
    for name, entry in entries.items():
        if name in found:
            given[id(entry.tensor)].append(name)

    def check() -> IncompatibleKeys:
        wanted = {name: entry for name, entry in entries.items() if name in found or not given[id(entry.tensor)]}
        keys = check_match(wanted, found, strict=strict, source="state dict")
        for first, *others in filter(None, given.values()):
            for other in others:
                if not torch.equal(raw_bytes(state_dict[first]), raw_bytes(state_dict[other])):
                    raise ValueError(
                        f"{other} and {first} are one parameter in the model and two in the state dict: leave one of "
                        "them out, or untie them in the model"
                    )
        return keys

    keys = together(group, "load_full_state_dict", check)
    with torch.no_grad():
        for name, entry in entries.items():
            if name in state_dict:
                entry.tensor.copy_(entry.spec.local(state_dict[name]))
    return keys
