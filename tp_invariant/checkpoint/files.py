"""A checkpoint's files, as torch.distributed.checkpoint's storage: safetensors and one JSON index, no pickle.

    index.json                      every tensor's dtype, full shape and boxes, the file of each box; plain values
    <save>-<rank>-<n>.safetensors   the boxes that a rank wrote
    save.lock                       during a save: the process that holds the lock

Each save writes new files, and replacing index.json is the commit: before it the folder holds the old checkpoint, after
it the new one. Files that the index does not name are left over from an unfinished save or from the checkpoint before;
the next commit removes them.

The index holds a SHA-256 of each box's bytes and one of itself, and every data file the random number of its save: so a
flipped bit, a file of another save and a changed value are found before a load writes anything. SHA-256, because server
processors have instructions for it (hashlib uses them and releases the interpreter's lock, so that threads hash in
parallel); torch.hash_tensor is ten times faster, but does not notice another order of elements.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import re
import reprlib
import secrets
import socket
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

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

INDEX, LOCK = "index.json", "save.lock"
FORMAT = "tp_invariant checkpoint 2"
_DATA = re.compile(r"[0-9a-f]{16}-\d{5,}-\d{5,}\.safetensors")
_LEFT_OVER = re.compile(rf"{_DATA.pattern}|[0-9a-f]{{16}}-{re.escape(INDEX)}|{re.escape(INDEX)}\.new")
_FILE_BYTES = 2**31  # a file's boxes are copied to the CPU together
_THREADS = 4  # for hashing, each at about 1 GB/s

_logger = logging.getLogger("tp_invariant")


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


def _new_file(path: Path) -> int:
    """A descriptor for writing a file that must not exist yet; its mode follows the umask."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _bytes_digest(tensor: Tensor) -> str:
    """SHA-256 of the bytes of a contiguous tensor on the CPU."""
    size = tensor.numel() * tensor.element_size()
    view = (ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b""
    return hashlib.sha256(view).hexdigest()


def _index_digest(index: Mapping[str, Any]) -> str:
    """SHA-256 of an index's content without the digest itself; the JSON text may be reformatted."""
    rest = {key: value for key, value in index.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def box_key(name: str, offsets: Sequence[int]) -> str:
    """The name of a box in its data file."""
    return f"{name}@{','.join(map(str, offsets))}"


# --- one save at a time ---------------------------------------------------------------------------------------------


def lock_folder(folder: Path) -> int:
    """Prevents two saves into one folder: a descriptor with the kernel's lock, which ends with the process.

    So the lock file of a process that died blocks no later save. On NFS the lock holds between hosts unless the mount
    has `nolock` or `local_lock`. On a filesystem without locks a warning is logged and the save continues.

    Raises:
        RuntimeError: another save holds it; says which.
    """
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "an unknown process"
        os.close(handle)
        raise RuntimeError(
            f"another save into {folder} is under way, by {holder}: give each job a folder of its own. The "
            "ranks of one job must save together, with the group of all of them as `group`"
        ) from error
    except OSError as error:
        _logger.warning(
            "the filesystem of %s has no locks (%s): make sure that no two jobs save into one folder",
            folder,
            error.strerror,
        )
    since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    with suppress(OSError):  # for example a full disk; the lock holds without the name
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)
    return handle


# --- writing --------------------------------------------------------------------------------------------------------


class SafetensorsWriter(StorageWriter):
    """Writes each rank's boxes to files of its own, then, on the coordinator, the index. See the top of the file.

    Call `close` at the end, also after an error.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.save = ""
        self.lock: int | None = None  # the descriptor of the folder's lock

    def close(self) -> None:
        if self.lock is not None:
            with suppress(OSError):
                (self.folder / LOCK).unlink()
            os.close(self.lock)
            self.lock = None

    def reset(self, checkpoint_id: Any = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise NotADirectoryError(f"{self.folder} is a file: a checkpoint is a folder") from error
        if is_coordinator:
            self.lock = lock_folder(self.folder)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.save = secrets.token_hex(8)
        return [dataclasses.replace(plan, storage_data=(self.save, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert isinstance(plan.storage_data, tuple)
        save, rank = plan.storage_data
        results: list[WriteResult] = []
        written: list[Path] = []
        try:
            for number, items in enumerate(_batches(plan.items)):
                path = self.folder / f"{save}-{rank:05}-{number:05}.safetensors"
                written.append(path)
                results += self._write_file(path, save, items, planner)
        except BaseException:
            for path in written:  # no index will name them, and the disk may be full
                with suppress(OSError):
                    path.unlink()
            raise
        return _done(results)

    def _write_file(self, path: Path, save: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        boxes = {}
        for item in items:
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor)
            # a copy, since boxes of one tensor share their memory, which safetensors refuses
            boxes[box_key(item.index.fqn, item.index.offset or ())] = data.to("cpu", copy=True).contiguous()
        handle = _new_file(path)
        try:
            mode = stat.S_IMODE(os.fstat(handle).st_mode)
        finally:
            os.close(handle)
        with ThreadPoolExecutor(_THREADS) as threads:
            digests = threads.map(_bytes_digest, boxes.values())
            require_safetensors().torch.save_file(boxes, path, metadata={"format": "pt", "save": save})
        os.chmod(path, mode)  # safetensors replaces the file by one that only its owner may read
        _sync(path)
        return [
            WriteResult(
                item.index,
                tensor.numel() * tensor.element_size(),
                {"file": path.name, "key": key, "digest": digest},
            )
            for item, (key, tensor), digest in zip(items, boxes.items(), digests, strict=True)
        ]

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
                f"{absent[0]}, which this save wrote, is not in {self.folder} here: the folder must be on a "
                "filesystem that all ranks share, and no other job may save into it"
            )
        index = {"format": FORMAT, "save": self.save, "values": metadata.planner_data["values"], "tensors": tensors}
        fresh = self.folder / f"{self.save}-{INDEX}"
        try:
            with open(_new_file(fresh), "w") as file:
                json.dump({**index, "digest": _index_digest(index)}, file)
            _sync(fresh)
            _sync(self.folder)  # the data files' names must be on disk before the index
            os.replace(fresh, self.folder / INDEX)
        except BaseException:
            with suppress(OSError):
                fresh.unlink()
            raise
        _sync(self.folder)
        for path in self.folder.iterdir():  # of saves before this one, or that did not finish
            if _LEFT_OVER.fullmatch(path.name) and path.name not in files:
                with suppress(OSError):  # the checkpoint is complete; leftovers only take space
                    path.unlink()


def _batches(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    """Splits items into batches, one for each file, of about _FILE_BYTES or less."""
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


class Place(NamedTuple):
    """Where a box is stored, and the SHA-256 of its bytes."""

    file: str
    key: str
    sizes: torch.Size
    dtype: torch.dtype
    digest: str


class Index(NamedTuple):
    """What a checkpoint holds; the metadata's storage_data are Places."""

    metadata: Metadata
    values: dict[str, Any]
    save: str
    digest: str  # of the file: the same on every rank that reads the same checkpoint


def read_index(folder: Path) -> Index:
    """What the checkpoint in a folder holds.

    Raises:
        FileNotFoundError: there is no checkpoint, or only a save that did not finish.
        ValueError: the index is damaged or of an unknown format; names the file and the reason.
    """
    path = folder / INDEX
    if not os.path.lexists(path):
        if folder.exists() and not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a checkpoint: it is a file, and a checkpoint is a folder")
        unfinished = folder.is_dir() and any(folder.iterdir())
        what = "holds a save that did not finish" if unfinished else "is not a checkpoint"
        raise FileNotFoundError(f"{folder} {what}: there is no {INDEX} in it")
    try:
        data = path.read_bytes()
        index = json.loads(data)
        saved_as = index.get("format") if isinstance(index, dict) else None
        if saved_as != FORMAT:
            raise ValueError(f"its format is {reprlib.repr(saved_as)}, and this version reads {FORMAT!r}")
        if _index_digest(index) != index.get("digest"):
            raise ValueError("it is not what was saved: its content does not have its digest")
        return _described(index, hashlib.sha256(data).hexdigest())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as a checkpoint's index: {error}") from error


def _described(index: dict[str, Any], digest: str) -> Index:
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Place] = {}
    for name, entry in index["tensors"].items():
        dtype, chunks = getattr(torch, entry["dtype"]), []
        for box in entry["boxes"]:
            if not _DATA.fullmatch(box["file"]):
                raise ValueError(f"{name} is in {reprlib.repr(box['file'])}, which is not the name of a data file")
            chunk = ChunkStorageMetadata(torch.Size(box["offsets"]), torch.Size(box["sizes"]))
            places[MetadataIndex(name, chunk.offsets)] = Place(
                box["file"], box["key"], chunk.sizes, dtype, box["digest"]
            )
            chunks.append(chunk)
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(entry["shape"]), chunks)
    return Index(Metadata(tensors, storage_data=places), index["values"], index["save"], digest)


