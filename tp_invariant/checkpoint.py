"""Checkpoints of shards, which any degree writes and any degree reads: `save(path, model)`, `load(path, model)`.

torch.distributed.checkpoint plans, drops what several ranks hold alike, and carries one rank's failure to all; its
planners are told here which boxes of a full tensor a rank holds (several for a gated layer, which no DTensor placement
says), and its storage is ours, since torch's own pickles.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from .collectives import Group, resolve_group
from .full_optimizer_state import (
    check_groups,
    install_optimizer_state,
    optimizer_entries,
    optimizer_groups,
    state_target,
)
from .full_state import WHOLE, Entry, check_match, model_entries, model_group, together
from .liveness import explain

_TENSOR, _TUPLE = "__tensor__", "__tuple__"


def save(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | DeviceMesh | Group | None = None,
) -> None:
    """Writes a checkpoint to the folder `path`, each rank its own shards; what all hold alike is written once.

    Replaces a checkpoint that is there, in one step at the very end: a crash before that leaves the old one as it was.
    A collective; the folder must be on a filesystem that all ranks share.

    Args:
        optimizer: its state and param_groups go with the model.
        extra: rank 0's; a nest of dicts, lists, tuples, numbers, strings, None and tensors (a step count, RNG states).
        group: the ranks that call; None for the model's own tp_group. With data parallelism give the group of all
            ranks, or call it on one replica.

    Raises:
        ValueError: an optimizer state that cannot be resharded (see full_optimizer_state_dict); layers of several
            tp_groups.
        TypeError: something in `extra` or param_groups that has no place in a checkpoint.
        RuntimeError: on every rank, where some rank failed; names it.
        KeyboardInterrupt, SystemExit: on the rank that got it; a RuntimeError on the others.
        ImportError: safetensors is not installed.
    """
    from torch.distributed import checkpoint as dcp  # takes a second to import

    from .checkpoint_files import SafetensorsWriter, require_safetensors
    from .checkpoint_plan import BoxSavePlanner

    ranks = model_group(model) if group is None else resolve_group(group)

    def describe() -> tuple[dict[str, Entry], dict[str, str], Any]:
        require_safetensors()
        entries, aliases = _once(model_entries(model))
        tensors = {f"model.{name}": entry for name, entry in entries.items()}
        values: dict[str, Any] = {"optimizer": None}
        if optimizer is not None:
            state = {"groups": optimizer_groups(model, optimizer), "state": optimizer_entries(model, optimizer)}
            values["optimizer"] = _pack(state, "optimizer", tensors)
        own: dict[str, Entry] = {}
        values["extra"] = _pack(dict(extra or {}), "extra", own)
        if ranks.rank == 0:
            tensors |= own
        return tensors, {f"model.{name}": f"model.{target}" for name, target in aliases.items()}, values

    tensors, aliases, values = together(ranks, f"saving {os.fspath(path)}", describe)
    writer, planner = SafetensorsWriter(Path(path)), BoxSavePlanner(tensors, aliases, values)
    _run(dcp.save, ranks, f"saving {os.fspath(path)}", storage_writer=writer, planner=planner)


def load(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    group: dist.ProcessGroup | DeviceMesh | Group | None = None,
) -> dict[str, Any]:
    """Reads a checkpoint that `save` wrote, at any degree, into the model and the optimizer; each rank its shards.

    Never unpickles. A collective; `group` as for `save`.

    Returns:
        The `extra` that was saved; its tensors on the CPU.

    Raises:
        FileNotFoundError: no checkpoint there.
        ValueError: on every rank, before anything is written: keys, shapes or dtypes that are not the model's (one
            error names all), other parameters in the optimizer's groups, no optimizer in the checkpoint, or an index
            that cannot be read.
        RuntimeError: on every rank, where some rank failed to read.
        KeyboardInterrupt, SystemExit: as for `save`.
        ImportError: safetensors is not installed.
    """
    from torch.distributed import checkpoint as dcp

    from .checkpoint_files import SafetensorsReader, read_index, require_safetensors
    from .checkpoint_plan import BoxLoadPlanner

    ranks, folder = model_group(model) if group is None else resolve_group(group), Path(path)

    def describe() -> tuple[Any, dict[str, Entry], dict[str, Any]]:
        require_safetensors()
        metadata, values = read_index(folder)
        saved = {name: (t.size, t.properties.dtype) for name, t in metadata.state_dict_metadata.items()}  # type: ignore[union-attr]
        offered = {name.removeprefix("model."): found for name, found in saved.items() if name.startswith("model.")}
        entries = model_entries(model)
        check_match(entries, offered, strict=True, source=f"checkpoint {folder}")
        once, aliases = _once(entries)
        for name, tied in aliases.items():
            if _places(metadata, f"model.{name}") != _places(metadata, f"model.{tied}"):
                raise ValueError(f"{name} and {tied} are one parameter in the model and two in the checkpoint {folder}")
        tensors = {f"model.{name}": entry for name, entry in once.items()}

        def target(path: tuple, name: str) -> Entry:
            shape, dtype = saved[name]
            if path[:2] == ("optimizer", "state"):
                entry = entries[path[2]]
                return state_target(path[2], path[3], shape, dtype, entry.tensor, entry.spec)
            return Entry(torch.zeros(shape, dtype=dtype), WHOLE)

        if optimizer is None:
            values["optimizer"] = None
        elif values["optimizer"] is None:
            raise ValueError(f"the checkpoint {folder} holds no optimizer: load without one")
        else:
            groups = values["optimizer"]["groups"]
            check_groups(optimizer, optimizer_groups(model, optimizer), groups, f"checkpoint {folder}")
        return metadata, tensors, _unpack(values, target, tensors)

    metadata, tensors, values = together(ranks, f"loading {folder}", describe)
    for entry in tensors.values():
        if entry.spec.padding:
            entry.tensor.detach().zero_()  # no box of the full tensor covers the padding
    reader, planner = SafetensorsReader(folder, metadata), BoxLoadPlanner(tensors)
    _run(dcp.load, ranks, f"loading {folder}", storage_reader=reader, planner=planner)
    if optimizer is not None:
        install_optimizer_state(model, optimizer, **_loaded(values["optimizer"]))
    return _loaded(values["extra"])


def _run(call: Callable[..., Any], ranks: Group, what: str, **arguments: Any) -> None:
    """Calls torch.distributed.checkpoint; its exception, which is no Exception, becomes one that names the ranks."""
    from torch.distributed.checkpoint import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            call({}, process_group=ranks.process_group, no_dist=ranks.size == 1, **arguments)
        except CheckpointException as error:
            own, _ = error.failures.get(ranks.rank, (None, None))
            if isinstance(own, (KeyboardInterrupt, SystemExit)):  # who asks this process to end is no failed write
                raise own from None
            causes = "\n".join(
                f"rank {rank} of {ranks.size}: {type(cause).__name__}: {cause}"
                for rank, (cause, _) in sorted(error.failures.items())
            )
            raise RuntimeError(f"{what} failed:\n{causes}") from None
        except RuntimeError as error:
            raise explain(error, ranks, what) from error


def _places(metadata: Any, name: str) -> list[tuple[str, str]]:
    """Where the boxes of a tensor lie."""
    return sorted(place for index, place in metadata.storage_data.items() if index.fqn == name)


# --- nests of values, and tensors in them ---------------------------------------------------------------------------


def _once(entries: Mapping[str, Entry]) -> tuple[dict[str, Entry], dict[str, str]]:
    """Each tensor under its first name, and {further name: first name} of tied ones."""
    first: dict[int, str] = {}
    for name, entry in entries.items():
        first.setdefault(id(entry.tensor), name)
    aliases = {name: first[id(e.tensor)] for name, e in entries.items() if first[id(e.tensor)] != name}
    return {name: entry for name, entry in entries.items() if name not in aliases}, aliases


def _pack(value: Any, name: str, tensors: dict[str, Entry]) -> Any:
    """`value` as JSON takes it; tensors go to `tensors` under names made of their paths, marks stand in their place."""
    if isinstance(value, Tensor):
        value = Entry(value, WHOLE)
    if isinstance(value, Entry):
        if name in tensors:
            raise ValueError(f"two tensors of the checkpoint would both be called {name}: rename a key")
        tensors[name] = value
        return {_TENSOR: name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        packed = [_pack(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]
        return packed if isinstance(value, list) else {_TUPLE: packed}
    if isinstance(value, Mapping) and all(isinstance(key, str) and key not in (_TENSOR, _TUPLE) for key in value):
        return {key: _pack(item, f"{name}.{key}", tensors) for key, item in value.items()}
    raise TypeError(
        f"{name} is a {type(value).__name__}: a checkpoint takes dicts with string keys, lists, tuples, numbers, "
        "strings, None and tensors"
    )


def _unpack(value: Any, target: Callable[[tuple, str], Entry], tensors: dict[str, Entry], path: tuple = ()) -> Any:
    """The inverse of `_pack`, with the Entry target(path, name) for each tensor, which goes to `tensors` as well."""
    if isinstance(value, list):
        return [_unpack(item, target, tensors, (*path, index)) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        name = value[_TENSOR]
        tensors[name] = target(path, name)
        return tensors[name]
    if _TUPLE in value:
        return tuple(_unpack(value[_TUPLE], target, tensors, path))
    return {key: _unpack(item, target, tensors, (*path, key)) for key, item in value.items()}


def _loaded(value: Any) -> Any:
    """A nest with tensors for Entries."""
    if isinstance(value, Entry):
        return value.tensor
    if isinstance(value, (list, tuple)):
        return type(value)(map(_loaded, value))
    return {key: _loaded(item) for key, item in value.items()} if isinstance(value, dict) else value
