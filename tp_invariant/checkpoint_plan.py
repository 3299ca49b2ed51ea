"""Planners for torch.distributed.checkpoint that know which boxes of each full tensor a rank holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

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


def _boxes(entries: Mapping[str, Entry]) -> dict[tuple[str, Size], Tensor]:
    return {(name, offsets): view for name, entry in entries.items() for offsets, view in entry.pieces()}


class BoxSavePlanner(DefaultSavePlanner):
    """Offers every box that this rank holds; what several ranks offer is written by the one with the least to write."""

    def __init__(self, entries: Mapping[str, Entry], aliases: Mapping[str, str], values: Any) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.entries, self.boxes = entries, _boxes(entries)
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
    """Asks for the boxes that this rank holds, wherever the boxes that were saved lie."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.boxes = _boxes(entries)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for (name, offsets), view in self.boxes.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, [ChunkStorageMetadata(offsets, view.shape)])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.boxes[index.fqn, index.offset]
