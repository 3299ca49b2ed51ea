"""Planners for torch.distributed.checkpoint that know which boxes of each full tensor a rank holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from .full_state import Entry

# Large boxes are cut into blocks of rows of this size, because a rank must read a whole block to check its digest.
_BLOCK_BYTES = 2**26


def _boxes(entries: Mapping[str, Entry]) -> dict[tuple[str, Size], Tensor]:
    return {(name, offsets): view for name, entry in entries.items() for offsets, view in entry.pieces()}


def _blocks(offsets: Size, view: Tensor) -> Iterator[tuple[Size, Tensor]]:
    """Cuts a box into blocks of rows of about _BLOCK_BYTES or less."""
    size = view.numel() * view.element_size()
    rows = view.shape[0] if view.dim() else 1
    step = max(1, rows * _BLOCK_BYTES // max(1, size))
    if step >= rows:
        yield offsets, view
        return
    for start in range(0, rows, step):
        yield Size([offsets[0] + start, *offsets[1:]]), view[start : start + step]


class BoxSavePlanner(DefaultSavePlanner):
    """Offers every box that this rank holds; of several ranks that offer a box, that with the least to write writes."""

    def __init__(self, entries: Mapping[str, Entry], aliases: Mapping[str, str], values: Any) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.entries = entries
        self.boxes = {
            (name, start): block
            for (name, offsets), view in _boxes(entries).items()
            for start, block in _blocks(offsets, view)
        }
        self.planner_data = {"aliases": aliases, "values": values}

    def create_local_plan(self) -> SavePlan:
        items = []
        for (name, offsets), view in self.boxes.items():
            data = TensorWriteData(
                ChunkStorageMetadata(offsets, view.shape), TensorProperties(view.dtype), self.entries[name].full_shape
            )
            items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data=self.planner_data)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.boxes[index.fqn, index.offset]


class BoxLoadPlanner(DefaultLoadPlanner):
    """Requests the boxes that this rank holds, however the saved boxes were cut."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.entries, self.boxes = entries, _boxes(entries)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for (name, offsets), view in self.boxes.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, [ChunkStorageMetadata(offsets, view.shape)])
        return LoadPlan(items)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """All ranks have checked what they will read: from here on the model is written."""
        with torch.no_grad():
            for entry in self.entries.values():
                if entry.spec.padding:
                    entry.tensor.detach().zero_()  # no box of the full tensor covers the padding
        return super().finish_plan(new_plan)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.boxes[index.fqn, index.offset]
