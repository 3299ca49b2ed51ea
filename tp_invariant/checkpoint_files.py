"""A checkpoint's files, as torch.distributed.checkpoint's storage: safetensors and one JSON index, no pickle.

    index.json                  every tensor's dtype, full shape and boxes, where each box lies; plain values
    <save>-<rank>-<n>.safetensors   the boxes that a rank wrote

Files of one save have names of their own, and replacing index.json is the commit: until then the folder is the old
checkpoint, from then on the new one. What no index names is left over from a save that did not finish, or from the
one before, and goes with the next commit.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

INDEX = "index.json"
FORMAT = "tp_invariant checkpoint 1"
_DATA = re.compile(r"[0-9a-f]{16}-\d{5}-\d{5}\.safetensors")
_FILE_BYTES = 2**31  # a file's boxes are copied to the CPU together


def require_safetensors() -> Any:
    """The safetensors module.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("checkpoints need safetensors: pip install 'tp_invariant[hf]'") from error
    return safetensors


def _done(value: Any) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- writing --------------------------------------------------------------------------------------------------------


class SafetensorsWriter(StorageWriter):
    """Writes each rank's boxes to files of its own, then, on the coordinator, the index. See the top of the file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reset(self, checkpoint_id: Any = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        save = secrets.token_hex(8)
        return [dataclasses.replace(plan, storage_data=f"{save}-{rank:05}") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        save_file = require_safetensors().torch.save_file
        results = []
        for number, items in enumerate(_batches(plan.items)):
            path = self.folder / f"{plan.storage_data}-{number:05}.safetensors"
            boxes = {}
            for item in items:
                data = planner.resolve_data(item)
                assert isinstance(data, Tensor)
                key = f"{item.index.fqn}@{','.join(map(str, item.index.offset or ()))}"
                # a copy, since boxes of one tensor share their memory, which safetensors refuses
                boxes[key] = data.to("cpu", copy=True).contiguous()
                place = {"file": path.name, "key": key}
                results.append(WriteResult(item.index, data.numel() * data.element_size(), place))
            save_file(boxes, path)
            _sync(path)
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits. planner_data is {"values": .., "aliases": {name: the name it is written under}}."""
        places = {result.index: result.storage_data for ranks in results for result in ranks}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            boxes = [
                {"offsets": list(box.offsets), "sizes": list(box.sizes), **places[MetadataIndex(name, box.offsets)]}
                for box in tensor.chunks
            ]
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(tensor.size), "boxes": boxes}
        for name, target in metadata.planner_data["aliases"].items():
            tensors[name] = tensors[target]
        files = {place["file"] for place in places.values()}
        if absent := sorted(file for file in files if not (self.folder / file).is_file()):
            raise FileNotFoundError(
                f"{absent[0]}, which another rank wrote, is not in {self.folder} here: the folder must be on a "
                "filesystem that all ranks share"
            )
        text = json.dumps({"format": FORMAT, "values": metadata.planner_data["values"], "tensors": tensors})
        fresh = self.folder / f"{INDEX}.new"
        fresh.write_text(text)
        _sync(fresh)
        _sync(self.folder)  # the data files' names, before the index that speaks of them
        os.replace(fresh, self.folder / INDEX)
        _sync(self.folder)
        for path in self.folder.iterdir():
            if _DATA.fullmatch(path.name) and path.name not in files:
                with suppress(OSError):  # the checkpoint stands; leftovers only take room
                    path.unlink()


def _batches(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    """Runs of items that make a file of about _FILE_BYTES or less."""
    batch: list[WriteItem] = []
    size = 0
    for item in items:
        if batch and size + (item.tensor_storage_size() or 0) > _FILE_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item.tensor_storage_size() or 0
    if batch:
        yield batch


# --- reading --------------------------------------------------------------------------------------------------------


def read_index(folder: Path) -> tuple[Metadata, dict[str, Any]]:
    """What the checkpoint in a folder holds: torch.distributed.checkpoint's Metadata, and the plain values.

    Raises:
        FileNotFoundError: there is no checkpoint, or a save that never finished.
        ValueError: the index is not one that this version reads.
    """
    path = folder / INDEX
    if not path.is_file():
        what = "holds a save that did not finish" if folder.is_dir() and any(folder.iterdir()) else "is no checkpoint"
        raise FileNotFoundError(f"{folder} {what}: there is no {INDEX} in it")
    try:
        index = json.loads(path.read_text())
        if index["format"] != FORMAT:
            raise ValueError(f"its format is {index['format']!r}, not {FORMAT!r}")
        tensors, places = {}, {}
        for name, entry in index["tensors"].items():
            boxes = []
            for box in entry["boxes"]:
                if not _DATA.fullmatch(box["file"]):
                    raise ValueError(f"{name} lies in {box['file']!r}, which is no name of a data file")
                boxes.append(ChunkStorageMetadata(torch.Size(box["offsets"]), torch.Size(box["sizes"])))
                places[MetadataIndex(name, box["offsets"])] = (box["file"], box["key"])
            if sum(math.prod(box.sizes) for box in boxes) != math.prod(entry["shape"]):
                raise ValueError(f"the boxes of {name} do not make up its shape {entry['shape']}")
            dtype = getattr(torch, entry["dtype"])
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(entry["shape"]), boxes)
        return Metadata(tensors, storage_data=places), index["values"]  # type: ignore[arg-type]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read as a checkpoint's index: {error!r}") from error


class SafetensorsReader(StorageReader):
    """Reads of each file only the slices that this rank's boxes need."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self.folder, self.metadata = folder, metadata

    def reset(self, checkpoint_id: Any = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))

    def read_metadata(self, *args: Any) -> Metadata:
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        safe_open = require_safetensors().safe_open
        by_file: dict[str, list[tuple[str, Any]]] = {}
        for item in plan.items:
            file, key = self.metadata.storage_data[item.storage_index]
            by_file.setdefault(file, []).append((key, item))
        for file, wanted in by_file.items():
            with safe_open(self.folder / file, framework="pt") as data:
                for key, item in wanted:
                    box = zip(item.storage_offsets, item.lengths, strict=True)
                    slices = tuple(slice(start, start + length) for start, length in box)
                    tensor = data.get_slice(key)[slices] if slices else data.get_tensor(key)
                    out = planner.resolve_tensor(item)
                    if tensor.shape != out.shape or tensor.dtype != out.dtype:
                        raise ValueError(f"{file} does not hold what {INDEX} says of {key}")
                    out.copy_(tensor)
        return _done(None)