class SafetensorsReader(StorageReader):
    """Reads only the slices that this rank's boxes need, after all ranks have checked what they will read.

    A digest is of a whole box, so a rank that needs a slice must read the whole box to check it. Boxes are cut into
    blocks of rows (plan.py): a degree that cuts rows reads little more than it needs, and one that cuts columns the
    whole tensor. Files stay open from the check to the copy, so that a later save may remove them. Nothing is kept in
    memory in between.
    """

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index
        self.files: dict[str, Any] = {}

    def reset(self, checkpoint_id: Any = None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Checks all that this rank will read, before any rank writes: next, the ranks exchange plans or errors."""
        places = {self.index.metadata.storage_data[item.storage_index] for item in plan.items}
        for place in places:
            self._open(place.file)
        with ThreadPoolExecutor(_THREADS) as threads:
            for _ in threads.map(self._check, sorted(places, key=lambda place: (place.file, place.key))):
                pass  # raises the first error
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            place = self.index.metadata.storage_data[item.storage_index]
            try:
                tensor = self._box(place)
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    tensor = tensor.narrow(dim, start, length)
                planner.resolve_tensor(item).copy_(tensor)
            except Exception as error:
                raise RuntimeError(
                    f"{self.folder / place.file}: {error}. This rank's model is now partly loaded"
                ) from error
        return _done(None)

    def _open(self, file: str) -> None:
        if file in self.files:
            return
        path = self.folder / file
        try:
            data = require_safetensors().safe_open(path, framework="pt")
            metadata = data.metadata()
        except FileNotFoundError as error:
            raise ValueError(f"{path} does not exist, but {INDEX} names it") from error
        except Exception as error:
            reason = str(error)
            raise ValueError(reason if str(path) in reason else f"{path} cannot be read: {reason}") from error
        if (metadata or {}).get("save") != self.index.save:
            raise ValueError(f"{path} is not of the save that {INDEX} names, {self.index.save}")
        self.files[file] = data

    def _box(self, place: Place) -> Tensor:
        """The box in the file's memory map, which is read on use."""
        path = self.folder / place.file
        try:
            tensor = self.files[place.file].get_tensor(place.key)
        except Exception as error:
            raise ValueError(f"{path} does not hold what {INDEX} says: {error}") from error
        return tensor

    def _check(self, place: Place) -> None:
        tensor = self._box(place)
        if _bytes_digest(tensor.contiguous()) != place.digest:
            raise ValueError(
                f"{self.folder / place.file} is damaged: {place.key} does not have the digest that {INDEX} holds"
            )
