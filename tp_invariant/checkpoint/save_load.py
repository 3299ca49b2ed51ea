"""Sharded checkpoints, which any degree writes and any degree reads: `save(path, model)`, `load(path, model)`.

torch.distributed.checkpoint makes the plans, writes replicated tensors once and reports one rank's failure to all. Its
planners get from here the boxes of a full tensor that a rank holds: several for a gated layer, which no DTensor
placement can express. Its storage is files.py, because torch's own pickles.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ..comm.collectives import Group, resolve_group
from ..comm.liveness import explain
from ..comm.wire import gather_objects
from ..consistency.differences import format_values, gather_differences
from ..core.bits import leaves
from ..core.torch_private import tree
from .full_optimizer_state import (
    TENSOR,
    check_optimizer,
    install_optimizer_state,
    optimizer_entries,
    optimizer_groups,
    state_target,
)
from .full_state import (
    WHOLE,
    Entry,
    check_match,
    check_members,
    check_replicas,
    error_of_ranks,
    model_entries,
    model_group,
    modules_with_extra_state,
    run_on_all_ranks,
    tensor_specs,
)
from .stages import copies_in, merge_optimizers, optimizer_of_stage, without_copies

if TYPE_CHECKING:
    from .files import Index, SafetensorsReader

_TUPLE = "__tuple__"


def save(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | DeviceMesh | Group | None = None,
    pp_group: dist.ProcessGroup | DeviceMesh | Group | None = None,
) -> None:
    """Writes a checkpoint to the folder `path`, each rank its own shards; replicated tensors are written once.

    An existing checkpoint is replaced in one step at the very end; a crash before that leaves it unchanged.
    A collective; the folder must be on a filesystem that all ranks share. Files' modes follow the umask.

    Args:
        optimizer: its state and param_groups are saved too.
        extra: rank 0's is saved: nested dicts, lists, tuples, numbers, strings, None, tensors (a step, RNG states). The
            same holds for what modules return from get_extra_state.
        group: the ranks that call; None for the model's own tp_group, and after fully_shard for a process group of all
            ranks that have parts of the model, if there is one. With other data parallelism give the group of all
            ranks, or call it on one replica.
        pp_group: the ProcessGroup or 1-D DeviceMesh of a pipeline's stages, of which `model` is this rank's. The
            checkpoint is that of the whole model. `group` must have all ranks of all stages; None for all of the job.

    Raises:
        ValueError: an optimizer state that cannot be resharded (see full_optimizer_state_dict); a parameter that two
            layers shard in different ways; without `group`, no tp_group of the layers contains all ranks.
        TypeError: `extra`, param_groups or the state dict has a value that a checkpoint cannot store.
        RuntimeError: on every rank: names a rank that failed; copies of replicated parameters, buffers or param_groups
            differ; another save into the folder is under way.
        KeyboardInterrupt, SystemExit: on the rank that got it; a RuntimeError on the others.
        ImportError: safetensors is not installed.
    """
    from torch.distributed import checkpoint as dcp  # takes a second to import

    from .files import SafetensorsWriter, require_safetensors
    from .plan import BoxSavePlanner

    ranks, stages = _ranks(model, group, pp_group)

    def describe() -> tuple[dict[str, Entry], dict[str, Entry], dict[str, str], Any]:
        require_safetensors()
        entries, aliases = _once(model_entries(model))
        aliases |= copies_in(model)
        tensors = {f"model.{name}": entry for name, entry in entries.items() if name not in aliases}
        values: dict[str, Any] = {"optimizer": None}
        if optimizer is not None:
            state = {
                "class": type(optimizer).__name__,
                "groups": optimizer_groups(model, optimizer),
                "state": optimizer_entries(model, optimizer),
            }
            values["optimizer"] = _pack(without_copies(model, state), "optimizer", tensors)
        own: dict[str, Entry] = {}
        values["extra"] = _pack(dict(extra or {}), "extra", own)
        if states := modules_with_extra_state(model, "get_extra_state"):
            if stages.size > 1:
                raise ValueError(f"{next(iter(states))}: what get_extra_state gives is not supported with pp_group")
            values["states"] = _pack({key: one.get_extra_state() for key, one in states.items()}, "states", own)
        check_members(tensors, ranks)
        json.dumps(values)  # before anything is written
        return tensors, own, {f"model.{name}": f"model.{target}" for name, target in aliases.items()}, values

    what = f"saving {os.fspath(path)}"
    tensors, own, aliases, values = run_on_all_ranks(ranks, what, describe)
    check_replicas(what, tensors, ranks, stages.rank)
    aliases, values["optimizer"] = _of_all_stages(what, aliases, values["optimizer"], ranks, stages)
    if ranks.rank == 0:
        tensors |= own
    writer, planner = SafetensorsWriter(Path(path)), BoxSavePlanner(tensors, aliases, values)
    try:
        _run(dcp.save, ranks, what, storage_writer=writer, planner=planner)
    finally:
        writer.close()


def load(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    group: dist.ProcessGroup | DeviceMesh | Group | None = None,
    pp_group: dist.ProcessGroup | DeviceMesh | Group | None = None,
) -> dict[str, Any]:
    """Reads a checkpoint that `save` wrote, at any degree, into the model and the optimizer; each rank its shards.

    Never unpickles. A collective; `group` and `pp_group` as for `save`, with as many stages as there are now. Every
    rank checks all that it will read, digests included, before any rank writes to its model; so files are read twice,
    the second time mostly from the system's cache, and nothing is held in memory meanwhile. The optimizer's
    hyperparameters become the saved ones.

    Returns:
        The `extra` that was saved; its tensors on the CPU.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: on every rank, before anything is written: keys, shapes or dtypes that are not the model's (one
            error names all); other parameters in the optimizer's groups, another optimizer, or options that give its
            state another meaning (such as amsgrad); no optimizer in the checkpoint; files that are damaged, of another
            save: names the file and the reason.
        RuntimeError: on every rank, if a rank failed in another way; says so if a model is partly loaded.
        KeyboardInterrupt, SystemExit: as for `save`.
        ImportError: safetensors is not installed.
    """
    from torch.distributed import checkpoint as dcp

    from .files import INDEX, SafetensorsReader, read_index, require_safetensors
    from .plan import BoxLoadPlanner

    (ranks, stages), folder = _ranks(model, group, pp_group), Path(path)
    what = f"loading {folder}"
    names = set(model.state_dict(keep_vars=True))
    elsewhere = set().union(*gather_objects(names, ranks)) - names if stages.size > 1 else set()

    def describe() -> tuple[SafetensorsReader, dict[str, Entry], dict[str, Any]]:
        require_safetensors()
        index = read_index(folder)
        reader, metadata = SafetensorsReader(folder, index), index.metadata
        saved = {name: (t.size, t.properties.dtype) for name, t in metadata.state_dict_metadata.items()}  # type: ignore[union-attr]
        values = index.values
        offered = {name.removeprefix("model."): kind for name, kind in saved.items() if name.startswith("model.")}
        entries = model_entries(model)
        check_members(entries, ranks)
        saved_states, states = index.values.get("states", {}), modules_with_extra_state(model, "set_extra_state")
        absent = [key for key in states if key not in saved_states]
        offered = {name: kind for name, kind in offered.items() if name not in elsewhere}
        offered |= {key: (torch.Size(()), torch.uint8) for key in saved_states if key not in states}  # unexpected
        check_match(entries, offered, strict=True, source=f"checkpoint {folder}", absent=absent)
        once, aliases = _once(entries)
        for name, tied in aliases.items():
            if _contents(index, f"model.{name}") != _contents(index, f"model.{tied}"):
                raise ValueError(f"{name} and {tied} are one parameter in the model and two in the checkpoint {folder}")
        tensors = {f"model.{name}": entry for name, entry in once.items()}
        parameters, specs = dict(model.named_parameters()), tensor_specs(model)

        def target(path: tuple, name: str) -> Entry:
            shape, dtype = saved[name]
            if path[:2] == ("optimizer", "state"):
                parameter = parameters[path[2]]
                return state_target(path[2], path[3], shape, dtype, parameter, specs[id(parameter)])
            return Entry(torch.zeros(shape, dtype=dtype, device="cpu"), WHOLE)

        if optimizer is None:
            values["optimizer"] = None
        elif values["optimizer"] is None:
            raise ValueError(f"the checkpoint {folder} holds no optimizer: load without one")
        else:
            if stages.size > 1:
                values["optimizer"] = optimizer_of_stage(model, values["optimizer"])
            check_optimizer(model, optimizer, values["optimizer"], f"checkpoint {folder}")
        values = _unpack(values, target, tensors)  # which adds to `tensors`
        return reader, tensors, values

    reader, tensors, values = run_on_all_ranks(ranks, what, describe)
    if len(set(gather_objects(reader.index.digest, ranks))) > 1:
        raise ValueError(
            f"the ranks read different {INDEX} in {folder}: another job saves into it, or ranks do not share it"
        )
    _run(dcp.load, ranks, what, storage_reader=reader, planner=BoxLoadPlanner(tensors))
    loaded = tree.tree_map_only(Entry, lambda entry: entry.tensor, values)
    if optimizer is not None:
        install_optimizer_state(model, optimizer, loaded["optimizer"]["groups"], loaded["optimizer"]["state"])
    for key, module in modules_with_extra_state(model, "set_extra_state").items():
        module.set_extra_state(loaded["states"][key])
    return loaded["extra"]


def _run(call: Callable[..., Any], ranks: Group, what: str, **arguments: Any) -> None:
    """Calls torch.distributed.checkpoint; its CheckpointException becomes an Exception that names the ranks."""
    from torch.distributed.checkpoint import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            call({}, process_group=ranks.process_group, no_dist=ranks.size == 1, **arguments)
        except CheckpointException as error:
            own, _ = error.failures.get(ranks.rank, (None, None))
            if isinstance(own, (KeyboardInterrupt, SystemExit)):  # a request to end the process
                raise own from None
            causes = {rank: (type(cause).__name__, str(cause)) for rank, (cause, _) in error.failures.items()}
            raise error_of_ranks(what, causes, ranks) from None
        except RuntimeError as error:
            raise explain(error, ranks, what) from error


def _ranks(model: nn.Module, group: Any, pp_group: Any) -> tuple[Group, Group]:
    """The ranks that save or load, and those of the pipeline's stages."""
    stages = resolve_group(pp_group)
    if group is None and stages.size > 1:
        group = dist.group.WORLD
    return model_group(model) if group is None else resolve_group(group), stages


def _contents(index: Index, name: str) -> list[tuple]:
    """A tensor's boxes with their digests."""
    return sorted(
        (tuple(box.offset), tuple(place.sizes), place.digest)
        for box, place in index.metadata.storage_data.items()
        if box.fqn == name
    )


def _of_all_stages(what: str, aliases: dict[str, str], optimizer: Any, ranks: Group, stages: Group) -> tuple:
    """(aliases, the optimizer's values) of the whole model, which the ranks of each stage have alike.

    Raises:
        RuntimeError: the same on every rank, where ranks of one stage differ; names the first value and each one's.
        ValueError: see `merge_optimizers`.
    """
    own = {name: repr(leaf) for name, leaf in leaves({"aliases": aliases, "optimizer": optimizer})}
    hashes = gather_objects((stages.rank, hashlib.sha256(repr(own).encode()).hexdigest()), ranks)
    of_stage = dict(reversed([(stage, (rank, found)) for rank, (stage, found) in enumerate(hashes)]))
    if any(found != of_stage[stage][1] for stage, found in hashes):
        for name, values_of_ranks in gather_differences(own, ranks).items():
            named = format_values(values_of_ranks)
            raise RuntimeError(f"{what}: the {ranks.size} ranks differ in {name}, which must be equal: {named}")
    if stages.size == 1:
        return aliases, optimizer
    speaks = of_stage[stages.rank][0] == ranks.rank
    everyone = gather_objects((aliases, optimizer) if speaks else None, ranks)
    spoken: list[Any] = [everyone[of_stage[stage][0]] for stage in range(stages.size)]
    merged = {name: target for theirs, _ in spoken for name, target in theirs.items()}
    return merged, merge_optimizers([theirs for _, theirs in spoken])


# --- nests of values, and tensors in them ---------------------------------------------------------------------------


def _once(entries: Mapping[str, Entry]) -> tuple[dict[str, Entry], dict[str, str]]:
    """Each tensor under its first name, and {further name: first name} of tied ones."""
    first: dict[int, str] = {}
    for name, entry in entries.items():
        first.setdefault(id(entry.tensor), name)
    aliases = {name: first[id(e.tensor)] for name, e in entries.items() if first[id(e.tensor)] != name}
    return {name: entry for name, entry in entries.items() if name not in aliases}, aliases


def _pack(value: Any, name: str, tensors: dict[str, Entry]) -> Any:
    """`value` for JSON: marks replace the tensors, which go to `tensors` under names made from their paths."""
    if isinstance(value, Tensor):
        value = Entry(value, WHOLE)
    if isinstance(value, Entry):
        if name in tensors:
            raise ValueError(f"two tensors of the checkpoint would both be called {name}: rename a key")
        tensors[name] = value
        return {TENSOR: name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        packed = [_pack(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]
        return packed if isinstance(value, list) else {_TUPLE: packed}
    if isinstance(value, Mapping) and all(isinstance(key, str) and key not in (TENSOR, _TUPLE) for key in value):
        return {key: _pack(item, f"{name}.{key}", tensors) for key, item in value.items()}
    raise TypeError(
        f"{name} is a {type(value).__name__}: a checkpoint takes dicts with string keys, lists, tuples, numbers, "
        "strings, None and tensors"
    )


def _unpack(value: Any, target: Callable[[tuple, str], Entry], tensors: dict[str, Entry], path: tuple = ()) -> Any:
    """The inverse of `_pack`, with the Entry target(path, name) for each tensor, which is also added to `tensors`."""
    if isinstance(value, list):
        return [_unpack(item, target, tensors, (*path, index)) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        name = value[TENSOR]
        tensors[name] = target(path, name)
        return tensors[name]
    if _TUPLE in value:
        return tuple(_unpack(value[_TUPLE], target, tensors, path))
    return {key: _unpack(item, target, tensors, (*path, key)) for key, item in value.items()}
